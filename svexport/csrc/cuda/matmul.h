// Products of matrices on tensor cores, summed in float32. Those of float32 are as precise as float32 products and sums
// are: three products of tf32 parts. Infinite elements give NaN.
#pragma once

#include "tensor.h"

namespace svexport {

// Bytes of scratch for matmul on the current device: of any, and of this one, which may need none.
size_t matmul_workspace();
size_t matmul_partials(const Tensor& a, const Tensor& c);

// c[i] = a[i % A] b[i % B] + bias[i % A], `add`: that and what c[i] is; all but bias of one float type. a: (A, M, K), b: (B, K, N), each with neighbours
// along one of its last two axes, a of half types along K; c: (I, M, N), neighbours along N and all I*M rows equally far
// apart; bias: (A*M) of any float type, or absent. Fastest if what lies along the neighbours is aligned to 16 bytes, and a whole number of them or, where that is
// not along K, followed by memory of as much.
cudaError_t matmul(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& c, bool add, void* workspace,
                   cudaStream_t stream);

}  // namespace svexport
