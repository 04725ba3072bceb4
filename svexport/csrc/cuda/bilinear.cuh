// Bilinear interpolation with zeros outside, and what else the sampling kernels share; svexport/ops/_bilinear.py.
#pragma once

#include "device.cuh"

namespace svexport {

// The two pixels around a coordinate along one axis, the lower and the upper one. Index and weight are both 0 for a
// pixel outside of 0 .. size - 1, and for a NaN coordinate: every index may be read.
struct Corners {
  int index[2];
  float weight[2];
};

// x: 0 is the centre of the first pixel.
__device__ __forceinline__ Corners corners(float x, int size) {
  const float lower = floorf(x), fraction = x - lower;
  Corners c;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float pixel = lower + static_cast<float>(i);
    const bool inside = pixel >= 0 && pixel < static_cast<float>(size);
    c.index[i] = inside ? static_cast<int>(pixel) : 0;
    c.weight[i] = inside ? (i ? fraction : 1 - fraction) : 0.0f;
  }
  return c;
}

// sum += weight * v, in float.
template <bool SHIFTED = false, class T, int N>
__device__ __forceinline__ void add_scaled(float (&sum)[N], float weight, const Vec<T, N>& v) {
  float x[N];
  to_floats<SHIFTED>(v, x);
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
}

template <class T, int N>
__device__ __forceinline__ Vec<T, N> rounded(const float (&x)[N]) {
  Vec<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v.at[i] = from_float<T>(x[i]);
  return v;
}

// p[i] += x[i] atomically in global memory, nothing returned; p aligned to 16 bytes if N is 4 or more.
template <int N>
__device__ __forceinline__ void atomic_add(float* p, const float (&x)[N]) {
#if __CUDA_ARCH__ >= 900
  constexpr int kScalars = N % 4;
#pragma unroll
  for (int i = 0; i < N - kScalars; i += 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p + i), "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]),
                 "f"(x[i + 3])
                 : "memory");
  }
#else
  constexpr int kScalars = N;
#endif
#pragma unroll
  for (int i = N - kScalars; i < N; ++i) atomicAdd(p + i, x[i]);
}

}  // namespace svexport
