// Inverses of small matrices: svexport/ops/inverse.py, inverse_ex.py.
#pragma once

#include "tensor.h"

namespace svexport {

// A: (*, n, n), n at most 8, fp32, fp16 or bf16, any strides; output: (*, n, n), the type of A, NaN where A is singular;
// info (data null: not wanted): (*), int32, 0 or the number of the first pivot that is zero.
// Computed in float64. output and info are contiguous.
cudaError_t inverse(const Tensor& A, const Tensor& output, const Tensor& info, cudaStream_t stream);

// The gradient of A, contiguous, for that of the inverse, grad (*, n, n) of any strides: -inv(A)^T grad inv(A)^T.
cudaError_t inverse_backward(const Tensor& grad, const Tensor& A, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
