// NCHW to NC/32HW32 and back: svexport/ops/to_chw32.py, from_chw32.py.
#pragma once

#include "tensor.h"

namespace svexport {

// x: (N, C, H, W), any type and strides, fastest if its pixels are contiguous.
// output: (N, ceil(C/32), H, W, 32), contiguous; channels beyond C are zero. With `pool`, it has H/2 and W/2, and a
// pixel is the maximum of a 2x2 block (fp32, fp16, bf16, int8), NaN if one of the four is.
cudaError_t to_chw32(const Tensor& x, bool pool, const Tensor& output, cudaStream_t stream);

// x: (N, ceil(C/32), H, W, 32), any type and strides, fastest if contiguous; output: (N, C, H, W), contiguous.
cudaError_t from_chw32(const Tensor& x, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
