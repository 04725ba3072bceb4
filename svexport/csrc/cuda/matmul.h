// Products of float32 matrices, as precise as float32 products and sums are, on tensor cores: three products of tf32
// parts, summed in float32. From compute capability 8.0 on.
#pragma once

#include "tensor.h"

namespace svexport {

// c[i] = a[i] b[i] + bias. a: (B, M, K), b: (B, K, N), c: (B, M, N), bias: (M) of any float type, or absent.
// With parts > 1, B is that many parts of the inner dimension: a: (M, K), b: (K, N), c: (parts, M, N), to be summed.
// Each of the two last axes of a and of b has neighbours along one axis, four of which are loaded at once: its size and
// the other strides are multiples of 4, the data aligned to 16 bytes. c is contiguous.
// cudaErrorNotSupported for anything else.
cudaError_t matmul(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& c, int parts, cudaStream_t stream);

}  // namespace svexport
