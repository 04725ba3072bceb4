#include "inverse.h"

#include "gauss_jordan.cuh"

namespace svexport {
namespace {

constexpr int kThreads = 128;

struct Problem {
  Walk<2> batch;  // batch strides of A and of the gradient of its inverse
  AnyFloat A, grad, output;
  int64_t A_row, A_column, grad_row, grad_column;
  int32_t* info;
  int n;
};

// Writes one row of a matrix, in vectors where its address is aligned.
template <int L, class T>
__device__ __forceinline__ void write(T* to, const double (&row)[L], int n) {
  constexpr int N = L * sizeof(T) <= 16 ? L : 16 / sizeof(T);
  if (n == L && reinterpret_cast<uintptr_t>(to) % (N * sizeof(T)) == 0) {
    UNROLL for (int c = 0; c < L; c += N) {
      Vec<T, N> v;
      UNROLL for (int j = 0; j < N; ++j) v.at[j] = from_float<T>(static_cast<float>(row[c + j]));
      store<T, N>(to + c, v);
    }
  } else {
    UNROLL for (int c = 0; c < L; ++c) {
      if (c < n) to[c] = from_float<T>(static_cast<float>(row[c]));
    }
  }
}

template <int L>
__device__ __forceinline__ void write(const AnyFloat& to, int64_t offset, const double (&row)[L], int n) {
  if (to.dtype == DType::kFloat32) {
    write(static_cast<float*>(to.data) + offset, row, n);
  } else if (to.dtype == DType::kFloat16) {
    write(static_cast<__half*>(to.data) + offset, row, n);
  } else {
    write(static_cast<__nv_bfloat16*>(to.data) + offset, row, n);
  }
}

template <int L, bool kBackward>
__global__ void __launch_bounds__(kThreads) inverse_kernel(const __grid_constant__ Problem a) {
  const int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / L;
  const int64_t matrix = min(i, a.batch.count - 1);  // past the end the last one: shuffles need all lanes
  int64_t from[2];
  a.batch.offsets(matrix, from);
  LaneMatrix<L> m;
  m.read(a.A, from[0], a.n, a.A_row, a.A_column);
  if constexpr (kBackward) {
    // A lane computes a row of the transposed gradient, -inv(A) grad^T inv(A). It reads grad^T by rows too, so that
    // both products take rows from other lanes.
    LaneMatrix<L> grad;
    grad.read(a.grad, from[1], a.n, a.grad_column, a.grad_row);
    m.invert();
    m.order_columns();
    m.order_rows();
    double left[L] = {}, result[L] = {};
    UNROLL for (int k = 0; k < L; ++k) {
      UNROLL for (int c = 0; c < L; ++c) left[c] += m.row[k] * __shfl_sync(~0u, grad.row[c], k, L);
    }
    UNROLL for (int k = 0; k < L; ++k) {
      UNROLL for (int c = 0; c < L; ++c) result[c] -= left[k] * __shfl_sync(~0u, m.row[c], k, L);
    }
    if (i >= a.batch.count || m.lane() >= a.n) return;
    UNROLL for (int c = 0; c < L; ++c) {
      if (c < a.n) a.output.set((matrix * a.n + c) * a.n + m.lane(), static_cast<float>(result[c]));
    }
  } else {
    m.invert();
    m.order_columns();
    if (i >= a.batch.count || m.step >= a.n) return;
    write(a.output, (matrix * a.n + m.step) * a.n, m.row, a.n);
    if (a.info && m.step == 0) a.info[matrix] = m.info;
  }
}

}  // namespace
}  // namespace svexport

#ifndef SVEXPORT_AOT  // csrc/aot compiles the kernels only
namespace svexport {
namespace {

template <bool kBackward>
cudaError_t launch(const Tensor& A, const Tensor& grad, const Tensor& output, int32_t* info, cudaStream_t stream) {
  const int64_t n = A.sizes[A.rank - 1];
  if (!is_float(A) || A.sizes[A.rank - 2] != n) return cudaErrorNotSupported;
  if (A.numel() == 0) return cudaSuccess;
  const Tensor& second = kBackward ? grad : A;
  auto row = [](const Tensor& t) { return t.strides[t.rank - 2]; };
  auto column = [](const Tensor& t) { return t.strides[t.rank - 1]; };
  const Problem problem{Walk<2>(Axes<2>({&A, &second}, 2, Axes<2>::Order::kRowMajor)),
                        AnyFloat(A), AnyFloat(second), AnyFloat(output), row(A), column(A), row(second),
                        column(second), info, static_cast<int>(n)};
  return dispatch_lanes(n, [&](auto lanes) {
    constexpr int L = lanes.value;
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
#endif
