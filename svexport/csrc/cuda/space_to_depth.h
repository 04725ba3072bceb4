// Space to depth: svexport/ops/space_to_depth.py.
#pragma once

#include "tensor.h"

namespace svexport {

// x: (N, C, H, W) of any type and strides; output: (N, 4C, H/2, W/2), contiguous.
cudaError_t space_to_depth(const Tensor& x, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
