#include "quantize.h"

#include "elementwise.cuh"

namespace svexport {
namespace {

template <class T>
struct Quantize {
  float lowest;

  struct Scale {
    float scale, reciprocal, limit;  // reciprocal 0: to be divided by

    __device__ __forceinline__ explicit Scale(float s)
        : scale(s), reciprocal(s > 0x1p-100f && s < 0x1p100f ? 1 / s : 0), limit(512 * s) {}
  };

  // The correctly rounded quotient without a division: from the correctly rounded reciprocal, by two corrections with
  // the exact remainder. Before that x is brought to where neither overflows, which is far beyond the result's range.
  __device__ __forceinline__ int8_t operator()(const T (&x)[1], const Scale& s) const {
    float q;
    if (s.reciprocal != 0) {
      const float value = fminf(fmaxf(to_float(x[0]), -s.limit), s.limit);
      q = value * s.reciprocal;
      q = fmaf(fmaf(-q, s.scale, value), s.reciprocal, q);
      q = fmaf(fmaf(-q, s.scale, value), s.reciprocal, q);
    } else {
      q = to_float(x[0]) / s.scale;
    }
    q = fminf(fmaxf(q, lowest), 127.f);
    // The integer in the low bits of the sum, which is rounded half to even.
    return static_cast<int8_t>(__float_as_int(q + 12582912.f));
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

}  // namespace svexport
