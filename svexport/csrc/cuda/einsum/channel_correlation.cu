// y, the sum of x z over positions.
#include "einsum/channels.cuh"

namespace svexport::einsum {
namespace {

struct Correlation {
  Side rows, columns;
  int64_t positions;
  Divider fetches_each;  // fetches of a sample
  int fetches, column_tiles;
  float* parts;  // (gridDim.x, rows, columns)
};

// Rows are the channels of the side that has more. Some warps fetch positions of all channels, others split the floats
// of the columns into parts, and two warp groups multiply, 64 rows each. A fence before wgmma may wait for all copies
// that the thread has in flight, so threads that fetch issue none. Every block writes a part of the sum.

constexpr int kMultiplying = 256, kSplitting = 128;  // threads out of kCorrelating
template <class T>
constexpr int kFetching = kCorrelating - kMultiplying - (sizeof(T) == 4 ? kSplitting : 0);
template <int kRows>
constexpr int kPiecePitch = kRows * 16 + 16;
constexpr int kTallBytes = kFetchPieces * kPiecePitch<kTall>, kNarrowBytes = kFetchPieces * kPiecePitch<kNarrow>;
template <class T>
constexpr int kSlotBytes = kTallBytes + kNarrowBytes * (sizeof(T) == 4 ? 2 : 1);

#if SVEXPORT_CHANNELS

constexpr int kLongSum = 4;  // fetches that tensor cores sum up before a float addition

// Some positions of a side. A thread fetches kWide neighbouring positions of some rows.
template <class T, int kRows, int kWide>
class Fetch {
  static constexpr int kSize = sizeof(T), kAcross = kFetchPieces * 16 / kSize / kWide, kApart = kFetching<T> / kAcross;

 public:
  __device__ __forceinline__ Fetch(const Correlation& a, const Side& side, int channel0, int64_t sample, int64_t position,
                                   int thread)
      : data_(reinterpret_cast<const T*>(side.data)), next_(kApart * side.strides[1]) {
    const int row = thread / kAcross, within = thread % kAcross * kWide;
    from_ = data_ + sample * side.strides[0] + (channel0 + row) * side.strides[1] + position + within;
    rows_ = position + within < a.positions ? side.channels - channel0 - row : 0;
    to_ = within * kSize / 16 * kPiecePitch<kRows> + row * 16 + within * kSize % 16;
  }
  // Copies to shared memory without waiting.
  __device__ __forceinline__ void copy(char* slot) const {
    const T* from = from_;
    UNROLL for (int i = 0; i < kRows; i += kApart, from += next_) {
      copy_word<Word<T, kWide>>(slot + to_ + i * 16, i < rows_ ? from : data_, i < rows_);
    }
  }
  // Copies by way of registers, for words of fewer than 4 bytes.
  __device__ __forceinline__ void read() {
    const T* from = from_;
    UNROLL for (int i = 0; i < kRows; i += kApart, from += next_) {
      values_[i / kApart] = load_if<Word<T, kWide>, 1>(reinterpret_cast<const Word<T, kWide>*>(from), i < rows_).at[0];
    }
  }
  __device__ __forceinline__ void write(char* slot) const {
    UNROLL for (int i = 0; i < kRows; i += kApart) {
      *reinterpret_cast<Word<T, kWide>*>(slot + to_ + i * 16) = values_[i / kApart];
    }
  }

 private:
  const T *data_, *from_;
  int64_t next_;
  int rows_, to_;
  Word<T, kWide> values_[kRows / kApart];
};

#endif

template <class T, int kWide>
__global__ void __launch_bounds__(kCompiled ? kCorrelating : 32, 1)
    correlation_kernel(const __grid_constant__ Correlation a) {
#if SVEXPORT_CHANNELS
  constexpr int kSize = sizeof(T), kEach = 16 * kFetchPieces / kSize, J = kNarrow / 8, kSteps = kFetchPieces / 2;
  extern __shared__ __align__(128) char shared[];
  // Barriers of a slot: it has been fetched; its floats have been split; it has been read.
  const uint32_t fetched = shared_address(shared + kSlots * kSlotBytes<T>), empty = fetched + kSlots * 16;
  const uint32_t ready = kSize == 4 ? fetched + kSlots * 8 : fetched;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform in a warp, which the compiler sees by this
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
  uint32_t turn = 0;  // parity of the slot's turn: 0, 1, 0, ...
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
          // Arrives when this thread's copies are there.
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
        UNROLL for (int k = thread - kFetching<T>; k < kFetchPieces * kNarrow; k += kSplitting) {
          auto* const here = reinterpret_cast<uint32_t*>(columns + k / kNarrow * kPiecePitch<kNarrow> + k % kNarrow * 16);
          auto v = load<uint32_t, 4>(here);
          Vec<uint32_t, 4> rest;
          UNROLL for (int e = 0; e < 4; ++e) {
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
    UNROLL for (int s = 0; s < kSteps; ++s) {
      UNROLL for (int e = 0; e < 4; ++e) {
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
    UNROLL for (int s = 0; s < kSteps; ++s) {
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
    if (adds == kLongSum - 1 || i + 1 == count) {  // tensor cores truncate in long sums
      UNROLL for (int e = 0; e < 4 * J; ++e) sums[e / 4][e % 4] += part[e / 4][e % 4];
    }
  }

  const int row = row0 + warp * 16 + group, column = column0 + pair * 2;
  if constexpr (kSize == 4) {  // the parts of values that are not finite do not add up to them
    float zero = 0.0f;
    UNROLL for (int e = 0; e < 4 * J; ++e) zero = fmaf(sums[e / 4][e % 4], 0.0f, zero);
    if (!(zero == 0.0f)) {
      UNROLL for (int e = 0; e < 4 * J; ++e) sums[e / 4][e % 4] = 0.0f;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        int64_t sample;
        const int64_t position = place(i, sample), end = min(position + kEach, a.positions);
#pragma unroll 1
        for (int64_t at = position; at < end; ++at) {
          const auto* const x = reinterpret_cast<const float*>(a.rows.data) + sample * a.rows.strides[0] + at;
          const auto* const z = reinterpret_cast<const float*>(a.columns.data) + sample * a.columns.strides[0] + at;
          float left[2];
          UNROLL for (int e = 0; e < 2; ++e) {
            left[e] = load_if<float, 1>(x + (row + e * 8) * a.rows.strides[1], row + e * 8 < a.rows.channels).at[0];
          }
          UNROLL for (int e = 0; e < 2 * J; ++e) {
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
  UNROLL for (int e = 0; e < 4 * J; ++e) {
    const int r = row + e / 2 % 2 * 8, c = column + e / 4 * 8 + e % 2;
    if (r < a.rows.channels && c < a.columns.channels) to[r * a.columns.channels + c] = sums[e / 4][e % 4];
  }
#endif
}

}  // namespace

cudaError_t run_channel_correlation(const Call& call) {
  if (!countable(call)) return cudaErrorNotSupported;
  const bool swapped = call.x.sizes[2] < call.z.sizes[2];
  const Tensor &rows = swapped ? call.z : call.x, &columns = swapped ? call.x : call.z, &y = call.y;
  const Correlated divided(call.problem, call.gpu);
  const Correlation a{side(rows), side(columns), call.problem.rows, Divider(divided.fetches / call.problem.outer),
                      int_of(divided.fetches), ceil_div(int_of(columns.sizes[2]), kNarrow),
                      static_cast<float*>(call.workspace)};
  return dispatch_float(y.dtype, [&](auto* pointer) {
    using T = element_t<decltype(pointer)>;
    static_assert(kSlotBytes<T> == slot_bytes(sizeof(T)));
    const cudaError_t status = with_constant<4, 2, 1>(call.problem.aligned, [&](auto wide) {
      return launch_compiled(correlation_kernel<T, wide.value>, call, a);
    });
    if (status != cudaSuccess) return status;
    const PartedSum sum{a.parts, int_of(call.launch.blocks()), {1, rows.sizes[2], 1, columns.sizes[2]},
                        {0, y.strides[swapped ? 3 : 1], 0, y.strides[swapped ? 1 : 3]}, y.data, y.dtype};
    return add_up(sum, call.stream);
  });
}

}  // namespace svexport::einsum
