// What is asked of the kernels of camera_sample. Host C++, no CUDA.
#pragma once

#include <cstdint>

#include "fields.h"

namespace svexport::camera {

struct Figures;

// `points` of each of `queries` of an image, on so many levels of maps of `channels`.
struct Problem {
  static constexpr const char* kOp = "camera_sample";
  using Figures = camera::Figures;
  int64_t images = 1, queries = 0, points = 1, levels = 1, channels = 0;  // channels 0: not known ahead of time
  int32_t item_size = 4;                                                  // of an element of the output
  int32_t vectors = 0;  // whether the channels of a group are whole vectors of 16 bytes, at multiples of these
  int32_t planes = 0;   // whether maps, weights and attributes are those that the kernel of planes reads

  SVEXPORT_EACH(images, queries, points, levels, channels, item_size, vectors, planes)
};

}  // namespace svexport::camera
