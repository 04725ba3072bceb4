// What is asked of the kernels of grid_sample and bilinear_sample. Host C++, no CUDA.
#pragma once

#include <cstdint>

#include "fields.h"

namespace svexport::sampler {

struct Figures;

struct Problem {
  static constexpr const char* kOp = "grid_sample";
  using Figures = sampler::Figures;
  int64_t images = 1, channels = 1, points = 0;    // points: of an image
  int64_t width = 1, height = 1, depth = 1;        // of an image, in pixels
  int64_t across = 1;        // points along x
  int32_t taps = 4;          // pixels of a point: 1 nearest, 4 bilinear, 8 trilinear, 16 bicubic
  int32_t item_size = 4;     // of an element of the image, 1, 2 or 4
  int32_t alignment = 0;     // bytes at a multiple of which the channels of a pixel lie, one behind the other, 16 at most;
                             // 0: they lie elsewhere
  int32_t row_alignment = 4; // bytes at a multiple of which rows of planes begin: 2, 4 or 8
  int32_t output_last = 0;   // whether the channels of a result lie one behind the other, and not the points:
  int32_t output_vectors = 1;  // then, whether at multiples of 16 bytes
  int32_t planes = 0;        // whether rows, results and coordinates are those that the kernels of planes read
  int32_t dense = 0;         // whether the rows of a plane lie one behind the other
  int32_t pairs = 0;         // whether results and coordinates of two points can be moved at once
  int32_t workspace = 0;     // whether there is memory for a copy of the image

  int64_t pixels() const { return width * height * depth; }
  int64_t results() const { return images * channels * points; }

  SVEXPORT_EACH(images, channels, points, width, height, depth, across, taps, item_size, alignment, row_alignment,
                output_last, output_vectors, planes, dense, pairs, workspace)
};

}  // namespace svexport::sampler
