// Inverses of small matrices: svexport/ops/inverse.py, inverse_ex.py.
#pragma once

#include "tensor.h"

namespace svexport {

// A: (*, n, n), n at most 8, fp32, fp16 or bf16, any strides; output: (*, n, n), of A's type, NaN where A is singular;
// info (null data: not wanted): (*), int32, 0 or the number of the first pivot that is zero.
// output and info are contiguous. The computation is in float64.
cudaError_t inverse(const Tensor& A, const Tensor& output, const Tensor& info, cudaStream_t stream);

// output: the gradient of A, contiguous, -inv(A)^T grad inv(A)^T. grad: that of the inverse, (*, n, n), any strides.
cudaError_t inverse_backward(const Tensor& grad, const Tensor& A, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
