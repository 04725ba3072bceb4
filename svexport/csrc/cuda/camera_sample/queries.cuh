// The kernel of kVectors and kChannels (tactics.h): a block per query, as described in sampling.cuh.
#pragma once

#include "camera_sample/sampling.cuh"

namespace svexport {
namespace {

// F: element type of the maps, T or int8, all of one layout. kOthers: some levels are pooled or have the other type.
template <class T, int N, bool kSplit, bool kOthers, class F = T>
__global__ void __launch_bounds__(kThreads, kOthers ? 4 : kSplit ? 8 : 7)
    camera_sample_kernel(const Params __grid_constant__ p) {
  constexpr int kParts = kSplit ? kPasses : 1;
  constexpr bool kCodes = sizeof(F) == 1, kAsIntegers = kIntegers<int8_t, T, N> && !kSplit;  // int8 levels, not pooled
  constexpr int kSums = kThreads * (kSplit ? kPasses / 2 : N);
  __shared__ Sample samples[kThreads];
  __shared__ float sums[kSums > 2 * kMaxGroups ? kSums : 2 * kMaxGroups];
  __shared__ float2 norms[kMaxGroups];
  __shared__ int counts[kWarps];

  const int q = blockIdx.x, b = blockIdx.y;
  const int rows = kThreads >> p.row_shift, row = threadIdx.x >> p.row_shift;
  const int lane = threadIdx.x & ((1 << p.row_shift) - 1), column = kSplit ? lane & 1 : 0;
  const int stride = kSplit ? 1 << p.row_shift >> 1 : 0;  // between a thread's channels
  const int chunk = kSplit ? stride * kPasses : N << p.row_shift;
  const int begin = blockIdx.z * chunk, end = min(begin + chunk, p.channels);
  const int64_t logits = b * p.weights_stride[0] + q * p.weights_stride[1];
  const bool simple = !p.softmax && p.groups == 1;  // a weight is the sigmoid of its logit: it needs no norm

  int first_group = 0, groups = 1, slots = 0;
  if (!simple) {
    first_group = p.group_channels.divide(begin);
    groups = p.group_channels.divide(end - 1) - first_group + 1;
    slots = partial_norms(p, logits, first_group, groups, reinterpret_cast<float2*>(sums));
  }

  int channel[kParts], group[kParts];
  float sum[kParts][N] = {};
  UNROLL for (int i = 0; i < kParts; ++i) {
    // threads beyond the end repeat the last channels and write nothing
    channel[i] = min(begin + i * stride + (kSplit ? lane >> 1 : lane * N), p.channels - N);
    group[i] = p.group_channels.divide(channel[i]);
  }
  bool nan = false;
  for (int base = 0; base == 0 || base < p.samples; base += kThreads) {
    const int index = base + threadIdx.x;
    Sample mine;
    mine.inside = 0;
    if (index < p.samples) {
      const Name name(p, index);
      const float logit = simple ? p.weights.get(logits + index * p.weights_stride[2]) : 0;
      const Matrix matrix(p, b, name.camera);
      const Projection at = project(p, matrix, Point(p, b, q, name.point));
      if (at.seen) {
        const Level& map = p.levels[name.level];
        const bool integers = kAsIntegers && (kCodes || (kOthers && map.int8 && !map.pool));
        mine = sample_at(map, locate(p, map, at), b, name, index, activate(false, logit, 0), integers);
      }
      nan |= logit != logit;
    }
    if (base > 0) __syncthreads();  // the previous samples have been read
    int count;
    const int at = position(mine.inside != 0, counts, count);
    if (mine.inside) samples[at] = mine;
    if (base == 0 && !simple) merge_norms(p, groups, slots, reinterpret_cast<const float2*>(sums), norms);
    __syncthreads();

#pragma unroll 2
    for (int k = row; k - row < count; k += rows) {  // as many turns in every row, because lanes exchange below
      const bool live = k < count;
      const Sample& s = samples[live ? k : 0];
      const uint32_t inside = live ? s.inside : 0;
      const Level& map = p.levels[kOthers ? s.level : 0];
      float v[kParts][N], factor[kParts];
      const auto read = [&](auto* stored, auto pool) {
        using S = element_t<decltype(stored)>;
        Pixels<S, N, kSplit, pool.value, kAsIntegers && sizeof(S) == 1 && !pool.value> pixels[kParts];
        UNROLL for (int i = 0; i < kParts; ++i) {
          const char* from = s.at + channel_offset<S, kSplit>(s.sc, map.block_shift, channel[i]);
          pixels[i].read(s, begin + i * stride < end ? inside : 0, from, column);
        }
        UNROLL for (int i = 0; i < kParts; ++i) {
          factor[i] = i == 0 ? s.factor : factor[0];
          if (simple || (i > 0 && p.groups == 1)) continue;
          const float logit = p.weights.get(logits + s.index * p.weights_stride[2] + group[i] * p.weights_stride[3]);
          factor[i] = activate(p.softmax, logit, norms[group[i] - first_group].x);
        }
        UNROLL for (int i = 0; i < kParts; ++i) pixels[i].sum(s, column, v[i]);
      };
      F* stored = nullptr;
      int8_t* codes = nullptr;
      if (!kOthers || !(map.int8 || map.pool)) {
        read(stored, std::false_type{});
      } else if (!map.int8) {
        read(stored, std::true_type{});
      } else if (!map.pool) {
        read(codes, std::false_type{});
      } else {
        read(codes, std::true_type{});
      }
      UNROLL for (int i = 0; i < kParts; ++i) {
        UNROLL for (int n = 0; n < N; ++n) {
          if (kSplit) v[i][n] += __shfl_xor_sync(~0u, v[i][n], 1);  // here, where all lanes meet: levels differ
          // Integer sums are 0 where nothing is sampled, and never NaN.
          const bool counts = (kCodes && kAsIntegers) || (live && v[i][n] == v[i][n]);
          if (counts) sum[i][n] = fmaf(factor[i], v[i][n], sum[i][n]);
        }
      }
    }
  }

  // Adds the sums of the rows in a fixed order.
  UNROLL for (int i = 0; i < kParts; ++i) {
    UNROLL for (int n = 0; n < N; ++n) {
      const int c = i * stride + (kSplit ? lane >> 1 : lane * N) + n;
      if (!kSplit || column == 0) sums[row * chunk + c] = sum[i][n];
    }
  }
  nan = __syncthreads_or(nan);
  T* out = static_cast<T*>(p.output) + b * p.output_stride[0] + q * p.output_stride[1];
  for (int c = begin + threadIdx.x; c < end; c += kThreads) {
    float total = 0;
#pragma unroll 4
    for (int r = 0; r < rows; ++r) total += sums[r * chunk + c - begin];
    total *= simple ? (nan ? NAN : 1) : norms[p.group_channels.divide(c) - first_group].y;
    out[c * p.output_stride[2]] = from_float<T>(total);
  }
}

}  // namespace
}  // namespace svexport
