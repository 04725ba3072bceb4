// Sums to which many threads add, in global memory.
#pragma once

#include "bilinear.cuh"

namespace svexport {

// In float, where the order of the additions shows in the last bits; or, with a scale, in 64-bit fixed point, where it
// does not: x counts as round(x * scale).
struct Sums {
  void* data;  // float or int64_t; null: nobody wants them
  const float* scale;

  template <int N>
  __device__ __forceinline__ void add(int64_t i, const float (&x)[N]) const {
    if (!scale) {
      atomic_add(static_cast<float*>(data) + i, x);
      return;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      atomicAdd(static_cast<unsigned long long*>(data) + i + j,
                static_cast<unsigned long long>(__float2ll_rn(x[j] * *scale)));
    }
  }
};

}  // namespace svexport
