// Bias, residual and layer norm in one: what forward and backward share.
#pragma once

#include "add_bias_residual_layer_norm/tactics.h"
#include "overlap.cuh"
#include "strided.cuh"

namespace svexport::norm {

constexpr int kWarp = kLanes, kMaxThreads = kRowThreads;

// x, residual and extra (*, D) as rows that are walked together.
struct Rows {
  Walk<3> walk;
  const void* data[3];  // null: no extra

  __device__ Rows(const Walk<3>& walk, const void* x, const void* residual, const void* extra)
      : walk(walk), data{x, residual, extra} {}
  Rows(const Axes<3>& axes, const void* x, const void* residual, const void* extra)
      : walk(axes), data{x, residual, extra} {}
};

// Whether a tensor, unless it is missing, has the type of x and contiguous columns.
inline bool walks(const Tensor& t, const Tensor& x) {
  return !t.data || (t.dtype == x.dtype && x.sizes[x.rank - 1] < INT32_MAX / 2 &&
                     (t.strides[t.rank - 1] == 1 || t.sizes[t.rank - 1] == 1));
}

// Calls f(N, shifted) with constants: the vector width of an access, and whether it is shifted.
template <class T, class F>
auto with_access(Access access, F&& f) {
  constexpr int V = 16 / sizeof(T);
  switch (access) {
    case Access::kVector: return f(Int<V>(), std::false_type());
    case Access::kShifted: return f(Int<V>(), std::true_type());
    case Access::kPair: return f(Int<2>(), std::false_type());
    default: return f(Int<1>(), std::false_type());
  }
}

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

// Rows of any length that follow each other without gaps are still read and written at multiples of 16 bytes,
// "shifted": the N columns of a vector may begin before the row or end behind it. A thread keeps its columns if its
// rows are a multiple of N apart.
template <int N>
__device__ __forceinline__ int shift_of(int64_t row, int d) {
  return static_cast<int>(row % N) * (d % N) % N;
}

// The column up to which whole vectors of this row can be read: for the last rows, the end of the tensor.
template <int N>
__device__ __forceinline__ int readable(int64_t row, int64_t count, int d) {
  return row + N < count ? INT32_MAX : static_cast<int>(min((count - row) * d, static_cast<int64_t>(INT32_MAX)));
}

// One bit per column of the vector, set if the row has the column.
template <int N>
__device__ __forceinline__ uint32_t columns_inside(int column, int d) {
  const int before = max(-column, 0), behind = min(max(column + N - d, 0), N);
  return ((1u << N) - 1 >> behind) & ~0u << before;
}

// Loads without branches, so that none waits for another. Use the values only after all loads are issued.
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
    UNROLL for (int j = 0; j < N; ++j) {
      to[j] = to_float(x.at[j]) + bias[j] + to_float(residual.at[j]);
      if (has_extra) to[j] += to_float(extra.at[j]);
    }
  }
};

// Last, incomplete vectors of contiguous tensors: the constructor loads them, share() hands them to all threads.
template <class T, int N, int I>
struct Ends {
  Vec<T, 1> elements[I];

  __device__ __forceinline__ Ends(const void* const (&tensors)[I], int64_t numel) {
    const int64_t i = numel / N * N + threadIdx.x;
    UNROLL for (int k = 0; k < I; ++k) {
      elements[k] = load_if<T, 1>(static_cast<const T*>(tensors[k]) + i, tensors[k] && i < numel);
    }
  }
  __device__ __forceinline__ void share(Vec<T, N> (&to)[I]) const {
    if (threadIdx.x < N && threadIdx.y == 0) {
      UNROLL for (int k = 0; k < I; ++k) to[k].at[threadIdx.x] = elements[k].at[0];
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
    UNROLL for (int k = 0; k < N / W; ++k) {
      floats[k] = load_if<float, W>(static_cast<const float*>(p.data) + i + W * k, there && wide);
    }
    const auto narrow = load_if<Narrow, N>(static_cast<const Narrow*>(p.data) + i, there && !wide);
    const Format<Narrow> format(p.dtype);
    UNROLL for (int j = 0; j < N; ++j) to[j] = wide ? floats[j / W].at[j % W] : format.number(narrow.at[j]);
  }
}

template <class T, int N>
__device__ __forceinline__ void store_floats(T* p, const float* from) {
  Vec<T, N> v;
  UNROLL for (int j = 0; j < N; ++j) v.at[j] = from_float<T>(from[j]);
  store<T, N>(p, v);
}

// Loads the columns of one vector of a parameter, 0 outside the row.
template <int N, bool kShifted>
__device__ __forceinline__ void load_columns(const AnyFloat& p, int column, int d, float (&to)[N]) {
  if constexpr (kShifted) {
    UNROLL for (int j = 0; j < N; ++j) {
      to[j] = p.get(column + j, static_cast<uint32_t>(column + j) < static_cast<uint32_t>(d));
    }
  } else {
    load_floats(p, column, column < d, to);
  }
}

// Stores a vector. If part of it is outside the row, stores words of 4 bytes, and elements of a word that is cut too.
template <class T, int N, bool kShifted>
__device__ __forceinline__ void store_columns(T* row, int column, int d, const float* from) {
  T* const p = row + column;
  if constexpr (!kShifted) {
    store_floats<T, N>(p, from);
  } else {
    constexpr int W = 4 / sizeof(T);
    Vec<T, W> words[N / W];
    UNROLL for (int j = 0; j < N; ++j) words[j / W].at[j % W] = from_float<T>(from[j]);
    if (column >= 0 && column + N <= d) {
      uint32_t x[4];
      memcpy(x, words, 16);
      // Assembly, because the compiler would split this store into single elements as in the other branch.
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                   : "memory");
      return;
    }
    const uint32_t inside = columns_inside<N>(column, d), all = (1u << W) - 1;
    UNROLL for (int w = 0; w < N / W; ++w) {
      const uint32_t here = inside >> W * w & all;
      if (here == all) {
        store<T, W>(p + W * w, words[w]);
      } else if (here) {  // the row has only one of the word's two elements
        p[W * w + (here != 1)] = here == 1 ? words[w].at[0] : words[w].at[W - 1];
      }
    }
  }
}

// Several sums that are reduced together.
template <int K>
struct Sums {
  float at[K];

  __device__ __forceinline__ Sums& operator+=(const Sums& other) {
    UNROLL for (int k = 0; k < K; ++k) at[k] += other.at[k];
    return *this;
  }
};

// Of two lanes that differ in `bit`, one gets the sum of both lanes' `low`, the other the sum of their `high`.
__device__ __forceinline__ float halved(float low, float high, int bit) {
  const bool upper = threadIdx.x & bit;
  return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, bit);
}

using svexport::warp_sum;

template <int K>
__device__ __forceinline__ Sums<K> warp_sum(Sums<K> x) {
  UNROLL for (int k = 0; k < K; ++k) x.at[k] = warp_sum(x.at[k]);
  return x;
}

// Reduces several sums at a time on different lanes, then hands them to all: fewer dependent instructions.
__device__ __forceinline__ float shared_sum(float x) { return warp_sum(x); }

__device__ __forceinline__ Sums<2> shared_sum(const Sums<2>& x) {
  float sum = halved(x.at[0], x.at[1], 16);
  UNROLL for (int o = 8; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return {__shfl_sync(~0u, sum, 0), __shfl_sync(~0u, sum, 16)};
}

__device__ __forceinline__ Sums<3> shared_sum(const Sums<3>& x) {
  float sum = halved(halved(x.at[0], x.at[2], 16), x.at[1] + __shfl_xor_sync(~0u, x.at[1], 16), 8);
  UNROLL for (int o = 4; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return {__shfl_sync(~0u, sum, 0), __shfl_sync(~0u, sum, 8), __shfl_sync(~0u, sum, 16)};
}

// The sum over the block, in every thread. `scratch` has one element per warp; two calls in a row need two scratches.
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

// From the sums of v and v*v, where v is the difference from the rounded mean. `shift` takes that rounding off again:
// if the mean is much larger than the deviation, the rounding is a large part of the deviation.
struct Moments {
  float shift, scale;

  // part: the weight of one column in the mean, 1 / columns
  __device__ __forceinline__ Moments(const Sums<2>& sums, float part, float eps) : shift(sums.at[0] * part) {
    scale = rsqrtf(fmaxf(sums.at[1] * part - shift * shift, 0.f) + eps);
  }
  __device__ __forceinline__ float normal(float v) const { return (v - shift) * scale; }
};

// Sums over the threads that share a row: a warp, or the whole block.
template <bool kBlock, class F>
__device__ __forceinline__ F row_sum(F x, F* scratch) {
  if constexpr (kBlock) {
    return block_sum(x, scratch);
  } else {
    return warp_sum(x);
  }
}

// K vectors of N floats per thread, for several parameters, in shared memory. They are columns of float4, so that
// threads read from different banks.
template <int K, int N>
struct Kept {
  static __device__ __forceinline__ float4* shared(int i, int k) {
    extern __shared__ float4 kept[];
    return kept + (i * K + k) * (N / 4) * blockDim.x + threadIdx.x;
  }
  // Writes parameter i, neighbouring threads reading neighbouring columns. A barrier must follow.
  static __device__ __forceinline__ void share(int i, const AnyFloat& p, int shift, int d) {
    extern __shared__ float4 kept[];
    UNROLL for (int k = 0; k < K; ++k) {
      UNROLL for (int j = 0; j < N; ++j) {
        const int at = j * blockDim.x + threadIdx.x, column = k * blockDim.x * N + at - shift;
        auto* const to = kept + ((i * K + k) * (N / 4) + at % N / 4) * blockDim.x + at / N;
        reinterpret_cast<float*>(to)[at % 4] = p.get(column, static_cast<uint32_t>(column) < static_cast<uint32_t>(d));
      }
    }
  }
  static __device__ __forceinline__ void get(int i, int k, float (&to)[N]) {
    UNROLL for (int j = 0; j < N; j += 4) {
      const float4 x = shared(i, k)[j / 4 * blockDim.x];
      to[j] = x.x, to[j + 1] = x.y, to[j + 2] = x.z, to[j + 3] = x.w;
    }
  }
};

}  // namespace svexport::norm
