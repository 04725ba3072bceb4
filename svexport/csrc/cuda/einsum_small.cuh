// A small tensor from two large ones: sums over their rows.
#pragma once

#include "einsum.cuh"
#include "parts.cuh"

namespace svexport::einsum {

// Floats from row to row of the sums of a warp in shared memory: its lanes store to different banks.
template <int J>
constexpr int kSumPitch = J % 2 ? 8 * J : 8 * J + 8;

// The sums of a warp, 16 * I of K times V from kv0 on, by products of floats, one after the other, from device memory:
// of its tiles in `range`, to (16 * I, kSumPitch) in shared memory.
template <class T, int I, int J>
__device__ __forceinline__ void exact(const Einsum& a, uint32_t s, int of_k, int kv0, const Range& range, float* to) {
  const int lane = threadIdx.x % 32, V = a.x.width, W = a.z.width;
  for (int i = 0; i < 2 * I; ++i) {
    const int at = min(kv0 + i * 8 + lane / 4, a.x.count * V - 1);
    float sums[2 * J] = {};
    for (int tile = range.begin + threadIdx.x / 32; tile < range.end; tile += blockDim.x / 32) {
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

// sums += products of a tile's rows of x, V wide, of which a lane has the elements at `offsets`, and of z, 8 * J columns
// of W. A lane has eight rows.
template <class T, int I, int J>
__device__ __forceinline__ void add_tile(float (&sums)[I][J][4], const char* x, const char* z, const int (&offsets)[2 * I],
                                         int V, int W) {
  constexpr int E = kEach<T>, kSize = sizeof(T), kSums = I * J * 4;
  const int group = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 8;
  float part[I][J][4] = {};  // tensor cores cut off what does not fit into a long sum, the additions below round
#pragma unroll
  for (int step = 0; step < kRows / (4 * E); ++step) {
    Fragment<T> r[J];
#pragma unroll
    for (int j = 0; j < J; ++j) {
      T of[E];  // behind the columns it is x, and not used
#pragma unroll
      for (int e = 0; e < E; ++e) of[e] = element<T>(z + ((row + step * E + e) * W + j * 8 + group) * kSize);
      r[j].set(of, true);
    }
#pragma unroll
    for (int i = 0; i < I; ++i) {
      Fragment<T> l[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        T of[E];
#pragma unroll
        for (int e = 0; e < E; ++e) of[e] = element<T>(x + (row + step * E + e) * V * kSize + offsets[2 * i + h]);
        l[h].set(of);
      }
      multiply(part[i], l[0], l[1], r);
    }
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i / 4 / J][i / 4 % J][i % 4] += part[i / 4 / J][i / 4 % J][i % 4];
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
  constexpr int kSize = sizeof(T), kSums = I * J * 4;
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
    add_tile<T>(sums, x, z, offsets, V, W);
    __syncwarp();  // until all have read the tile
    fetch_tile(tile + a.stages * warps, stage);
  }

  float zero = 0.0f;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (i / 4 % J * 8 + pair * 2 + i % 2 < W) zero = fmaf(sums[i / 4 / J][i / 4 % J][i % 4], 0.0f, zero);
  }
  auto* const mine_at = reinterpret_cast<float*>(memory);  // where the tiles were, (16 * I, kSumPitch)
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    const auto& four = sums[i / 4 / J][i / 4 % J];
    store(mine_at + (i / 4 / J * 16 + i % 4 / 2 * 8 + group) * kSumPitch<J> + i / 4 % J * 8 + pair * 2,
          Vec<float, 2>{four[i % 4], four[i % 4 + 1]});
  }
  // Parts of what is not finite, or of what it meets, add up to something else.
  if (__builtin_expect(__any_sync(0xffffffffu, !(zero == 0.0f)), 0)) {
    // The range is found again where registers are short.
    const Range mine = kSmallBound<T, I, J> > kSmallWarps * 32 ? Range(a.tiles, blockIdx.x, gridDim.x) : range;
    exact<T, I, J>(a, s, of_k, kv0, mine, mine_at);
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

// y, from its parts.
template <class T>
__global__ void __launch_bounds__(kPartThreads) sum_kernel(const __grid_constant__ Einsum a) {
  const int W = a.z.width, size = a.shared * a.x.count * a.x.width * W;
  add_parts(a.partials, a.parts, size, [&](int64_t i, float sum) {
    auto kv = static_cast<uint32_t>(i) / W;  // of all S
    const uint32_t v = a.per_k.split(kv);
    *small_at<T>(a, kv / a.x.count, kv % a.x.count, v, static_cast<uint32_t>(i) % W) = from_float<T>(sum);
  });
}

// Tiles of 16 of K times V that a warp adds up at most, with so many of 8 columns: as registers hold twice.
constexpr int most_sums(int columns) { return columns > 7 ? 2 : columns > 5 ? 3 : columns > 4 ? 4 : 5; }

// Whether rows are so few that it takes less time to read them more often, each time for fewer of these.
inline bool few_rows(const Tensor& x) {
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
    const int memory_ = shared_memory();  // the driver takes its time
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
      const int fit = std::min(most_warps, memory_ / bytes), used = std::min(fit, each);
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
        std::max(1, std::min((memory_ + 1024) / (warps * warp + 1024), 65536 / (ceil_div(registers, 8) * 256 * warps))),
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
inline Sums sums_of(const Tensor& x, const Tensor& z) {
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

template <class T>
cudaError_t launch_sum(const Einsum& a, cudaStream_t stream) {
  const int64_t size = static_cast<int64_t>(a.shared) * a.x.count * a.x.width * a.z.width;
  return launch(sum_kernel<T>, static_cast<unsigned>(ceil_div<int64_t>(size, kPartColumns)), kPartThreads, 0, stream,
                true, a);
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
  return launch_sum<T>(a, stream);
}

// With kernels of one type, which are compiled apart: einsum_small.cu, einsum_half.cu and einsum_bfloat16.cu.
template <class T>
cudaError_t run_small(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early, const Sums& sums,
                      cudaStream_t stream) {
  return dispatch_columns(sums.columns, [&](auto columns) {
    return dispatch_sums<columns.value>(sums.tiles, [&](auto tiles) {
      return launch_small<T, tiles.value, columns.value>(x, z, y, workspace, early, sums, stream);
    });
  });
}

extern template cudaError_t run_small<float>(const Tensor&, const Tensor&, const Tensor&, void*, bool, const Sums&,
                                             cudaStream_t);
extern template cudaError_t run_small<__half>(const Tensor&, const Tensor&, const Tensor&, void*, bool, const Sums&,
                                              cudaStream_t);
extern template cudaError_t run_small<__nv_bfloat16>(const Tensor&, const Tensor&, const Tensor&, void*, bool,
                                                     const Sums&, cudaStream_t);

}  // namespace svexport::einsum
