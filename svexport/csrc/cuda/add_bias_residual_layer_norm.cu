#include "add_bias_residual_layer_norm.h"

#include "overlap.cuh"
#include "strided.cuh"

namespace svexport {
namespace {

constexpr int kWarp = 32;

// x, residual and extra (*, D) as rows that are walked together.
struct Rows {
  Walk<3> walk;
  const void* data[3];  // null: no extra

  __device__ Rows(const Walk<3>& walk, const void* x, const void* residual, const void* extra)
      : walk(walk), data{x, residual, extra} {}
  Rows(const Tensor& x, const Tensor& residual, const Tensor& extra)
      : walk(Axes<3>({&x, &residual, &extra}, 1, Axes<3>::Order::kRowMajor)),
        data{x.data, residual.data, extra.data} {}
};

template <class T>
struct Row {
  const T *x, *residual, *extra;

  __device__ __forceinline__ Row(const Rows& rows, int64_t i) {
    int64_t at[3];
    rows.walk.offsets(i, at);
    x = static_cast<const T*>(rows.data[0]) + at[0];
    residual = static_cast<const T*>(rows.data[1]) + at[1];
    extra = rows.data[2] ? static_cast<const T*>(rows.data[2]) + at[2] : nullptr;
  }
};

struct Forward {
  Rows rows;
  AnyFloat bias, weight, norm_bias;
  void *y, *s;
  int d;
  float eps;
};

// Of a row: what is left to find a column's gradients.
struct alignas(16) Statistics {
  float mean, shift, scale;  // normal: (s - mean - shift) * scale
  float mean_g, mean_gn;     // of the gradient of y times the weight; of that times normal, times scale
  float unused[3];
};

struct Backward {
  Rows rows;
  AnyFloat bias, weight;
  const void *dy, *ds;
  void* dx[3];      // of x, residual, extra; null: not wanted
  AnyFloat vectors[3];  // gradients of weight, norm_bias, bias
  float* partials;      // of them: (blocks, 3, d); null: none wanted
  Statistics* statistics;  // of long rows: (rows); null: not wanted
  int d;
  float eps;
};

// Loads that wait for none before them: without branches, and used only when all are on their way.
template <class T, int N>
struct Loaded {
  Vec<T, N> x, residual, extra;

  __device__ __forceinline__ Loaded(const Row<T>& row, int column, bool there)
      : x(load_if<T, N>(row.x + column, there)),
        residual(load_if<T, N>(row.residual + column, there)),
        extra(load_if<T, N>(row.extra + column, there && row.extra)) {}
  Loaded() = default;

  // x + bias + residual (+ extra)
  __device__ __forceinline__ void sum(const float (&bias)[N], bool has_extra, float (&to)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      to[j] = to_float(x.at[j]) + bias[j] + to_float(residual.at[j]);
      if (has_extra) to[j] += to_float(extra.at[j]);
    }
  }
};

template <int N>
__device__ __forceinline__ void load_floats(const AnyFloat& p, int64_t i, bool there, float (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = there ? p.get(i) : 0;
  } else {
    constexpr int W = N < 4 ? N : 4;
    const bool wide = p.dtype == DType::kFloat32;
    Vec<float, W> floats[N / W];
#pragma unroll
    for (int k = 0; k < N / W; ++k) {
      floats[k] = load_if<float, W>(static_cast<const float*>(p.data) + i + W * k, there && wide);
    }
    const auto halves = load_if<uint16_t, N>(static_cast<const uint16_t*>(p.data) + i, there && !wide);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float narrow = p.dtype == DType::kFloat16 ? __half2float(__ushort_as_half(halves.at[j]))
                                                      : __uint_as_float(static_cast<uint32_t>(halves.at[j]) << 16);
      to[j] = wide ? floats[j / W].at[j % W] : narrow;
    }
  }
}

template <class T, int N>
__device__ __forceinline__ void store_floats(T* p, const float* from) {
  Vec<T, N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = from_float<T>(from[j]);
  store<T, N>(p, v);
}

// Sums that are taken together.
template <int K>
struct Sums {
  float at[K];

  __device__ __forceinline__ Sums& operator+=(const Sums& other) {
#pragma unroll
    for (int k = 0; k < K; ++k) at[k] += other.at[k];
    return *this;
  }
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = kWarp / 2; o; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

template <int K>
__device__ __forceinline__ Sums<K> warp_sum(Sums<K> x) {
#pragma unroll
  for (int k = 0; k < K; ++k) x.at[k] = warp_sum(x.at[k]);
  return x;
}

// The sum over the block, in every thread. `scratch` holds one element per warp; two calls in a row need two of them.
template <class F>
__device__ __forceinline__ F block_sum(F x, F* scratch) {
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  F sum = scratch[0];
  for (int i = 1; i < blockDim.x / kWarp; ++i) sum += scratch[i];
  return sum;
}

// From the sums of v and of v*v, where v is the difference from the mean but for its rounding, which is taken off again:
// of a mean much larger than the deviation it is no small part of that.
struct Moments {
  float shift, scale;

  __device__ __forceinline__ Moments(const Sums<2>& sums, int d, float eps) : shift(sums.at[0] / d) {
    scale = rsqrtf(fmaxf(sums.at[1] / d - shift * shift, 0.f) + eps);
  }
  __device__ __forceinline__ float normal(float v) const { return (v - shift) * scale; }
};

// A row of x summed up by the threads that share it: a warp, or the whole block.
template <bool kBlock, class F>
__device__ __forceinline__ F row_sum(F x, F* scratch) {
  if constexpr (kBlock) {
    return block_sum(x, scratch);
  } else {
    return warp_sum(x);
  }
}

constexpr int kMaxThreads = 512;  // that do a row

// A warp or the whole block does one row after another, of at most N * K columns per thread, which stay in registers.
// N columns are loaded at once.
template <class T, int N, int K, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kMaxThreads : 128, !kBlock ? 4 : N > 1 && N * K <= 8 ? 2 : 1)
    forward_rows(const __grid_constant__ Forward a) {
  constexpr bool kKeep = N * K <= 8;  // bias, weight and norm_bias in registers, for all rows of this thread
  __shared__ float scratch[kBlock ? kWarp : 1];
  __shared__ Sums<2> scratch_rest[kBlock ? kWarp : 1];
  const int lanes = kBlock ? blockDim.x : kWarp, lane = kBlock ? threadIdx.x : threadIdx.x % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kBlock ? 1 : blockDim.x / kWarp);
  int64_t row = kBlock ? blockIdx.x : blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;

  auto column = [&](int k) { return (k * lanes + lane) * N; };
  float bias[K][N], weight[K][N], norm_bias[K][N];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!kKeep) break;
    load_floats(a.bias, column(k), column(k) < a.d, bias[k]);
    load_floats(a.weight, column(k), column(k) < a.d, weight[k]);
    load_floats(a.norm_bias, column(k), column(k) < a.d, norm_bias[k]);
  }
  for (; row < a.rows.walk.count; row += step) {
    const Row<T> from(a.rows, row);
    Loaded<T, N> loaded[K];
#pragma unroll
    for (int k = 0; k < K; ++k) loaded[k] = {from, column(k), column(k) < a.d};
    if constexpr (!kKeep) {
#pragma unroll
      for (int k = 0; k < K; ++k) load_floats(a.bias, column(k), column(k) < a.d, bias[k]);
    }
    float v[K][N], sum = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      loaded[k].sum(bias[k], a.rows.data[2], v[k]);
      if (column(k) >= a.d) continue;
      store_floats<T, N>(static_cast<T*>(a.s) + row * a.d + column(k), v[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += v[k][j];
    }
    const float mean = row_sum<kBlock>(sum, scratch) / a.d;
    Sums<2> rest{};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (column(k) >= a.d) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        v[k][j] -= mean;
        rest += {v[k][j], v[k][j] * v[k][j]};
      }
    }
    const Moments moments(row_sum<kBlock>(rest, scratch_rest), a.d, a.eps);
    if constexpr (!kKeep) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        load_floats(a.weight, column(k), column(k) < a.d, weight[k]);
        load_floats(a.norm_bias, column(k), column(k) < a.d, norm_bias[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (column(k) >= a.d) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) v[k][j] = moments.normal(v[k][j]) * weight[k][j] + norm_bias[k][j];
      store_floats<T, N>(static_cast<T*>(a.y) + row * a.d + column(k), v[k]);
    }
  }
}

// One block per row of any length, which is summed up three times.
template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads) forward_long_rows(const __grid_constant__ Forward a) {
  __shared__ float scratch[kWarp];
  __shared__ Sums<2> scratch_rest[kWarp];
  for (int64_t row = blockIdx.x; row < a.rows.walk.count; row += gridDim.x) {
    const Row<T> from(a.rows, row);
    auto sums = [&](int column, float (&v)[N]) {
      float bias[N];
      const Loaded<T, N> loaded(from, column, true);
      load_floats(a.bias, column, true, bias);
      loaded.sum(bias, a.rows.data[2], v);
    };
    float v[N], sum = 0;
    for (int column = threadIdx.x * N; column < a.d; column += blockDim.x * N) {
      sums(column, v);
      store_floats<T, N>(static_cast<T*>(a.s) + row * a.d + column, v);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += v[j];
    }
    const float mean = block_sum(sum, scratch) / a.d;
    Sums<2> rest{};
    for (int column = threadIdx.x * N; column < a.d; column += blockDim.x * N) {
      sums(column, v);
#pragma unroll
      for (int j = 0; j < N; ++j) rest += {v[j] - mean, (v[j] - mean) * (v[j] - mean)};
    }
    const Moments moments(block_sum(rest, scratch_rest), a.d, a.eps);
    for (int column = threadIdx.x * N; column < a.d; column += blockDim.x * N) {
      float weight[N], norm_bias[N];
      load_floats(a.weight, column, true, weight);
      load_floats(a.norm_bias, column, true, norm_bias);
      sums(column, v);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = moments.normal(v[j] - mean) * weight[j] + norm_bias[j];
      store_floats<T, N>(static_cast<T*>(a.y) + row * a.d + column, v);
    }
  }
}

constexpr int kColumns = 8;  // per thread, in the backward kernel
constexpr int kWarps = 8;    // per block, where a warp does a row

// The sums of the vectors' gradients over the warps of a block, one after another, of columns from `first` on that lie
// kWarp * N apart in a thread: to the part of a block, or if it is alone to where they go.
template <int K, int N>
__device__ __forceinline__ void write_sums(const Backward& a, const float (&sums)[3][K][N], int first, int64_t part,
                                           bool alone) {
  __shared__ float shared[kWarps][kWarp * kColumns];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) shared[threadIdx.y][(k * kWarp + threadIdx.x) * N + j] = sums[i][k][j];
    }
    __syncthreads();
    const int count = min(a.d - first, kWarp * kColumns);
    for (int c = threadIdx.y * kWarp + threadIdx.x; c < count; c += kWarp * kWarps) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared[w][c];
      if (!alone) {
        a.partials[(part * 3 + i) * a.d + first + c] = sum;
      } else if (a.vectors[i].data) {
        a.vectors[i].set(first + c, sum);
      }
    }
  }
}

// A warp (blockDim.y of them) or the whole block does one row after another. A thread keeps the same columns all the
// time, so that it can sum up the gradients of the vectors in registers.
template <class T, int N, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kMaxThreads : kWarp * kWarps)
    backward_rows(const __grid_constant__ Backward a) {
  constexpr int K = kColumns / N;
  start_next();
  __shared__ Sums<2> scratch[kBlock ? kWarp : 1];
  __shared__ Sums<3> scratch_rest[kBlock ? kWarp : 1];
  auto column = [&](int k) { return (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N; };
  float bias[K][N], weight[K][N], sums[3][K][N] = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    load_floats(a.bias, column(k), column(k) < a.d, bias[k]);
    load_floats(a.weight, column(k), column(k) < a.d, weight[k]);
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  Loaded<T, N> loaded[K];
  Vec<T, N> loaded_dy[K], loaded_ds[K];
  const auto fetch = [&](int64_t row) {
    const bool real = row < a.rows.walk.count;
    const Row<T> from(a.rows, real ? row : 0);
    const T *dy = static_cast<const T*>(a.dy) + row * a.d, *ds = static_cast<const T*>(a.ds) + row * a.d;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      loaded[k] = {from, column(k), real && column(k) < a.d};
      loaded_dy[k] = load_if<T, N>(dy + column(k), real && column(k) < a.d);
      loaded_ds[k] = load_if<T, N>(ds + column(k), real && column(k) < a.d);
    }
  };
  constexpr bool kAhead = K == 1;  // a row is on its way while the one before is summed up: the registers must do
  int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.y) + threadIdx.y;
  if (kAhead) fetch(row);
  for (; row < a.rows.walk.count; row += step) {
    if (!kAhead) fetch(row);
    float v[K][N], g[K][N];  // s and then s - mean, the gradient of y
    Sums<2> sum{};           // of s, of g * weight
#pragma unroll
    for (int k = 0; k < K; ++k) {
      loaded[k].sum(bias[k], a.rows.data[2], v[k]);
      if (column(k) >= a.d) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        g[k][j] = to_float(loaded_dy[k].at[j]);
        sum += {v[k][j], __fmul_rn(g[k][j], weight[k][j])};
      }
    }
    Vec<T, N> ds[K];
#pragma unroll
    for (int k = 0; k < K; ++k) ds[k] = loaded_ds[k];
    if (kAhead) fetch(row + step);
    sum = row_sum<kBlock>(sum, scratch);
    const float mean = sum.at[0] / a.d, mean_g = sum.at[1] / a.d;
    Sums<3> rest{};  // of v = s - mean, its square, v * g * weight
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (column(k) >= a.d) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        v[k][j] -= mean;
        rest += {v[k][j], v[k][j] * v[k][j], v[k][j] * __fmul_rn(g[k][j], weight[k][j])};
      }
    }
    rest = row_sum<kBlock>(rest, scratch_rest);
    const Moments moments({rest.at[0], rest.at[1]}, a.d, a.eps);
    const float mean_gn = (rest.at[2] / a.d - moments.shift * mean_g) * moments.scale;  // n: v, normal
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (column(k) >= a.d) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float normal = moments.normal(v[k][j]);
        sums[0][k][j] += g[k][j] * normal;
        sums[1][k][j] += g[k][j];
        // The product rounded, as it was in the mean: of a single column nothing may be left.
        v[k][j] = (__fmul_rn(g[k][j], weight[k][j]) - mean_g - normal * mean_gn) * moments.scale +
                  to_float(ds[k].at[j]);
        sums[2][k][j] += v[k][j];
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (a.dx[i]) store_floats<T, N>(static_cast<T*>(a.dx[i]) + row * a.d + column(k), v[k]);
      }
    }
  }
  if (!a.partials) return;
  const bool alone = gridDim.x == 1;
  if constexpr (!kBlock) {
    write_sums(a, sums, 0, blockIdx.x, alone);
  } else {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (column(k) >= a.d) continue;
        if (alone) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            if (a.vectors[i].data) a.vectors[i].set(column(k) + j, sums[i][k][j]);
          }
        } else {
          store_floats<float, N == 8 ? 4 : N>(a.partials + (blockIdx.x * 3ll + i) * a.d + column(k), sums[i][k]);
          if (N == 8) store_floats<float, 4>(a.partials + (blockIdx.x * 3ll + i) * a.d + column(k) + 4, sums[i][k] + N - 4);
        }
      }
    }
  }
}

// One block per row: the gradients of rows, and statistics of these. A row of at most N * K columns per thread stays in
// registers; of any length (kKept false) it is read and summed up three times, N * K columns per thread at a time.
template <class T, int N, int K, bool kKept>
__global__ void __launch_bounds__(kMaxThreads) backward_long_rows(const __grid_constant__ Backward a) {
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
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const bool there = column(first, k) < a.d;
        loaded[k] = {from, column(first, k), there};
        loaded_dy[k] = load_if<T, N>(dy + column(first, k), there);
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const bool there = column(first, k) < a.d;
        float bias[N], weight[N];
        load_floats(a.bias, column(first, k), there, bias);
        load_floats(a.weight, column(first, k), there, weight);
        loaded[k].sum(bias, a.rows.data[2], v[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) g[k][j] = __fmul_rn(to_float(loaded_dy[k].at[j]), weight[j]);
      }
    };
    if (kKept) read(0);
    Sums<2> sum{};
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum += {v[k][j], g[k][j]};
      }
    }
    sum = block_sum(sum, scratch);
    const float mean = sum.at[0] / a.d, mean_g = sum.at[1] / a.d;
    Sums<3> rest{};
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (column(first, k) >= a.d) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float difference = v[k][j] - mean;
          rest += {difference, difference * difference, difference * g[k][j]};
        }
      }
    }
    rest = block_sum(rest, scratch_rest);
    const Moments moments({rest.at[0], rest.at[1]}, a.d, a.eps);
    const float mean_gn = (rest.at[2] / a.d - moments.shift * mean_g) * moments.scale;
    if (a.statistics && threadIdx.x == 0) {
      a.statistics[row] = {mean, moments.shift, moments.scale, mean_g, mean_gn};
    }
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
      Vec<T, N> loaded_ds[K];
#pragma unroll
      for (int k = 0; k < K; ++k) loaded_ds[k] = load_if<T, N>(ds + column(first, k), column(first, k) < a.d);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (column(first, k) >= a.d) continue;
        float dx[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          dx[j] = (g[k][j] - mean_g - moments.normal(v[k][j] - mean) * mean_gn) * moments.scale +
                  to_float(loaded_ds[k].at[j]);
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) {
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
#pragma unroll
  for (int k = 0; k < K; ++k) {
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
#pragma unroll
    for (int k = 0; k < K; ++k) {
      loaded[k] = {from, column(k), column(k) < a.d};
      loaded_dy[k] = load_if<T, N>(dy + column(k), column(k) < a.d);
      loaded_ds[k] = load_if<T, N>(ds + column(k), column(k) < a.d);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float v[N];
      loaded[k].sum(bias[k], a.rows.data[2], v);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float g = to_float(loaded_dy[k].at[j]), normal = (v[j] - of.mean - of.shift) * of.scale;
        sums[0][k][j] += g * normal;
        sums[1][k][j] += g;
        sums[2][k][j] += (__fmul_rn(g, weight[k][j]) - of.mean_g - normal * of.mean_gn) * of.scale +
                         to_float(loaded_ds[k].at[j]);
      }
    }
  }
  write_sums(a, sums, first, blockIdx.y, gridDim.y == 1);
}

// partials: (count, 3 * d) -> its sums over the first dimension.
__global__ void __launch_bounds__(1024) backward_columns(const __grid_constant__ Backward a, int count) {
  __shared__ float shared[kWarp][kWarp];
  const int column = blockIdx.x * kWarp + threadIdx.x;
  wait_for_previous();
  float sum = 0;
  if (column < 3 * a.d) {
#pragma unroll 8
    for (int i = threadIdx.y; i < count; i += blockDim.y) sum += a.partials[i * 3ll * a.d + column];
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

#ifndef SVEXPORT_AOT  // csrc/aot takes the kernels only
namespace svexport {
namespace {

// Calls f(N) with how many elements of all of them can be read and written at a time: those of 16 bytes, 2 or 1.
template <class T, class F>
cudaError_t with_width(const Rows& rows, int d, std::initializer_list<const void*> contiguous,
                       std::initializer_list<AnyFloat> vectors, F&& f) {
  const auto fits = [&](int n) {
    const auto aligned = [](const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
    bool result = d % n == 0;
    for (int k = 0; k < 3; ++k) {
      result = result && aligned(rows.data[k], n * sizeof(T));
      for (int i = 0; i < rows.walk.rank; ++i) result = result && rows.walk.strides[i][k] % n == 0;
    }
    for (const void* p : contiguous) result = result && aligned(p, n * sizeof(T));
    for (const AnyFloat& v : vectors) result = result && aligned(v.data, std::min(n, 4) * sizeof(float));
    return result;
  };
  constexpr int N = 16 / sizeof(T);
  return fits(N)   ? f(std::integral_constant<int, N>())
         : fits(2) ? f(std::integral_constant<int, 2>())
                   : f(std::integral_constant<int, 1>());
}

// Whether a tensor like x, or none, has the type of x and contiguous columns.
bool walks(const Tensor& t, const Tensor& x) {
  return !t.data || (t.dtype == x.dtype && x.sizes[x.rank - 1] < INT32_MAX / 2 &&
                     (t.strides[t.rank - 1] == 1 || t.sizes[t.rank - 1] == 1));
}

int multiprocessors() { return of_device(cudaDevAttrMultiProcessorCount); }

template <class T>
cudaError_t launch_forward(const Forward& a, cudaStream_t stream) {
  return with_width<T>(a.rows, a.d, {a.y, a.s}, {a.bias, a.weight, a.norm_bias}, [&](auto width) {
    constexpr int N = width.value;
    const auto run = [&](auto kernel, bool warp, int columns) {  // columns: of a thread
      // As many as stay on the device, where that was measured to be faster; otherwise one by one.
      const int64_t most = warp && sizeof(T) == 2 ? 7 * multiprocessors() : INT32_MAX;
      const int64_t rows = a.rows.walk.count, blocks = std::min(warp ? ceil_div<int64_t>(rows, 4) : rows, most);
      const int threads = warp ? 128 : std::min(ceil_div(a.d, columns * kWarp) * kWarp, kMaxThreads);
      kernel<<<static_cast<int>(blocks), threads, 0, stream>>>(a);
      return cudaGetLastError();
    };
    if (a.d <= 8 * kWarp) return run(forward_rows<T, N, 8 / N, false>, true, 8);
    if constexpr (N * sizeof(T) == 16) {
      if (a.d <= 16 * kWarp) return run(forward_rows<T, N, 16 / N, false>, true, 16);
      if (a.d > 8 * kMaxThreads && a.d <= 16 * kMaxThreads) return run(forward_rows<T, N, 16 / N, true>, false, 16);
    }
    if (a.d <= 8 * kMaxThreads) return run(forward_rows<T, N, 8 / N, true>, false, 8);
    return run(forward_long_rows<T, N>, false, 8);
  });
}

// Blocks of backward_rows.
struct Grid {
  dim3 threads;
  int blocks;

  Grid(int64_t rows, int64_t d) {
    const int lanes = static_cast<int>(ceil_div<int64_t>(d, kColumns * kWarp)) * kWarp;
    threads = lanes == kWarp ? dim3(kWarp, kWarps) : dim3(lanes);
    const int resident = multiprocessors() * std::max<int>(1, 512 / static_cast<int>(threads.x * threads.y));
    blocks = static_cast<int>(std::min<int64_t>(ceil_div<int64_t>(rows, threads.y), resident));
  }
};

// Parts of rows in backward_long_columns: as many blocks as are resident, of two rows a warp at least.
int parts_of(int64_t rows, int64_t d) {
  const int64_t blocks = ceil_div<int64_t>(d, kWarp * kColumns), most = ceil_div<int64_t>(rows, 2 * kWarps);
  return static_cast<int>(std::min(most, std::max<int64_t>(1, 2 * multiprocessors() / blocks)));
}

bool is_long(int64_t d) { return d > kColumns * kMaxThreads; }

template <class T>
cudaError_t launch_backward(const Backward& a, cudaStream_t stream) {
  const int64_t rows = a.rows.walk.count;
  return with_width<T>(a.rows, a.d, {a.dy, a.ds, a.dx[0], a.dx[1], a.dx[2]}, {a.bias, a.weight}, [&](auto width) {
    constexpr int N = width.value;
    if (!is_long(a.d)) {
      const Grid grid(rows, a.d);
      const auto kernel = grid.threads.x == kWarp ? backward_rows<T, N, false> : backward_rows<T, N, true>;
      kernel<<<grid.blocks, grid.threads, 0, stream>>>(a);
      return cudaGetLastError();
    }
    const bool kept = a.d <= 16 * kMaxThreads;
    const auto kernel = kept ? backward_long_rows<T, N, 16 / N, true> : backward_long_rows<T, N, 8 / N, false>;
    const int threads = kept ? ceil_div(a.d, 16 * kWarp) * kWarp : kMaxThreads;
    kernel<<<static_cast<int>(std::min<int64_t>(rows, INT32_MAX)), threads, 0, stream>>>(a);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess || !a.partials) return status;
    const dim3 blocks(ceil_div(a.d, kWarp * kColumns), parts_of(rows, a.d));
    return launch(backward_long_columns<T, N>, blocks, dim3(kWarp, kWarps), 0, stream, true, a);
  });
}

}  // namespace

cudaError_t add_bias_residual_layer_norm(const Tensor& x, const Tensor& bias, const Tensor& residual,
                                         const Tensor& weight, const Tensor& norm_bias, float eps, const Tensor& extra,
                                         const Tensor& y, const Tensor& s, cudaStream_t stream) {
  if (!walks(x, x) || !walks(residual, x) || !walks(extra, x) || !is_float(bias) || !is_float(weight) ||
      !is_float(norm_bias)) {
    return cudaErrorNotSupported;
  }
  return dispatch_float(x.dtype, [&](auto* p) {
    if (x.numel() == 0) return cudaSuccess;
    const auto d = static_cast<int>(x.sizes[x.rank - 1]);
    return launch_forward<element_t<decltype(p)>>(
        {Rows(x, residual, extra), AnyFloat(bias), AnyFloat(weight), AnyFloat(norm_bias), y.data, s.data, d, eps}, stream);
  });
}

size_t add_bias_residual_layer_norm_backward_workspace(const Tensor& x) {
  if (x.numel() == 0) return 0;
  const int64_t d = x.sizes[x.rank - 1], rows = x.numel() / d;
  if (!is_long(d)) return Grid(rows, d).blocks * 3 * d * sizeof(float);
  return rows * sizeof(Statistics) + parts_of(rows, d) * 3 * d * sizeof(float);
}

cudaError_t add_bias_residual_layer_norm_backward(const Tensor& dy, const Tensor& ds, const Tensor& x,
                                                  const Tensor& bias, const Tensor& residual, const Tensor& weight,
                                                  float eps, const Tensor& extra, const Tensor& dx, const Tensor& dbias,
                                                  const Tensor& dresidual, const Tensor& dweight,
                                                  const Tensor& dnorm_bias, const Tensor& dextra, void* workspace,
                                                  cudaStream_t stream) {
  if (!walks(x, x) || !walks(residual, x) || !walks(extra, x) || !walks(dy, x) || !walks(ds, x) || !is_float(bias) ||
      !is_float(weight) || x.numel() == 0) {
    return cudaErrorNotSupported;
  }
  const bool columns = dbias.data || dweight.data || dnorm_bias.data;
  const auto d = static_cast<int>(x.sizes[x.rank - 1]);
  const Rows rows(x, residual, extra);
  const int64_t count = rows.walk.count;
  auto* const statistics = columns && is_long(d) ? static_cast<Statistics*>(workspace) : nullptr;
  void* const partials = statistics ? statistics + count : columns ? workspace : nullptr;
  const Backward a{rows,
                   AnyFloat(bias),
                   AnyFloat(weight),
                   dy.data,
                   ds.data,
                   {dx.data, dresidual.data, dextra.data},
                   {AnyFloat(dweight), AnyFloat(dnorm_bias), AnyFloat(dbias)},
                   static_cast<float*>(partials),
                   statistics,
                   d,
                   eps};
  const cudaError_t status =
      dispatch_float(x.dtype, [&](auto* p) { return launch_backward<element_t<decltype(p)>>(a, stream); });
  const int blocks = is_long(d) ? parts_of(count, d) : Grid(count, d).blocks;
  if (status != cudaSuccess || !columns || blocks == 1) return status;
  const dim3 threads(kWarp, std::min(ceil_div(blocks, 8), kWarp));
  return launch(backward_columns, ceil_div(3 * d, kWarp), threads, 0, stream, true, a, blocks);
}

}  // namespace svexport
#endif
