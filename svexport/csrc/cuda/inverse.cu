#include "inverse.h"

#include "gauss_jordan.cuh"

namespace svexport {
namespace {

constexpr int kThreads = 128;

struct Problem {
  Walk<2> batch;  // of A and of the gradient of its inverse
  AnyFloat A, grad, output;
  int64_t A_row, A_column, grad_row, grad_column;
  int32_t* info;
  int n;
};

// Of the transpose, as torch takes pivots in a contiguous A; neighbouring lanes then read and write neighbours.
template <int L, bool kBackward>
__global__ void __launch_bounds__(kThreads) inverse_kernel(const __grid_constant__ Problem a) {
  const int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / L;
  const int64_t matrix = min(i, a.batch.count - 1);  // all lanes take part in the exchange
  int64_t from[2];
  a.batch.offsets(matrix, from);
  LaneMatrix<L> m;
  m.read(a.A, from[0], a.n, a.A_column, a.A_row);
  m.invert();
  m.order_columns();
  if constexpr (kBackward) {
    m.order_rows();
    LaneMatrix<L> grad;
    grad.read(a.grad, from[1], a.n, a.grad_row, a.grad_column);
    double left[L], result[L] = {};  // of this lane's row
#pragma unroll
    for (int l = 0; l < L; ++l) {
      left[l] = 0;
#pragma unroll
      for (int k = 0; k < L; ++k) left[l] += m.row[k] * __shfl_sync(~0u, grad.row[l], k, L);
    }
#pragma unroll
    for (int l = 0; l < L; ++l) {
#pragma unroll
      for (int c = 0; c < L; ++c) result[c] -= left[l] * __shfl_sync(~0u, m.row[c], l, L);
    }
    if (i >= a.batch.count || m.lane() >= a.n) return;
#pragma unroll
    for (int c = 0; c < L; ++c) {
      if (c < a.n) a.output.set((matrix * a.n + m.lane()) * a.n + c, static_cast<float>(result[c]));
    }
  } else {
    if (i >= a.batch.count || m.step >= a.n) return;
#pragma unroll
    for (int c = 0; c < L; ++c) {
      if (c < a.n) a.output.set((matrix * a.n + c) * a.n + m.step, static_cast<float>(m.row[c]));
    }
    if (a.info && m.step == 0) a.info[matrix] = m.info;
  }
}

template <bool kBackward>
cudaError_t launch(const Tensor& A, const Tensor& grad, const Tensor& output, int32_t* info, cudaStream_t stream) {
  const int64_t n = A.sizes[A.rank - 1];
  if (!is_float(A) || A.sizes[A.rank - 2] != n) return cudaErrorNotSupported;
  const Tensor& second = kBackward ? grad : A;
  auto row = [](const Tensor& t) { return t.strides[t.rank - 2]; };
  auto column = [](const Tensor& t) { return t.strides[t.rank - 1]; };
  const Problem problem{Walk<2>(Axes<2>({&A, &second}, 2, Axes<2>::Order::kRowMajor)),
                        AnyFloat(A),
                        AnyFloat(second),
                        AnyFloat(output),
                        row(A),
                        column(A),
                        row(second),
                        column(second),
                        info,
                        static_cast<int>(n)};
  return dispatch_lanes(n, [&](auto lanes) {
    constexpr int L = decltype(lanes)::value;
    if (problem.batch.count == 0) return cudaSuccess;
    const int64_t blocks = ceil_div<int64_t>(problem.batch.count, kThreads / L);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    inverse_kernel<L, kBackward><<<static_cast<int>(blocks), kThreads, 0, stream>>>(problem);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t inverse(const Tensor& A, const Tensor& output, const Tensor& info, cudaStream_t stream) {
  return launch<false>(A, Tensor{}, output, static_cast<int32_t*>(info.data), stream);
}

cudaError_t inverse_backward(const Tensor& grad, const Tensor& A, const Tensor& output, cudaStream_t stream) {
  return launch<true>(A, grad, output, nullptr, stream);
}

}  // namespace svexport
