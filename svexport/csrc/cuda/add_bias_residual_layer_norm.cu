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
  float* partials;      // of them: (blocks, 3, width); null: none wanted
  int width, period;    // in those of block i column c is the (c + i * d % period)th
  Statistics* statistics;  // of long rows: (rows); null: not wanted
  int d;
  float eps;
};

// Rows of any length that lie one behind the other are read and written at multiples of 16 bytes all the same, "shifted":
// the N columns of a vector may begin before the first of the row or end behind its last. A thread keeps its columns if
// its rows are a multiple of N apart.
template <int N>
__device__ __forceinline__ int shift_of(int64_t row, int d) {
  return static_cast<int>(row % N) * (d % N) % N;
}

// Up to which column of this row whole vectors can be read: of the last rows, to the end of the tensor.
template <int N>
__device__ __forceinline__ int readable(int64_t row, int64_t count, int d) {
  return row + N < count ? INT32_MAX : static_cast<int>(min((count - row) * d, static_cast<int64_t>(INT32_MAX)));
}

// One bit per column of the vector that is in the row.
template <int N>
__device__ __forceinline__ uint32_t columns_inside(int column, int d) {
  const int before = max(-column, 0), behind = min(max(column + N - d, 0), N);
  return ((1u << N) - 1 >> behind) & ~0u << before;
}

// Loads that wait for none before them: without branches, and used only when all are on their way.
template <class T, int N>
struct Loaded {
  Vec<T, N> x, residual, extra;

  __device__ __forceinline__ Loaded(const Row<T>& row, int column, bool there)
      : x(load_if<T, N>(row.x + column, there)),
        residual(load_if<T, N>(row.residual + column, there)),
        extra(load_if<T, N>(row.extra + column, there && row.extra)) {}
  Loaded() = default;

  template <int I>
  __device__ __forceinline__ Loaded(const Vec<T, N> (&all)[I]) : x(all[0]), residual(all[1]), extra(all[2]) {}

  // x + bias + residual (+ extra)
  __device__ __forceinline__ void sum(const float (&bias)[N], bool has_extra, float (&to)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      to[j] = to_float(x.at[j]) + bias[j] + to_float(residual.at[j]);
      if (has_extra) to[j] += to_float(extra.at[j]);
    }
  }
};

// Contiguous tensors' last vectors, of which only a part is theirs: on their way, and then for all threads behind a barrier.
template <class T, int N, int I>
struct Ends {
  Vec<T, 1> elements[I];

  __device__ __forceinline__ Ends(const void* const (&tensors)[I], int64_t numel) {
    const int64_t i = numel / N * N + threadIdx.x;
#pragma unroll
    for (int k = 0; k < I; ++k) {
      elements[k] = load_if<T, 1>(static_cast<const T*>(tensors[k]) + i, tensors[k] && i < numel);
    }
  }
  __device__ __forceinline__ void share(Vec<T, N> (&to)[I]) const {
    if (threadIdx.x < N && threadIdx.y == 0) {
#pragma unroll
      for (int k = 0; k < I; ++k) to[k].at[threadIdx.x] = elements[k].at[0];
    }
    __syncthreads();
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

// What was computed from v is not kept in registers.
template <class T, int N>
__device__ __forceinline__ void converted_again(Vec<T, N>& v) {
  constexpr int kBytes = sizeof(v), kWords = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t words[kWords];
  memcpy(words, &v, kBytes);
#pragma unroll
  for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(words[i]));
  memcpy(&v, words, kBytes);
}

template <class T, int N>
__device__ __forceinline__ void store_floats(T* p, const float* from) {
  Vec<T, N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = from_float<T>(from[j]);
  store<T, N>(p, v);
}

// The columns of a vector of the parameters.
template <int N, bool kShifted>
__device__ __forceinline__ void load_columns(const AnyFloat& p, int column, int d, float (&to)[N]) {
  if constexpr (kShifted) {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = p.get(column + j, static_cast<uint32_t>(column + j) < static_cast<uint32_t>(d));
  } else {
    load_floats(p, column, column < d, to);
  }
}

// Of a vector that is not all of the row words of 4 bytes, and elements where these are not either.
template <class T, int N, bool kShifted>
__device__ __forceinline__ void store_columns(T* row, int column, int d, const float* from) {
  T* const p = row + column;
  if constexpr (!kShifted) {
    store_floats<T, N>(p, from);
  } else {
    constexpr int W = 4 / sizeof(T);
    Vec<T, W> words[N / W];
#pragma unroll
    for (int j = 0; j < N; ++j) words[j / W].at[j % W] = from_float<T>(from[j]);
    if (column >= 0 && column + N <= d) {
      uint32_t x[4];
      memcpy(x, words, 16);
      // The compiler would make single elements of it, those of the other branch.
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                   : "memory");
      return;
    }
    const uint32_t inside = columns_inside<N>(column, d), all = (1u << W) - 1;
#pragma unroll
    for (int w = 0; w < N / W; ++w) {
      const uint32_t here = inside >> W * w & all;
      if (here == all) {
        store<T, W>(p + W * w, words[w]);
      } else if (here) {  // one of two
        p[W * w + (here != 1)] = here == 1 ? words[w].at[0] : words[w].at[W - 1];
      }
    }
  }
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

// Of two lanes that differ in `bit` one gets the sum of their `low`, the other that of their `high`.
__device__ __forceinline__ float halved(float low, float high, int bit) {
  const bool upper = threadIdx.x & bit;
  return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, bit);
}

template <int K>
__device__ __forceinline__ Sums<K> warp_sum(Sums<K> x) {
#pragma unroll
  for (int k = 0; k < K; ++k) x.at[k] = warp_sum(x.at[k]);
  return x;
}

// Several sums on different lanes at a time, and then given to all: fewer instructions one after another.
__device__ __forceinline__ float shared_sum(float x) { return warp_sum(x); }

__device__ __forceinline__ Sums<2> shared_sum(const Sums<2>& x) {
  float sum = halved(x.at[0], x.at[1], 16);
#pragma unroll
  for (int o = 8; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return {__shfl_sync(~0u, sum, 0), __shfl_sync(~0u, sum, 16)};
}

__device__ __forceinline__ Sums<3> shared_sum(const Sums<3>& x) {
  float sum = halved(halved(x.at[0], x.at[2], 16), x.at[1] + __shfl_xor_sync(~0u, x.at[1], 16), 8);
#pragma unroll
  for (int o = 4; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return {__shfl_sync(~0u, sum, 0), __shfl_sync(~0u, sum, 8), __shfl_sync(~0u, sum, 16)};
}

// The sum over the block, in every thread. `scratch` holds one element per warp; two calls in a row need two of them.
template <class F>
__device__ __forceinline__ F block_sum(F x, F* scratch) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  x = shared_sum(x);
  if (lane == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  if (warps > 4) return shared_sum(lane < warps ? scratch[lane] : F{});
  F sum = scratch[0];
  for (int i = 1; i < warps; ++i) sum += scratch[i];
  return sum;
}

// From the sums of v and of v*v, where v is the difference from the mean but for its rounding, which is taken off again:
// of a mean much larger than the deviation it is no small part of that.
struct Moments {
  float shift, scale;

  // part: of one column in the mean
  __device__ __forceinline__ Moments(const Sums<2>& sums, float part, float eps) : shift(sums.at[0] * part) {
    scale = rsqrtf(fmaxf(sums.at[1] * part - shift * shift, 0.f) + eps);
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

// I times K vectors of N floats that a thread keeps: in registers, or in shared memory, as columns of float4, so that no
// two threads meet in a bank.
template <int I, int K, int N, bool kShared>
struct Kept {
  float registers[kShared ? 1 : I][kShared ? 1 : K][N];

  static __device__ __forceinline__ float4* shared(int i, int k) {
    extern __shared__ float4 kept[];
    return kept + (i * K + k) * (N / 4) * blockDim.x + threadIdx.x;
  }
  // Puts them there, all threads together, one column after another; for all of them behind a barrier.
  static __device__ __forceinline__ void share(int i, const AnyFloat& p, int shift, int d) {
    extern __shared__ float4 kept[];
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int at = j * blockDim.x + threadIdx.x, column = k * blockDim.x * N + at - shift;
        auto* const to = kept + ((i * K + k) * (N / 4) + at % N / 4) * blockDim.x + at / N;
        reinterpret_cast<float*>(to)[at % 4] = p.get(column, static_cast<uint32_t>(column) < static_cast<uint32_t>(d));
      }
    }
  }
  __device__ __forceinline__ void get(int i, int k, float (&to)[N]) const {
    if constexpr (kShared) {
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const float4 x = shared(i, k)[j / 4 * blockDim.x];
        to[j] = x.x, to[j + 1] = x.y, to[j + 2] = x.z, to[j + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) to[j] = registers[i][k][j];
    }
  }
  __device__ __forceinline__ void set(int i, int k, const float (&from)[N]) {
    if constexpr (kShared) {
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        shared(i, k)[j / 4 * blockDim.x] = {from[j], from[j + 1], from[j + 2], from[j + 3]};
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) registers[i][k][j] = from[j];
    }
  }
};

constexpr int kMaxThreads = 512;  // that do a row

// A warp or the whole block does one row after another, of at most N * K columns per thread, which stay in registers.
// N columns are loaded at once.
template <class T, int N, int K, bool kBlock, bool kShifted = false>
__global__ void __launch_bounds__(kBlock ? kMaxThreads : 128, !kBlock ? 4 : N > 1 && N * K <= 8 ? 2 : 1)
    forward_rows(const __grid_constant__ Forward a) {
  const float part = 1.f / a.d;
  // bias, weight and norm_bias: in registers for all rows of this thread, or in shared memory, or read for each row, all
  // of them at once or not
  constexpr bool kKeep = kShifted ? N * K <= 16 : N * K <= 8, kShared = kShifted && !kKeep, kAtOnce = N * K <= 16;
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
#pragma unroll
  for (int k = 0; k < K; ++k) inside[k] = kShifted ? columns_inside<N>(column(k), a.d) : ~0u;
  float bias[K][N], weight[K][N], norm_bias[K][N];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!kKeep) break;
    load_columns<N, kShifted>(a.bias, column(k), a.d, bias[k]);
    load_columns<N, kShifted>(a.weight, column(k), a.d, weight[k]);
    load_columns<N, kShifted>(a.norm_bias, column(k), a.d, norm_bias[k]);
  }
  Kept<3, K, N, kShared> kept;
  if constexpr (kShared) {
    kept.share(0, a.bias, shift, a.d);
    kept.share(1, a.weight, shift, a.d);
    kept.share(2, a.norm_bias, shift, a.d);
  }
  const auto parameters = [&](int i, const AnyFloat& p, int k, float (&to)[N]) {
    if constexpr (kShared) {
      kept.get(i, k, to);
    } else {
      load_floats(p, column(k), column(k) < a.d, to);
    }
  };
  if (kShifted) last.share(ends);
  for (; row < a.rows.walk.count; row += step) {
    const Row<T> from(a.rows, row);
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
    Loaded<T, N> loaded[K];
#pragma unroll
    for (int k = 0; k < K; ++k) loaded[k] = {from, column(k), column(k) < a.d && column(k) + N <= end};
    if (kShifted && end != INT32_MAX) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (column(k) < a.d && column(k) + N > end) loaded[k] = ends;
      }
    }
    if constexpr (!kKeep && kAtOnce) {
#pragma unroll
      for (int k = 0; k < K; ++k) parameters(0, a.bias, k, bias[k]);
    }
    float v[K][N], sum = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if constexpr (!kAtOnce) parameters(0, a.bias, k, bias[k]);
      loaded[k].sum(bias[k], a.rows.data[2], v[k]);  // 0 where no column is
#pragma unroll
      for (int j = 0; j < N; ++j) sum += inside[k] >> j & 1 ? v[k][j] : 0;
      if (column(k) < a.d) store_columns<T, N, kShifted>(static_cast<T*>(a.s) + row * a.d, column(k), a.d, v[k]);
    }
    const float mean = row_sum<kBlock>(sum, scratch) * part;
    Sums<2> rest{};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const float less = column(k) < a.d ? mean : 0;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        v[k][j] = inside[k] >> j & 1 ? v[k][j] - less : 0;
        rest += {v[k][j], v[k][j] * v[k][j]};
      }
    }
    const Moments moments(row_sum<kBlock>(rest, scratch_rest), part, a.eps);
    if constexpr (!kKeep && kAtOnce) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        parameters(1, a.weight, k, weight[k]);
        parameters(2, a.norm_bias, k, norm_bias[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (column(k) >= a.d) continue;
      if constexpr (!kAtOnce) {
        parameters(1, a.weight, k, weight[k]);
        parameters(2, a.norm_bias, k, norm_bias[k]);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) v[k][j] = moments.normal(v[k][j]) * weight[k][j] + norm_bias[k][j];
      store_columns<T, N, kShifted>(static_cast<T*>(a.y) + row * a.d, column(k), a.d, v[k]);
    }
  }
}

// One block per row of any length, which is summed up three times.
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
#pragma unroll
      for (int j = 0; j < N; ++j) sum += inside >> j & 1 ? v[j] : 0;
    }
    const float mean = block_sum(sum, scratch) * part;
    Sums<2> rest{};
    for (int column = first; column < a.d; column += blockDim.x * N) {
      sums(column, v);
      const uint32_t inside = kShifted ? columns_inside<N>(column, a.d) : ~0u;
#pragma unroll
      for (int j = 0; j < N; ++j) {
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
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = moments.normal(v[j] - mean) * weight[j] + norm_bias[j];
      store_columns<T, N, kShifted>(static_cast<T*>(a.y) + row * a.d, column, a.d, v);
    }
  }
}

constexpr int kColumns = 8;  // per thread, in the backward kernel
constexpr int kWarps = 8;    // per block, where a warp does a row

// Of a thread whose columns are too many for its registers; as many threads as shared memory and registers do for.
constexpr int kWideColumns = 16, kWidestColumns = 32;

constexpr int most_threads(int columns) { return columns == kWidestColumns ? 352 : kMaxThreads; }

// The sums of the vectors' gradients over the warps of a block, one after another, of columns from `first` on that lie
// kWarp * N apart in a thread: to the part of a block, or if it is alone to where they go.
template <int K, int N>
__device__ __forceinline__ void write_sums(const Backward& a, const float (&sums)[3][K][N], int first, int shift,
                                           int64_t part, bool alone) {
  __shared__ float shared[kWarps][kWarp * kColumns];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int c = (k * kWarp + threadIdx.x) * N + j - shift;
        if (c >= 0) shared[threadIdx.y][c] = sums[i][k][j];
      }
    }
    __syncthreads();
    const int count = min(a.d - first, kWarp * kColumns);
    for (int c = threadIdx.y * kWarp + threadIdx.x; c < count; c += kWarp * kWarps) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared[w][c];
      if (!alone) {
        a.partials[(part * 3 + i) * a.width + first + c] = sum;
      } else if (a.vectors[i].data) {
        a.vectors[i].set(first + c, sum);
      }
    }
  }
}

constexpr int kKept = 5;  // the sums for weight, norm_bias and bias; bias, weight

// A warp (blockDim.y of them) or the whole block does one row after another, C columns a thread. A thread keeps the same
// columns all the time, so that it can sum up the gradients of the vectors.
template <class T, int N, int C, bool kBlock, bool kShifted>
__global__ void __launch_bounds__(kBlock ? most_threads(C) : kWarp * kWarps)
    backward_rows(const __grid_constant__ Backward a) {
  constexpr int K = C / N;
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
  Kept<kKept, K, N, (C > kColumns)> kept;
#pragma unroll
  for (int k = 0; k < K; ++k) inside[k] = kShifted ? columns_inside<N>(column(k), a.d) : ~0u;
  // As far as the registers do, a row is on its way while the one before is summed up; or all of it at once; or first what
  // the sums need.
  constexpr bool kAhead = sizeof(T) == 2 && N * sizeof(T) == 16 && C <= kWideColumns, kLate = C == kWidestColumns;
  constexpr bool kShare = C > kColumns && kShifted;  // bias and weight, which a thread would read by single elements
  Loaded<T, N> loaded[K];
  Vec<T, N> loaded_dy[K], loaded_ds[K];
  const auto fetch = [&](int64_t row) {
    const bool real = row < a.rows.walk.count;
    const Row<T> from(a.rows, real ? row : 0);
    const T *dy = static_cast<const T*>(a.dy) + row * a.d, *ds = static_cast<const T*>(a.ds) + row * a.d;
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const bool there = real && column(k) < a.d && column(k) + N <= end;
      loaded[k] = {from, column(k), there};
      loaded_dy[k] = load_if<T, N>(dy + column(k), there);
      if (!kLate) loaded_ds[k] = load_if<T, N>(ds + column(k), there);
    }
  };
  if (kAhead) fetch(row);
  const Ends<T, N, 5> last({a.rows.data[0], a.rows.data[1], a.rows.data[2], a.dy, a.ds}, a.rows.walk.count * a.d);
#pragma unroll(C > kColumns ? 1 : K)
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int i = 0; i < 3; ++i) kept.set(i, k, {});
    if (kShare) continue;
    float bias[N], weight[N];
    load_columns<N, kShifted>(a.bias, column(k), a.d, bias);
    load_columns<N, kShifted>(a.weight, column(k), a.d, weight);
    kept.set(3, k, bias);
    kept.set(4, k, weight);
  }
  if constexpr (kShare) {
    kept.share(3, a.bias, shift, a.d);
    kept.share(4, a.weight, shift, a.d);
  }
  if (kShifted) last.share(ends);
  for (; row < a.rows.walk.count; row += step) {
    if (!kAhead) fetch(row);
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
    if (kShifted && end != INT32_MAX) {  // here and not in fetch(), where it would wait for what was loaded
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (column(k) < a.d && column(k) + N > end) loaded[k] = ends, loaded_dy[k] = ends[3], loaded_ds[k] = ends[4];
      }
    }
    float v[K][N];  // s and then s - mean
    Vec<T, N> dy[K], ds[K];
    Sums<2> sum{};  // of s, of the gradient of y times the weight
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float bias[N], weight[N];
      kept.get(3, k, bias);
      kept.get(4, k, weight);
      loaded[k].sum(bias, a.rows.data[2], v[k]);
      dy[k] = loaded_dy[k];
      if (!kLate) ds[k] = loaded_ds[k];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (kShifted && !(inside[k] >> j & 1)) v[k][j] = 0, dy[k].at[j] = from_float<T>(0);
        sum += {v[k][j], __fmul_rn(to_float(dy[k].at[j]), weight[j])};
      }
      if (C > kColumns) converted_again(dy[k]);
    }
    if (kAhead) fetch(row + step);
    sum = row_sum<kBlock>(sum, scratch);
    const float mean = sum.at[0] * part, mean_g = sum.at[1] * part;
    Sums<3> rest{};  // of v = s - mean, its square, v * g * weight
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float weight[N];
      kept.get(4, k, weight);
      const float less = column(k) < a.d ? mean : 0;  // v stays 0 where no column is
#pragma unroll
      for (int j = 0; j < N; ++j) {
        v[k][j] = inside[k] >> j & 1 ? v[k][j] - less : 0;
        rest += {v[k][j], v[k][j] * v[k][j], v[k][j] * __fmul_rn(to_float(dy[k].at[j]), weight[j])};
      }
    }
    if constexpr (kLate) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const bool there = column(k) < a.d, all = column(k) + N <= end;
        ds[k] = load_if<T, N>(static_cast<const T*>(a.ds) + row * a.d + column(k), there && all);
        if (kShifted && there && !all) ds[k] = ends[4];
      }
    }
    rest = row_sum<kBlock>(rest, scratch_rest);
    const Moments moments({rest.at[0], rest.at[1]}, part, a.eps);
    const float mean_gn = (rest.at[2] * part - moments.shift * mean_g) * moments.scale;  // n: v, normal
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float weight[N], sums[3][N];
      kept.get(4, k, weight);
#pragma unroll
      for (int i = 0; i < 3; ++i) kept.get(i, k, sums[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float normal = moments.normal(v[k][j]), g = to_float(dy[k].at[j]);
        sums[0][j] += g * normal;
        sums[1][j] += g;
        // The product rounded, as it was in the mean: of a single column nothing may be left.
        v[k][j] = (__fmul_rn(g, weight[j]) - mean_g - normal * mean_gn) * moments.scale + to_float(ds[k].at[j]);
        sums[2][j] += v[k][j];
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        kept.set(i, k, sums[i]);
        T* const dx = static_cast<T*>(a.dx[i]) + row * a.d;
        if (a.dx[i] && column(k) < a.d) store_columns<T, N, kShifted>(dx, column(k), a.d, v[k]);
      }
    }
  }
  if (!a.partials) return;
  const bool alone = gridDim.x == 1;
  if constexpr (!kBlock) {
    float sums[3][K][N];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) kept.get(i, k, sums[i][k]);
    }
    write_sums(a, sums, 0, shift, blockIdx.x, alone);
  } else {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (column(k) >= a.d) continue;
        float sums[N];
        kept.get(i, k, sums);
        if (alone) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            if (a.vectors[i].data && inside[k] >> j & 1) a.vectors[i].set(column(k) + j, sums[j]);
          }
        } else {
          constexpr int W = N < 4 ? N : 4;
          float* const to = a.partials + (blockIdx.x * 3ll + i) * a.width + column(k) + shift;
#pragma unroll
          for (int j = 0; j < N; j += W) store_floats<float, W>(to + j, sums + j);
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
    const float mean = sum.at[0] * part, mean_g = sum.at[1] * part;
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
    const Moments moments({rest.at[0], rest.at[1]}, part, a.eps);
    const float mean_gn = (rest.at[2] * part - moments.shift * mean_g) * moments.scale;
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

#ifndef SVEXPORT_AOT  // csrc/aot takes the kernels only
namespace svexport {
namespace {

// How far a row can begin behind a multiple of n columns, if rows of d lie one behind the other.
int most_shifted(int64_t d, int n) { return d % n ? n - static_cast<int>(d & -d) : 0; }

// Calls f(N, shifted) with how many elements of all of them can be read and written at a time: those of 16 bytes, in place
// or, if no more columns than `most` are to be seen then, shifted (rather not if `pairs` will do); 2; or 1.
template <class T, class F>
cudaError_t with_width(const Rows& rows, int d, int most, bool pairs, std::initializer_list<const void*> contiguous,
                       std::initializer_list<AnyFloat> vectors, F&& f) {
  const auto aligned = [&](size_t bytes) {
    const auto at = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
    return std::all_of(rows.data, rows.data + 3, at) && std::all_of(contiguous.begin(), contiguous.end(), at);
  };
  const auto fits = [&](int n) {
    bool result = d % n == 0 && aligned(n * sizeof(T));
    for (int k = 0; k < 3; ++k) {
      for (int i = 0; i < rows.walk.rank; ++i) result = result && rows.walk.strides[i][k] % n == 0;
    }
    for (const AnyFloat& v : vectors) {
      result = result && reinterpret_cast<uintptr_t>(v.data) % (std::min(n, 4) * sizeof(float)) == 0;
    }
    return result;
  };
  constexpr int N = 16 / sizeof(T);
  const int width = d + most_shifted(d, N), warp = 8 * kWarp;
  bool shifted = aligned(16) && rows.walk.rank <= 1 && width <= most;
  // By measurement: where a row of half types would not be a warp's any more.
  if (sizeof(T) == 2 && d <= warp && width > warp) shifted = false;
  for (int k = 0; shifted && rows.walk.rank && k < 3; ++k) shifted = !rows.data[k] || rows.walk.strides[0][k] == d;
  using std::false_type, std::true_type;
  return fits(N)   ? f(std::integral_constant<int, N>(), false_type())
         : shifted && !(pairs && fits(2)) ? f(std::integral_constant<int, N>(), true_type())
         : fits(2) ? f(std::integral_constant<int, 2>(), false_type())
                   : f(std::integral_constant<int, 1>(), false_type());
}

// Whether a tensor like x, or none, has the type of x and contiguous columns.
bool walks(const Tensor& t, const Tensor& x) {
  return !t.data || (t.dtype == x.dtype && x.sizes[x.rank - 1] < INT32_MAX / 2 &&
                     (t.strides[t.rank - 1] == 1 || t.sizes[t.rank - 1] == 1));
}

int multiprocessors() { return of_device(cudaDevAttrMultiProcessorCount); }

// Blocks for as many rows, one after another where they are more than `most`; then a multiple of `period`.
int blocks_of(int64_t rows, int64_t most, int period) {
  return static_cast<int>(rows <= most ? rows : std::max<int64_t>(period, most / period * period));
}

// Shared memory of a kernel, beyond what every kernel may have.
template <class... Parameters>
cudaError_t allow_memory(void (*kernel)(Parameters...), int bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <class T>
cudaError_t launch_forward(const Forward& a, cudaStream_t stream) {
  const auto launched = [&](auto width, auto shifted) {
    constexpr int N = width.value;
    constexpr bool kShifted = shifted.value;
    const int d = a.d + (kShifted ? most_shifted(a.d, N) : 0);
    const auto run = [&](auto kernel, bool warp, int columns) {  // columns: of a thread
      const int threads = warp ? 128 : std::min(ceil_div(d, columns * kWarp) * kWarp, kMaxThreads);
      // As many as stay on the device, where that was measured to be faster or the columns' numbers are read one by one;
      // otherwise a block for each row.
      int64_t most = INT32_MAX;
      if (warp && (kShifted || sizeof(T) == 2)) most = 7 * multiprocessors();
      if (!warp && kShifted) most = multiprocessors() * std::max(1, (columns > 8 ? 512 : 1024) / threads);
      const int memory = kShifted && columns > 16 ? 3 * columns * threads * static_cast<int>(sizeof(float)) : 0;
      if (const cudaError_t status = allow_memory(kernel, memory); status != cudaSuccess) return status;
      const int64_t rows = a.rows.walk.count, blocks = warp ? ceil_div<int64_t>(rows, 4) : rows;
      kernel<<<blocks_of(blocks, most, kShifted ? N : 1), threads, memory, stream>>>(a);
      return cudaGetLastError();
    };
    if (d <= 8 * kWarp) return run(forward_rows<T, N, 8 / N, false, kShifted>, true, 8);
    if constexpr (N * sizeof(T) == 16) {
      if (d <= 16 * kWarp) return run(forward_rows<T, N, 16 / N, false, kShifted>, true, 16);
      if (d > 8 * kMaxThreads && d <= 16 * kMaxThreads) {
        return run(forward_rows<T, N, 16 / N, true, kShifted>, false, 16);
      }
      if (d > 16 * kMaxThreads && d <= 32 * kMaxThreads) {
        return run(forward_rows<T, N, 32 / N, true, kShifted>, false, 32);
      }
    }
    if (d <= 8 * kMaxThreads) return run(forward_rows<T, N, 8 / N, true, kShifted>, false, 8);
    const int blocks = static_cast<int>(std::min<int64_t>(a.rows.walk.count, INT32_MAX));
    forward_long_rows<T, N, kShifted><<<blocks, kMaxThreads, 0, stream>>>(a);
    return cudaGetLastError();
  };
  const bool pairs = sizeof(T) == 2 && a.d <= 8 * kWarp;  // by measurement
  return with_width<T>(a.rows, a.d, INT32_MAX, pairs, {a.y, a.s}, {a.bias, a.weight, a.norm_bias}, launched);
}

constexpr int kMostWide = kWidestColumns * most_threads(kWidestColumns);
constexpr int kFewRows = 16;

// Blocks of backward_rows, for rows that are seen as d columns.
struct Grid {
  int columns;  // of a thread
  dim3 threads;
  int blocks, memory;

  Grid(int64_t rows, int64_t d, int period)
      : columns(d <= kColumns * kMaxThreads ? kColumns : d <= kWideColumns * kMaxThreads ? kWideColumns : kWidestColumns) {
    const int lanes = static_cast<int>(ceil_div<int64_t>(d, columns * kWarp)) * kWarp;
    threads = lanes == kWarp ? dim3(kWarp, kWarps) : dim3(lanes);
    memory = columns == kColumns ? 0 : kKept * columns * lanes * static_cast<int>(sizeof(float));
    const int resident = std::max(1, most_threads(columns) / static_cast<int>(threads.x * threads.y));
    blocks = blocks_of(ceil_div<int64_t>(rows, threads.y), multiprocessors() * resident, threads.y == 1 ? period : 1);
  }
};

// Parts of rows in backward_long_columns: as many blocks as are resident, of two rows a warp at least.
int parts_of(int64_t rows, int64_t d) {
  const int64_t blocks = ceil_div<int64_t>(d, kWarp * kColumns), most = ceil_div<int64_t>(rows, 2 * kWarps);
  return static_cast<int>(std::min(most, std::max<int64_t>(1, 2 * multiprocessors() / blocks)));
}

bool is_long(int64_t d) { return d > kColumns * kMaxThreads; }

// The second stage of the sums over rows.
cudaError_t launch_columns(const Backward& a, int parts, cudaStream_t stream) {
  if (!a.partials || parts == 1) return cudaGetLastError();
  const dim3 threads(kWarp, std::min(ceil_div(parts, 8), kWarp));
  return launch(backward_columns, ceil_div(3 * a.d, kWarp), threads, 0, stream, true, a, parts);
}

// workspace: null if no gradient of the vectors is wanted.
template <class T>
cudaError_t launch_backward(Backward a, void* workspace, cudaStream_t stream) {
  const int64_t rows = a.rows.walk.count;
  const auto launched = [&](auto width, auto shifted) {
    constexpr int N = width.value;
    constexpr bool kShifted = shifted.value, kVectors = N * sizeof(T) == 16;
    const int d = a.d + (kShifted ? most_shifted(a.d, N) : 0);
    // Of so few rows the sums over them are most of it: blocks for the columns are faster, by measurement.
    const bool few = !kShifted && rows <= kFewRows && d <= kWideColumns * kMaxThreads;
    if (d <= (kVectors && !few ? kMostWide : kColumns * kMaxThreads)) {
      const Grid grid(rows, d, kShifted ? N : 1);
      a.partials = static_cast<float*>(workspace);
      if (kShifted && grid.threads.y == 1) {
        a.width = ceil_div(d, N) * N;
        a.period = N;
      }
      auto* kernel = grid.threads.x == kWarp ? backward_rows<T, N, kColumns, false, kShifted>
                                             : backward_rows<T, N, kColumns, true, kShifted>;
      if constexpr (kVectors) {
        if (grid.columns == kWideColumns) kernel = backward_rows<T, N, kWideColumns, true, kShifted>;
        if (grid.columns == kWidestColumns) kernel = backward_rows<T, N, kWidestColumns, true, kShifted>;
      }
      if (const cudaError_t status = allow_memory(kernel, grid.memory); status != cudaSuccess) return status;
      kernel<<<grid.blocks, grid.threads, grid.memory, stream>>>(a);
      return launch_columns(a, grid.blocks, stream);
    }
    if constexpr (kShifted) return cudaErrorNotSupported;  // never: with_width
    a.statistics = static_cast<Statistics*>(workspace);
    a.partials = reinterpret_cast<float*>(workspace ? a.statistics + rows : nullptr);
    const bool kept = a.d <= 16 * kMaxThreads;
    const auto kernel = kept ? backward_long_rows<T, N, 16 / N, true> : backward_long_rows<T, N, 8 / N, false>;
    const int threads = kept ? ceil_div(a.d, 16 * kWarp) * kWarp : kMaxThreads;
    kernel<<<static_cast<int>(std::min<int64_t>(rows, INT32_MAX)), threads, 0, stream>>>(a);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess || !workspace) return status;
    const int parts = parts_of(rows, a.d);
    const dim3 blocks(ceil_div(a.d, kWarp * kColumns), parts);
    const cudaError_t status_of_columns =
        launch(backward_long_columns<T, N>, blocks, dim3(kWarp, kWarps), 0, stream, true, a);
    return status_of_columns != cudaSuccess ? status_of_columns : launch_columns(a, parts, stream);
  };
  return with_width<T>(a.rows, a.d, kMostWide, false, {a.dy, a.ds, a.dx[0], a.dx[1], a.dx[2]}, {a.bias, a.weight},
                       launched);
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
  const auto of = [&](int64_t parts) { return parts * 3 * (d + 16) * sizeof(float); };
  const auto of_grid = [&](int64_t width, int period) {
    return width <= kMostWide ? of(Grid(rows, width, period).blocks) : 0;
  };
  const size_t of_long = is_long(d) ? rows * sizeof(Statistics) + of(parts_of(rows, d)) : 0;
  // Whatever the alignment, which is not known here.
  const int n = 16 / static_cast<int>(x.item_size());
  return std::max({of_grid(d, 1), of_grid(d + most_shifted(d, n), n), of_long});
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
  const Backward a{Rows(x, residual, extra),
                   AnyFloat(bias),
                   AnyFloat(weight),
                   dy.data,
                   ds.data,
                   {dx.data, dresidual.data, dextra.data},
                   {AnyFloat(dweight), AnyFloat(dnorm_bias), AnyFloat(dbias)},
                   nullptr,
                   d,
                   1,
                   nullptr,
                   d,
                   eps};
  return dispatch_float(x.dtype, [&](auto* p) {
    return launch_backward<element_t<decltype(p)>>(a, columns ? workspace : nullptr, stream);
  });
}

}  // namespace svexport
#endif
