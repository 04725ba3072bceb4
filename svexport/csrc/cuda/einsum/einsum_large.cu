// A large tensor as the product of a large and a small one.
#include "einsum/rows.cuh"
#include "planned.cuh"

namespace svexport::einsum {
namespace {

// Computes the sums of a tile's products with columns again by float multiplications, one after the other.
template <class T, int J>
__device__ __forceinline__ void exact(const Einsum& a, const char* const (&rows)[4], const T* y, int first,
                                      float (&sums)[2][J][4]) {
  constexpr int kSize = sizeof(T);
  const Format<T> format(a.dtype);
  UNROLL for (int i = 0; i < 4; ++i) {
    UNROLL for (int j = 0; j < 2 * J; ++j) sums[i / 2][j / 2][i % 2 * 2 + j % 2] = 0.0f;
  }
  for (int kv = 0; kv < a.x.count * a.x.width; ++kv) {
    const int k = kv / a.x.width, v = kv % a.x.width;
    float left[4];
    UNROLL for (int i = 0; i < 4; ++i) left[i] = format.number(element<T>(rows[i] + a.x.begin(k) + v * kSize));
    UNROLL for (int j = 0; j < 2 * J; ++j) {
      uint32_t m = first + j / 2 * 8 + j % 2;
      const int w = a.per_m.split(m);
      const T* const from = y + (k * a.y_k + v * a.y_v + static_cast<int>(m) * a.y_m + w * a.y_w);
      const float factor = format.number(load_if<T, 1>(from, m < a.z.count && w < a.z.width).at[0]);
      UNROLL for (int i = 0; i < 4; ++i) {
        float& sum = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
        sum = fmaf(left[i], factor, sum);
      }
    }
  }
}

// Writes z. The M * W columns are in groups of 8 * J. kPairs: elements of half types are read and stored in pairs,
// because widths are even and rows begin at multiples of 4 bytes.
template <class T, int J, bool kWhole, bool kPairs>
__global__ void __launch_bounds__(kLargeWarps * 32, 1) large_kernel(const __grid_constant__ Einsum a) {
  constexpr int E = kEach<T>, P = kPieces<T>, N = E / P, kSize = sizeof(T);
  constexpr int kReads = J > 5 ? 1 : 2;  // reads of a thread at once, limited by registers
  using Offsets = Vec<int, P>;
  const Format<T> format(a.dtype);
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int warp = threadIdx.x / 32;
  const bool works = warp < a.workers;  // the other warps only help with the factors
  const int K = a.x.count, V = a.x.width, M = a.z.count, W = a.z.width, factors = a.steps * J * 32;
  auto* const right = reinterpret_cast<Fragment<T>*>(shared);                   // (groups, steps, J, 32)
  auto* const offsets = reinterpret_cast<Offsets*>(right + a.groups * factors);  // (steps, 4): offsets of row pieces
  auto* const columns = reinterpret_cast<int*>(offsets + a.steps * 4);          // (groups, J, 8): offsets of results
  char* const results = shared + a.before + warp * a.warp;
  char* const memory = results + a.count * a.z.pitch;
  Stages<kWhole> stages(memory, memory + a.stages * a.stage, works ? a.stages : 0, a.stage, 1);
  start_next();

  int row[4];
  UNROLL for (int i = 0; i < 4; ++i) {
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

    // Starts with what takes longest: the factors, then the tiles. The tables are made meanwhile.
    const T* const y = reinterpret_cast<const T*>(a.y) + s * a.y_shared + of_m * a.y_m;
    T loaded[kReads][E];
    const auto read = [&](int i0) {
      UNROLL for (int r = 0; r < kReads; ++r) {
        const int i = i0 + r * blockDim.x;
        if (r > 0 && i - lane >= a.groups * factors) break;
        uint32_t columns_before = i / (J * 32);  // groups before these columns
        const uint32_t step = a.per_group.split(columns_before);
        uint32_t m = (columns_before * J + i / 32 % J) * 8 + i % 32 / 4;
        const int w = a.per_m.split(m);
        const int from = static_cast<int>(m) * a.y_m + w * a.y_w;
        UNROLL for (int p = 0; p < P; ++p) {
          uint32_t k = (step * P + p) * 4 + i % 4;
          const uint32_t v = a.per_k.split(k) * N;
          const T* const piece = y + (from + static_cast<int>(k) * a.y_k + static_cast<int>(v) * a.y_v);
          UNROLL for (int n = 0; n < N; ++n) {
            loaded[r][p * N + n] = load_if<T, 1>(piece + n * a.y_v, k < K && v + n < V && m < M && w < W).at[0];
          }
        }
      }
    };
    read(threadIdx.x);

    const int pieces = end - begin;
    const auto fetch_tile = [&](int piece, int stage) {
      if (piece < pieces) {
        const Place place(a, begin + piece);
        const T* const from = a.x.at<const T>(s, place.outer, 0, place.first);
        char* const to = stages.at(stage);
        fetch<kWhole>(to, a.x, K, from, place.rows, 0, stages.barrier(stage));
        // The last piece of the last row reads one element beyond it. Clear that element where no copy has covered it:
        // what other kernels have left there need not be finite.
        char* const beyond = to + begin_of<kWhole>(from) + place.rows * V * kSize + a.x.begin(lane);
        if (lane < K && within_16(beyond) == 0) *reinterpret_cast<T*>(beyond) = T{};
      }
      copy_async_commit();
    };
    const int first = works ? warp : pieces;
#pragma unroll 1
    for (int i = 0; i < a.stages; ++i) fetch_tile(first + i * a.workers, i);

    if (begins) {
      const int thread = blockDim.x - 1 - threadIdx.x;  // the last warps may have no tiles to fetch
      for (int i = thread; i < a.steps * 4; i += blockDim.x) {
        UNROLL for (int p = 0; p < P; ++p) {
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

    __syncthreads();  // no warp needs the previous factors now
    for (int i0 = threadIdx.x; i0 < a.groups * factors;) {
      UNROLL for (int r = 0; r < kReads; ++r) {
        if (const int i = i0 + r * blockDim.x; i < a.groups * factors) right[i].set(loaded[r], true);
      }
      if (i0 += kReads * blockDim.x; i0 < a.groups * factors) read(i0);
    }
    __syncthreads();

    int stage = 0;
    for (int piece = first; piece < pieces; piece += a.workers, stage = stage + 1 < a.stages ? stage + 1 : 0) {
      stages.wait(stage);
      const Place place(a, begin + piece);
      const char* const x = stages.at(stage) + begin_of<kWhole>(a.x.at<const T>(s, place.outer, 0, place.first));
      T* const to = a.z.at<T>(s, place.outer, of_m, place.first);
      char* const z = results + begin_of<kWhole>(to);
      const char* rows[4];
      UNROLL for (int i = 0; i < 4; ++i) rows[i] = x + row[i] * V * kSize;

      for (int columns_at = 0; columns_at < a.groups * J; columns_at += J) {
        float sums[2][J][4] = {};
        const Fragment<T>* factor = right + columns_at * a.steps * 32 + lane;
        format.known([&](const auto& format) {
#pragma unroll 2
          for (int step = 0; step < a.steps; ++step, factor += J * 32) {
            const Offsets offset = load<int, P>(offsets[step * 4 + pair].at);
            Fragment<T> l[4], r[J];
            UNROLL for (int i = 0; i < 4; ++i) {
              if constexpr (kPairs) {
                UNROLL for (int p = 0; p < P; ++p) l[i].both[p] = element<uint32_t>(rows[i] + offset.at[p]);
              } else {
                T of[E];
                UNROLL for (int e = 0; e < E; ++e) of[e] = element<T>(rows[i] + offset.at[e / N] + e % N * kSize);
                l[i].set(of);
              }
            }
            UNROLL for (int j = 0; j < J; ++j) r[j] = factor[j * 32];
            multiply(format, sums[0], l[0], l[1], r);
            multiply(format, sums[1], l[2], l[3], r);
          }
        });

        // A value that is not finite may have met one of a number's two parts, or a zero in place of a missing element.
        bool finite = true;
        UNROLL for (int i = 0; i < 4; ++i) {
          float zero = 0.0f;
          UNROLL for (int j = 0; j < 2 * J; ++j) zero = fmaf(sums[i / 2][j / 2][i % 2 * 2 + j % 2], 0.0f, zero);
          finite = finite && (row[i] >= place.rows || zero == 0.0f);
        }
        if (__builtin_expect(__any_sync(0xffffffffu, !finite), 0)) exact(a, rows, y, columns_at * 8 + pair * 2, sums);
        if (columns_at == 0) {  // wait until the previous results are out
          if constexpr (kWhole) engine_wait();
          __syncwarp();
        }
        format.known([&](const auto& format) {
          UNROLL for (int j = 0; j < J; ++j) {
            const Vec<int, 2> column = load<int, 2>(columns + (columns_at + j) * 8 + pair * 2);
            if constexpr (kPairs) {
              UNROLL for (int i = 0; i < 4; ++i) {
                const float* const two = sums[i / 2][j] + i % 2 * 2;
                if (column.at[0] < 0) continue;
                const Vec<T, 2> pair{format.rounded(two[0]), format.rounded(two[1])};
                store(reinterpret_cast<T*>(z + row[i] * W * kSize + column.at[0]), pair);
              }
            } else {
              UNROLL for (int e = 0; e < 2; ++e) {
                UNROLL for (int i = 0; i < 4; ++i) {
                  if (column.at[e] < 0) continue;
                  *reinterpret_cast<T*>(z + row[i] * W * kSize + column.at[e]) =
                      format.rounded(sums[i / 2][j][i % 2 * 2 + e]);
                }
              }
            }
          }
        });
      }
      if constexpr (kWhole) publish();
      __syncwarp();  // all lanes have read the tile and written their results
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

template <class T>
void (*large_kernel_of(const Problem& problem, const Tactic& tactic))(Einsum) {
  const auto with = [&](auto columns) {
    constexpr int J = columns.value;
    if constexpr (sizeof(T) == 2) {
      if (problem.pairs) return tactic.engine ? large_kernel<T, J, true, true> : large_kernel<T, J, false, true>;
    }
    return tactic.engine ? large_kernel<T, J, true, false> : large_kernel<T, J, false, false>;
  };
  if constexpr (sizeof(T) == 4) {
    return with_constant<2, 3, 4, 5>(tactic.columns, with);
  } else {
    return with_constant<2, 3, 4, 5, 7>(tactic.columns, with);
  }
}

}  // namespace

cudaError_t run_large(const Call& call) {
  Einsum a{};
  if (!describe(call.x, call.y, call.z, &a)) return cudaErrorNotSupported;
  const Division division(call.problem, call.tactic.of, call.gpu);
  a.apart = Divider(division.apart);
  a.shared *= division.apart;
  a.z.count /= division.apart;
  a.count = division.count;
  a.groups = division.groups;
  a.steps = division.steps;
  a.per_group = Divider(a.steps);
  a.per_m = Divider(a.z.width);
  a.before = division.before;
  a.stage = a.x.count * a.x.pitch;
  a.workers = division.workers;
  a.stages = division.stages;
  a.warp = division.warp;
  const int64_t grid = call.launch.blocks(), all = static_cast<int64_t>(a.tiles) * a.shared;
  const bool aligned = grid % a.shared == 0;
  const int64_t blocks_each = aligned ? grid / a.shared : grid;
  a.span = aligned ? a.tiles : static_cast<int>(all);
  a.per_block = Divider(blocks_each);
  a.each = static_cast<int>(a.span / blocks_each);
  a.more = static_cast<int>(a.span % blocks_each);
  return dispatch_narrow(call.x.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    a.per_k = Divider(ceil_div(a.x.width, kEach<T> / kPieces<T>));
    return launch_planned(large_kernel_of<T>(call.problem, call.tactic), call.launch, false, call.stream, a);
  });
}

}  // namespace svexport::einsum
