#include "einsum.h"

#include <algorithm>
#include <cmath>

#include "bulk.cuh"
#include "overlap.cuh"

namespace svexport {
namespace {

// A warp works on its own: it copies rows of the large tensors to shared memory as they lie in memory, some tiles ahead,
// and multiplies them there. Which row or element stands where in the fragments is free, as long as both factors agree:
// the orders here are those in which the lanes of a warp read from different banks.

constexpr int kRows = 32;       // of a tile
constexpr int kMostStages = 4;  // tiles of a warp that are under way
constexpr int kLargeWarps = 16, kSmallWarps = 8;  // of a block, at most

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
  int slip;          // bytes of 16 by which each of them begins after the one before
  bool whole;        // whether all tiles begin and end where 16 bytes do
  int pitch;         // bytes in shared memory of a tile of one of them
  const char* end;   // of the tensor
  bool ragged;       // whether it ends within 16 bytes

  template <class T>
  __device__ __forceinline__ T* at(int64_t s, int64_t o, int64_t k, int64_t row) const {
    return reinterpret_cast<T*>(data + s * strides[0] + o * strides[1] + k * strides[2] +
                                row * width * static_cast<int>(sizeof(T)));
  }
  // Where in shared memory the rows of one of `count` begin, but for where those of the first do in 16 bytes.
  __device__ __forceinline__ int begin(int k) const { return k * pitch + (k * slip & 15); }
};

struct Einsum {
  Large x, z;
  char* y;
  int64_t y_shared, rows;           // the stride of y over S; T
  int y_k, y_v, y_m, y_w;           // the other strides of y
  int shared, tiles;                // S, times those that are apart; tiles of one of these
  Divider apart;                    // of M or, for a sum, of K, if each has tiles of its own, their count being 1; else 1
  Divider per_shared, per_outer;    // tiles of one of S, and of one of O
  int steps, groups;                // of the product over K and V; of the columns, M times W
  Divider per_group, per_k, per_m;  // steps of a group; pieces, or elements, of one of K; columns of one of M
  int workers, stages;              // warps that have tiles; those of a warp that are under way
  int before, stage, warp;          // bytes of shared memory: in front of what the warps have, of a stage, of a warp
  float* partials;                  // (parts, S, K, V, W)
  int parts;
  Divider per_row;  // kTogether elements of W
  // Of large_kernel:
  Divider per_tile, per_block;  // warps that share a tile, one or one for each of M; blocks that have `span` tiles between them
  int count, groups_each;       // of M, and groups of columns, that a warp does
  int span, each, more;         // each: tiles of a block; more: blocks that have another one
};

// One of so many equal parts of 0, 1, .., count - 1.
struct Range {
  int begin, end;

  __device__ __forceinline__ Range(int count, int part, int parts) {
    const int each = static_cast<uint32_t>(count) / static_cast<uint32_t>(parts), more = count - each * parts;
    begin = each * part + min(part, more);
    end = begin + each + (part < more ? 1 : 0);
  }
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
  // barriers: where those are, of 8 bytes a stage; fetches: of a stage.
  __device__ __forceinline__ Stages(char* memory, char* barriers, int stages, int bytes, int fetches)
      : memory_(memory), barriers_(shared_address(barriers)), stages_(stages), bytes_(bytes) {
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
  __device__ __forceinline__ uint32_t barrier(int stage) const { return barriers_ + stage * 8; }

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
  uint32_t barriers_;
  int stages_, bytes_;
  uint32_t turns_ = 0;
};

// Copies rows of `count` to shared memory, where they begin at the same place of 16 bytes as they do where they come from,
// with zeros behind them until there are `filled` rows, but for the piece of 16 bytes in which they end.
template <bool kWhole, class T>
__device__ __forceinline__ void fetch(char* to, const Large& t, int count, const T* first, int rows, int filled,
                                      uint32_t barrier) {
  constexpr int kSize = sizeof(T);
  const int lane = threadIdx.x % 32, begin = kWhole ? 0 : within_16(first), bytes = rows * t.width * kSize;
  const char* from = reinterpret_cast<const char*>(first);
  if constexpr (kWhole) {
    if (lane == 0) expect_bytes(barrier, bytes * count);
    if (lane < count) copy_bulk(to + lane * t.pitch, from + lane * t.strides[2], bytes, barrier);
  } else {
    // Whole pieces, with what lies around the rows.
    for (int k = 0; k < count; ++k, from += t.strides[2]) {
      const int before = within_16(from), end = before + bytes;
      int pieces = ceil_div(end, 16);
      char* shared = to + t.begin(k) + begin - before + lane * 16;
      const char* device = from - before + lane * 16;
      // The last one of the tensor may end behind it: its elements, and a zero. memcheck takes a piece of fewer bytes for
      // one of 16.
      if (t.ragged && from - before + pieces * 16 > t.end) {
        const int i = --pieces * 16 + lane * kSize;
        if (i <= end) {
          const auto last = load_if<T, 1>(reinterpret_cast<const T*>(device - lane * 16 + i), i < end);
          store(reinterpret_cast<T*>(shared - lane * 16 + i), last);
        }
      }
#pragma unroll 1  // few rows take longer to fetch instructions than elements
      for (int i = pieces - lane; i > 0; i -= 32, shared += 512, device += 512) copy_async(shared, device, true);
    }
  }
  if (rows >= filled) return;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    char* const rest = to + t.begin(k) + begin;
#pragma unroll 1
    for (int i = bytes + (-within_16(rest + bytes) & 15) + lane * 16; i < filled * t.width * kSize; i += 512) {
      store(reinterpret_cast<uint32_t*>(rest + i), Vec<uint32_t, 4>{});
    }
  }
  if constexpr (kWhole) publish();
}

// Zeros from the rows of a tile that have come to where fetch() has filled it.
template <class T>
__device__ __forceinline__ void clear_last(char* rows, const Large& t, int count, int bytes) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    char* const end = rows + t.begin(k) + bytes;
    const int i = lane * static_cast<int>(sizeof(T));
    if (i < (-within_16(end) & 15)) *reinterpret_cast<T*>(end + i) = from_float<T>(0.0f);
  }
}

// Where in 16 bytes rows begin that are at `first` in device memory.
template <bool kWhole>
__device__ __forceinline__ int begin_of(const void* first) {
  return kWhole ? 0 : within_16(first);
}

// Bytes out of shared memory, where they begin at the same place of 16 bytes as they do where they go.
template <class T>
__device__ __forceinline__ void put(T* first, const char* from, int bytes) {
  constexpr int kSize = sizeof(T), kPiece = 16 / kSize;
  const int lane = threadIdx.x % 32, begin = within_16(first), end = begin + bytes, last = end / 16 * 16;
  from -= begin;
  char* const to = reinterpret_cast<char*>(first) - begin;
#pragma unroll 4
  for (int i = (begin ? 16 : 0) + lane * 16; i < last; i += 512) {
    store(reinterpret_cast<uint32_t*>(to + i), load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from + i)));
  }
  // The elements of the first and of the last 16 bytes, which need not all be theirs.
  const bool is_last = lane >= kPiece;
  const int i = lane % kPiece * kSize + (is_last ? last : 0);
  if (lane < 2 * kPiece && i >= begin && i < end && (is_last ? last || !begin : begin)) {
    *reinterpret_cast<T*>(to + i) = *reinterpret_cast<const T*>(from + i);
  }
}

template <class T>
__device__ __forceinline__ T element(const char* p) {
  return *reinterpret_cast<const T*>(p);
}

// The sums of a tile's products with columns by products of floats, one after the other.
template <class T, int J>
__device__ __forceinline__ void exact(const Einsum& a, const char* const (&rows)[4], const T* y, int first,
                                      float (&sums)[2][J][4]) {
  constexpr int kSize = sizeof(T);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * J; ++j) sums[i / 2][j / 2][i % 2 * 2 + j % 2] = 0.0f;
  }
  for (int kv = 0; kv < a.x.count * a.x.width; ++kv) {
    const int k = kv / a.x.width, v = kv % a.x.width;
    float left[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = to_float(element<T>(rows[i] + a.x.begin(k) + v * kSize));
#pragma unroll
    for (int j = 0; j < 2 * J; ++j) {
      uint32_t m = first + j / 2 * 8 + j % 2;
      const int w = a.per_m.split(m);
      const T* const from = y + (k * a.y_k + v * a.y_v + static_cast<int>(m) * a.y_m + w * a.y_w);
      const float factor = to_float(load_if<T, 1>(from, m < a.z.count && w < a.z.width).at[0]);
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
__global__ void __launch_bounds__(kLargeWarps * 32, 1) large_kernel(const __grid_constant__ Einsum a) {
  constexpr int E = kEach<T>, P = kPieces<T>, N = E / P, kSize = sizeof(T);
  constexpr int kReads = J > 5 ? 1 : 2;  // of a thread, at once: as registers allow
  using Offsets = Vec<int, P>;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int warp = threadIdx.x / 32;
  const bool works = warp < a.workers;  // the others help with the factors only
  const int K = a.x.count, V = a.x.width, M = a.z.count, W = a.z.width, factors = a.steps * J * 32;
  auto* const right = reinterpret_cast<Fragment<T>*>(shared);                   // (groups, steps, J, 32)
  auto* const offsets = reinterpret_cast<Offsets*>(right + a.groups * factors);  // (steps, 4), of pieces of a row
  auto* const columns = reinterpret_cast<int*>(offsets + a.steps * 4);          // (groups, J, 8), of results
  char* const results = shared + a.before + warp * a.warp;
  char* const memory = results + a.count * a.z.pitch;
  Stages<kWhole> stages(memory, memory + a.stages * a.stage, works ? a.stages : 0, a.stage, 1);
  start_next();

  int row[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    row[i] = V % 2 == 0 ? group + 8 * i : P == 1 ? group % 4 * 8 + group / 4 + 2 * i : group * 4 + i;
  }

  uint32_t span = blockIdx.x;
  const int part = static_cast<int>(a.per_block.split(span));
  const int first_tile = static_cast<int>(span) * a.span + part * a.each + min(part, a.more);
  const int last_tile = first_tile + a.each + (part < a.more ? 1 : 0);
  for (int next = first_tile; next < last_tile;) {
    auto rest = static_cast<uint32_t>(next);
    const int begin = static_cast<int>(a.per_shared.split(rest)), end = min(begin + last_tile - next, a.tiles);
    const auto of_m = static_cast<int>(a.apart.split(rest));
    const int64_t s = rest;
    const bool begins = next == first_tile;
    next += end - begin;

    // What takes longest comes first: the factors, then the tiles; the tables are made meanwhile.
    const T* const y = reinterpret_cast<const T*>(a.y) + s * a.y_shared + of_m * a.y_m;
    T loaded[kReads][E];
    const auto read = [&](int i0) {
#pragma unroll
      for (int r = 0; r < kReads; ++r) {
        const int i = i0 + r * blockDim.x;
        if (r > 0 && i - lane >= a.groups * factors) break;
        uint32_t columns_before = i / (J * 32);  // in groups
        const uint32_t step = a.per_group.split(columns_before);
        uint32_t m = (columns_before * J + i / 32 % J) * 8 + i % 32 / 4;
        const int w = a.per_m.split(m);
        const int from = static_cast<int>(m) * a.y_m + w * a.y_w;
#pragma unroll
        for (int p = 0; p < P; ++p) {
          uint32_t k = (step * P + p) * 4 + i % 4;
          const uint32_t v = a.per_k.split(k) * N;
          const T* const piece = y + (from + static_cast<int>(k) * a.y_k + static_cast<int>(v) * a.y_v);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            loaded[r][p * N + n] = load_if<T, 1>(piece + n * a.y_v, k < K && v + n < V && m < M && w < W).at[0];
          }
        }
      }
    };
    read(threadIdx.x);

    const int pieces = (end - begin) * static_cast<int>(a.per_tile.d);  // tiles, or tiles for one of M
    const auto fetch_tile = [&](int piece, int stage) {
      if (piece < pieces) {
        const Place place(a, begin + static_cast<int>(a.per_tile.divide(piece)));
        const T* const from = a.x.at<const T>(s, place.outer, 0, place.first);
        char* const to = stages.at(stage);
        fetch<kWhole>(to, a.x, K, from, place.rows, 0, stages.barrier(stage));
        // The last piece of the last row has one more: where no other element has been copied with it, what other kernels
        // have left there need not be finite.
        char* const beyond = to + begin_of<kWhole>(from) + place.rows * V * kSize + a.x.begin(lane);
        if (lane < K && within_16(beyond) == 0) *reinterpret_cast<T*>(beyond) = from_float<T>(0.0f);
      }
      copy_async_commit();
    };
    const int first = works ? warp : pieces;
#pragma unroll 1
    for (int i = 0; i < a.stages; ++i) fetch_tile(first + i * a.workers, i);

    if (begins) {
      const int thread = blockDim.x - 1 - threadIdx.x;  // the last warps may have no tiles to fetch
      for (int i = thread; i < a.steps * 4; i += blockDim.x) {
#pragma unroll
        for (int p = 0; p < P; ++p) {
          uint32_t k = i / 4 * 4 * P + p * 4 + i % 4;
          const uint32_t piece = a.per_k.split(k);
          offsets[i].at[p] = k < K ? a.x.begin(k) + piece * (N * kSize) : 0;
        }
      }
      for (int i = thread; i < a.groups * J * 8; i += blockDim.x) {
        uint32_t m = i;
        const int w = a.per_m.split(m);
        columns[i] = m < M && w < W ? (a.count > 1 ? a.z.begin(m) : 0) + w * kSize : -1;
      }
    }

    __syncthreads();  // until none needs the factors before
    for (int i0 = threadIdx.x; i0 < a.groups * factors;) {
#pragma unroll
      for (int r = 0; r < kReads; ++r) {
        if (const int i = i0 + r * blockDim.x; i < a.groups * factors) right[i].set(loaded[r], true);
      }
      if (i0 += kReads * blockDim.x; i0 < a.groups * factors) read(i0);
    }
    __syncthreads();

    int stage = 0;
    for (int piece = first; piece < pieces; piece += a.workers, stage = stage + 1 < a.stages ? stage + 1 : 0) {
      stages.wait(stage);
      uint32_t tile = piece;
      const auto m0 = static_cast<int>(a.per_tile.split(tile));
      const Place place(a, begin + static_cast<int>(tile));
      const char* const x = stages.at(stage) + begin_of<kWhole>(a.x.at<const T>(s, place.outer, 0, place.first));
      T* const to = a.z.at<T>(s, place.outer, of_m + m0, place.first);
      char* const z = results + begin_of<kWhole>(to);
      const char* rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i] = x + row[i] * V * kSize;

      const int columns_begin = m0 * a.groups_each * J, columns_end = columns_begin + a.groups_each * J;
      for (int columns_at = columns_begin; columns_at < columns_end; columns_at += J) {
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
        if (__builtin_expect(__any_sync(0xffffffffu, !finite), 0)) exact(a, rows, y, columns_at * 8 + pair * 2, sums);
        if (columns_at == columns_begin) {  // until the results before are out
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
      fetch_tile(piece + a.stages * a.workers, stage);
      const int bytes = place.rows * W * kSize;
      const auto device = [&](int m) { return reinterpret_cast<char*>(to) + m * a.z.strides[2]; };
      if constexpr (kWhole) {
        if (lane < a.count) engine_put(device(lane), results + lane * a.z.pitch, bytes);
      } else {
        for (int m = 0; m < a.count; ++m) put(reinterpret_cast<T*>(device(m)), z + a.z.begin(m), bytes);
      }
    }
  }
  if constexpr (kWhole) engine_wait();
}

// Floats from row to row of the sums of a warp in shared memory: its lanes store to different banks.
template <int J>
constexpr int kSumPitch = J % 2 ? 8 * J : 8 * J + 8;

// The sums of a warp of small_kernel by products of floats, one after the other, from device memory.
template <class T, int I, int J>
__device__ __forceinline__ void exact(const Einsum& a, const Range& range, float* to) {
  const int lane = threadIdx.x % 32, V = a.x.width, W = a.z.width;
  uint32_t s = blockIdx.y;
  const auto of_k = static_cast<int>(a.apart.split(s));
  for (int i = 0; i < 2 * I; ++i) {
    const int at = min(static_cast<int>(blockIdx.z) * 16 * I + i * 8 + lane / 4, a.x.count * V - 1);
    float sums[2 * J] = {};
    for (int tile = range.begin + static_cast<int>(threadIdx.x) / 32; tile < range.end; tile += blockDim.x / 32) {
      const Place place(a, tile);
      const T* x = a.x.at<const T>(s, place.outer, of_k + at / V, place.first) + at % V;
      const T* z = a.z.at<const T>(s, place.outer, 0, place.first);
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
    for (int j = 0; j < J; ++j) {
      store(to + (i * 8 + lane / 4) * kSumPitch<J> + j * 8 + lane % 4 * 2, Vec<float, 2>{sums[2 * j], sums[2 * j + 1]});
    }
  }
}

template <class T>
__device__ __forceinline__ T* small_at(const Einsum& a, uint32_t s, int k, int v, int w) {
  k += static_cast<int>(a.apart.split(s));
  return reinterpret_cast<T*>(a.y) + static_cast<int64_t>(s) * a.y_shared + (k * a.y_k + v * a.y_v + w * a.y_w);
}

constexpr int kTogether = 4;  // neighbours of W that a thread adds up
constexpr int kFewSums = 3;  // tiles of 16 of K times V that a warp adds up, where there are few rows

// Threads for which there must be registers. Few rows are blocks of few warps, of which several are to fit: for floats with
// 168 registers, which the compiler would exceed.
template <class T, int I, int J>
constexpr int kSmallBound = (sizeof(T) == 4 && I == kFewSums && J == 4 ? 12 : kSmallWarps) * 32;

// Parts of y, or y, of 16 * I of K times V and all W, at most 8 * J. A warp adds up tiles.
template <class T, int I, int J, bool kWhole>
__global__ void __launch_bounds__(kSmallBound<T, I, J>) small_kernel(const __grid_constant__ Einsum a) {
  constexpr int E = kEach<T>, kSize = sizeof(T), kSums = I * J * 4;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int V = a.x.width, W = a.z.width, kv = a.x.count * V, kv0 = blockIdx.z * 16 * I;
  uint32_t s = blockIdx.y;
  const auto of_k = static_cast<int>(a.apart.split(s));
  const int k0 = a.per_k.divide(kv0), count = static_cast<int>(a.per_k.divide(min(kv, kv0 + 16 * I) - 1)) - k0 + 1;
  char* const memory = shared + warp * a.warp;
  Stages<kWhole> stages(memory, memory + a.warp - a.stages * 8, a.stages, a.stage, 2);
  start_next();

  const Range range(a.tiles, blockIdx.x, gridDim.x);
  const int begin = range.begin, end = range.end;
  const auto fetch_tile = [&](int tile, int stage) {
    if (tile < end) {
      const Place place(a, tile);
      char* const to = stages.at(stage);
      const T *z = a.z.at<const T>(s, place.outer, 0, place.first), *x = a.x.at<const T>(s, place.outer, of_k + k0, place.first);
      fetch<kWhole>(to, a.z, 1, z, place.rows, kRows, stages.barrier(stage));
      fetch<kWhole>(to + a.z.pitch, a.x, count, x, place.rows, kRows, stages.barrier(stage));
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < a.stages; ++i) fetch_tile(begin + warp + i * warps, i);

  int offsets[2 * I];  // of this lane's K and V
#pragma unroll
  for (int i = 0; i < 2 * I; ++i) {
    uint32_t k = min(kv0 + group + 8 * i, kv - 1);
    const uint32_t v = a.per_k.split(k);
    offsets[i] = a.x.begin(k - k0) + v * kSize;
  }

  float sums[I][J][4] = {};
  int stage = 0;
  for (int tile = begin + warp; tile < end; tile += warps, stage = stage + 1 < a.stages ? stage + 1 : 0) {
    stages.wait(stage);
    const Place place(a, tile);
    char* const tiles = stages.at(stage);
    char* const z = tiles + begin_of<kWhole>(a.z.at<const T>(s, place.outer, 0, place.first));
    char* const x = tiles + a.z.pitch + begin_of<kWhole>(a.x.at<const T>(s, place.outer, of_k + k0, place.first));
    if (!kWhole && place.rows < kRows) {
      clear_last<T>(z, a.z, 1, place.rows * W * kSize);
      clear_last<T>(x, a.x, count, place.rows * V * kSize);
      __syncwarp();
    }
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
  auto* const mine = reinterpret_cast<float*>(memory);  // where the tiles were, (16 * I, kSumPitch)
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    const auto& four = sums[i / 4 / J][i / 4 % J];
    store(mine + (i / 4 / J * 16 + i % 4 / 2 * 8 + group) * kSumPitch<J> + i / 4 % J * 8 + pair * 2,
          Vec<float, 2>{four[i % 4], four[i % 4 + 1]});
  }
  // Parts of what is not finite, or of what it meets, add up to something else.
  if (__builtin_expect(__any_sync(0xffffffffu, !(zero == 0.0f)), 0)) {
    // The range is found again where registers are short.
    exact<T, I, J>(a, kSmallBound<T, I, J> > kSmallWarps * 32 ? Range(a.tiles, blockIdx.x, gridDim.x) : range, mine);
  }
  __syncthreads();
  const int size = min(16 * I, kv - kv0) * ceil_div(W, kTogether);
  float* const part = a.partials + ((static_cast<int64_t>(blockIdx.x) * a.shared + blockIdx.y) * kv + kv0) * W;
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    uint32_t row = i;
    const int first = static_cast<int>(a.per_row.split(row)) * kTogether;
    const char* const from = shared + (row * kSumPitch<J> + first) * sizeof(float);
    Vec<float, kTogether> of[kSmallWarps];
#pragma unroll
    for (int j = 0; j < kSmallWarps; ++j) {  // all at once
      of[j] = load<float, kTogether>(reinterpret_cast<const float*>(from + (j < warps ? j * a.warp : 0)));
    }
    const auto put = [&](auto* to, int stride) {
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        float sum = of[0].at[e];
#pragma unroll
        for (int j = 1; j < kSmallWarps; ++j) sum = j < warps ? sum + of[j].at[e] : sum;
        if (first + e < W) to[e * stride] = from_float<element_t<decltype(to)>>(sum);
      }
    };
    if (a.parts == 1) {
      uint32_t k = kv0 + row;
      const uint32_t v = a.per_k.split(k);
      put(small_at<T>(a, blockIdx.y, k, v, first), a.y_w);
    } else {
      put(part + row * W + first, 1);
    }
  }
  wait_for_previous();  // also where there was no need: what comes next waits for this kernel alone
}

constexpr int kSumThreads = 256, kSumColumns = 32;

// y, from its parts: a block adds up those of kSumColumns elements.
template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ Einsum a) {
  __shared__ float sums[kSumThreads];
  const int V = a.x.width, W = a.z.width;
  const int64_t size = static_cast<int64_t>(a.shared) * a.x.count * V * W;
  const int i = blockIdx.x * kSumColumns + threadIdx.x % kSumColumns;
  float sum = 0.0f;
  wait_for_previous();
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
  auto kv = static_cast<uint32_t>(i / W);  // of all S
  const uint32_t v = a.per_k.split(kv);
  *small_at<T>(a, kv / a.x.count, kv % a.x.count, v, i % W) = from_float<T>(sum);
}

constexpr int kLargestWidth = 64, kLargestCount = 8;  // of V and W, and of K and M

bool small_enough(const Tensor& t) {
  return t.numel() > 0 && t.sizes[2] <= kLargestCount && t.sizes[4] <= kLargestWidth;
}

// t: (S, O, K, T, V)
bool large(const Tensor& t, Large* to) {
  const int64_t size = t.item_size(), width = t.sizes[4];
  *to = {static_cast<char*>(t.data),
         {t.strides[0] * size, t.strides[1] * size, t.strides[2] * size},
         static_cast<int>(t.sizes[2]),
         static_cast<int>(width),
         static_cast<int>(t.strides[2] * size & 15),
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0,
         static_cast<int>(kRows * width * size) + 32,
         static_cast<char*>(t.data) + size};
  for (int i = 0; i < 5; ++i) to->end += (t.sizes[i] - 1) * t.strides[i] * size;
  to->ragged = reinterpret_cast<uintptr_t>(to->end) % 16 != 0;
  for (int i = 0; i < 3; ++i) to->whole = to->whole && (t.sizes[i] == 1 || to->strides[i] % 16 == 0);
  to->whole = to->whole && t.sizes[3] * width * size % 16 == 0;
  return (t.strides[4] == 1 || width == 1) && (t.strides[3] == width || t.sizes[3] == 1);
}

// All that does not depend on how the shared memory is divided.
bool describe(const Tensor& x, const Tensor& y, const Tensor& z, Einsum* a) {
  if (!is_float(x) || y.dtype != x.dtype || z.dtype != x.dtype || !has_mma(DType::kFloat32)) return false;
  if (!large(x, &a->x) || !large(z, &a->z)) return false;
  a->y = static_cast<char*>(y.data);
  int64_t last = 0;  // of one of S
  for (int i = 1; i < 5; ++i) last += (y.sizes[i] - 1) * y.strides[i];
  if (last > INT32_MAX || y.numel() > INT32_MAX) return false;
  a->y_shared = y.strides[0];
  const auto stride = [&](int i) { return y.sizes[i] == 1 ? 0 : static_cast<int>(y.strides[i]); };
  a->y_k = stride(1), a->y_v = stride(2), a->y_m = stride(3), a->y_w = stride(4);
  a->rows = x.sizes[3];
  const int64_t per_outer = ceil_div<int64_t>(a->rows, kRows), tiles = per_outer * x.sizes[1];
  if (tiles * x.sizes[0] > INT32_MAX / 2) return false;
  a->per_outer = Divider(per_outer);
  a->tiles = static_cast<int>(tiles);
  a->per_shared = Divider(tiles);
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
  if (tiles <= 6) return f(std::integral_constant<int, 6>());
  if (tiles <= 7) return f(std::integral_constant<int, 7>());
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

// Of a tensor's width.
int pitch_of(const Tensor& t) { return kRows * static_cast<int>(t.sizes[4] * t.item_size()) + 32; }

// What does the products of a tile with each of M: a warp, as many that share it, or blocks apart, that read it again.
enum class Of { kOne, kSharing, kApart };

// How large_kernel divides its work.
struct Division {
  int sharing, apart, count;  // 1 or, of M, warps that share a tile, those that are apart, and those that a warp does
  int columns;                // of 8, that a warp does at once
  int steps, groups, before;  // as Einsum has them
  int pieces, workers, stages, warp = 0;  // pieces: of a block, of one of S; the rest as Einsum has it
  bool fits;
  double time = INFINITY;

  Division(const Tensor& x, const Tensor& z, Of of)
      : sharing(of == Of::kSharing ? static_cast<int>(z.sizes[2]) : 1),
        apart(of == Of::kApart ? static_cast<int>(z.sizes[2]) : 1),
        count(of == Of::kOne ? static_cast<int>(z.sizes[2]) : 1) {
    const int size = static_cast<int>(x.item_size()), K = static_cast<int>(x.sizes[2]), pairs = ceil_div<int>(x.sizes[4], 2);
    // For every group of columns the rows are read anew, which takes as long as 4 tiles of columns. 7 are for half types
    // alone.
    const int tiles = ceil_div<int>(count * z.sizes[4], 8);
    columns = 2;
    for (const int i : {3, 4, 5, 7}) {
      if ((i <= 5 || size == 2) && ceil_div(tiles, i) * (4 + i) < ceil_div(tiles, columns) * (4 + columns)) columns = i;
    }
    groups = sharing * ceil_div(tiles, columns);
    steps = ceil_div(K * pairs, size == 4 ? 4 : 8);
    const int fragment = static_cast<int>(size == 4 ? sizeof(Fragment<float>) : sizeof(Fragment<__half>));
    before = groups * columns * 32 * (steps * fragment + 1) + steps * 32;
    const int stage = K * pitch_of(x), results = count * pitch_of(z), room = shared_memory() - before;
    const auto bytes_of = [&](int n) { return ceil_div(n * (stage + 8), 16) * 16 + results; };
    // Warps hide more than tiles under way.
    stages = room / bytes_of(2) >= 12 ? 2 : 1;
    while (stages < kMostStages && room / bytes_of(stages + 1) >= kLargeWarps) ++stages;
    const int64_t shared = x.sizes[0] * apart, of_one = x.sizes[1] * ceil_div<int64_t>(x.sizes[3], kRows);
    pieces = sharing * static_cast<int>(std::min(of_one, ceil_div<int64_t>(of_one * shared, processors())));
    fits = room / bytes_of(stages) >= 2 && of_one * shared <= INT32_MAX / 2;
    if (!fits) return;
    workers = std::min({kLargeWarps, room / bytes_of(stages), pieces});
    stages = std::min(stages, ceil_div(pieces, workers));
    warp = bytes_of(stages);
    // To fetch or to store a tile takes as long as 8 tiles of columns.
    time = ceil_div(pieces, workers) * (groups / sharing * (4.0 + columns) + 8.0 * (1 + count)) *
           std::max(1.0, static_cast<double>(shared) / processors());
  }
};

Division division_of(const Tensor& x, const Tensor& z) {
  const Division one(x, z, Of::kOne);
  if (z.sizes[2] == 1) return one;
  const Division apart(x, z, Of::kApart);
  // So few tiles that every warp is to do only one of M. More blocks leave a sum that follows no room to begin early.
  if (x.sizes[0] <= processors() && one.pieces * z.sizes[2] <= kLargeWarps) {
    const Division few(x, z, x.sizes[0] == 1 && z.sizes[4] > 32 ? Of::kApart : Of::kSharing);
    if (few.fits) return few;
  }
  return apart.fits && apart.time * 1.1 < one.time ? apart : one;
}

template <class T, int J>
cudaError_t launch_large(const Tensor& x, const Tensor& y, const Tensor& z, const Division& division, cudaStream_t stream) {
  Einsum a{};
  if (!describe(x, y, z, &a)) return cudaErrorNotSupported;
  const auto kernel = whole(a) ? large_kernel<T, J, true> : large_kernel<T, J, false>;
  a.apart = Divider(division.apart);
  a.shared *= division.apart;
  a.z.count /= division.apart;
  a.per_tile = Divider(division.sharing);
  a.count = division.count;
  a.groups = division.groups;
  a.groups_each = division.groups / division.sharing;
  a.steps = division.steps;
  a.per_group = Divider(a.steps);
  a.per_k = Divider(ceil_div(a.x.width, kEach<T> / kPieces<T>));
  a.per_m = Divider(division.sharing > 1 ? a.groups_each * 8 * J : a.z.width);
  a.before = division.before;
  a.stage = a.x.count * a.x.pitch;
  a.workers = division.workers;
  a.stages = division.stages;
  a.warp = division.warp;
  const int64_t all = static_cast<int64_t>(a.tiles) * a.shared, count = processors();
  // One block a processor has all its tiles; where it had several of S, there are smaller blocks instead.
  const bool one = division.pieces <= a.workers && a.shared <= count;
  const int warps = one ? kLargeWarps : std::max(a.workers, kLargeWarps / 2);
  const int bytes = a.before + a.workers * a.warp;
  cudaError_t status = allow(kernel, bytes);
  int blocks = 1;
  if (status == cudaSuccess && !one) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, warps * 32, bytes);
  }
  if (status != cudaSuccess) return status;
  int64_t grid = std::min(all, blocks * count);
  // Where it costs little, no block is to work on two of S.
  if (const int64_t even = grid / a.shared * a.shared; even * 16 > grid * 15) grid = even;
  const bool aligned = grid % a.shared == 0;
  const int64_t blocks_each = aligned ? grid / a.shared : grid;
  a.span = aligned ? a.tiles : static_cast<int>(all);
  a.per_block = Divider(blocks_each);
  a.each = static_cast<int>(a.span / blocks_each);
  a.more = static_cast<int>(a.span % blocks_each);
  kernel<<<static_cast<unsigned>(grid), warps * 32, bytes, stream>>>(a);
  return cudaGetLastError();
}

// Tiles of 16 of K times V that a warp adds up at most, with so many of 8 columns: as registers hold twice.
constexpr int most_sums(int columns) { return columns > 7 ? 2 : columns > 5 ? 3 : columns > 4 ? 4 : 5; }

// Whether rows are so few that it takes less time to read them more often, each time for fewer of these.
bool few_rows(const Tensor& x) {
  return x.sizes[0] * x.sizes[1] * ceil_div<int64_t>(x.sizes[3], kRows) <= int64_t{kSmallWarps} * processors();
}

// Calls f with how many of these a warp adds up.
template <int J, class F>
cudaError_t dispatch_sums(int tiles, F&& f) {
  if (tiles == 2) return f(std::integral_constant<int, 2>());
  if (tiles <= kFewSums) return f(std::integral_constant<int, std::min(most_sums(J), kFewSums)>());
  return f(std::integral_constant<int, most_sums(J)>());
}

// How small_kernel divides its work.
struct Sums {
  int tiles, columns;  // of 16 of K times V, and of 8 columns, that a warp adds up
  int shared, count;   // S and K or, where each of K is apart, their product and 1
  int groups, parts;   // of y; of the sum over rows
  int stage, stages = 0, warps = 0, warp = 0;
  double time = INFINITY;  // in microseconds: within a tenth those of an H200

  Sums(const Tensor& x, const Tensor& z, int tiles, bool apart, int most_warps)
      : tiles(tiles),
        columns(std::max(2, ceil_div<int>(z.sizes[4], 8))),
        shared(static_cast<int>(x.sizes[0] * (apart ? x.sizes[2] : 1))),
        count(apart ? 1 : static_cast<int>(x.sizes[2])) {
    const int V = static_cast<int>(x.sizes[4]), rows = 16 * tiles, all = count * V, processors_ = processors();
    groups = ceil_div(all, rows);
    const int64_t of_one = x.sizes[1] * ceil_div<int64_t>(x.sizes[3], kRows), blocks_each = int64_t{shared} * groups;
    // As many parts as leave the fewest processors idle, in fewer or shorter waves of blocks.
    const int64_t most_parts = std::max<int64_t>(1, of_one / kSmallWarps);
    int64_t best = std::max<int64_t>(1, std::min<int64_t>(most_parts, processors_ / blocks_each));
    for (int64_t i = best + 1; i <= std::min<int64_t>(most_parts, 8); ++i) {
      if (ceil_div<int64_t>(blocks_each * i, processors_) * best < ceil_div<int64_t>(blocks_each * best, processors_) * i) best = i;
    }
    parts = static_cast<int>(best);
    stage = std::min(count, (rows - 2) / V + 2) * pitch_of(x) + pitch_of(z);
    const auto each = static_cast<int>(ceil_div<int64_t>(of_one, parts));
    const int sums = rows * (columns % 2 ? 8 * columns : 8 * columns + 8) * 4;
    for (int n = kMostStages; n > 0 && shared <= 65535; --n) {  // the most tiles under way
      // Barriers stay what they are: sums take the place of tiles alone.
      const int bytes = std::max(n * stage, sums) + ceil_div(n * 8, 16) * 16;
      const int fit = std::min(most_warps, shared_memory() / bytes), used = std::min(fit, each);
      if (fit < 2 || std::min(used * n, each) < std::min(warps * stages, each)) continue;
      warps = used;
      stages = n;
      warp = bytes;
    }
    if (warps == 0) return;

    const bool single = x.item_size() == 4;
    const double products = tiles * columns, blocks = static_cast<double>(blocks_each) * parts / processors_;
    int fetched = 0;  // of K, by all groups
    for (int i = 0; i < groups; ++i) fetched += (std::min(all, (i + 1) * rows) - 1) / V - i * rows / V + 1;
    const double bytes = static_cast<double>(fetched) / groups * pitch_of(x) + pitch_of(z);
    const double tile = (single ? 0.0264 : 0.0088) * products + (single ? 0.0181 : 0.0113) * (2 * tiles + columns) + 7e-5 * bytes;
    const auto registers = static_cast<int>(std::min(255.0, single ? 40 + 11.5 * products : 60 + 6 * products));
    const double resident = std::min<double>(
        std::max(1, std::min((shared_memory() + 1024) / (warps * warp + 1024), 65536 / (ceil_div(registers, 8) * 256 * warps))),
        std::ceil(blocks));
    const double block = 2.4 + ceil_div(each, warps) * std::max(tile * std::max(1.0, resident * warps / 4), tile + 0.73 / stages) +
                         0.0078 * products * warps * std::max(1.0, resident / 2);
    const double waves = blocks / resident;
    time = 4.4 + std::max(1.0, (std::ceil(waves) + waves) / 2) * block;
    if (parts > 1) time += 1.5 + 3e-6 * parts * x.sizes[0] * x.sizes[2] * V * z.sizes[4];
    // What is left between this and what was measured.
    time *= (single && products > 16 ? 1.12 : tiles == 2 ? 0.93 : 1.0) * (most_warps < kSmallWarps ? 1.06 : 1.0);
  }
};

// The usual one, or another that takes clearly less time. A single sum of many rows is bound by memory; that of few
// narrow ones begins before the gradient that it follows has ended.
Sums sums_of(const Tensor& x, const Tensor& z) {
  const int columns = std::max(2, ceil_div<int>(z.sizes[4], 8)), few = std::min(most_sums(columns), kFewSums);
  const bool is_few = few_rows(x);
  const int usual = columns == 6 || (is_few && columns > 5) ? 2 : is_few ? few : most_sums(columns);
  Sums best(x, z, usual, false, kSmallWarps);
  if (x.sizes[0] == 1 && (!is_few || columns <= 5) && best.warps > 0) return best;
  double time = best.time * 0.92;
  for (const bool apart : {false, true}) {
    if (apart && x.sizes[2] == 1) continue;
    for (const int tiles : {2, few}) {
      for (const int warps : {kSmallWarps, kSmallWarps / 2}) {
        const Sums other(x, z, tiles, apart, warps);
        if (other.time >= time) continue;
        best = other;
        time = other.time;
      }
    }
  }
  return best;
}

template <class T, int I, int J>
cudaError_t launch_small(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early, const Sums& sums,
                         cudaStream_t stream) {
  Einsum a{};
  if (!describe(x, y, z, &a) || a.z.count != 1) return cudaErrorNotSupported;
  a.per_k = Divider(a.x.width);
  a.per_row = Divider(ceil_div(a.z.width, kTogether));
  a.apart = Divider(a.x.count / sums.count);
  a.shared = sums.shared;
  a.x.count = sums.count;
  a.parts = sums.parts;
  a.stage = sums.stage;
  a.stages = sums.stages;
  a.warp = sums.warp;
  a.partials = static_cast<float*>(workspace);
  const int bytes = sums.warps * a.warp;
  const auto kernel = whole(a) ? small_kernel<T, I, J, true> : small_kernel<T, I, J, false>;
  if (const cudaError_t status = allow(kernel, bytes); status != cudaSuccess) return status;
  const dim3 blocks(a.parts, a.shared, sums.groups);  // the last of y, often smaller ones, behind all others
  const cudaError_t status = launch(kernel, blocks, sums.warps * 32, bytes, stream, early, a);
  if (a.parts == 1 || status != cudaSuccess) return status;
  const int64_t size = static_cast<int64_t>(a.shared) * a.x.count * a.x.width * a.z.width;
  return launch(sum_kernel<T>, static_cast<unsigned>(ceil_div<int64_t>(size, kSumColumns)), kSumThreads, 0, stream,
                true, a);
}

}  // namespace

cudaError_t einsum_large(const Tensor& x, const Tensor& y, const Tensor& z, cudaStream_t stream) {
  if (!small_enough(x) || !small_enough(z)) return cudaErrorNotSupported;
  const Division division = division_of(x, z);
  if (!division.fits) return cudaErrorNotSupported;
  return dispatch_float(x.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    if constexpr (sizeof(T) == 2) {
      if (division.columns == 7) return launch_large<T, 7>(x, y, z, division, stream);
    }
    return dispatch_columns(division.columns, [&](auto columns) {
      return launch_large<T, std::min(columns.value, 5)>(x, y, z, division, stream);
    });
  });
}

size_t einsum_small_workspace(const Tensor& x, const Tensor& z) {
  if (!small_enough(x) || !small_enough(z)) return 0;
  const Sums sums = sums_of(x, z);
  return sums.parts == 1 ? 0 : sizeof(float) * sums.parts * x.sizes[0] * x.sizes[2] * x.sizes[4] * z.sizes[4];
}

cudaError_t einsum_small(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early,
                         cudaStream_t stream) {
  if (!small_enough(x) || !small_enough(z)) return cudaErrorNotSupported;
  const Sums sums = sums_of(x, z);
  if (sums.warps == 0) return cudaErrorNotSupported;
  return dispatch_columns(sums.columns, [&](auto columns) {
    return dispatch_float(x.dtype, [&](auto* p) {
      return dispatch_sums<columns.value>(sums.tiles, [&](auto tiles) {
        return launch_small<element_t<decltype(p)>, tiles.value, columns.value>(x, z, y, workspace, early, sums, stream);
      });
    });
  });
}

}  // namespace svexport
