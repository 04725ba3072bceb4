// Small systems of linear equations: svexport/ops/solve.py, solve_ex.py.
#pragma once

#include "tensor.h"

namespace svexport {

// Solves A X = B for X, NaN where A is singular. A: (*, n, n), n at most 8; B, X: (*, n, k); each fp32, fp16 or bf16,
// any strides, also 0 where a batch broadcasts. info (null data: not wanted): (*), int32, 0 or the number of the first
// pivot that is zero. The computation is in float64. For X A = B, pass the transposes of A, B and X.
cudaError_t solve(const Tensor& A, const Tensor& B, const Tensor& X, const Tensor& info, cudaStream_t stream);

}  // namespace svexport
