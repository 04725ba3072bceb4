// NCHW to NC/32HW32 and back: svexport/ops/to_chw32.py, from_chw32.py.
#pragma once

#include "tensor.h"

namespace svexport {

// x: (N, C, H, W) of any type and strides, fastest where its pixels are contiguous.
// output: (N, ceil(C/32), H, W, 32), contiguous, the channels beyond C zero; with `pool` H/2 and W/2, each pixel the
// largest of a 2x2 block (fp32, fp16, bf16, int8), NaN if one is.
cudaError_t to_chw32(const Tensor& x, bool pool, const Tensor& output, cudaStream_t stream);

// x: (N, ceil(C/32), H, W, 32) of any type and strides, fastest where it is contiguous; output: (N, C, H, W), contiguous.
cudaError_t from_chw32(const Tensor& x, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
