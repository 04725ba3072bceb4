#include "aot.cuh"
#include "add_bias_residual_layer_norm.cu"

namespace svexport::aot {

// D: the columns, 0 if they are not known. Up to 1024 a warp takes a row, else a block; KEEP: its row in shared memory.
template <class T, int R, class B, class W, class N, int D, bool KEEP>
__device__ void add_bias_residual_layer_norm(const View<const T, R>& x, const View<const B, 1>& bias,
                                             const View<const T, R>& residual, const View<const W, 1>& weight,
                                             const View<const N, 1>& norm_bias, float eps,
                                             const View<const T, R>& extra, const View<T, R>& y, const View<T, R>& s,
                                             Int<D>, std::bool_constant<KEEP>) {
  constexpr int V = 16 / sizeof(T);
  const int d = D ? D : x.sizes[R - 1];
  Walk<3> rows;
  rows.push({x.product(0, R - 1), {d, d, d}});
  const Forward a{{rows, x.data, residual.data, extra.data},
                  AnyFloat(untyped(bias)),
                  AnyFloat(untyped(weight)),
                  AnyFloat(untyped(norm_bias)),
                  y.data,
                  s.data,
                  d,
                  eps};
  const bool vectors = d % V == 0 && x.aligned(16) && residual.aligned(16) && extra.aligned(16) && y.aligned(16) &&
                       s.aligned(16) && bias.aligned(16) && weight.aligned(16) && norm_bias.aligned(16);
  if constexpr (D > 0 && D <= 1024) {
    constexpr int K = D <= 256 ? 8 : D <= 512 ? 16 : 32;  // columns of a lane
    vectors ? forward_rows<T, V, K / V, false>(a) : forward_rows<T, 1, K, false>(a);
  } else {
    vectors ? forward_long_rows<T, V>(a) : forward_long_rows<T, 1>(a);
  }
}

}  // namespace svexport::aot
