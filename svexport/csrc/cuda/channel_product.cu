#include "channel_product.h"

#include <algorithm>
#include <cmath>

#include "parts.cuh"
#include "wgmma.cuh"

namespace svexport {
namespace {

struct Side {  // x or z
  char* data;
  int64_t strides[2];  // in elements, of N and of the channels
  int channels;
  const char* end;  // of the tensor
};

struct Product {
  Side x, z;
  const char* y;
  int y_strides[2];
  int groups;  // of columns, one of which a block does
  int64_t positions;
  Divider units_each;  // of a sample
  int units;           // of kRun positions
};

struct Correlation {
  Side rows, columns;
  int64_t positions;
  Divider fetches_each;  // of a sample
  int fetches, column_tiles;
  float* parts;  // (gridDim.x, rows, columns)
};

// ---------------------------------------------------------------- the sum over channels

// x^T y: positions are the rows of what tensor cores multiply, channels of z their columns. Four warps have neighbouring
// positions, which they fetch, some channels ahead of the products, and store in rows as long as there are: shorter ones
// cost bandwidth. Which position stands in which row of a fragment is free: a lane has four neighbours.

constexpr int kPositions = 32;  // of a warp: two fragments
constexpr int kTogether = 4;    // warps
constexpr int kRun = kTogether * kPositions;
constexpr int kResults = 16;  // columns that are stored at once

template <int N>
constexpr int kMostTeams = N > 64 ? 2 : N > 32 ? 3 : 4;  // of kTogether warps, as registers allow
template <int N>
constexpr int kStages = N == 64 ? 3 : 4;  // fetches that are under way, one being read

template <class T>
constexpr int kChannels = 64 / sizeof(T);  // of a fetch
// Bytes from row to row in shared memory, of what was fetched and of results: the lanes of a warp meet in no bank.
template <class T>
constexpr int kPitch = (kRun + 8) * sizeof(T);
template <class T>
constexpr int kResultPitch = kRun * sizeof(T) + 16;
template <class T>
constexpr int kFetchBytes = kChannels<T> * kPitch<T>;
template <class T, int N>
constexpr int kTeamBytes = kStages<N> * kFetchBytes<T> + 2 * kResults * kResultPitch<T>;

// ---------------------------------------------------------------- the sum over positions

// The side with more channels is the one of the rows. Some warps fetch positions of all channels, others split the floats
// of the columns into parts, and two warp groups multiply, 64 rows each. A fence of what wgmma reads may wait for all that
// the thread has under way, so none of those who fetch has one. Blocks leave parts of the sum.

constexpr int kTall = 128, kNarrow = 64;  // rows and columns of a block
constexpr int kPieces = 8;                // of 16 bytes of positions, in a fetch
constexpr int kSlots = 6;                 // fetches in shared memory
constexpr int kMultiplying = 256, kSplitting = 128, kCorrelating = 512;  // threads, and all of them
template <class T>
constexpr int kFetching = kCorrelating - kMultiplying - (sizeof(T) == 4 ? kSplitting : 0);
template <int kRows>
constexpr int kPiecePitch = kRows * 16 + 16;
constexpr int kTallBytes = kPieces * kPiecePitch<kTall>, kNarrowBytes = kPieces * kPiecePitch<kNarrow>;
template <class T>
constexpr int kSlotBytes = kTallBytes + kNarrowBytes * (sizeof(T) == 4 ? 2 : 1);

// wgmma is of sm_90a alone.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// kCount elements that are read and written at once.
template <class T, int kCount, int kBytes = kCount * static_cast<int>(sizeof(T))>
using Word = std::conditional_t<kBytes == 16, uint4,
                                std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// One of at least 4 bytes to shared memory, zeros where not `valid`. Through the first cache, also those of 16 bytes: past
// it each of them is written on its own where they do not lie side by side.
template <class Word>
__device__ __forceinline__ void copy_word(char* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(sizeof(Word)), "r"(valid ? static_cast<int>(sizeof(Word)) : 0)
               : "memory");
}

// Rows of half types that are aligned nowhere are fetched as they lie in memory, in pieces of 16 bytes.
template <class T, int kWide>
constexpr bool kShifted = sizeof(T) == 2 && kWide == 1;

__device__ __forceinline__ int within_16(const void* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 15); }

// Such a piece. Its elements where it would end behind the tensor: memcheck takes a copy of fewer bytes for one of 16.
template <class T>
__device__ __forceinline__ void copy_piece(char* to, const char* from, const char* end) {
  if (from + 16 <= end) {
    copy_async(to, from, true);
  } else {
#pragma unroll 1
    for (; from < end; to += sizeof(T), from += sizeof(T)) *reinterpret_cast<T*>(to) = *reinterpret_cast<const T*>(from);
  }
}

// ---------------------------------------------------------------- matrix products

// c (64 x 8 * J) += a b, or = without `adds`, of all warps of a group, as long as one fragment is wide: 8 floats or 16
// halves. c and a are fragments as of mma.
template <class T, int J>
__device__ __forceinline__ void wgmma(float (&c)[J][4], const uint32_t (&a)[4], uint64_t b, int adds);

#define SVEXPORT_4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define SVEXPORT_16(j) SVEXPORT_4(j), SVEXPORT_4(j + 1), SVEXPORT_4(j + 2), SVEXPORT_4(j + 3)
#define SVEXPORT_32(j) SVEXPORT_16(j), SVEXPORT_16(j + 4)
#define SVEXPORT_64(j) SVEXPORT_32(j), SVEXPORT_32(j + 8)
#define SVEXPORT_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SVEXPORT_NAMES_32 \
  SVEXPORT_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SVEXPORT_NAMES_64                                                                                     \
  SVEXPORT_NAMES_32                                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52" \
  ", %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SVEXPORT_WGMMA(type, shape, more, columns, sums, a0, a1, a2, a3, to, if_adds)                               \
  template <>                                                                                                       \
  __device__ __forceinline__ void wgmma<type, columns / 8>(float (&c)[columns / 8][4], const uint32_t (&a)[4],      \
                                                           uint64_t b, int adds) {                                  \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, " if_adds ", 0; wgmma.mma_async.sync.aligned.m64n" #columns   \
                 shape " {" SVEXPORT_NAMES_##sums "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " to ", adds, 1, 1" more ";}" \
                 : SVEXPORT_##sums(0)                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                                  \
  }
#define SVEXPORT_WGMMAS(type, shape, more)                                                             \
  SVEXPORT_WGMMA(type, shape, more, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21")                  \
  SVEXPORT_WGMMA(type, shape, more, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37")                  \
  SVEXPORT_WGMMA(type, shape, more, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
SVEXPORT_WGMMAS(float, "k8.f32.tf32.tf32", "")
SVEXPORT_WGMMAS(__half, "k16.f32.f16.f16", ", 0")
SVEXPORT_WGMMAS(__nv_bfloat16, "k16.f32.bf16.bf16", ", 0")
#undef SVEXPORT_WGMMAS
#undef SVEXPORT_WGMMA
#undef SVEXPORT_NAMES_64
#undef SVEXPORT_NAMES_32
#undef SVEXPORT_NAMES_16
#undef SVEXPORT_64
#undef SVEXPORT_32
#undef SVEXPORT_16
#undef SVEXPORT_4

// How wgmma is told of a matrix in shared memory, of columns of 16 bytes, 8 of them one after the other wherever they are;
// pitch: bytes to the next 16 of all columns. A product reads two such.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address, int pitch) {
  return uint64_t{128 / 16} << 32 | static_cast<uint64_t>(pitch / 16) << 16 | address / 16;
}

// What tf32 cuts off of a float, and the float without it. The parts of the other factor are rounded: the second ones have
// either sign then, which is enough for errors to cancel.
__device__ __forceinline__ void cut(float x, uint32_t& big, uint32_t& small) {
  big = __float_as_uint(x) & 0xffffe000u;
  small = __float_as_uint(x - __uint_as_float(big));
}

// ---------------------------------------------------------------- the sum over channels

// The sums of a lane by products of floats, one after the other. x: its first position, of `count` that there are.
template <int J>
__device__ __forceinline__ void exact(const Product& p, const float* x, int64_t count, int column, float (&sums)[2][J][4]) {
#pragma unroll
  for (int i = 0; i < 8 * J; ++i) sums[i / 4 / J][i / 4 % J][i % 4] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < p.x.channels; ++k) {
    float left[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) left[e] = load_if<float, 1>(x + k * p.x.strides[1] + e, e < count).at[0];
    const float* const y = reinterpret_cast<const float*>(p.y) + k * p.y_strides[0];
#pragma unroll
    for (int j = 0; j < 2 * J; ++j) {
      const int d = column + j / 2 * 8 + j % 2;
      const float right = load_if<float, 1>(y + d * p.y_strides[1], d < p.z.channels).at[0];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums[e / 2][j / 2][e % 2 * 2 + j % 2];
        sum = fmaf(left[e], right, sum);
      }
    }
  }
}

// y to shared memory, as wgmma reads it; of floats the first parts, and the second ones `small` bytes behind. kAlong:
// channels of x lie side by side, up to 16 of which neighbouring threads read.
template <class T, int N, bool kAlong>
__device__ __forceinline__ void read_factor(const Product& p, int column0, int channels, char* shared, int small) {
  constexpr int kReads = 8, kPiece = 16 / sizeof(T);  // at once; of a column
  const T* const y = reinterpret_cast<const T*>(p.y);
  const auto channel = [](int i) { return kAlong ? i / (16 * N) * 16 + i % 16 : i / N; };
  const auto column = [](int i) { return kAlong ? i / 16 % N : i % N; };
  for (int i0 = threadIdx.x; i0 < channels * N; i0 += kReads * blockDim.x) {
    T v[kReads];
#pragma unroll
    for (int k = 0; k < kReads; ++k) {
      const int i = i0 + k * blockDim.x, c = channel(i), d = column0 + column(i);
      v[k] = load_if<T, 1>(y + (c * p.y_strides[0] + d * p.y_strides[1]), c < p.x.channels && d < p.z.channels).at[0];
    }
#pragma unroll
    for (int k = 0; k < kReads; ++k) {
      const int i = i0 + k * blockDim.x, c = channel(i);
      if (i >= channels * N) continue;
      char* const to = shared + (c / kPiece * N + column(i)) * 16 + c % kPiece * static_cast<int>(sizeof(T));
      if constexpr (sizeof(T) == 4) {
        const Parts both = parts(v[k]);
        *reinterpret_cast<uint32_t*>(to) = both.big;
        *reinterpret_cast<uint32_t*>(to + small) = both.small;
      } else {
        *reinterpret_cast<T*>(to) = v[k];
      }
    }
  }
}

// N: columns of a block. kWide: positions that are aligned wherever as many begin: 4, 2 or 1.
template <class T, int N, int kWide>
__global__ void __launch_bounds__(kMostTeams<N>* kTogether * 32, 1) product_kernel(const __grid_constant__ Product p) {
  constexpr int J = N / 8, kSize = sizeof(T), kPart = N * kChannels<T> * kSize, kSteps = 2;
  using Few = Word<T, kWide>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // the same for all lanes, as the compiler sees
  const int part = warp % kTogether, team = warp / kTogether, teams = static_cast<int>(blockDim.x) / 32 / kTogether;
  const int first_position = part * kPositions + group * 4;  // of the four of a lane
  const int chunks = ceil_div(p.x.channels, kChannels<T>), small_y = chunks * kPart;
  const int column0 = static_cast<int>(blockIdx.x) % p.groups * N;
  const uint32_t y = shared_address(shared);
  char* const fetched = shared + small_y * (kSize == 4 ? 2 : 1) + team * kTeamBytes<T, N>;
  char* const results = fetched + kStages<N> * kFetchBytes<T>;
  const auto sync = [&] { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTogether * 32) : "memory"); };

  const int blocks = static_cast<int>(gridDim.x) / p.groups, next = blocks * teams;
  const int first = static_cast<int>(blockIdx.x) / p.groups + team * blocks;
  const auto position = [&](int unit, int64_t& sample) {
    auto rest = static_cast<uint32_t>(unit);
    const int64_t within = static_cast<int64_t>(p.units_each.split(rest)) * kRun;
    sample = rest;
    return within;
  };

  int unit_ahead = first, chunk_ahead = 0, count = 0;  // count: positions that there are
  const T* from = nullptr;
  const auto fetch = [&](int stage) {
    if (unit_ahead < p.units) {
      if (chunk_ahead == 0) {
        int64_t sample;
        const int64_t at = position(unit_ahead, sample);
        count = static_cast<int>(min(p.positions - at, int64_t{kRun}));
        from = reinterpret_cast<const T*>(p.x.data) + sample * p.x.strides[0] + at;
      }
      constexpr int kRows = kChannels<T> / kTogether;  // of a warp
      const int channel = chunk_ahead * kChannels<T> + part;
      const int64_t apart = kTogether * p.x.strides[1];
      const T* const first = from + channel * p.x.strides[1];
      char* const to = fetched + stage * kFetchBytes<T> + part * kPitch<T>;
      const auto copy = [&](auto whole) {
        constexpr bool kAll = decltype(whole)::value;  // whether all of it is there
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const bool there = kAll || channel + i * kTogether < p.x.channels;
          const T* const row = there ? first + i * apart : from;
          char* const place = to + i * (kTogether * kPitch<T>);
          if constexpr (kShifted<T, kWide>) {
            const int before = within_16(row), k = lane * 16;
            const char* const piece = reinterpret_cast<const char*>(row) - before + k;
            if (!there) {
              if (k < kPitch<T>) store(reinterpret_cast<uint32_t*>(place + k), Vec<uint32_t, 4>{});
            } else if (k < before + (kAll ? kRun : count) * kSize) {
              kAll ? copy_async(place + k, piece, true) : copy_piece<T>(place + k, piece, p.x.end);
            }
          } else {
#pragma unroll
            for (int k = lane * kWide; k < kRun; k += 32 * kWide) {
              const bool here = there && (kAll || k < count);
              copy_word<Few>(place + k * kSize, here ? row + k : from, here);
            }
          }
        }
      };
      const bool inside = !kShifted<T, kWide> || reinterpret_cast<const char*>(first + (kRows - 1) * apart + kRun) + 16 <= p.x.end;
      if (count == kRun && (chunk_ahead + 1) * kChannels<T> <= p.x.channels && inside) {
        copy(std::true_type());
      } else {
        copy(std::false_type());
      }
      if (++chunk_ahead == chunks) {
        chunk_ahead = 0;
        unit_ahead += next;
      }
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStages<N> - 1; ++i) fetch(i);
  if (p.y_strides[0] == 1) {
    read_factor<T, N, true>(p, column0, chunks * kChannels<T>, shared, small_y);
  } else {
    read_factor<T, N, false>(p, column0, chunks * kChannels<T>, shared, small_y);
  }
  publish();
  __syncthreads();

  int stage = 0;
#pragma unroll 1
  for (int unit = first; unit < p.units; unit += next) {
    int64_t sample;
    const int64_t at = position(unit, sample);
    int before[2] = {};  // bytes of 16 in front of this lane's rows, of which every other one is alike within 8 of them
    if constexpr (kShifted<T, kWide>) {
      const T* const row = reinterpret_cast<const T*>(p.x.data) + sample * p.x.strides[0] + at + pair * 2 * p.x.strides[1];
#pragma unroll
      for (int i = 0; i < 2; ++i) before[i] = within_16(row + i * p.x.strides[1]);
    }
    float sums[2][J][4];
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      copy_async_wait<kStages<N> - 2>();
      sync();
      fetch(stage == 0 ? kStages<N> - 1 : stage - 1);
      const char* const mine = fetched + stage * kFetchBytes<T> + first_position * kSize;
      stage = stage + 1 < kStages<N> ? stage + 1 : 0;
      const auto read = [&](int local, int skip = 0) {
        if constexpr (kShifted<T, kWide>) {
          const auto* const words = reinterpret_cast<const uint32_t*>(mine + local * kPitch<T> + (skip & 12));
          Vec<uint32_t, 2> both;
#pragma unroll
          for (int i = 0; i < 2; ++i) both.at[i] = __funnelshift_r(words[i], words[i + 1], (skip & 2) * 8);
          Vec<T, 4> v;
          memcpy(&v, &both, sizeof(v));
          return v;
        } else {
          return load<T, 4>(reinterpret_cast<const T*>(mine + local * kPitch<T>));
        }
      };
      uint32_t a[kSteps][2][4], small[kSteps][2][4];  // of a step two fragments
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // of the channels of a fragment
          if constexpr (kSize == 4) {
            const auto x = read(step * 8 + i * 4 + pair);
#pragma unroll
            for (int e = 0; e < 4; ++e) cut(x.at[e], a[step][e / 2][i * 2 + e % 2], small[step][e / 2][i * 2 + e % 2]);
          } else {
            const int local = step * 16 + i * 8 + pair * 2;
            const auto x = read(local, before[0]), above = read(local + 1, before[1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {  // fragment, half of its rows
              const Vec<T, 2> both{x.at[e], above.at[e]};
              memcpy(&a[step][e / 2][i * 2 + e % 2], &both, 4);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          hold(a[step][m]);
          if constexpr (kSize == 4) hold(small[step][m]);
        }
      }
      hold(sums[0]);
      hold(sums[1]);
      begin_products();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t b = matrix_at(y + chunk * kPart + step * (N * 32), N * 16);
        const uint64_t small_b = matrix_at(y + small_y + chunk * kPart + step * (N * 32), N * 16);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if constexpr (kSize == 4) {
            wgmma<T>(sums[m], small[step][m], b, chunk | step);
            wgmma<T>(sums[m], a[step][m], small_b, 1);
            wgmma<T>(sums[m], a[step][m], b, 1);
          } else {
            wgmma<T>(sums[m], a[step][m], b, chunk | step);
          }
        }
      }
      commit_products();
      await_products();
      hold(sums[0]);
      hold(sums[1]);
    }

    if constexpr (kSize == 4) {  // an element that is not finite has met parts of a number
      float zero = 0.0f;
#pragma unroll
      for (int i = 0; i < 8 * J; ++i) zero = fmaf(sums[i / 4 / J][i / 4 % J][i % 4], 0.0f, zero);
      if (!(zero == 0.0f)) {
        const int64_t mine = at + first_position;
        const auto* const x = reinterpret_cast<const float*>(p.x.data) + sample * p.x.strides[0] + mine;
        exact(p, x, p.positions - mine, column0 + pair * 2, sums);
      }
    }

    T* const to = reinterpret_cast<T*>(p.z.data) + sample * p.z.strides[0] + at;
    const int here = static_cast<int>(min(p.positions - at, int64_t{kRun}));
#pragma unroll
    for (int j = 0; j < J; j += 2) {  // by turns in two places, so that one barrier is enough
      char* const place = results + j / 2 % 2 * (kResults * kResultPitch<T>);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int local = i / 2 * 8 + pair * 2 + i % 2;
        Vec<T, 4> v;
#pragma unroll
        for (int e = 0; e < 4; ++e) v.at[e] = from_float<T>(sums[e / 2][j + i / 2][e % 2 * 2 + i % 2]);
        store(reinterpret_cast<T*>(place + local * kResultPitch<T> + first_position * kSize), v);
      }
      sync();
      const int d = column0 + j * 8 + part;
      const auto put = [&](auto whole) {
        constexpr bool kAll = decltype(whole)::value;
#pragma unroll
        for (int i = 0; i < kResults / kTogether; ++i) {
          if (!kAll && d + i * kTogether >= p.z.channels) continue;
          const auto* const row = reinterpret_cast<const Few*>(place + (i * kTogether + part) * kResultPitch<T>);
          auto* const out = reinterpret_cast<Few*>(to + d * p.z.strides[1] + i * (kTogether * p.z.strides[1]));
#pragma unroll
          for (int k = lane; k < kRun / kWide; k += 32) {
            if (kAll || k * kWide < here) out[k] = row[k];
          }
        }
      };
      if (here == kRun && column0 + j * 8 + kResults <= p.z.channels) {
        put(std::true_type());
      } else {
        put(std::false_type());
      }
    }
  }
}

// ---------------------------------------------------------------- the sum over positions

constexpr int kLongSum = 4;  // fetches

// Some positions of a side: a thread fetches kWide neighbours of some rows.
template <class T, int kRows, int kWide>
class Fetch {
  static constexpr int kSize = sizeof(T), kAcross = kPieces * 16 / kSize / kWide, kApart = kFetching<T> / kAcross;

 public:
  __device__ __forceinline__ Fetch(const Correlation& a, const Side& side, int channel0, int64_t sample, int64_t position,
                                   int thread)
      : data_(reinterpret_cast<const T*>(side.data)), next_(kApart * side.strides[1]) {
    const int row = thread / kAcross, within = thread % kAcross * kWide;
    from_ = data_ + sample * side.strides[0] + (channel0 + row) * side.strides[1] + position + within;
    rows_ = position + within < a.positions ? side.channels - channel0 - row : 0;
    to_ = within * kSize / 16 * kPiecePitch<kRows> + row * 16 + within * kSize % 16;
  }
  // To shared memory, without waiting.
  __device__ __forceinline__ void copy(char* slot) const {
    const T* from = from_;
#pragma unroll
    for (int i = 0; i < kRows; i += kApart, from += next_) {
      copy_word<Word<T, kWide>>(slot + to_ + i * 16, i < rows_ ? from : data_, i < rows_);
    }
  }
  // By way of registers, where a copy would be of fewer than 4 bytes.
  __device__ __forceinline__ void read() {
    const T* from = from_;
#pragma unroll
    for (int i = 0; i < kRows; i += kApart, from += next_) {
      values_[i / kApart] = load_if<Word<T, kWide>, 1>(reinterpret_cast<const Word<T, kWide>*>(from), i < rows_).at[0];
    }
  }
  __device__ __forceinline__ void write(char* slot) const {
#pragma unroll
    for (int i = 0; i < kRows; i += kApart) {
      *reinterpret_cast<Word<T, kWide>*>(slot + to_ + i * 16) = values_[i / kApart];
    }
  }

 private:
  const T *data_, *from_;
  int64_t next_;
  int rows_, to_;
  Word<T, kWide> values_[kRows / kApart];
};

template <class T, int kWide>
__global__ void __launch_bounds__(kCorrelating, 1) correlation_kernel(const __grid_constant__ Correlation a) {
  constexpr int kSize = sizeof(T), kEach = 16 * kPieces / kSize, J = kNarrow / 8, kSteps = kPieces / 2;
  extern __shared__ __align__(128) char shared[];
  // Of a slot: whether it has been fetched, of floats also split, and has been read.
  const uint32_t fetched = shared_address(shared + kSlots * kSlotBytes<T>), empty = fetched + kSlots * 16;
  const uint32_t ready = kSize == 4 ? fetched + kSlots * 8 : fetched;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // the same for all lanes, as the compiler sees
  start_next();
  const int row0 = static_cast<int>(blockIdx.y) / a.column_tiles * kTall;
  const int column0 = static_cast<int>(blockIdx.y) % a.column_tiles * kNarrow;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      init_barrier(fetched + i * 8, kFetching<T>);
      if (kSize == 4) init_barrier(ready + i * 8, kSplitting);
      init_barrier(empty + i * 8, kMultiplying / 32 * kArrivals);
    }
    publish_barriers();
  }
  __syncthreads();

  const int first = blockIdx.x, next = gridDim.x, count = first < a.fetches ? (a.fetches - first - 1) / next + 1 : 0;
  const auto place = [&](int fetch, int64_t& sample) {
    auto rest = static_cast<uint32_t>(first + fetch * next);
    const int64_t position = static_cast<int64_t>(a.fetches_each.split(rest)) * kEach;
    sample = rest;
    return position;
  };
  int slot = 0;
  uint32_t turn = 0;  // of the slot: 0, 1, 0, ...
  const auto advance = [&] {
    if (++slot == kSlots) slot = 0, turn ^= 1;
  };

  if (warp >= kMultiplying / 32) {
    const int thread = static_cast<int>(threadIdx.x) - kMultiplying;
    if (thread < kFetching<T>) {
#pragma unroll 1
      for (int i = 0; i < count; ++i, advance()) {
        int64_t sample;
        const int64_t position = place(i, sample);
        char* const to = shared + slot * kSlotBytes<T>;
        Fetch<T, kTall, kWide> rows(a, a.rows, row0, sample, position, thread);
        Fetch<T, kNarrow, kWide> columns(a, a.columns, column0, sample, position, thread);
        const auto wait = [&] {
          if (i >= kSlots) wait_for(empty + slot * 8, turn ^ 1);
        };
        if constexpr (kWide * kSize >= 4) {
          wait();
          rows.copy(to);
          columns.copy(to + kTallBytes);
          // When what this thread copies is there.
          asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(fetched + slot * 8) : "memory");
        } else {
          rows.read();
          columns.read();
          wait();
          rows.write(to);
          columns.write(to + kTallBytes);
          expect_bytes(fetched + slot * 8, 0);
        }
      }
      copy_async_commit();
      copy_async_wait<0>();
    } else {
#pragma unroll 1
      for (int i = 0; i < count; ++i, advance()) {
        wait_for(fetched + slot * 8, turn);
        char* const columns = shared + slot * kSlotBytes<T> + kTallBytes;
#pragma unroll
        for (int k = thread - kFetching<T>; k < kPieces * kNarrow; k += kSplitting) {
          auto* const here = reinterpret_cast<uint32_t*>(columns + k / kNarrow * kPiecePitch<kNarrow> + k % kNarrow * 16);
          auto v = load<uint32_t, 4>(here);
          Vec<uint32_t, 4> rest;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const Parts both = parts(__uint_as_float(v.at[e]));
            v.at[e] = both.big;
            rest.at[e] = both.small;
          }
          store(here, v);
          store(here + kNarrowBytes / 4, rest);
        }
        publish();
        expect_bytes(ready + slot * 8, 0);
      }
    }
    return;
  }

  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  float sums[J][4] = {}, part[J][4];
#pragma unroll 1
  for (int i = 0; i < count; ++i, advance()) {
    wait_for(ready + slot * 8, turn);
    if constexpr (kSize < 4) publish();
    const char* const rows = shared + slot * kSlotBytes<T> + (warp * 16 + group) * 16 + pair * 4;
    const uint32_t columns = shared_address(shared + slot * kSlotBytes<T> + kTallBytes);
    uint32_t x[kSteps][4], small[kSteps][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const char* const at = rows + (s * 2 + e / 2) * kPiecePitch<kTall> + e % 2 * 128;
        if constexpr (kSize == 4) {
          cut(*reinterpret_cast<const float*>(at), x[s][e], small[s][e]);
        } else {
          x[s][e] = *reinterpret_cast<const uint32_t*>(at);
        }
      }
      hold(x[s]);
      if constexpr (kSize == 4) hold(small[s]);
    }
    hold(part);
    begin_products();
    const int adds = i % kLongSum;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint64_t b = matrix_at(columns + s * 2 * kPiecePitch<kNarrow>, kPiecePitch<kNarrow>);
      if constexpr (kSize == 4) {
        wgmma<T>(part, small[s], b, adds | s);
        wgmma<T>(part, x[s], b + kNarrowBytes / 16, 1);
        wgmma<T>(part, x[s], b, 1);
      } else {
        wgmma<T>(part, x[s], b, adds | s);
      }
    }
    commit_products();
    await_products();
    hold(part);
    arrive_for_warp(empty + slot * 8, lane);
    if (adds == kLongSum - 1 || i + 1 == count) {  // tensor cores cut off what does not fit into a long sum
#pragma unroll
      for (int e = 0; e < 4 * J; ++e) sums[e / 4][e % 4] += part[e / 4][e % 4];
    }
  }

  const int row = row0 + warp * 16 + group, column = column0 + pair * 2;
  if constexpr (kSize == 4) {  // parts of what is not finite add up to something else
    float zero = 0.0f;
#pragma unroll
    for (int e = 0; e < 4 * J; ++e) zero = fmaf(sums[e / 4][e % 4], 0.0f, zero);
    if (!(zero == 0.0f)) {
#pragma unroll
      for (int e = 0; e < 4 * J; ++e) sums[e / 4][e % 4] = 0.0f;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        int64_t sample;
        const int64_t position = place(i, sample), end = min(position + kEach, a.positions);
#pragma unroll 1
        for (int64_t at = position; at < end; ++at) {
          const auto* const x = reinterpret_cast<const float*>(a.rows.data) + sample * a.rows.strides[0] + at;
          const auto* const z = reinterpret_cast<const float*>(a.columns.data) + sample * a.columns.strides[0] + at;
          float left[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            left[e] = load_if<float, 1>(x + (row + e * 8) * a.rows.strides[1], row + e * 8 < a.rows.channels).at[0];
          }
#pragma unroll
          for (int e = 0; e < 2 * J; ++e) {
            const int c = column + e / 2 * 8 + e % 2;
            const float right = load_if<float, 1>(z + c * a.columns.strides[1], c < a.columns.channels).at[0];
            sums[e / 2][e % 2] = fmaf(left[0], right, sums[e / 2][e % 2]);
            sums[e / 2][e % 2 + 2] = fmaf(left[1], right, sums[e / 2][e % 2 + 2]);
          }
        }
      }
    }
  }
  float* const to = a.parts + static_cast<int64_t>(blockIdx.x) * a.rows.channels * a.columns.channels;
#pragma unroll
  for (int e = 0; e < 4 * J; ++e) {
    const int r = row + e / 2 % 2 * 8, c = column + e / 4 * 8 + e % 2;
    if (r < a.rows.channels && c < a.columns.channels) to[r * a.columns.channels + c] = sums[e / 4][e % 4];
  }
}

#else  // The launchers do not get here: `compiled` sees that these take no more than a warp.

template <class T, int N, int kWide>
__global__ void __launch_bounds__(32, 1) product_kernel(const __grid_constant__ Product) {}
template <class T, int kWide>
__global__ void __launch_bounds__(32, 1) correlation_kernel(const __grid_constant__ Correlation) {}

#endif

// y, from its parts.
template <class T>
__global__ void __launch_bounds__(kPartThreads) add_kernel(const float* parts, int count, int columns, int64_t size, T* y,
                                                           int64_t row_stride, int64_t column_stride) {
  add_parts(parts, count, size, [&](int64_t i, float sum) {
    y[i / columns * row_stride + i % columns * column_stride] = from_float<T>(sum);
  });
}

// ---------------------------------------------------------------- launching

int processors() { return of_device(cudaDevAttrMultiProcessorCount); }

// Whether what was compiled for this device has the kernels: for sm_90a it does. Allows one of them its shared memory.
template <class Kernel>
cudaError_t prepare(Kernel kernel, int threads, int bytes) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    cudaGetLastError();  // or the next to ask is told of it
    return cudaErrorNotSupported;
  }
  if (attributes.maxThreadsPerBlock < threads) return cudaErrorNotSupported;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// t: (N, channels, S)
Side side(const Tensor& t) {
  int64_t size = t.item_size();
  for (int i = 0; i < 3; ++i) size += (t.sizes[i] - 1) * t.strides[i] * t.item_size();
  auto* const data = static_cast<char*>(t.data);
  return {data, {t.strides[0], t.strides[1]}, static_cast<int>(t.sizes[1]), data + size};
}

constexpr int64_t kMostChannels = 4096;

bool supported(const Tensor& x, const Tensor& y, const Tensor& z) {
  const auto rows = [](const Tensor& t) { return (t.strides[2] == 1 || t.sizes[2] == 1) && t.sizes[1] <= kMostChannels; };
  const int64_t last = (y.sizes[0] - 1) * y.strides[0] + (y.sizes[1] - 1) * y.strides[1];
  return y.dtype == x.dtype && z.dtype == x.dtype && rows(x) && rows(z) && x.numel() > 0 && z.numel() > 0 &&
         last <= INT32_MAX;
}

// Calls f with how many positions are aligned wherever as many begin.
template <class F>
cudaError_t dispatch_wide(const Tensor& x, const Tensor& z, F&& f) {
  const auto are = [&](int count) {
    return x.sizes[2] % count == 0 && x.aligned(2, count * x.item_size()) && z.aligned(2, count * x.item_size());
  };
  if (are(4)) return f(std::integral_constant<int, 4>());
  if (are(2)) return f(std::integral_constant<int, 2>());
  return f(std::integral_constant<int, 1>());
}

// How blocks of N columns are launched.
template <class T, int N>
struct Shape {
  int factor, teams, groups, blocks;  // bytes of y; teams of a block; groups of columns; blocks of one of these

  explicit Shape(const Product& p)
      : factor(ceil_div(p.x.channels, kChannels<T>) * kChannels<T> * N * (sizeof(T) == 4 ? 8 : 2)),
        teams(std::min(kMostTeams<N>, (of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) - factor) / kTeamBytes<T, N>)),
        groups(ceil_div(p.z.channels, N)),
        blocks(std::min(p.units, std::max(1, processors() / groups))) {}
  bool fits() const { return teams >= 2; }
  // How many units a team has, at most.
  int64_t turns(const Product& p) const { return ceil_div<int64_t>(p.units, int64_t{blocks} * std::max(teams, 1)); }
};

template <class T, int N, int kWide>
cudaError_t launch(Product p, cudaStream_t stream) {
  const auto kernel = product_kernel<T, N, kWide>;
  const Shape<T, N> shape(p);
  if (!shape.fits()) return cudaErrorNotSupported;
  const int threads = shape.teams * kTogether * 32, bytes = shape.factor + shape.teams * kTeamBytes<T, N>;
  if (const cudaError_t status = prepare(kernel, threads, bytes); status != cudaSuccess) return status;
  p.groups = shape.groups;
  kernel<<<shape.blocks * shape.groups, threads, bytes, stream>>>(p);
  return cudaGetLastError();
}

int64_t fetches(const Tensor& x) { return x.sizes[0] * ceil_div<int64_t>(x.sizes[2] * x.item_size(), kPieces * 16); }

dim3 tiles(const Tensor& rows, const Tensor& columns) {
  return {static_cast<unsigned>(ceil_div<int64_t>(columns.sizes[1], kNarrow)),
          static_cast<unsigned>(ceil_div<int64_t>(rows.sizes[1], kTall))};
}

// Parts of the sum: at most as many as there are blocks at once. A block's fetches and the sum of all parts take the least
// time together where one fetch takes as long as to add up kFetchTime floats of parts.
int parts_of(const Tensor& rows, const Tensor& columns) {
  constexpr double kFetchTime = 160000;
  const dim3 all = tiles(rows, columns);
  const int64_t most = std::min<int64_t>(processors() / static_cast<int>(all.x * all.y), fetches(rows));
  const auto best = static_cast<int64_t>(std::sqrt(kFetchTime * fetches(rows) / (rows.sizes[1] * columns.sizes[1])));
  return static_cast<int>(std::max<int64_t>(1, std::min(most, best)));
}

}  // namespace

cudaError_t channel_product(const Tensor& x, const Tensor& y, const Tensor& z, cudaStream_t stream) {
  if (!supported(x, y, z)) return cudaErrorNotSupported;
  const int64_t each = ceil_div<int64_t>(x.sizes[2], kRun), units = each * x.sizes[0];
  if (units > INT32_MAX / 2) return cudaErrorNotSupported;
  const auto stride = [&](int i) { return y.sizes[i] == 1 ? 0 : static_cast<int>(y.strides[i]); };
  const Product p{side(x), side(z), static_cast<const char*>(y.data), {stride(0), stride(1)}, 1, x.sizes[2],
                  Divider(each), static_cast<int>(units)};
  return dispatch_float(x.dtype, [&](auto* pointer) {
    using T = element_t<decltype(pointer)>;
    const auto with = [&](auto columns) {
      return dispatch_wide(x, z, [&](auto wide) { return launch<T, columns.value, wide.value>(p, stream); });
    };
    // Narrow ones where these take one turn; else the widest that fit, but for 64 where these, whose turns are shorter, take
    // no more of them than 128, or of floats a quarter more.
    const Shape<T, 128> wide(p);
    const Shape<T, 64> half(p);
    const Shape<T, 32> narrow(p);
    const int64_t count = processors(), out = z.sizes[1];
    cudaError_t status = cudaErrorNotSupported;
    if (out > 64 && units * wide.groups > 2 * count && wide.fits() &&
        half.turns(p) * 4 > wide.turns(p) * (sizeof(T) == 4 ? 5 : 4)) {
      status = with(std::integral_constant<int, 128>());
    }
    if (status == cudaErrorNotSupported && out > 32 && narrow.turns(p) > 1) {
      status = with(std::integral_constant<int, 64>());
    }
    return status == cudaErrorNotSupported ? with(std::integral_constant<int, 32>()) : status;
  });
}

size_t channel_correlation_workspace(const Tensor& x, const Tensor& z) {
  if (x.numel() == 0 || z.numel() == 0) return 0;
  const bool swapped = x.sizes[1] < z.sizes[1];
  return sizeof(float) * x.sizes[1] * z.sizes[1] * (swapped ? parts_of(z, x) : parts_of(x, z));
}

cudaError_t channel_correlation(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, cudaStream_t stream) {
  const int64_t count = fetches(x);
  if (!supported(x, y, z) || count > INT32_MAX / 2) return cudaErrorNotSupported;
  const bool swapped = x.sizes[1] < z.sizes[1];
  const Tensor &rows = swapped ? z : x, &columns = swapped ? x : z;
  const dim3 all = tiles(rows, columns), grid(parts_of(rows, columns), all.x * all.y);
  const Correlation a{side(rows),
                      side(columns),
                      x.sizes[2],
                      Divider(count / x.sizes[0]),
                      static_cast<int>(count),
                      static_cast<int>(all.x),
                      static_cast<float*>(workspace)};
  return dispatch_float(x.dtype, [&](auto* pointer) {
    using T = element_t<decltype(pointer)>;
    const cudaError_t status = dispatch_wide(x, z, [&](auto wide) {
      const auto kernel = correlation_kernel<T, wide.value>;
      const int bytes = kSlots * (kSlotBytes<T> + 24);  // with the barriers
      const cudaError_t prepared = prepare(kernel, kCorrelating, bytes);
      if (prepared == cudaSuccess) kernel<<<grid, kCorrelating, bytes, stream>>>(a);
      return prepared;
    });
    if (status != cudaSuccess) return status;
    const int64_t size = x.sizes[1] * z.sizes[1];
    return svexport::launch(add_kernel<T>, static_cast<unsigned>(ceil_div<int64_t>(size, kPartColumns)), kPartThreads, 0,
                            stream, true, a.parts, grid.x, a.columns.channels, size, y.data, y.strides[swapped ? 1 : 0],
                            y.strides[swapped ? 0 : 1]);
  });
}

}  // namespace svexport
