#include "aot.cuh"
#include "add_bias_residual_layer_norm.cu"

namespace svexport::aot {

// D: the columns, 0 if they are not known. Up to 512 a warp takes a row, else a block; up to 4096 each thread 8 columns.
template <class T, int R, class B, class W, class N, int D>
__device__ void add_bias_residual_layer_norm(const View<const T, R>& x, const View<const B, 1>& bias,
                                             const View<const T, R>& residual, const View<const W, 1>& weight,
                                             const View<const N, 1>& norm_bias, float eps,
                                             const View<const T, R>& extra, const View<T, R>& y, const View<T, R>& s,
                                             Int<D>) {
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
  if constexpr (D > 0 && D <= 4096) {
    constexpr int K = D <= 256 || D > 512 ? 8 : 16;  // columns of a lane
    constexpr bool kBlock = D > 512;
    vectors ? forward_rows<T, V, K / V, kBlock>(a) : forward_rows<T, 1, K, kBlock>(a);
  } else {
    vectors ? forward_long_rows<T, V>(a) : forward_long_rows<T, 1>(a);
  }
}

}  // namespace svexport::aot
