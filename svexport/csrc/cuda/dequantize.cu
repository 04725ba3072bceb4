#include "dequantize.h"

#include "elementwise.cuh"

namespace svexport {
namespace {

template <class T>
struct Dequantize {
  struct Scale {
    float scale;

    __device__ __forceinline__ explicit Scale(float s) : scale(s) {}
  };

  template <int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<int8_t, N> (&q)[1], const Scale& s) const {
    Vec<T, N> x;
#pragma unroll
    for (int j = 0; j < N; ++j) x.at[j] = from_float<T>(to_float(q[0].at[j]) * s.scale);
    return x;
  }
};

}  // namespace

cudaError_t dequantize(const Tensor& q, float scale, const Tensor& scales, int axis, const Tensor& output,
                       cudaStream_t stream) {
  if (q.dtype != DType::kInt8) return cudaErrorNotSupported;
  return dispatch_float(output.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return elementwise<int8_t, T, 1>({&q}, {scale, scales, axis}, output, Dequantize<T>{}, stream);
  });
}

}  // namespace svexport
