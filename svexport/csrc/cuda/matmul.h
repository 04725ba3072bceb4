// Matrix products on tensor cores, summed in float32. For float32, three products of tf32 parts are as precise as
// float32 products and sums. Infinite elements give NaN.
#pragma once

#include "tensor.h"

namespace svexport {

// Bytes of scratch memory for matmul on the current device: for any product, and for this one, which may need none.
size_t matmul_workspace();
size_t matmul_partials(const Tensor& a, const Tensor& c);

// c[i] = a[i % A] b[i % B] + bias[i % A], or c[i] += that with `add`. a, b and c have one float type. a: (A, M, K) and
// b: (B, K, N), stride 1 along one of the last two axes; a of half types along K. c: (I, M, N), stride 1 along N, all
// I*M rows equally far apart. bias: (A*M), any float type, or absent. Fastest if lines of stride 1 are aligned to 16
// bytes, and are multiples of 16 bytes or, except along K, followed by readable memory up to the next multiple.
cudaError_t matmul(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& c, bool add, void* workspace,
                   cudaStream_t stream);

}  // namespace svexport
