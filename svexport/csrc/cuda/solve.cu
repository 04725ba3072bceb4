#include "solve.h"

#include "gauss_jordan.cuh"

namespace svexport {
namespace {

constexpr int kThreads = 128, kColumns = 16;  // kColumns: columns of B that a group of lanes does

struct Problem {
  Walk<4> batch;
  AnyFloat A, B, X;
  int32_t* info;
  int64_t strides[3][2];  // of the rows and the columns of A, B, X
  int64_t columns, parts;
  int n;
};

template <int L>
__global__ void __launch_bounds__(kThreads) solve_kernel(const __grid_constant__ Problem a) {
  const int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / L;
  const int64_t matrix = min(i / a.parts, a.batch.count - 1);  // past the end the last one: shuffles need all lanes
  int64_t at[4];
  a.batch.offsets(matrix, at);
  LaneMatrix<L> m;
  m.read(a.A, at[0], a.n, a.strides[0][0], a.strides[0][1]);
  m.invert();
  const bool exists = i < a.batch.count * a.parts;
  for (int64_t c = i % a.parts * kColumns, k = 0; k < kColumns; ++k, ++c) {
    const bool inside = exists && c < a.columns;
    double b = 0, sum = 0;
    if (inside && m.lane() < a.n) b = a.B.get(at[1] + m.lane() * a.strides[1][0] + c * a.strides[1][1]);
    UNROLL for (int j = 0; j < L; ++j) sum += m.row[j] * __shfl_sync(~0u, b, m.pivot[j], L);
    if (m.info) sum = __longlong_as_double(0x7ff8000000000000);
    if (inside && m.step < a.n) {
      a.X.set(at[2] + m.step * a.strides[2][0] + c * a.strides[2][1], static_cast<float>(sum));
    }
  }
  if (a.info && exists && m.step == 0) a.info[at[3]] = m.info;
}

}  // namespace

cudaError_t solve(const Tensor& A, const Tensor& B, const Tensor& X, const Tensor& info, cudaStream_t stream) {
  const int rank = A.rank;
  const int64_t n = A.sizes[rank - 1], columns = B.sizes[rank - 1];
  if (!is_float(A) || !is_float(B) || !is_float(X) || A.sizes[rank - 2] != n) return cudaErrorNotSupported;
  if (X.numel() == 0) return cudaSuccess;
  Tensor infos = info;
  infos.rank = rank;  // the rank of the others, whose last two dimensions are dropped
  Problem problem{Walk<4>(Axes<4>({&A, &B, &X, &infos}, 2, Axes<4>::Order::kRowMajor)),
                  AnyFloat(A), AnyFloat(B), AnyFloat(X), static_cast<int32_t*>(info.data), {}, columns,
                  ceil_div<int64_t>(columns, kColumns), static_cast<int>(n)};
  const Tensor* tensors[] = {&A, &B, &X};
  for (int t = 0; t < 3; ++t) {
    problem.strides[t][0] = tensors[t]->strides[rank - 2];
    problem.strides[t][1] = tensors[t]->strides[rank - 1];
  }
  return dispatch_lanes(n, [&](auto lanes) {
    constexpr int L = lanes.value;
    const int64_t blocks = ceil_div<int64_t>(problem.batch.count * problem.parts, kThreads / L);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    solve_kernel<L><<<static_cast<int>(blocks), kThreads, 0, stream>>>(problem);
    return cudaGetLastError();
  });
}

}  // namespace svexport
