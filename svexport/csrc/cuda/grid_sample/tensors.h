// Builds the planners' problems of grid_sample and its gradient from tensors. Host C++.
#pragma once

#include "gpu.h"
#include "grid_sample/gradient.h"
#include "grid_sample/sampling.h"
#include "grid_sample/tactics.h"

namespace svexport::sampler {

// `input` seen as (N, C, ...), also where it is (N, ceil(C/V), H, W, V): there the stride of channels means nothing.
inline Tensor image_of(const Tensor& input, const Tensor& grid, const Tensor& output) {
  Tensor image = input;
  if (input.rank > grid.rank) --image.rank;
  image.sizes[1] = output.sizes[1];
  return image;
}

// The part of a problem that does not depend on the output.
inline Problem problem_of(const Tensor& input, const Tensor& grid, int mode) {
  Problem p;
  p.images = input.sizes[0], p.channels = input.sizes[1];
  p.width = input.sizes[input.rank - 1], p.height = input.sizes[input.rank - 2];
  p.depth = input.rank == 5 ? input.sizes[2] : 1;
  p.points = 1, p.across = grid.sizes[grid.rank - 2];
  for (int i = 1; i < grid.rank - 1; ++i) p.points *= grid.sizes[i];
  p.taps = mode == kNearest ? 1 : mode == kBicubic ? 16 : input.rank == 4 ? 4 : 8;
  p.item_size = static_cast<int32_t>(input.item_size());
  if (input.strides[1] == 1) {
    p.alignment = 16;
    while (p.alignment > p.item_size &&
           (p.channels * p.item_size % p.alignment || !input.aligned(1, p.alignment))) {
      p.alignment /= 2;
    }
  }
  int64_t pixel = 1;
  p.dense = input.rank == 4 && evenly_spaced(input, 2, 3, pixel) && pixel == 1;
  return p;
}

// point: stride in elements between the results of adjacent points.
inline Problem problem_of(const Tensor& input, const Tensor& grid, const Tensor& output, int64_t point, int mode,
                          bool workspace) {
  Problem p = problem_of(image_of(input, grid, output), grid, mode);
  if (input.rank > grid.rank) {  // CHW32 and CHW4, which are int8
    p.alignment = static_cast<int32_t>(std::min<int64_t>(16, input.sizes[4]));
    while (p.alignment > 1 && !input.aligned(4, p.alignment)) p.alignment /= 2;
    p.dense = 0;
  }
  const int64_t size = output.item_size(), input_size = input.item_size(), coordinate = grid.item_size();
  p.output_last = output.strides[1] == 1;
  Multiple vectors, pairs, rows;
  vectors.add(output.data);
  if (p.points > 1) vectors.add(point * size);
  if (p.images > 1) vectors.add(output.strides[0] * size);
  p.output_vectors = vectors.bytes() == 16;
  pairs.add(output.data), pairs.add(output.strides[0] * size), pairs.add(p.points * size);
  if (p.channels > 1) pairs.add(output.strides[1] * size);
  p.pairs = pairs.bytes() >= 2 * size && reinterpret_cast<uintptr_t>(grid.data) % (4 * coordinate) == 0;
  rows.add(input.data), rows.add(input.strides[0] * input_size), rows.add(input.strides[1] * input_size);
  rows.add(input.strides[input.rank - 2] * input_size), rows.add(p.width * input_size);
  p.row_alignment = std::min(8, rows.bytes());
  const bool coordinates = grid.contiguous() && grid.aligned(grid.rank - 1, 2 * coordinate) &&
                           (grid.dtype == input.dtype || grid.dtype == DType::kFloat32);
  p.planes = p.item_size > 1 && input.rank == 4 && input.strides[3] == 1 && point == 1 && coordinates;
  p.workspace = workspace;
  return p;
}

// The tactics worth timing for a node that has workspace for a copy.
inline Few<int32_t> worth_timing(const Tensor& input, const Tensor& grid, const Tensor& output, int mode) {
  int64_t point = 1;
  if (output.numel() == 0 || !evenly_spaced(output, 2, output.rank - 1, point)) return {};
  return worth_timing(problem_of(input, grid, output, point, mode, true), current_gpu());
}

}  // namespace svexport::sampler

namespace svexport::sampler::gradient {

// point: stride in elements between the gradients of adjacent points.
inline Problem problem_of(const Tensor& grad, int64_t point, const Tensor& input, const Tensor& grid, int mode,
                          bool deterministic, bool input_gradient, bool grid_gradient) {
  Problem p;
  static_cast<sampler::Problem&>(p) = sampler::problem_of(input, grid, mode);
  p.volume = input.rank == 5;
  p.input = input_gradient, p.grid = grid_gradient, p.deterministic = deterministic;
  p.last = input.strides[1] == 1 && input.aligned(1, 16);
  int64_t pixel = 1;
  p.dense = evenly_spaced(input, 2, input.rank - 1, pixel) && pixel == 1;
  p.near = p.points * point * grad.item_size() <= UINT32_MAX;
  return p;
}

}  // namespace svexport::sampler::gradient
