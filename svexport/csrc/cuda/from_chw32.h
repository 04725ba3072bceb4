// NC/32HW32 to NCHW: svexport/ops/from_chw32.py.
#pragma once

#include "tensor.h"

namespace svexport {

// x: (N, ceil(C/32), H, W, 32) of any type and strides, fastest where it is contiguous; output: (N, C, H, W), contiguous.
cudaError_t from_chw32(const Tensor& x, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
