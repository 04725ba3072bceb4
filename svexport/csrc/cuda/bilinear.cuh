// Bilinear interpolation with zeros outside, and other functions of the sampling kernels; svexport/ops/_bilinear.py.
#pragma once

#include "device.cuh"

namespace svexport {

// The two pixels around a coordinate along one axis, the lower and the upper one. Index and weight are both 0 for a
// pixel outside 0 .. size - 1, and for a NaN coordinate, so that every index can be read.
struct Corners {
  int index[2];
  float weight[2];
};

// x = 0 is the centre of the first pixel.
__device__ __forceinline__ Corners corners(float x, int size) {
  const float lower = floorf(x), fraction = x - lower;
  Corners c;
  UNROLL for (int i = 0; i < 2; ++i) {
    const float pixel = lower + static_cast<float>(i);
    const bool inside = pixel >= 0 && pixel < static_cast<float>(size);
    c.index[i] = inside ? static_cast<int>(pixel) : 0;
    c.weight[i] = inside ? (i ? fraction : 1 - fraction) : 0.0f;
  }
  return c;
}

// sum += weight * v, in float.
template <class T, int N>
__device__ __forceinline__ void add_scaled(float (&sum)[N], float weight, const Vec<T, N>& v) {
  float x[N];
  to_floats(v, x);
  UNROLL for (int i = 0; i < N; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
}

// Whether int8 codes of four pixels are multiplied by integer weights: one instruction for two products, where float
// needs two for one. Weights are exact to 2^-15, bilinear sums to 2^-6 of a step; the codes are off by half a step.
template <class F, class T, int N>
constexpr bool kIntegers = sizeof(F) == 1 && sizeof(T) == 2 && N % 4 == 0;

constexpr float kOfFloat = 12582912;  // 2^23 + 2^22: adding an integer leaves it in the lowest bits

// Weights of four pixels, -1 to 1, in steps of 2^-14. Each takes 16 bits, and a float variable holds two of them.
struct CodeWeights {
  static constexpr float kOne = 16384;
  float upper, lower;  // the first two, the last two

  CodeWeights() = default;
  __device__ __forceinline__ CodeWeights(float upper, float lower) : upper(upper), lower(lower) {}
  __device__ __forceinline__ CodeWeights(float a, float b, float c, float d) : upper(pair(a, b)), lower(pair(c, d)) {}

 private:
  static __device__ __forceinline__ float pair(float a, float b) {
    const uint32_t low = __float_as_uint(fmaf(a, kOne, kOfFloat)), high = __float_as_uint(fmaf(b, kOne, kOfFloat));
    return __uint_as_float(__byte_perm(low, high, 0x5410));
  }
};

// sum += factor * (weights times the codes of their pixels); factor: the value of a code's step over kOne.
template <int N>
__device__ __forceinline__ void add_scaled(float (&sum)[N], float factor, const CodeWeights& weights,
                                           const Vec<int8_t, N> (&v)[4]) {
  UNROLL for (int i = 0; i < N; i += 2) {
    uint32_t codes[4];
    UNROLL for (int k = 0; k < 4; ++k) memcpy(&codes[k], &v[k].at[i / 4 * 4], 4);
    const int bytes = i % 4 ? 0x7362 : 0x5140;  // puts the codes of two pixels for a channel side by side
    const int above = __byte_perm(codes[0], codes[1], bytes), below = __byte_perm(codes[2], codes[3], bytes);
    const int upper = __float_as_int(weights.upper), lower = __float_as_int(weights.lower);
    const int zero = __float_as_int(kOfFloat);
    const int x[] = {__dp2a_lo(lower, below, __dp2a_lo(upper, above, zero)),
                     __dp2a_hi(lower, below, __dp2a_hi(upper, above, zero))};
    UNROLL for (int j = 0; j < 2; ++j) sum[i + j] = fmaf(factor, __int_as_float(x[j]) - kOfFloat, sum[i + j]);
  }
}

template <class T, int N>
__device__ __forceinline__ Vec<T, N> rounded(const float (&x)[N]) {
  Vec<T, N> v;
  UNROLL for (int i = 0; i < N; ++i) v.at[i] = from_float<T>(x[i]);
  return v;
}

// p[i] += x[i] atomically in global memory, returning nothing; p is aligned to 16 bytes if N is 4 or more.
template <int N>
__device__ __forceinline__ void atomic_add(float* p, const float (&x)[N]) {
#if __CUDA_ARCH__ >= 900
  constexpr int kScalars = N % 4;
  UNROLL for (int i = 0; i < N - kScalars; i += 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p + i), "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]),
                 "f"(x[i + 3])
                 : "memory");
  }
#else
  constexpr int kScalars = N;
#endif
  UNROLL for (int i = N - kScalars; i < N; ++i) atomicAdd(p + i, x[i]);
}

// Sums in global memory to which many threads add. In float, the order of the additions shows in the last bits. With a
// scale, they are 64-bit fixed point, where the order does not matter: x counts as round(x * scale).
struct Sums {
  void* data;  // float or int64_t; null: not wanted
  const float* scale;

  template <int N>
  __device__ __forceinline__ void add(int64_t i, const float (&x)[N]) const {
    if (!scale) {
      atomic_add(static_cast<float*>(data) + i, x);
      return;
    }
    UNROLL for (int j = 0; j < N; ++j) {
      atomicAdd(static_cast<unsigned long long*>(data) + i + j,
                static_cast<unsigned long long>(__float2ll_rn(x[j] * *scale)));
    }
  }
};

}  // namespace svexport
