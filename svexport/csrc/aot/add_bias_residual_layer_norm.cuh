#include "aot.cuh"
#include "add_bias_residual_layer_norm/forward.cuh"

namespace svexport::aot {

// The planner's tactic is given as constants: kColumns of a thread, 0 for rows of any length, and kWidth elements at a
// time. Where addresses do not allow these, single elements are read.
template <class T, int R, class B, class W, class N, int kColumns, bool kBlock, int kWidth, bool kShifted>
__device__ void add_bias_residual_layer_norm(const View<const T, R>& x, const View<const B, 1>& bias,
                                             const View<const T, R>& residual, const View<const W, 1>& weight,
                                             const View<const N, 1>& norm_bias, float eps,
                                             const View<const T, R>& extra, const View<T, R>& y, const View<T, R>& s,
                                             Int<kColumns>, std::bool_constant<kBlock>, Int<kWidth>,
                                             std::bool_constant<kShifted>) {
  const int d = x.sizes[R - 1];
  Walk<3> rows;
  rows.push({x.product(0, R - 1), {d, d, d}});
  const Forward a{{rows, x.data, residual.data, extra.data}, AnyFloat(untyped(bias)), AnyFloat(untyped(weight)),
                  AnyFloat(untyped(norm_bias)), y.data, s.data, d, eps};
  constexpr int kBytes = kWidth * sizeof(T), kVector = kWidth < 4 ? kWidth * 4 : 16;
  const bool aligned = x.aligned(kBytes) && residual.aligned(kBytes) && extra.aligned(kBytes) && y.aligned(kBytes) &&
                       s.aligned(kBytes) && bias.aligned(kVector) && weight.aligned(kVector) &&
                       norm_bias.aligned(kVector);
  if constexpr (kColumns > 0) {  // the fallback is short, so that it does not cost registers
    aligned ? forward_rows<T, kWidth, kColumns / kWidth, kBlock, kShifted>(a) : forward_long_rows<T, 1>(a);
  } else {
    aligned && (kShifted || d % kWidth == 0) ? forward_long_rows<T, kWidth, kShifted>(a) : forward_long_rows<T, 1>(a);
  }
}

}  // namespace svexport::aot
