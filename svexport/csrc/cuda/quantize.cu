#include "quantize.h"

#include "elementwise.cuh"

namespace svexport {
namespace {

template <class T>
struct Quantize {
  float lowest;

  struct Scale {
    float scale, reciprocal, limit;  // reciprocal 0: divide by scale instead

    __device__ __forceinline__ explicit Scale(float s)
        : scale(s), reciprocal(s > 0x1p-100f && s < 0x1p100f ? 1 / s : 0), limit(512 * s) {}
  };

  template <int N>
  __device__ __forceinline__ Vec<int8_t, N> operator()(const Vec<T, N> (&x)[1], const Scale& s) const {
    // The correctly rounded quotient without a division: from the correctly rounded reciprocal, by two corrections with
    // the exact remainder. First, x is clamped to where neither overflows, far beyond the result's range.
    float q[N];
    if (s.reciprocal != 0) {
      UNROLL for (int j = 0; j < N; ++j) {
        const float value = fminf(fmaxf(to_float(x[0].at[j]), -s.limit), s.limit);
        q[j] = value * s.reciprocal;
        q[j] = fmaf(fmaf(-q[j], s.scale, value), s.reciprocal, q[j]);
        q[j] = fmaf(fmaf(-q[j], s.scale, value), s.reciprocal, q[j]);
      }
    } else {
      UNROLL for (int j = 0; j < N; ++j) q[j] = to_float(x[0].at[j]) / s.scale;
    }
    Vec<int8_t, N> result;
    UNROLL for (int j = 0; j < N; ++j) {
      // The sum rounds half to even and has the integer in its low bits.
      result.at[j] = static_cast<int8_t>(__float_as_int(fminf(fmaxf(q[j], lowest), 127.f) + 12582912.f));
    }
    return result;
  }
};

template <class T>
struct Dequantize {
  struct Scale {
    float scale;

    __device__ __forceinline__ explicit Scale(float s) : scale(s) {}
  };

  template <int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<int8_t, N> (&q)[1], const Scale& s) const {
    Vec<T, N> x;
    UNROLL for (int j = 0; j < N; ++j) x.at[j] = from_float<T>(to_float(q[0].at[j]) * s.scale);
    return x;
  }
};

}  // namespace

cudaError_t quantize(const Tensor& x, float scale, const Tensor& scales, int axis, bool restricted,
                     const Tensor& output, cudaStream_t stream) {
  return dispatch_float(x.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return elementwise<T, int8_t, 1>({&x}, {scale, scales, axis}, output, Quantize<T>{restricted ? -127.f : -128.f},
                                     stream);
  });
}

cudaError_t dequantize(const Tensor& q, float scale, const Tensor& scales, int axis, const Tensor& output,
                       cudaStream_t stream) {
  if (q.dtype != DType::kInt8) return cudaErrorNotSupported;
  return dispatch_float(output.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return elementwise<int8_t, T, 1>({&q}, {scale, scales, axis}, output, Dequantize<T>{}, stream);
  });
}

}  // namespace svexport
