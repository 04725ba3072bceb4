// The forward kernels: s = x + bias + residual (+ extra), y = layer_norm(s).
//
// A warp or a block reads a row once, keeps it in registers, computes its mean and then the sum of squared differences,
// and writes s and y. Memory bounds it: 4 tensors are moved, 5 with `extra`. A row too long for registers is read three
// times. csrc/aot compiles these kernels too.
#pragma once

#include "add_bias_residual_layer_norm/rows.cuh"

namespace svexport {
namespace {

using namespace norm;

struct Forward {
  Rows rows;
  AnyFloat bias, weight, norm_bias;
  void *y, *s;
  int d;
  float eps;
};

// A warp or the whole block does one row after another; at most N * K columns per thread stay in registers.
// N columns are loaded at once.
template <class T, int N, int K, bool kBlock, bool kShifted = false>
__global__ void __launch_bounds__(kBlock ? kMaxThreads : 128, !kBlock ? 4 : N > 1 && N * K <= 8 ? 2 : 1)
    forward_rows(const __grid_constant__ Forward a) {
  const float part = 1.f / a.d;
  // bias, weight and norm_bias: in registers for all rows of this thread, or in shared memory, or read for each row
  constexpr bool kKeep = N * K <= 8, kShared = kShifted && !kKeep;
  __shared__ float scratch[kBlock ? kWarp : 1];
  __shared__ Sums<2> scratch_rest[kBlock ? kWarp : 1];
  const int lanes = kBlock ? blockDim.x : kWarp, lane = kBlock ? threadIdx.x : threadIdx.x % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kBlock ? 1 : blockDim.x / kWarp);
  int64_t row = kBlock ? blockIdx.x : blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  __shared__ Vec<T, N> ends[3];
  const Ends<T, N, 3> last(a.rows.data, a.rows.walk.count * a.d);

  const int shift = kShifted ? shift_of<N>(row, a.d) : 0;
  auto column = [&](int k) { return (k * lanes + lane) * N - shift; };
  uint32_t inside[K];
  UNROLL for (int k = 0; k < K; ++k) inside[k] = kShifted ? columns_inside<N>(column(k), a.d) : ~0u;
  float bias[K][N], weight[K][N], norm_bias[K][N];
  UNROLL for (int k = 0; k < K; ++k) {
    if (!kKeep) break;
    load_columns<N, kShifted>(a.bias, column(k), a.d, bias[k]);
    load_columns<N, kShifted>(a.weight, column(k), a.d, weight[k]);
    load_columns<N, kShifted>(a.norm_bias, column(k), a.d, norm_bias[k]);
  }
  using Shared = Kept<K, N>;
  if constexpr (kShared) {
    Shared::share(0, a.bias, shift, a.d);
    Shared::share(1, a.weight, shift, a.d);
    Shared::share(2, a.norm_bias, shift, a.d);
  }
  const auto parameters = [&](int i, const AnyFloat& p, int k, float (&to)[N]) {
    if constexpr (kShared) {
      Shared::get(i, k, to);
    } else {
      load_floats(p, column(k), column(k) < a.d, to);
    }
  };
  if (kShifted) last.share(ends);
  for (; row < a.rows.walk.count; row += step) {
    const Row<T> from(a.rows, row);
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
    Loaded<T, N> loaded[K];
    UNROLL for (int k = 0; k < K; ++k) loaded[k] = {from, column(k), column(k) < a.d && column(k) + N <= end};
    if (kShifted && end != INT32_MAX) {
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(k) < a.d && column(k) + N > end) loaded[k] = ends;
      }
    }
    float v[K][N], sum = 0;
    UNROLL for (int k = 0; k < K; ++k) {
      if constexpr (!kKeep) parameters(0, a.bias, k, bias[k]);
      loaded[k].sum(bias[k], a.rows.data[2], v[k]);  // 0 outside the row
      UNROLL for (int j = 0; j < N; ++j) sum += inside[k] >> j & 1 ? v[k][j] : 0;
      if (column(k) < a.d) store_columns<T, N, kShifted>(static_cast<T*>(a.s) + row * a.d, column(k), a.d, v[k]);
    }
    const float mean = row_sum<kBlock>(sum, scratch) * part;
    Sums<2> rest{};
    UNROLL for (int k = 0; k < K; ++k) {
      const float less = column(k) < a.d ? mean : 0;
      UNROLL for (int j = 0; j < N; ++j) {
        v[k][j] = inside[k] >> j & 1 ? v[k][j] - less : 0;
        rest += {v[k][j], v[k][j] * v[k][j]};
      }
    }
    const Moments moments(row_sum<kBlock>(rest, scratch_rest), part, a.eps);
    UNROLL for (int k = 0; k < K; ++k) {
      if (column(k) >= a.d) continue;
      if constexpr (!kKeep) {
        parameters(1, a.weight, k, weight[k]);
        parameters(2, a.norm_bias, k, norm_bias[k]);
      }
      UNROLL for (int j = 0; j < N; ++j) v[k][j] = moments.normal(v[k][j]) * weight[k][j] + norm_bias[k][j];
      store_columns<T, N, kShifted>(static_cast<T*>(a.y) + row * a.d, column(k), a.d, v[k]);
    }
  }
}

// One block per row of any length, which it reads three times.
template <class T, int N, bool kShifted = false>
__global__ void __launch_bounds__(kMaxThreads) forward_long_rows(const __grid_constant__ Forward a) {
  const float part = 1.f / a.d;
  __shared__ float scratch[kWarp];
  __shared__ Sums<2> scratch_rest[kWarp];
  __shared__ Vec<T, N> ends[3];
  if (kShifted) Ends<T, N, 3>(a.rows.data, a.rows.walk.count * a.d).share(ends);
  for (int64_t row = blockIdx.x; row < a.rows.walk.count; row += gridDim.x) {
    const Row<T> from(a.rows, row);
    const int first = static_cast<int>(threadIdx.x) * N - (kShifted ? shift_of<N>(row, a.d) : 0);
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
    auto sums = [&](int column, float (&v)[N]) {
      float bias[N];
      Loaded<T, N> loaded(from, column, column + N <= end);
      load_columns<N, kShifted>(a.bias, column, a.d, bias);
      if (kShifted && column + N > end) loaded = ends;
      loaded.sum(bias, a.rows.data[2], v);
    };
    float v[N], sum = 0;
    for (int column = first; column < a.d; column += blockDim.x * N) {
      sums(column, v);
      store_columns<T, N, kShifted>(static_cast<T*>(a.s) + row * a.d, column, a.d, v);
      const uint32_t inside = kShifted ? columns_inside<N>(column, a.d) : ~0u;
      UNROLL for (int j = 0; j < N; ++j) sum += inside >> j & 1 ? v[j] : 0;
    }
    const float mean = block_sum(sum, scratch) * part;
    Sums<2> rest{};
    for (int column = first; column < a.d; column += blockDim.x * N) {
      sums(column, v);
      const uint32_t inside = kShifted ? columns_inside<N>(column, a.d) : ~0u;
      UNROLL for (int j = 0; j < N; ++j) {
        const float difference = inside >> j & 1 ? v[j] - mean : 0;
        rest += {difference, difference * difference};
      }
    }
    const Moments moments(block_sum(rest, scratch_rest), part, a.eps);
    for (int column = first; column < a.d; column += blockDim.x * N) {
      float weight[N], norm_bias[N];
      load_columns<N, kShifted>(a.weight, column, a.d, weight);
      load_columns<N, kShifted>(a.norm_bias, column, a.d, norm_bias);
      sums(column, v);
      UNROLL for (int j = 0; j < N; ++j) v[j] = moments.normal(v[j] - mean) * weight[j] + norm_bias[j];
      store_columns<T, N, kShifted>(static_cast<T*>(a.y) + row * a.d, column, a.d, v);
    }
  }
}

}  // namespace
}  // namespace svexport
