// Space to depth: svexport/ops/space_to_depth.py.
#pragma once

#include "tensor.h"

namespace svexport {

// x: (N, C, H, W) of any type and strides, H and W even; output: (N, 4C, H/2, W/2), any strides.
// Fastest if the rows of both are contiguous.
cudaError_t space_to_depth(const Tensor& x, const Tensor& output, cudaStream_t stream);

// The inverse of space_to_depth, which is also its gradient: input (N, 4C, H/2, W/2), output (N, C, H, W).
cudaError_t depth_to_space(const Tensor& input, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
