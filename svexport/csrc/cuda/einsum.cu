#include "einsum.h"

#include <algorithm>

#include "bulk.cuh"

namespace svexport {
namespace {

// A warp works on its own: it copies rows of the large tensors to shared memory as they lie in memory, some tiles ahead,
// and multiplies them there. Which row or element stands where in the fragments is free, as long as both factors agree:
// the orders here are those in which the lanes of a warp read from different banks.

constexpr int kRows = 32;       // of a tile
constexpr int kMostStages = 4;  // tiles of a warp that are under way

// What a lane holds of a row or column in one step of a product: 8 bytes, in pieces of neighbours.
template <class T>
constexpr int kEach = 8 / sizeof(T);
template <class T>
constexpr int kPieces = sizeof(T) == 4 ? 1 : 2;

template <class T>
struct alignas(8) Fragment {
  uint32_t both[2];

  __device__ __forceinline__ void set(const T (&x)[4], bool = false) { memcpy(both, x, sizeof(both)); }
};
template <>
struct alignas(16) Fragment<float> {
  uint32_t big[2], small[2];

  // A rounded first part leaves a second one of either sign. That of one factor is enough for errors to cancel.
  __device__ __forceinline__ void set(const float (&x)[2], bool rounded = false) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Parts p = rounded ? parts(x[i]) : cut(x[i]);
      big[i] = p.big;
      small[i] = p.small;
    }
  }

 private:
  // What mma_tf32 cuts off of the first part is the second one.
  static __device__ __forceinline__ Parts cut(float x) {
    const uint32_t bits = __float_as_uint(x);
    return {bits, __float_as_uint(x - __uint_as_float(bits & 0xffffe000u))};
  }
};

// c += a b of 16 rows, half of them in each of two fragments, and 8 * J columns.
template <class T, int J>
__device__ __forceinline__ void multiply(float (&c)[J][4], const Fragment<T>& upper, const Fragment<T>& lower,
                                         const Fragment<T> (&b)[J]) {
  if constexpr (sizeof(T) == 4) {
    const uint32_t big[4] = {upper.big[0], lower.big[0], upper.big[1], lower.big[1]};
    const uint32_t small[4] = {upper.small[0], lower.small[0], upper.small[1], lower.small[1]};
#pragma unroll
    for (int j = 0; j < J; ++j) mma_tf32(c[j], small, b[j].big[0], b[j].big[1]);
#pragma unroll
    for (int j = 0; j < J; ++j) mma_tf32(c[j], big, b[j].small[0], b[j].small[1]);
#pragma unroll
    for (int j = 0; j < J; ++j) mma_tf32(c[j], big, b[j].big[0], b[j].big[1]);
  } else {
    const uint32_t both[4] = {upper.both[0], lower.both[0], upper.both[1], lower.both[1]};
#pragma unroll
    for (int j = 0; j < J; ++j) mma<T>(c[j], both, b[j].both[0], b[j].both[1]);
  }
}

// A large tensor; strides in bytes, of S, O and the third dimension.
struct Large {
  char* data;
  int64_t strides[3];
  int count, width;  // of the third and the last dimension
  bool vectors;      // whether all of `count` begin at the same place of 16 bytes
  bool whole;        // whether all tiles begin and end where 16 bytes do
  int pitch;         // bytes in shared memory of a tile of one of them

  template <class T>
  __device__ __forceinline__ T* at(int64_t s, int64_t o, int64_t k, int64_t row) const {
    return reinterpret_cast<T*>(data + s * strides[0] + o * strides[1] + k * strides[2] +
                                row * width * static_cast<int>(sizeof(T)));
  }
};

struct Einsum {
  Large x, z;
  char* y;
  int64_t y_strides[5], rows;  // T
  int shared, tiles;           // S; tiles of one of S
  Divider per_outer;           // tiles of one of O
  int steps, groups;           // of the product over K and V; of the columns, M times W
  int stages;
  int before, stage, warp;     // bytes of shared memory: in front of what the warps have, of a stage, of a warp
  float* partials;             // (parts, S, K, V, W)
  int parts;
};

// The rows of a tile.
struct Place {
  int64_t outer, first;
  int rows;

  __device__ __forceinline__ Place(const Einsum& a, int tile) {
    auto rest = static_cast<uint32_t>(tile);
    first = static_cast<int64_t>(a.per_outer.split(rest)) * kRows;
    outer = rest;
    rows = static_cast<int>(min(static_cast<int64_t>(kRows), a.rows - first));
  }
};

__device__ __forceinline__ int within_16(const void* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 15); }

// 16 bytes to shared memory, zeros but for the first `bytes`.
__device__ __forceinline__ void copy_some(char* to, const char* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
#endif
}

__device__ __forceinline__ void copy_16(char* to, const char* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#endif
}

// Back to global memory by the copy engine.
__device__ __forceinline__ void engine_put(char* to, const char* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Until it has read what this thread puts.
__device__ __forceinline__ void engine_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// The stages of a warp: their tiles are fetched in pieces or, kWhole, by the copy engine.
template <bool kWhole>
class Stages {
 public:
  // memory: with the barriers behind the tiles; fetches: of a stage.
  __device__ __forceinline__ Stages(char* memory, int stages, int bytes, int fetches)
      : memory_(memory), stages_(stages), bytes_(bytes) {
#if __CUDA_ARCH__ >= 900
    if constexpr (!kWhole) return;
    if (static_cast<int>(threadIdx.x) % 32 < stages) {
      init_barrier(barrier(threadIdx.x % 32), fetches);
      publish_barriers();
    }
    __syncwarp();
#endif
  }
  __device__ __forceinline__ char* at(int stage) const { return memory_ + stage * bytes_; }
  __device__ __forceinline__ uint32_t barrier(int stage) const { return shared_address(at(stages_)) + stage * 8; }

  // Until the tiles of a stage are there.
  __device__ __forceinline__ void wait(int stage) {
    if constexpr (kWhole) {
      wait_for(barrier(stage), turns_ >> stage & 1);
      turns_ ^= 1u << stage;
    } else if (stages_ == 1) {
      copy_async_wait<0>();
    } else if (stages_ == 2) {
      copy_async_wait<1>();
    } else if (stages_ == 3) {
      copy_async_wait<2>();
    } else {
      copy_async_wait<kMostStages - 1>();
    }
    __syncwarp();
  }

 private:
  char* memory_;
  int stages_, bytes_;
  uint32_t turns_ = 0;
};

// Copies rows of `count` to shared memory, where they begin at the same place of 16 bytes; after them come zeros until
// there are `filled` rows.
template <bool kWhole, class T>
__device__ __forceinline__ void fetch(char* to, const Large& t, int count, const T* first, int rows, int filled,
                                      uint32_t barrier) {
  constexpr int kSize = sizeof(T);
  const int lane = threadIdx.x % 32, begin = !kWhole && t.vectors ? within_16(first) : 0;
  const int end = begin + rows * t.width * kSize, whole = end / 16;
  const char* from = reinterpret_cast<const char*>(first) - begin;
  if constexpr (kWhole) {
    if (lane == 0) expect_bytes(barrier, end * count);
    if (lane < count) copy_bulk(to + lane * t.pitch, from + lane * t.strides[2], end, barrier);
  } else if (t.vectors) {
    for (int k = 0; k < count; ++k, from += t.strides[2]) {
      char* shared = to + k * t.pitch + lane * 16;
      const char* device = from + lane * 16;
#pragma unroll 4
      for (int i = whole - lane; i > 0; i -= 32, shared += 512, device += 512) copy_16(shared, device);
      if (whole * 16 < end && lane == whole % 32) copy_some(shared, device, end - whole * 16);
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < count; ++k, from += t.strides[2]) {
#pragma unroll 1
      for (int i = lane * kSize; i < end; i += 32 * kSize) {
        *reinterpret_cast<T*>(to + k * t.pitch + i) = *reinterpret_cast<const T*>(from + i);
      }
    }
  }
  if (rows >= filled) return;  // the first few zeros come twice, the other time from copy_some
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
#pragma unroll 1
    for (int i = end + lane * kSize; i < begin + filled * t.width * kSize; i += 32 * kSize) {
      *reinterpret_cast<T*>(to + k * t.pitch + i) = from_float<T>(0.0f);
    }
  }
  if constexpr (kWhole) publish();
}

// Where in 16 bytes of shared memory rows begin that are at `first` in device memory.
template <bool kWhole>
__device__ __forceinline__ int begin_of(const Large& t, const void* first) {
  return !kWhole && t.vectors ? within_16(first) : 0;
}

// Bytes out of shared memory, where they begin at `begin` of 16 bytes; so they do where they go, if `vectors`.
template <class T>
__device__ __forceinline__ void put(T* first, const char* from, int bytes, int begin, bool vectors) {
  constexpr int kSize = sizeof(T);
  const int lane = threadIdx.x % 32, end = begin + bytes, last = end / 16 * 16;
  char* const to = reinterpret_cast<char*>(first) - begin;
  const auto one = [&](int i) {
    if (i >= begin && i < end) *reinterpret_cast<T*>(to + i) = *reinterpret_cast<const T*>(from + i);
  };
  if (!vectors) {
#pragma unroll 1
    for (int i = lane * kSize; i < end; i += 32 * kSize) one(i);
    return;
  }
#pragma unroll 4
  for (int i = (begin ? 16 : 0) + lane * 16; i < last; i += 512) {
    store(reinterpret_cast<uint32_t*>(to + i), load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from + i)));
  }
  if (lane * kSize >= 16) return;
  if (begin) one(lane * kSize);
  if (last < end && (last || !begin)) one(last + lane * kSize);
}

template <class T>
__device__ __forceinline__ T element(const char* p) {
  return *reinterpret_cast<const T*>(p);
}

// The sums of a tile's products with columns by products of floats, one after the other.
template <class T, int J>
__device__ __forceinline__ void exact(const Einsum& a, const char* const (&rows)[4], const T* y, int first,
                                      float (&sums)[2][J][4]) {
  const int W = a.z.width;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * J; ++j) sums[i / 2][j / 2][i % 2 * 2 + j % 2] = 0.0f;
  }
  for (int kv = 0; kv < a.x.count * a.x.width; ++kv) {
    const int k = kv / a.x.width, v = kv % a.x.width;
    float left[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = to_float(element<T>(rows[i] + k * a.x.pitch + v * static_cast<int>(sizeof(T))));
#pragma unroll
    for (int j = 0; j < 2 * J; ++j) {
      const int column = first + j / 2 * 8 + j % 2, m = column / W, w = column % W;
      const T* const from = y + k * a.y_strides[1] + v * a.y_strides[2] + m * a.y_strides[3] + w * a.y_strides[4];
      const float factor = to_float(load_if<T, 1>(from, m < a.z.count).at[0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
        sum = fmaf(left[i], factor, sum);
      }
    }
  }
}

// z. The columns, M times W, are in groups of 8 * J.
template <class T, int J, bool kWhole>
__global__ void __launch_bounds__(512) large_kernel(const __grid_constant__ Einsum a) {
  constexpr int E = kEach<T>, P = kPieces<T>, N = E / P, kSize = sizeof(T);
  using Offsets = Vec<int, P>;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int K = a.x.count, V = a.x.width, M = a.z.count, W = a.z.width;
  const int pieces = ceil_div(V, N), factors = a.steps * J * 32;
  auto* const right = reinterpret_cast<Fragment<T>*>(shared);                   // (groups, steps, J, 32)
  auto* const offsets = reinterpret_cast<Offsets*>(right + a.groups * factors);  // (steps, 4), of pieces of a row
  auto* const columns = reinterpret_cast<int*>(offsets + a.steps * 4);          // (groups, J, 8), of results
  char* const results = shared + a.before + warp * a.warp;
  char* const memory = results + M * a.z.pitch;
  Stages<kWhole> stages(memory, a.stages, a.stage, 1);

  for (int i = threadIdx.x; i < a.steps * 4; i += blockDim.x) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int piece = i / 4 * 4 * P + p * 4 + i % 4;
      offsets[i].at[p] = piece < K * pieces ? piece / pieces * a.x.pitch + piece % pieces * (N * kSize) : 0;
    }
  }
  for (int i = threadIdx.x; i < a.groups * J * 8; i += blockDim.x) {
    columns[i] = i < M * W ? i / W * a.z.pitch + i % W * kSize : -1;
  }
  for (int i = lane; i < a.stages * K * 2; i += 32) {  // what the last piece of the last row has beyond it
    store(reinterpret_cast<int*>(memory + (i / 2 + 1) * a.x.pitch - (i % 2 + 1) * 16), Vec<int, 4>{});
  }
  __syncwarp();
  int row[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    row[i] = V % 2 == 0 ? group + 8 * i : P == 1 ? group % 4 * 8 + group / 4 + 2 * i : group * 4 + i;
  }

  const int64_t all = static_cast<int64_t>(a.shared) * a.tiles, last = all * (blockIdx.x + 1) / gridDim.x;
  for (int64_t next = all * blockIdx.x / gridDim.x; next < last;) {
    const int64_t s = next / a.tiles;
    const int begin = static_cast<int>(next - s * a.tiles);
    const int end = static_cast<int>(min(last - s * a.tiles, static_cast<int64_t>(a.tiles)));
    next = s * a.tiles + end;

    const auto fetch_tile = [&](int tile, int stage) {
      if (tile < end) {
        const Place place(a, tile);
        const T* from = a.x.at<const T>(s, place.outer, 0, place.first);
        fetch<kWhole>(stages.at(stage), a.x, K, from, place.rows, 0, stages.barrier(stage));
      }
      copy_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < a.stages; ++i) fetch_tile(begin + warp + i * warps, i);

    __syncthreads();  // until none needs the factors before
    const T* const y = reinterpret_cast<const T*>(a.y) + s * a.y_strides[0];
#pragma unroll 2
    for (int i = threadIdx.x; i < a.groups * factors; i += blockDim.x) {
      const int step = i / (J * 32) % a.steps, column = i / factors * (J * 8) + i / 32 % J * 8 + i % 32 / 4;
      const int m = column / W, w = column % W;
      const T* const from = y + m * a.y_strides[3] + w * a.y_strides[4];
      T x[E];
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int piece = step * 4 * P + e / N * 4 + i % 4, k = piece / pieces, v = piece % pieces * N + e % N;
        x[e] = load_if<T, 1>(from + k * a.y_strides[1] + v * a.y_strides[2], k < K && v < V && m < M).at[0];
      }
      right[i].set(x, true);
    }
    __syncthreads();

    int stage = 0;
    for (int tile = begin + warp; tile < end; tile += warps, stage = stage + 1 < a.stages ? stage + 1 : 0) {
      stages.wait(stage);
      const Place place(a, tile);
      const char* const x = stages.at(stage) + begin_of<kWhole>(a.x, a.x.at<const T>(s, place.outer, 0, place.first));
      T* const to = a.z.at<T>(s, place.outer, 0, place.first);
      char* const z = results + begin_of<kWhole>(a.z, to);
      const char* rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i] = x + row[i] * V * kSize;

      for (int columns_at = 0; columns_at < a.groups * J; columns_at += J) {
        float sums[2][J][4] = {};
        const Fragment<T>* factor = right + columns_at * a.steps * 32 + lane;
#pragma unroll 2
        for (int step = 0; step < a.steps; ++step, factor += J * 32) {
          const Offsets offset = load<int, P>(offsets[step * 4 + pair].at);
          Fragment<T> l[4], r[J];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            T of[E];
#pragma unroll
            for (int e = 0; e < E; ++e) of[e] = element<T>(rows[i] + offset.at[e / N] + e % N * kSize);
            l[i].set(of);
          }
#pragma unroll
          for (int j = 0; j < J; ++j) r[j] = factor[j * 32];
          multiply(sums[0], l[0], l[1], r);
          multiply(sums[1], l[2], l[3], r);
        }

        // An element that is not finite may have met parts of a number, or zeros in place of what is not there.
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float zero = 0.0f;
#pragma unroll
          for (int j = 0; j < 2 * J; ++j) zero = fmaf(sums[i / 2][j / 2][i % 2 * 2 + j % 2], 0.0f, zero);
          finite = finite && (row[i] >= place.rows || zero == 0.0f);
        }
        if (__any_sync(0xffffffffu, !finite)) exact(a, rows, y, columns_at * 8 + pair * 2, sums);
        if (columns_at == 0) {  // until the results before are out
          if constexpr (kWhole) engine_wait();
          __syncwarp();
        }
#pragma unroll
        for (int j = 0; j < J; ++j) {
          const Vec<int, 2> column = load<int, 2>(columns + (columns_at + j) * 8 + pair * 2);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (column.at[e] < 0) continue;
              *reinterpret_cast<T*>(z + row[i] * W * kSize + column.at[e]) = from_float<T>(sums[i / 2][j][i % 2 * 2 + e]);
            }
          }
        }
      }
      if constexpr (kWhole) publish();
      __syncwarp();  // until all have read the tile, and the results are there
      fetch_tile(tile + a.stages * warps, stage);
      const int bytes = place.rows * W * kSize;
      const auto device = [&](int m) { return reinterpret_cast<char*>(to) + m * a.z.strides[2]; };
      if constexpr (kWhole) {
        if (lane < M) engine_put(device(lane), results + lane * a.z.pitch, bytes);
      } else {
        for (int m = 0; m < M; ++m) {
          T* const first = reinterpret_cast<T*>(device(m));
          put(first, results + m * a.z.pitch, bytes, begin_of<kWhole>(a.z, first), a.z.vectors);
        }
      }
    }
  }
  if constexpr (kWhole) engine_wait();
}

// The sums of a warp of small_kernel by products of floats, one after the other, from device memory.
template <class T, int I, int J>
__device__ __noinline__ void exact(const Einsum& a, int begin, int end, float* to) {
  const int lane = threadIdx.x % 32, V = a.x.width, W = a.z.width;
  for (int i = 0; i < 2 * I; ++i) {
    const int at = min(static_cast<int>(blockIdx.y) * 16 * I + i * 8 + lane / 4, a.x.count * V - 1);
    float sums[2 * J] = {};
    for (int tile = begin + static_cast<int>(threadIdx.x) / 32; tile < end; tile += blockDim.x / 32) {
      const Place place(a, tile);
      const T* x = a.x.at<const T>(blockIdx.z, place.outer, at / V, place.first) + at % V;
      const T* z = a.z.at<const T>(blockIdx.z, place.outer, 0, place.first);
#pragma unroll 4
      for (int row = 0; row < place.rows; ++row) {
        const float left = to_float(x[row * V]);
#pragma unroll
        for (int j = 0; j < 2 * J; ++j) {
          const int w = min(j / 2 * 8 + lane % 4 * 2 + j % 2, W - 1);
          sums[j] = fmaf(left, to_float(z[row * W + w]), sums[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2 * J; ++j) to[((i / 2 * J + j / 2) * 4 + i % 2 * 2 + j % 2) * 32 + lane] = sums[j];
  }
}

// Parts of y, of 16 * I of K times V and all W, at most 8 * J. A warp adds up tiles.
template <class T, int I, int J, bool kWhole>
__global__ void __launch_bounds__(256) small_kernel(const __grid_constant__ Einsum a) {
  constexpr int E = kEach<T>, kSize = sizeof(T), kSums = I * J * 4;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int V = a.x.width, W = a.z.width, kv = a.x.count * V, kv0 = blockIdx.y * 16 * I, s = blockIdx.z;
  const int k0 = kv0 / V, count = (min(kv, kv0 + 16 * I) - 1) / V - k0 + 1;
  Stages<kWhole> stages(shared + warp * a.warp, a.stages, a.stage, 2);

  int offsets[2 * I];  // of this lane's K and V
#pragma unroll
  for (int i = 0; i < 2 * I; ++i) {
    const int at = min(kv0 + group + 8 * i, kv - 1);
    offsets[i] = (at / V - k0) * a.x.pitch + at % V * kSize;
  }
  const int begin = static_cast<int>(static_cast<int64_t>(a.tiles) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(a.tiles) * (blockIdx.x + 1) / gridDim.x);
  const auto fetch_tile = [&](int tile, int stage) {
    if (tile < end) {
      const Place place(a, tile);
      char* const to = stages.at(stage);
      const T *z = a.z.at<const T>(s, place.outer, 0, place.first), *x = a.x.at<const T>(s, place.outer, k0, place.first);
      fetch<kWhole>(to, a.z, 1, z, place.rows, kRows, stages.barrier(stage));
      fetch<kWhole>(to + a.z.pitch, a.x, count, x, place.rows, kRows, stages.barrier(stage));
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < a.stages; ++i) fetch_tile(begin + warp + i * warps, i);

  float sums[I][J][4] = {};
  int stage = 0;
  for (int tile = begin + warp; tile < end; tile += warps, stage = stage + 1 < a.stages ? stage + 1 : 0) {
    stages.wait(stage);
    const Place place(a, tile);
    const char* const tiles = stages.at(stage);
    const char* const z = tiles + begin_of<kWhole>(a.z, a.z.at<const T>(s, place.outer, 0, place.first));
    const char* const x = tiles + a.z.pitch + begin_of<kWhole>(a.x, a.x.at<const T>(s, place.outer, k0, place.first));
    float part[I][J][4] = {};  // tensor cores cut off what does not fit into a long sum, the additions below round
#pragma unroll
    for (int step = 0; step < kRows / (4 * E); ++step) {
      const int row = pair * 8 + step * E;
      Fragment<T> r[J];
#pragma unroll
      for (int j = 0; j < J; ++j) {
        T of[E];
#pragma unroll
        for (int e = 0; e < E; ++e) of[e] = element<T>(z + ((row + e) * W + j * 8 + group) * kSize);  // or x, not used
        r[j].set(of, true);
      }
#pragma unroll
      for (int i = 0; i < I; ++i) {
        Fragment<T> l[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          T of[E];
#pragma unroll
          for (int e = 0; e < E; ++e) of[e] = element<T>(x + (row + e) * V * kSize + offsets[2 * i + h]);
          l[h].set(of);
        }
        multiply(part[i], l[0], l[1], r);
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i / 4 / J][i / 4 % J][i % 4] += part[i / 4 / J][i / 4 % J][i % 4];
    __syncwarp();  // until all have read the tile
    fetch_tile(tile + a.stages * warps, stage);
  }

  float zero = 0.0f;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (i / 4 % J * 8 + pair * 2 + i % 2 < W) zero = fmaf(sums[i / 4 / J][i / 4 % J][i % 4], 0.0f, zero);
  }
  __syncthreads();  // until all have read their tiles: there the sums of the warps meet, (warps, kSums, 32)
  auto* const all = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < kSums; ++i) all[(warp * kSums + i) * 32 + lane] = sums[i / 4 / J][i / 4 % J][i % 4];
  // Parts of what is not finite, or of what it meets, add up to something else.
  if (__any_sync(0xffffffffu, !(zero == 0.0f))) exact<T, I, J>(a, begin, end, all + warp * kSums * 32);
  __syncthreads();
  float* const to = a.partials + (static_cast<int64_t>(blockIdx.x) * a.shared + s) * kv * W;
  for (int i = warp; i < kSums; i += warps) {
    const int at = kv0 + i / 4 / J * 16 + i % 4 / 2 * 8 + group, w = i / 4 % J * 8 + pair * 2 + i % 2;
    float sum = 0.0f;
    for (int j = 0; j < warps; ++j) sum += all[(j * kSums + i) * 32 + lane];
    if (at < kv && w < W) to[at * W + w] = sum;
  }
}

constexpr int kSumThreads = 256, kSumColumns = 32;

// y, from its parts: a block adds up those of kSumColumns elements.
template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ Einsum a) {
  __shared__ float sums[kSumThreads];
  const int V = a.x.width, W = a.z.width;
  const int64_t size = static_cast<int64_t>(a.shared) * a.x.count * V * W;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumColumns + threadIdx.x % kSumColumns;
  float sum = 0.0f;
  if (i < size) {
#pragma unroll 8
    for (int part = threadIdx.x / kSumColumns; part < a.parts; part += kSumThreads / kSumColumns) {
      sum += a.partials[part * size + i];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kSumColumns || i >= size) return;
#pragma unroll
  for (int j = 1; j < kSumThreads / kSumColumns; ++j) sum += sums[threadIdx.x + j * kSumColumns];
  const int64_t w = i % W, v = i / W % V, k = i / W / V % a.x.count, s = i / W / V / a.x.count;
  reinterpret_cast<T*>(a.y)[s * a.y_strides[0] + k * a.y_strides[1] + v * a.y_strides[2] + w * a.y_strides[4]] =
      from_float<T>(sum);
}

constexpr int kLargestWidth = 64, kLargestCount = 8;  // of V and W, and of K and M

// t: (S, O, K, T, V)
bool large(const Tensor& t, Large* to) {
  const int64_t size = t.item_size(), width = t.sizes[4];
  *to = {static_cast<char*>(t.data), {t.strides[0] * size, t.strides[1] * size, t.strides[2] * size},
         static_cast<int>(t.sizes[2]), static_cast<int>(width),
         t.sizes[2] == 1 || t.strides[2] * size % 16 == 0, reinterpret_cast<uintptr_t>(t.data) % 16 == 0,
         static_cast<int>(kRows * width * size) + 32};
  for (int i = 0; i < 3; ++i) to->whole = to->whole && (t.sizes[i] == 1 || to->strides[i] % 16 == 0);
  to->whole = to->whole && t.sizes[3] * width * size % 16 == 0;
  return width <= kLargestWidth && t.sizes[2] <= kLargestCount && (t.strides[4] == 1 || width == 1) &&
         (t.strides[3] == width || t.sizes[3] == 1);
}

// All that does not depend on how the shared memory is divided.
bool describe(const Tensor& x, const Tensor& y, const Tensor& z, Einsum* a) {
  if (!is_float(x) || y.dtype != x.dtype || z.dtype != x.dtype || !has_mma(DType::kFloat32)) return false;
  if (!large(x, &a->x) || !large(z, &a->z)) return false;
  a->y = static_cast<char*>(y.data);
  std::copy_n(y.strides, 5, a->y_strides);
  a->rows = x.sizes[3];
  const int64_t per_outer = ceil_div<int64_t>(a->rows, kRows), tiles = per_outer * x.sizes[1];
  if (tiles > INT32_MAX || x.sizes[0] > INT32_MAX) return false;
  a->per_outer = Divider(per_outer);
  a->tiles = static_cast<int>(tiles);
  a->shared = static_cast<int>(x.sizes[0]);
  return true;
}

int processors() { return of_device(cudaDevAttrMultiProcessorCount); }
int shared_memory() { return of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Calls f with so many tiles of columns, or more.
template <class F>
cudaError_t dispatch_columns(int tiles, F&& f) {
  if (tiles <= 2) return f(std::integral_constant<int, 2>());
  if (tiles <= 3) return f(std::integral_constant<int, 3>());
  if (tiles <= 4) return f(std::integral_constant<int, 4>());
  if (tiles <= 5) return f(std::integral_constant<int, 5>());
  return f(std::integral_constant<int, 8>());
}

// Whether tiles can be copied as a whole.
bool whole(const Einsum& a) {
  return a.x.whole && a.z.whole && of_device(cudaDevAttrComputeCapabilityMajor) >= 9;
}

template <class Kernel>
cudaError_t allow(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <class T, int J>
cudaError_t launch_large(const Tensor& x, const Tensor& y, const Tensor& z, cudaStream_t stream) {
  Einsum a{};
  if (!describe(x, y, z, &a)) return cudaErrorNotSupported;
  a.steps = ceil_div(a.x.count * ceil_div(a.x.width, kEach<T> / kPieces<T>), 4 * kPieces<T>);
  a.groups = ceil_div(a.z.count * a.z.width, 8 * J);
  a.before = a.groups * J * 32 * (a.steps * static_cast<int>(sizeof(Fragment<T>)) + 1) + a.steps * 32;
  a.stage = a.x.count * a.x.pitch;
  const int room = shared_memory() - a.before;
  const auto bytes_of = [&](int stages) { return ceil_div(stages * (a.stage + 8), 16) * 16 + a.z.count * a.z.pitch; };
  // Warps hide more than tiles under way.
  a.stages = room / bytes_of(2) >= 12 ? 2 : 1;
  while (a.stages < kMostStages && room / bytes_of(a.stages + 1) >= 16) ++a.stages;
  a.warp = bytes_of(a.stages);
  const int warps = std::min(16, room / a.warp);
  if (warps < 2) return cudaErrorNotSupported;
  const auto kernel = whole(a) ? large_kernel<T, J, true> : large_kernel<T, J, false>;
  const int bytes = a.before + warps * a.warp;
  cudaError_t status = allow(kernel, bytes);
  int blocks = 0;
  if (status == cudaSuccess) status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, warps * 32, bytes);
  if (status != cudaSuccess) return status;
  const int64_t all = static_cast<int64_t>(a.tiles) * a.shared, most = static_cast<int64_t>(blocks) * processors();
  int64_t grid = std::min(all, most);
  // Where it costs little, no block is to work on two of S.
  if (const int64_t even = grid / a.shared * a.shared; even * 16 > grid * 15) grid = even;
  kernel<<<static_cast<unsigned>(grid), warps * 32, bytes, stream>>>(a);
  return cudaGetLastError();
}

// Tiles of 16 of K times V that a warp adds up, with J of 8 columns: as many as registers hold twice.
template <int J>
constexpr int kSumTiles = J > 5 ? 2 : J > 4 ? 4 : 5;

int groups(const Tensor& x, int tiles) { return static_cast<int>(ceil_div<int64_t>(x.sizes[2] * x.sizes[4], 16 * tiles)); }

// Parts of the sum over rows: as many as leave the fewest processors idle.
int parts(const Tensor& x, int groups) {
  const int64_t count = processors(), blocks = x.sizes[0] * groups;
  const int64_t most = std::max<int64_t>(1, x.sizes[1] * ceil_div<int64_t>(x.sizes[3], kRows) / 8);
  int64_t best = 1;
  for (int64_t i = 2; i <= std::min(most, std::max<int64_t>(8, count / blocks)); ++i) {
    // fewer or shorter waves of blocks
    if (ceil_div(blocks * i, count) * best < ceil_div(blocks * best, count) * i) best = i;
  }
  return static_cast<int>(best);
}

template <class T, int J>
cudaError_t launch_small(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, cudaStream_t stream) {
  constexpr int I = kSumTiles<J>;
  Einsum a{};
  if (!describe(x, y, z, &a) || a.z.count != 1) return cudaErrorNotSupported;
  const int parts_of_y = groups(x, I);
  const int most = std::min(a.x.count, (16 * I - 2) / a.x.width + 2);  // of K in a group
  a.stage = most * a.x.pitch + a.z.pitch;
  int warps = 0;
  for (int stages = kMostStages; stages > 0; --stages) {  // the most tiles under way
    const int bytes = std::max(ceil_div(stages * (a.stage + 8), 16) * 16, I * J * 4 * 32 * 4);
    const int fit = std::min(8, shared_memory() / bytes);
    if (fit * stages < warps * a.stages) continue;
    warps = fit;
    a.stages = stages;
    a.warp = bytes;
  }
  if (warps < 2 || a.shared > 65535) return cudaErrorNotSupported;
  a.partials = static_cast<float*>(workspace);
  a.parts = parts(x, parts_of_y);
  const int bytes = warps * a.warp;
  const auto kernel = whole(a) ? small_kernel<T, I, J, true> : small_kernel<T, I, J, false>;
  if (const cudaError_t status = allow(kernel, bytes); status != cudaSuccess) return status;
  kernel<<<dim3(a.parts, parts_of_y, a.shared), warps * 32, bytes, stream>>>(a);
  const int64_t size = static_cast<int64_t>(a.shared) * a.x.count * a.x.width * a.z.width;
  sum_kernel<T><<<static_cast<unsigned>(ceil_div<int64_t>(size, kSumColumns)), kSumThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t einsum_large(const Tensor& x, const Tensor& y, const Tensor& z, cudaStream_t stream) {
  if (x.numel() == 0 || z.numel() == 0 || z.sizes[2] * z.sizes[4] > kLargestCount * kLargestWidth) {
    return cudaErrorNotSupported;
  }
  // For every group of columns the rows are read anew, which takes as long as 4 tiles of columns.
  const int tiles = static_cast<int>(ceil_div<int64_t>(z.sizes[2] * z.sizes[4], 8));
  int best = 2;
  for (int i = 3; i <= 5; ++i) {
    if (ceil_div(tiles, i) * (4 + i) < ceil_div(tiles, best) * (4 + best)) best = i;
  }
  return dispatch_columns(best, [&](auto columns) {
    return dispatch_float(x.dtype, [&](auto* p) {
      return launch_large<element_t<decltype(p)>, std::min(columns.value, 5)>(x, y, z, stream);
    });
  });
}

size_t einsum_small_workspace(const Tensor& x, const Tensor& z) {
  size_t count = 0;
  if (x.numel() == 0 || z.sizes[4] > kLargestWidth) return 0;
  dispatch_columns(static_cast<int>(ceil_div<int64_t>(z.sizes[4], 8)), [&](auto columns) {
    count = parts(x, groups(x, kSumTiles<columns.value>));
    return cudaSuccess;
  });
  return count * x.sizes[0] * x.sizes[2] * x.sizes[4] * z.sizes[4] * sizeof(float);
}

cudaError_t einsum_small(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, cudaStream_t stream) {
  if (x.numel() == 0 || z.numel() == 0 || z.sizes[4] > kLargestWidth) return cudaErrorNotSupported;
  return dispatch_columns(static_cast<int>(ceil_div<int64_t>(z.sizes[4], 8)), [&](auto columns) {
    return dispatch_float(x.dtype, [&](auto* p) {
      return launch_small<element_t<decltype(p)>, columns.value>(x, z, y, workspace, stream);
    });
  });
}

}  // namespace svexport
