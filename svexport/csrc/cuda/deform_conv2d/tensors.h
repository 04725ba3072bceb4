// Builds the planner's problem of deform_conv2d, and its pieces, from tensors. Host C++.
#pragma once

#include "deform_conv2d/launch.h"
#include "deform_conv2d/tactics.h"
#include "gpu.h"

namespace svexport::deform {

inline Problem sizes_of(const Tensor& offset, const DeformConv2d& conv, const Piece& piece) {
  Problem p;
  p.images = piece.images;
  p.pixels = piece.rows * offset.sizes[3];
  p.taps = int64_t{conv.kernel[0]} * conv.kernel[1];
  p.channels = conv.channels;
  p.offset_groups = conv.offset_groups;
  return p;
}

inline Problem problem_of(const Tensor& input, const Tensor& offset, const DeformConv2d& conv) {
  Problem p = sizes_of(offset, conv, {0, offset.sizes[0], 0, offset.sizes[2]});
  Tensor as_it_is;
  p.input_bytes = input.numel() * input.item_size();
  p.packed = is_packed(input, conv, &as_it_is);
  p.runs = input.dtype == DType::kInt8 ? p.packed : !has_short_runs(input, conv);
  p.planes = (input.sizes[2] - 1) * input.strides[2] + (input.sizes[3] - 1) * input.strides[3] < UINT32_MAX;
  return p;
}

// Columns for an output shaped like `offset`, at `row` bytes a row; more: Columns::more.
inline Columns columns_of(const Tensor& offset, int64_t row, int64_t more) {
  return {offset.sizes[0], offset.sizes[2], offset.sizes[3], row, more};
}

}  // namespace svexport::deform
