#include "aot.cuh"
#include "inverse.cu"

namespace svexport::aot {

// A block does kThreads / L matrices, where L is n rounded up to 2, 4 or 8.
template <class T, int R, int N>
__device__ void inverse(const View<const T, R>& A, Int<N>, const View<T, R>& output) {
  constexpr int L = N <= 2 ? 2 : N <= 4 ? 4 : 8;
  const int64_t matrices = A.product(0, R - 2);
  if (matrices == 0) return;
  const AnyFloat from(untyped(A));
  Walk<2> batch;
  batch.push({matrices, {N * N, N * N}});
  inverse_kernel<L, false>(Problem{batch, from, from, AnyFloat(untyped(output)), N, 1, N, 1, nullptr, N});
}

}  // namespace svexport::aot
