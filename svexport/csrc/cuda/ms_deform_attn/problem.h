// What is asked of the kernels of ms_deform_attn. Host C++, no CUDA.
#pragma once

#include <cstdint>

#include "fields.h"

namespace svexport::ms_deform {

struct Figures;

// value: (images, S, heads, channels); a row is one (query, head) of an image; samples: levels * points of a row.
struct Problem {
  static constexpr const char* kOp = "ms_deform_attn";
  using Figures = ms_deform::Figures;
  int32_t backward = 0;
  int64_t images = 1, rows = 0, channels = 0, samples = 1;  // channels 0: not known, of a kernel compiled ahead of time
  int32_t item_size = 4;                                    // of an element of value, 1, 2 or 4
  int32_t alignment = 16;  // bytes at a multiple of which the channels of value lie, one behind the other; 16 at most

  SVEXPORT_EACH(backward, images, rows, channels, samples, item_size, alignment)
};

}  // namespace svexport::ms_deform
