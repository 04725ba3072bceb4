// The kernels of rows, backward, and of the sums over rows.
//
// A warp or a block reads a row and its gradients once, keeps them in registers, finds the mean and the deviation again,
// writes the gradients of x, residual and extra and adds up those of the vectors, a part per block; backward_columns adds
// up the parts. Rows that are too long for that go through backward_long_rows, and
// backward_long_columns reads everything again for the sums. What bounds it is memory.
#pragma once

#include "add_bias_residual_layer_norm/rows.cuh"

namespace svexport {
namespace {

using namespace norm;

// Of a row: what is left to find a column's gradients.
struct alignas(16) Statistics {
  float mean, shift, scale;  // normal: (s - mean - shift) * scale
  float mean_g, mean_gn;     // of the gradient of y times the weight; of that times normal, times scale
  float unused[3];
};
static_assert(sizeof(Statistics) == kStatistics);

struct Backward {
  Rows rows;
  AnyFloat bias, weight;
  const void *dy, *ds;
  void* dx[3];      // of x, residual, extra; null: not wanted
  AnyFloat vectors[3];  // gradients of weight, norm_bias, bias
  float* partials;      // of them: (blocks, 3, width); null: none wanted
  int width, period;    // in those of block i column c is the (c + i * d % period)th
  Statistics* statistics;  // of long rows: (rows); null: not wanted
  int d;
  float eps;
};

constexpr int kColumns = kBackwardColumns, kWarps = kBackwardWarps;

// The sums of the vectors' gradients over the warps of a block, one after another, of columns from `first` on that lie
// kWarp * N apart in a thread: to the part of a block, or if it is alone to where they go.
template <int K, int N>
__device__ __forceinline__ void write_sums(const Backward& a, const float (&sums)[3][K][N], int first, int shift,
                                           int64_t part, bool alone) {
  __shared__ float shared[kWarps][kWarp * kColumns];
  UNROLL for (int i = 0; i < 3; ++i) {
    __syncthreads();
    UNROLL for (int k = 0; k < K; ++k) {
      UNROLL for (int j = 0; j < N; ++j) {
        const int c = (k * kWarp + threadIdx.x) * N + j - shift;
        if (c >= 0) shared[threadIdx.y][c] = sums[i][k][j];
      }
    }
    __syncthreads();
    const int count = min(a.d - first, kWarp * kColumns);
    for (int c = threadIdx.y * kWarp + threadIdx.x; c < count; c += kWarp * kWarps) {
      float sum = 0;
      UNROLL for (int w = 0; w < kWarps; ++w) sum += shared[w][c];
      if (!alone) {
        a.partials[(part * 3 + i) * a.width + first + c] = sum;
      } else if (a.vectors[i].data) {
        a.vectors[i].set(first + c, sum);
      }
    }
  }
}

// A warp (blockDim.y of them) or the whole block does one row after another, kColumns a thread. A thread keeps the same
// columns all the time, so that it can sum up the gradients of the vectors.
template <class T, int N, bool kBlock, bool kShifted>
__global__ void __launch_bounds__(kBlock ? kRowThreads : kWarp * kWarps)
    backward_rows(const __grid_constant__ Backward a) {
  constexpr int K = kColumns / N;
  const float part = 1.f / a.d;
  start_next();
  __shared__ Sums<2> scratch[kBlock ? kWarp : 1];
  __shared__ Sums<3> scratch_rest[kBlock ? kWarp : 1];
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.y) + threadIdx.y;
  __shared__ Vec<T, N> ends[5];
  const int shift = kShifted ? shift_of<N>(row, a.d) : 0;
  auto column = [&](int k) { return (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N - shift; };
  uint32_t inside[K];
  float sums[3][K][N] = {}, bias[K][N], weight[K][N];  // sums: for weight, norm_bias and bias
  UNROLL for (int k = 0; k < K; ++k) inside[k] = kShifted ? columns_inside<N>(column(k), a.d) : ~0u;
  // Where registers do, a row is on its way while the one before is summed up.
  constexpr bool kAhead = sizeof(T) == 2 && N * sizeof(T) == 16;
  Loaded<T, N> loaded[K];
  Vec<T, N> loaded_dy[K], loaded_ds[K];
  const auto fetch = [&](int64_t row) {
    const bool real = row < a.rows.walk.count;
    const Row<T> from(a.rows, real ? row : 0);
    const T *dy = static_cast<const T*>(a.dy) + row * a.d, *ds = static_cast<const T*>(a.ds) + row * a.d;
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
    UNROLL for (int k = 0; k < K; ++k) {
      const bool there = real && column(k) < a.d && column(k) + N <= end;
      loaded[k] = {from, column(k), there};
      loaded_dy[k] = load_if<T, N>(dy + column(k), there);
      loaded_ds[k] = load_if<T, N>(ds + column(k), there);
    }
  };
  if (kAhead) fetch(row);
  const Ends<T, N, 5> last({a.rows.data[0], a.rows.data[1], a.rows.data[2], a.dy, a.ds}, a.rows.walk.count * a.d);
  UNROLL for (int k = 0; k < K; ++k) {
    load_columns<N, kShifted>(a.bias, column(k), a.d, bias[k]);
    load_columns<N, kShifted>(a.weight, column(k), a.d, weight[k]);
  }
  if (kShifted) last.share(ends);
  for (; row < a.rows.walk.count; row += step) {
    if (!kAhead) fetch(row);
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
    if (kShifted && end != INT32_MAX) {  // here and not in fetch(), where it would wait for what was loaded
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(k) < a.d && column(k) + N > end) loaded[k] = ends, loaded_dy[k] = ends[3], loaded_ds[k] = ends[4];
      }
    }
    float v[K][N];  // s and then s - mean
    Vec<T, N> dy[K], ds[K];
    Sums<2> sum{};  // of s, of the gradient of y times the weight
    UNROLL for (int k = 0; k < K; ++k) {
      loaded[k].sum(bias[k], a.rows.data[2], v[k]);
      dy[k] = loaded_dy[k];
      ds[k] = loaded_ds[k];
      UNROLL for (int j = 0; j < N; ++j) {
        if (kShifted && !(inside[k] >> j & 1)) v[k][j] = 0, dy[k].at[j] = from_float<T>(0);
        sum += {v[k][j], __fmul_rn(to_float(dy[k].at[j]), weight[k][j])};
      }
    }
    if (kAhead) fetch(row + step);
    sum = row_sum<kBlock>(sum, scratch);
    const float mean = sum.at[0] * part, mean_g = sum.at[1] * part;
    Sums<3> rest{};  // of v = s - mean, its square, v * g * weight
    UNROLL for (int k = 0; k < K; ++k) {
      const float less = column(k) < a.d ? mean : 0;  // v stays 0 where no column is
      UNROLL for (int j = 0; j < N; ++j) {
        v[k][j] = inside[k] >> j & 1 ? v[k][j] - less : 0;
        rest += {v[k][j], v[k][j] * v[k][j], v[k][j] * __fmul_rn(to_float(dy[k].at[j]), weight[k][j])};
      }
    }
    rest = row_sum<kBlock>(rest, scratch_rest);
    const Moments moments({rest.at[0], rest.at[1]}, part, a.eps);
    const float mean_gn = (rest.at[2] * part - moments.shift * mean_g) * moments.scale;  // n: v, normal
    UNROLL for (int k = 0; k < K; ++k) {
      UNROLL for (int j = 0; j < N; ++j) {
        const float normal = moments.normal(v[k][j]), g = to_float(dy[k].at[j]);
        sums[0][k][j] += g * normal;
        sums[1][k][j] += g;
        // The product rounded, as it was in the mean: of a single column nothing may be left.
        v[k][j] = (__fmul_rn(g, weight[k][j]) - mean_g - normal * mean_gn) * moments.scale + to_float(ds[k].at[j]);
        sums[2][k][j] += v[k][j];
      }
      UNROLL for (int i = 0; i < 3; ++i) {
        T* const dx = static_cast<T*>(a.dx[i]) + row * a.d;
        if (a.dx[i] && column(k) < a.d) store_columns<T, N, kShifted>(dx, column(k), a.d, v[k]);
      }
    }
  }
  if (!a.partials) return;
  const bool alone = gridDim.x == 1;
  if constexpr (!kBlock) {
    write_sums(a, sums, 0, shift, blockIdx.x, alone);
  } else {
    UNROLL for (int i = 0; i < 3; ++i) {
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(k) >= a.d) continue;
        if (alone) {
          UNROLL for (int j = 0; j < N; ++j) {
            if (a.vectors[i].data && inside[k] >> j & 1) a.vectors[i].set(column(k) + j, sums[i][k][j]);
          }
        } else {
          constexpr int W = N < 4 ? N : 4;
          float* const to = a.partials + (blockIdx.x * 3ll + i) * a.width + column(k) + shift;
          UNROLL for (int j = 0; j < N; j += W) store_floats<float, W>(to + j, sums[i][k] + j);
        }
      }
    }
  }
}

// One block per row: the gradients of rows, and statistics of these. A row of at most N * K columns per thread stays in
// registers; of any length (kKept false) it is read and summed up three times, N * K columns per thread at a time.
template <class T, int N, int K, bool kKept>
__global__ void __launch_bounds__(kMaxThreads) backward_long_rows(const __grid_constant__ Backward a) {
  const float part = 1.f / a.d;
  __shared__ Sums<2> scratch[kWarp];
  __shared__ Sums<3> scratch_rest[kWarp];
  start_next();
  const int step = kKept ? INT32_MAX / 2 : static_cast<int>(blockDim.x) * N * K;
  for (int64_t row = blockIdx.x; row < a.rows.walk.count; row += gridDim.x) {
    const Row<T> from(a.rows, row);
    const T *dy = static_cast<const T*>(a.dy) + row * a.d, *ds = static_cast<const T*>(a.ds) + row * a.d;
    auto column = [&](int first, int k) {
      return first + (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
    };
    float v[K][N], g[K][N];  // s and the gradient of y times the weight; of columns that are not there 0
    const auto read = [&](int first) {
      Loaded<T, N> loaded[K];
      Vec<T, N> loaded_dy[K];
      UNROLL for (int k = 0; k < K; ++k) {
        const bool there = column(first, k) < a.d;
        loaded[k] = {from, column(first, k), there};
        loaded_dy[k] = load_if<T, N>(dy + column(first, k), there);
      }
      UNROLL for (int k = 0; k < K; ++k) {
        const bool there = column(first, k) < a.d;
        float bias[N], weight[N];
        load_floats(a.bias, column(first, k), there, bias);
        load_floats(a.weight, column(first, k), there, weight);
        loaded[k].sum(bias, a.rows.data[2], v[k]);
        UNROLL for (int j = 0; j < N; ++j) g[k][j] = __fmul_rn(to_float(loaded_dy[k].at[j]), weight[j]);
      }
    };
    if (kKept) read(0);
    Sums<2> sum{};
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
      UNROLL for (int k = 0; k < K; ++k) {
        UNROLL for (int j = 0; j < N; ++j) sum += {v[k][j], g[k][j]};
      }
    }
    sum = block_sum(sum, scratch);
    const float mean = sum.at[0] * part, mean_g = sum.at[1] * part;
    Sums<3> rest{};
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(first, k) >= a.d) continue;
        UNROLL for (int j = 0; j < N; ++j) {
          const float difference = v[k][j] - mean;
          rest += {difference, difference * difference, difference * g[k][j]};
        }
      }
    }
    rest = block_sum(rest, scratch_rest);
    const Moments moments({rest.at[0], rest.at[1]}, part, a.eps);
    const float mean_gn = (rest.at[2] * part - moments.shift * mean_g) * moments.scale;
    if (a.statistics && threadIdx.x == 0) {
      a.statistics[row] = {mean, moments.shift, moments.scale, mean_g, mean_gn};
    }
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
      Vec<T, N> loaded_ds[K];
      UNROLL for (int k = 0; k < K; ++k) loaded_ds[k] = load_if<T, N>(ds + column(first, k), column(first, k) < a.d);
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(first, k) >= a.d) continue;
        float dx[N];
        UNROLL for (int j = 0; j < N; ++j) {
          dx[j] = (g[k][j] - mean_g - moments.normal(v[k][j] - mean) * mean_gn) * moments.scale +
                  to_float(loaded_ds[k].at[j]);
        }
        UNROLL for (int i = 0; i < 3; ++i) {
          if (a.dx[i]) store_floats<T, N>(static_cast<T*>(a.dx[i]) + row * a.d + column(first, k), dx);
        }
      }
    }
  }
}

// The gradients of the vectors from long rows and their statistics. Blocks of kWarp * kColumns columns x rows.
template <class T, int N>
__global__ void __launch_bounds__(kWarp * kWarps, 2) backward_long_columns(const __grid_constant__ Backward a) {
  constexpr int K = kColumns / N;
  const int first = blockIdx.x * kWarp * kColumns;
  start_next();
  auto column = [&](int k) { return first + (k * kWarp + static_cast<int>(threadIdx.x)) * N; };
  float bias[K][N], weight[K][N], sums[3][K][N] = {};
  UNROLL for (int k = 0; k < K; ++k) {
    load_floats(a.bias, column(k), column(k) < a.d, bias[k]);
    load_floats(a.weight, column(k), column(k) < a.d, weight[k]);
  }
  wait_for_previous();
  const int64_t step = static_cast<int64_t>(gridDim.y) * kWarps;
  for (int64_t row = blockIdx.y * static_cast<int64_t>(kWarps) + threadIdx.y; row < a.rows.walk.count; row += step) {
    const Statistics of = a.statistics[row];
    const Row<T> from(a.rows, row);
    const T *dy = static_cast<const T*>(a.dy) + row * a.d, *ds = static_cast<const T*>(a.ds) + row * a.d;
    Loaded<T, N> loaded[K];
    Vec<T, N> loaded_dy[K], loaded_ds[K];
    UNROLL for (int k = 0; k < K; ++k) {
      loaded[k] = {from, column(k), column(k) < a.d};
      loaded_dy[k] = load_if<T, N>(dy + column(k), column(k) < a.d);
      loaded_ds[k] = load_if<T, N>(ds + column(k), column(k) < a.d);
    }
    UNROLL for (int k = 0; k < K; ++k) {
      float v[N];
      loaded[k].sum(bias[k], a.rows.data[2], v);
      UNROLL for (int j = 0; j < N; ++j) {
        const float g = to_float(loaded_dy[k].at[j]), normal = (v[j] - of.mean - of.shift) * of.scale;
        sums[0][k][j] += g * normal;
        sums[1][k][j] += g;
        sums[2][k][j] += (__fmul_rn(g, weight[k][j]) - of.mean_g - normal * of.mean_gn) * of.scale +
                         to_float(loaded_ds[k].at[j]);
      }
    }
  }
  write_sums(a, sums, first, 0, blockIdx.y, gridDim.y == 1);
}

// Sums up `count` partials.
__global__ void __launch_bounds__(1024) backward_columns(const __grid_constant__ Backward a, int count) {
  __shared__ float shared[kWarp][kWarp];
  const int column = blockIdx.x * kWarp + threadIdx.x;
  wait_for_previous();
  float sum = 0;
  if (column < 3 * a.d) {
#pragma unroll 8
    for (int i = threadIdx.y; i < count; i += blockDim.y) {
      const int shift = static_cast<uint32_t>(i) * a.d & (a.period - 1);
      sum += a.partials[(i * 3ll + column / a.d) * a.width + column % a.d + shift];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= 3 * a.d) return;
  for (int i = 1; i < blockDim.y; ++i) sum += shared[i][threadIdx.x];
  const AnyFloat& to = a.vectors[column / a.d];
  if (to.data) to.set(column % a.d, sum);
}

}  // namespace
}  // namespace svexport
