// z, the sum of x y over channels.
#include "einsum/channels.cuh"

namespace svexport::einsum {
namespace {

struct Product {
  Side x, z;
  const char* y;
  int y_strides[2];
  int groups;  // groups of columns; a block does one of them
  int64_t positions;
  Divider units_each;  // units of a sample
  int units;           // units of kRun positions
};

// x^T y: positions are the rows that tensor cores multiply, channels of z are the columns. Four warps have neighbouring
// positions. They fetch them some channels ahead of the products and store results in rows as long as possible, because
// short rows cost bandwidth. Positions may take any rows of a fragment, so a lane has four neighbours.

template <int N>
constexpr int kStages = stages_of_team(N);
template <class T>
constexpr int kChannels = channels_of_fetch(sizeof(T));
template <class T>
constexpr int kPitch = channel_pitch(sizeof(T));
template <class T>
constexpr int kResultPitch = result_pitch(sizeof(T));
template <class T>
constexpr int kFetchBytes = kChannels<T> * kPitch<T>;
template <class T, int N>
constexpr int kTeamBytes = team_bytes(N, sizeof(T));

#if SVEXPORT_CHANNELS

// Unaligned rows of half types are fetched as they lie in memory, in pieces of 16 bytes.
template <class T, int kWide>
constexpr bool kShifted = sizeof(T) == 2 && kWide == 1;

__device__ __forceinline__ int within_16(const void* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 15); }

// Copies such a piece; element by element at the tensor's end, as memcheck takes a copy of fewer bytes for one of 16.
template <class T>
__device__ __forceinline__ void copy_piece(char* to, const char* from, const char* end) {
  if (from + 16 <= end) {
    copy_async(to, from, true);
  } else {
#pragma unroll 1
    for (; from < end; to += sizeof(T), from += sizeof(T)) *reinterpret_cast<T*>(to) = *reinterpret_cast<const T*>(from);
  }
}

// Computes a lane's sums again by float multiplications, in order. x: the first of its `count` valid positions.
template <int J>
__device__ __forceinline__ void exact(const Product& p, const float* x, int64_t count, int column, float (&sums)[2][J][4]) {
  UNROLL for (int i = 0; i < 8 * J; ++i) sums[i / 4 / J][i / 4 % J][i % 4] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < p.x.channels; ++k) {
    float left[4];
    UNROLL for (int e = 0; e < 4; ++e) left[e] = load_if<float, 1>(x + k * p.x.strides[1] + e, e < count).at[0];
    const float* const y = reinterpret_cast<const float*>(p.y) + k * p.y_strides[0];
    UNROLL for (int j = 0; j < 2 * J; ++j) {
      const int d = column + j / 2 * 8 + j % 2;
      const float right = load_if<float, 1>(y + d * p.y_strides[1], d < p.z.channels).at[0];
      UNROLL for (int e = 0; e < 4; ++e) {
        float& sum = sums[e / 2][j / 2][e % 2 * 2 + j % 2];
        sum = fmaf(left[e], right, sum);
      }
    }
  }
}

// Writes y to shared memory as wgmma reads it; the second parts of floats lie `small` bytes behind the first ones.
// kAlong: channels of x are contiguous in y, and neighbouring threads read up to 16 of them.
template <class T, int N, bool kAlong>
__device__ __forceinline__ void read_factor(const Product& p, int column0, int channels, char* shared, int small) {
  constexpr int kReads = 8, kPiece = 16 / sizeof(T);  // reads at once; elements in 16 bytes
  const T* const y = reinterpret_cast<const T*>(p.y);
  const auto channel = [](int i) { return kAlong ? i / (16 * N) * 16 + i % 16 : i / N; };
  const auto column = [](int i) { return kAlong ? i / 16 % N : i % N; };
  for (int i0 = threadIdx.x; i0 < channels * N; i0 += kReads * blockDim.x) {
    T v[kReads];
    UNROLL for (int k = 0; k < kReads; ++k) {
      const int i = i0 + k * blockDim.x, c = channel(i), d = column0 + column(i);
      v[k] = load_if<T, 1>(y + (c * p.y_strides[0] + d * p.y_strides[1]), c < p.x.channels && d < p.z.channels).at[0];
    }
    UNROLL for (int k = 0; k < kReads; ++k) {
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

#endif

// N: columns of a block. kWide: how many positions, 4, 2 or 1, lie in aligned words.
template <class T, int N, int kWide>
__global__ void __launch_bounds__(kCompiled ? most_teams(N) * kTogether * 32 : 32, 1)
    product_kernel(const __grid_constant__ Product p) {
#if SVEXPORT_CHANNELS
  constexpr int J = N / 8, kSize = sizeof(T), kPart = N * kChannels<T> * kSize, kSteps = 2;
  using Few = Word<T, kWide>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform in a warp, which the compiler sees by this
  const int part = warp % kTogether, team = warp / kTogether, teams = static_cast<int>(blockDim.x) / 32 / kTogether;
  const int first_position = part * kPositions + group * 4;  // first of the lane's four positions
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

  int unit_ahead = first, chunk_ahead = 0, count = 0;  // count: valid positions of the unit
  const T* from = nullptr;
  const auto fetch = [&](int stage) {
    if (unit_ahead < p.units) {
      if (chunk_ahead == 0) {
        int64_t sample;
        const int64_t at = position(unit_ahead, sample);
        count = static_cast<int>(min(p.positions - at, int64_t{kRun}));
        from = reinterpret_cast<const T*>(p.x.data) + sample * p.x.strides[0] + at;
      }
      constexpr int kRows = kChannels<T> / kTogether;  // rows that a warp fetches
      const int channel = chunk_ahead * kChannels<T> + part;
      const int64_t apart = kTogether * p.x.strides[1];
      const T* const first = from + channel * p.x.strides[1];
      char* const to = fetched + stage * kFetchBytes<T> + part * kPitch<T>;
      const auto copy = [&](auto whole) {
        constexpr bool kAll = decltype(whole)::value;  // whether all channels and positions exist
        UNROLL for (int i = 0; i < kRows; ++i) {
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
            UNROLL for (int k = lane * kWide; k < kRun; k += 32 * kWide) {
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
    int before[2] = {};  // offsets within 16 bytes of this lane's even and odd rows; rows 8 apart have the same
    if constexpr (kShifted<T, kWide>) {
      const T* const row = reinterpret_cast<const T*>(p.x.data) + sample * p.x.strides[0] + at + pair * 2 * p.x.strides[1];
      UNROLL for (int i = 0; i < 2; ++i) before[i] = within_16(row + i * p.x.strides[1]);
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
          UNROLL for (int i = 0; i < 2; ++i) both.at[i] = __funnelshift_r(words[i], words[i + 1], (skip & 2) * 8);
          Vec<T, 4> v;
          memcpy(&v, &both, sizeof(v));
          return v;
        } else {
          return load<T, 4>(reinterpret_cast<const T*>(mine + local * kPitch<T>));
        }
      };
      uint32_t a[kSteps][2][4], small[kSteps][2][4];  // two fragments a step
      UNROLL for (int step = 0; step < kSteps; ++step) {
        UNROLL for (int i = 0; i < 2; ++i) {  // half of a fragment's channels
          if constexpr (kSize == 4) {
            const auto x = read(step * 8 + i * 4 + pair);
            UNROLL for (int e = 0; e < 4; ++e) {
              cut(x.at[e], a[step][e / 2][i * 2 + e % 2], small[step][e / 2][i * 2 + e % 2]);
            }
          } else {
            const int local = step * 16 + i * 8 + pair * 2;
            const auto x = read(local, before[0]), above = read(local + 1, before[1]);
            UNROLL for (int e = 0; e < 4; ++e) {  // e: fragment, half of its rows
              const Vec<T, 2> both{x.at[e], above.at[e]};
              memcpy(&a[step][e / 2][i * 2 + e % 2], &both, 4);
            }
          }
        }
        UNROLL for (int m = 0; m < 2; ++m) {
          hold(a[step][m]);
          if constexpr (kSize == 4) hold(small[step][m]);
        }
      }
      hold(sums[0]);
      hold(sums[1]);
      begin_products();
      UNROLL for (int step = 0; step < kSteps; ++step) {
        const uint64_t b = matrix_at(y + chunk * kPart + step * (N * 32), N * 16);
        const uint64_t small_b = matrix_at(y + small_y + chunk * kPart + step * (N * 32), N * 16);
        UNROLL for (int m = 0; m < 2; ++m) {
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

    if constexpr (kSize == 4) {  // the two parts of a number, times a value that is not finite, do not add up
      float zero = 0.0f;
      UNROLL for (int i = 0; i < 8 * J; ++i) zero = fmaf(sums[i / 4 / J][i / 4 % J][i % 4], 0.0f, zero);
      if (!(zero == 0.0f)) {
        const int64_t mine = at + first_position;
        const auto* const x = reinterpret_cast<const float*>(p.x.data) + sample * p.x.strides[0] + mine;
        exact(p, x, p.positions - mine, column0 + pair * 2, sums);
      }
    }

    T* const to = reinterpret_cast<T*>(p.z.data) + sample * p.z.strides[0] + at;
    const int here = static_cast<int>(min(p.positions - at, int64_t{kRun}));
    UNROLL for (int j = 0; j < J; j += 2) {  // alternates between two places, so one barrier is enough
      char* const place = results + j / 2 % 2 * (kResults * kResultPitch<T>);
      UNROLL for (int i = 0; i < 4; ++i) {
        const int local = i / 2 * 8 + pair * 2 + i % 2;
        Vec<T, 4> v;
        UNROLL for (int e = 0; e < 4; ++e) v.at[e] = from_float<T>(sums[e / 2][j + i / 2][e % 2 * 2 + i % 2]);
        store(reinterpret_cast<T*>(place + local * kResultPitch<T> + first_position * kSize), v);
      }
      sync();
      const int d = column0 + j * 8 + part;
      const auto put = [&](auto whole) {
        constexpr bool kAll = decltype(whole)::value;
        UNROLL for (int i = 0; i < kResults / kTogether; ++i) {
          if (!kAll && d + i * kTogether >= p.z.channels) continue;
          const auto* const row = reinterpret_cast<const Few*>(place + (i * kTogether + part) * kResultPitch<T>);
          auto* const out = reinterpret_cast<Few*>(to + d * p.z.strides[1] + i * (kTogether * p.z.strides[1]));
          UNROLL for (int k = lane; k < kRun / kWide; k += 32) {
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
#endif
}

}  // namespace

cudaError_t run_channel_product(const Call& call) {
  if (!countable(call)) return cudaErrorNotSupported;
  const Tensor& y = call.y;
  const Teams teams(call.problem, call.tactic.columns, call.gpu);
  const auto stride = [&](int i) { return y.sizes[i] == 1 ? 0 : static_cast<int>(y.strides[i]); };
  const Product p{side(call.x), side(call.z), static_cast<const char*>(y.data), {stride(1), stride(3)}, teams.groups,
                  call.problem.rows, Divider(teams.units / call.problem.outer), int_of(teams.units)};
  return dispatch_float(y.dtype, [&](auto* pointer) {
    using T = element_t<decltype(pointer)>;
    const auto kernel = with_constant<32, 64>(call.tactic.columns, [&](auto columns) {
      return with_constant<4, 2, 1>(call.problem.aligned,
                                    [&](auto wide) { return product_kernel<T, columns.value, wide.value>; });
    });
    return launch_compiled(kernel, call, p);
  });
}

}  // namespace svexport::einsum
