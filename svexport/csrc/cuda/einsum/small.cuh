// A small tensor as sums over the rows of two large ones.
#pragma once

#include "einsum/rows.cuh"
#include "planned.cuh"

namespace svexport::einsum {

template <int J>
constexpr int kSumPitch = sum_pitch(J);

// Computes a warp's sums again by float multiplications, one after the other, from device memory: 16 * I of the K * V
// sums, from kv0 on, over its tiles in `range`. Writes (16 * I, kSumPitch) to shared memory.
template <class T, int I, int J>
__device__ __forceinline__ void exact(const Einsum& a, uint32_t s, int of_k, int kv0, const Range& range, float* to) {
  const Format<T> format(a.dtype);
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
        const float left = format.number(x[row * V]);
        UNROLL for (int j = 0; j < 2 * J; ++j) {
          const int w = min(j / 2 * 8 + lane % 4 * 2 + j % 2, W - 1);
          sums[j] = fmaf(left, format.number(z[row * W + w]), sums[j]);
        }
      }
    }
    UNROLL for (int j = 0; j < J; ++j) {
      store(to + (i * 8 + lane / 4) * kSumPitch<J> + j * 8 + lane % 4 * 2, Vec<float, 2>{sums[2 * j], sums[2 * j + 1]});
    }
  }
}

// sums += products of a tile's rows of x, which are V wide and of which a lane has the elements at `offsets`, and of z,
// 8 * J columns for W. A lane has eight rows.
template <class T, class F, int I, int J>
__device__ __forceinline__ void add_tile(const F& format, float (&sums)[I][J][4], const char* x, const char* z,
                                         const int (&offsets)[2 * I], int V, int W) {
  constexpr int E = kEach<T>, kSize = sizeof(T), kSums = I * J * 4;
  const int group = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 8;
  float part[I][J][4] = {};  // tensor cores truncate in long sums; the additions below round
  UNROLL for (int step = 0; step < kRows / (4 * E); ++step) {
    Fragment<T> r[J];
    UNROLL for (int j = 0; j < J; ++j) {
      T of[E];  // beyond W these are elements of x, whose products are not used
      UNROLL for (int e = 0; e < E; ++e) of[e] = element<T>(z + ((row + step * E + e) * W + j * 8 + group) * kSize);
      r[j].set(of, true);
    }
    UNROLL for (int i = 0; i < I; ++i) {
      Fragment<T> l[2];
      UNROLL for (int h = 0; h < 2; ++h) {
        T of[E];
        UNROLL for (int e = 0; e < E; ++e) {
          of[e] = element<T>(x + (row + step * E + e) * V * kSize + offsets[2 * i + h]);
        }
        l[h].set(of);
      }
      multiply(format, part[i], l[0], l[1], r);
    }
  }
  UNROLL for (int i = 0; i < kSums; ++i) sums[i / 4 / J][i / 4 % J][i % 4] += part[i / 4 / J][i / 4 % J][i % 4];
}

template <class T>
__device__ __forceinline__ T* small_at(const Einsum& a, uint32_t s, int k, int v, int w) {
  k += static_cast<int>(a.apart.split(s));
  return reinterpret_cast<T*>(a.y) + static_cast<int64_t>(s) * a.y_shared + (k * a.y_k + v * a.y_v + w * a.y_w);
}

constexpr int kNeighbours = 4;  // elements of W that a thread adds up

// Threads of the launch bound. Few rows make blocks of few warps, several of which should fit: for floats with 168
// registers, which the compiler would exceed otherwise.
template <class T, int I, int J>
constexpr int kSmallBound = (sizeof(T) == 4 && I == kFewSums && J == 4 ? 12 : kSmallWarps) * 32;

// Writes y, or parts of y: 16 * I of the K * V sums and all of W, at most 8 * J. Every warp adds up tiles.
template <class T, int I, int J, bool kWhole>
__global__ void __launch_bounds__(kSmallBound<T, I, J>) small_kernel(const __grid_constant__ Einsum a) {
  constexpr int kSize = sizeof(T), kSums = I * J * 4;
  const Format<T> format(a.dtype);
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

  int offsets[2 * I];  // bytes, to the elements of K and V of this lane
  UNROLL for (int i = 0; i < 2 * I; ++i) {
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
    format.known([&](const auto& format) { add_tile<T>(format, sums, x, z, offsets, V, W); });
    __syncwarp();  // all lanes have read the tile
    fetch_tile(tile + a.stages * warps, stage);
  }

  float zero = 0.0f;
  UNROLL for (int i = 0; i < kSums; ++i) {
    if (i / 4 % J * 8 + pair * 2 + i % 2 < W) zero = fmaf(sums[i / 4 / J][i / 4 % J][i % 4], 0.0f, zero);
  }
  auto* const mine_at = reinterpret_cast<float*>(memory);  // in place of the tiles: (16 * I, kSumPitch)
  UNROLL for (int i = 0; i < kSums; i += 2) {
    const auto& four = sums[i / 4 / J][i / 4 % J];
    store(mine_at + (i / 4 / J * 16 + i % 4 / 2 * 8 + group) * kSumPitch<J> + i / 4 % J * 8 + pair * 2,
          Vec<float, 2>{four[i % 4], four[i % 4 + 1]});
  }
  // The two parts of a value that is not finite, or of one that it is multiplied with, do not add up to its product.
  if (__builtin_expect(__any_sync(0xffffffffu, !(zero == 0.0f)), 0)) {
    // Where registers are short, compute the range again.
    const Range mine = kSmallBound<T, I, J> > kSmallWarps * 32 ? Range(a.tiles, blockIdx.x, gridDim.x) : range;
    exact<T, I, J>(a, s, of_k, kv0, mine, mine_at);
  }
  __syncthreads();
  const int size = min(16 * I, kv - kv0) * ceil_div(W, kNeighbours);
  float* const part = a.partials + ((static_cast<int64_t>(blockIdx.x) * a.shared + blockIdx.y) * kv + kv0) * W;
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    uint32_t row = i;
    const int first = static_cast<int>(a.per_row.split(row)) * kNeighbours;
    const char* const from = shared + (row * kSumPitch<J> + first) * sizeof(float);
    Vec<float, kNeighbours> of[kSmallWarps];
    UNROLL for (int j = 0; j < kSmallWarps; ++j) {  // load all of them before adding
      of[j] = load<float, kNeighbours>(reinterpret_cast<const float*>(from + (j < warps ? j * a.warp : 0)));
    }
    const auto put = [&](auto* to, int stride) {
      UNROLL for (int e = 0; e < kNeighbours; ++e) {
        float sum = of[0].at[e];
        UNROLL for (int j = 1; j < kSmallWarps; ++j) sum = j < warps ? sum + of[j].at[e] : sum;
        if (first + e < W) to[e * stride] = Format<element_t<decltype(to)>>(a.dtype).rounded(sum);
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
  wait_for_previous();  // even where nothing was needed: the next kernel waits for this one only
}

template <class T>
void (*small_kernel_of(const Tactic& tactic))(Einsum) {
  return with_constant<2, 3, 4, 5, 6, 8>(tactic.columns, [&](auto columns) {
    constexpr int J = columns.value, kMost = most_sums(J), kFew = std::min(kMost, kFewSums);
    return with_constant<kFew, kMost>(tactic.sums, [&](auto sums) {
      return tactic.engine ? small_kernel<T, sums.value, J, true> : small_kernel<T, sums.value, J, false>;
    });
  });
}

template <class T>
cudaError_t run_small(const Call& call) {
  Einsum a{};
  if (!describe(call.x, call.y, call.z, &a)) return cudaErrorNotSupported;
  const Sums sums(call.problem, call.tactic, call.gpu);
  a.per_k = Divider(a.x.width);
  a.per_row = Divider(ceil_div(a.z.width, kNeighbours));
  a.apart = Divider(a.x.count / sums.count);
  a.shared = static_cast<int>(sums.shared);
  a.x.count = sums.count;
  a.parts = sums.parts;
  a.stage = sums.stage;
  a.stages = sums.stages;
  a.warp = sums.warp;
  a.partials = static_cast<float*>(call.workspace);
  const cudaError_t status = launch_planned(small_kernel_of<T>(call.tactic), call.launch, call.early, call.stream, a);
  if (a.parts == 1 || status != cudaSuccess) return status;
  PartedSum sum{a.partials, a.parts, {}, {}, call.y.data, call.y.dtype};
  for (int i = 0; i < 4; ++i) {
    sum.sizes[i] = call.y.sizes[i + i / 3];  // skips M, which is 1
    sum.strides[i] = call.y.strides[i + i / 3];
  }
  return add_up(sum, call.stream);
}

}  // namespace svexport::einsum
