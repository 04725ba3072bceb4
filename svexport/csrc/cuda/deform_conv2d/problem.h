// What is asked of the kernels of deform_conv2d. Host C++, no CUDA.
#pragma once

#include <cstdint>

#include "fields.h"

namespace svexport::deform {

struct Figures;

struct Problem {
  static constexpr const char* kOp = "deform_conv2d";
  using Figures = deform::Figures;
  int64_t images = 1, pixels = 0;  // pixels: of an output
  int64_t taps = 1, channels = 1, offset_groups = 1;
  int64_t input_bytes = 0;
  int32_t packed = 0;  // whether the input is packed as it is
  int32_t runs = 1;    // whether packing is of runs of 16 bytes and more, or of zeros mostly
  int32_t planes = 1;  // whether the kernel of planes counts the elements of an image: below 2^32

  SVEXPORT_EACH(images, pixels, taps, channels, offset_groups, input_bytes, packed, runs, planes)
};

}  // namespace svexport::deform
