// The gradient of the image with every pixel written once, by the block that owns it. Points are listed by tile of
// pixels, and within a tile by pixel. No sums have to be cleared before or rounded after.
#pragma once

#include "grid_sample/gradient.h"
#include "grid_sample/sampling.cuh"
#include "overlap.cuh"

namespace svexport {

// The gradient of the output: image n, channel c, point p is at n * image + c * channel + p * point.
template <class T>
struct Gradient {
  const T* data;
  int64_t image, channel, point;
  Format<T> format;  // of the image and its gradient too
};

constexpr int kOwnerThreads = 256;

// The lists of the bilinear points of each tile of pixels.
struct Lists : sampler::gradient::ListSizes {
  int* counts;  // (N, tiles, kApart): points that have pixels in a tile; one counter per cache line
  int* runs;    // (N): how often consecutive points lie in different tiles; kFull set: a list was too short
  int* points;  // (N, tiles, length)

  explicit Lists(const ListSizes& sizes) : ListSizes(sizes) {}

  void in(void* memory, int64_t batch) {
    counts = static_cast<int*>(memory);
    runs = counts + batch * tiles * kApart;
    points = runs + batch;
  }
};

// Images that other kernels have to compute: all, or those whose lists overflowed or whose points scatter.
struct Left {
  const int* runs = nullptr;
  int most = 0;

  __device__ __forceinline__ bool operator()(int n) const { return runs == nullptr || runs[n] > most; }

  // Lets the next kernel begin, waits for the previous one, and calls f(first image, count) for the images that are
  // left. Grid: any number x images.
  template <class F>
  __device__ __forceinline__ void each(int batch, F&& f) const {
    start_next();
    wait_for_previous();
    if (runs == nullptr) {
      if (blockIdx.y == 0) f(0, batch);
      return;
    }
    for (int n = blockIdx.y; n < batch; n += gridDim.y) {
      if ((*this)(n)) f(n, 1);
    }
  }
};

// Lists each thread's point p in the tiles of its pixels; p >= s.points: no point. All threads of a block must call it.
__device__ __forceinline__ void list(const Space& s, const Lists& lists, int n, int p, const Point<4>& point) {
  constexpr int K = 2, TAPS = 4;
  int column[K], row[K], firsts = 0;
  UNROLL for (int i = 0; i < K; ++i) {  // an index of -1 is in tile -1
    column[i] = p < s.points ? point.axis[0].index[i] >> lists.log_width : -1;
    if (i > 0 && column[i] == column[0]) column[i] = -1;
  }
  UNROLL for (int j = 0; j < K; ++j) {
    row[j] = p < s.points ? point.axis[1].index[j] >> lists.log_height : -1;
    bool listed = false;
    UNROLL for (int i = 0; i < j; ++i) listed = listed || row[i] == row[j];
    if (listed) row[j] = -1;
  }
  UNROLL for (int i = 0; i < TAPS; ++i) {
    const int x = column[i % K], y = row[i / K], tile = x < 0 || y < 0 ? -1 : y * lists.across + x;
    if (!__any_sync(~0u, tile >= 0)) continue;
    const unsigned together = __match_any_sync(~0u, tile), before = together & ((1u << threadIdx.x % 32) - 1);
    const int64_t index = static_cast<int64_t>(n) * lists.tiles + tile;
    int place = 0;
    if (tile >= 0 && before == 0) {
      place = atomicAdd(lists.counts + index * Lists::kApart, __popc(together));
      ++firsts;
    }
    place = __shfl_sync(~0u, place, __ffs(together) - 1) + __popc(before);
    if (tile < 0) continue;
    if (place < lists.length) {
      lists.points[index * lists.length + place] = p;
    } else {
      atomicOr(lists.runs + n, Lists::kFull);
    }
  }
  const int all = __syncthreads_count(firsts > 0);
  if (threadIdx.x == 0) atomicAdd(lists.runs + n, all);
}

// An entry of a pixel's list: its weight in a point, the index of the point's values, and the index of the next entry.
struct alignas(8) Link {
  static constexpr int kNone = 0xffff;
  float weight;
  uint16_t value, next;
};

template <class T, int W>
size_t owner_memory(const Lists& lists) {
  return lists.length * 4 * sizeof(Link) + (lists.length + 8) * sizeof(Vec<T, W>) +
         (sizeof(int) << (lists.log_width + lists.log_height));
}

// Grid: tiles x chunks of channels x images; W channels at a time. output: (N, C, pixels), contiguous. pairs: two
// pixels can be stored at once. A channel of the output's gradient must be less than 2^32 bytes.
template <class T, int W>
__global__ void __launch_bounds__(kOwnerThreads, W == 8 ? 3 : 4)
    owner_kernel(Space s, Lists lists, Gradient<T> grad, T* __restrict__ output, int batch, int channels, int chunk,
                 bool pairs) {
  constexpr int TAPS = 4, SHARE = 1024 / kOwnerThreads;
  extern __shared__ uint4 memory_of_block[];
  const int length = lists.length;
  Link* links = reinterpret_cast<Link*>(memory_of_block);                  // (TAPS, length)
  Vec<T, W>* values = reinterpret_cast<Vec<T, W>*>(links + TAPS * length);  // (length + 8), those of even points first
  int* heads = reinterpret_cast<int*>(values + length + 8);             // (height, width)
  const auto value_of = [&](int i) { return (i & 1) * (length / 2 + 4) + (i >> 1); };
  start_next();
  const int tile_y = blockIdx.x / lists.across, tile_x = blockIdx.x - tile_y * lists.across;
  const int width = 1 << lists.log_width, height = 1 << lists.log_height;
  const int left = tile_x * width, top = tile_y * height;
  const int begin = blockIdx.y * chunk, end = min(begin + chunk, channels);
  const int64_t pixels = static_cast<int64_t>(s.size[0]) * lists.height;
  wait_for_previous();
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (lists.runs[n] > lists.most) continue;
    const int64_t index = static_cast<int64_t>(n) * lists.tiles + blockIdx.x;
    const int count = lists.counts[index * Lists::kApart];
    __syncthreads();
    for (int i = threadIdx.x; i < width * height; i += kOwnerThreads) heads[i] = Link::kNone;
    int points[SHARE];
    UNROLL for (int u = 0; u < SHARE; ++u) {
      const int i = threadIdx.x + u * kOwnerThreads;
      points[u] = load_if<int, 1>(lists.points + index * length + i, i < count).at[0];
    }
    __syncthreads();
    uint32_t offsets[SHARE];  // bytes
    UNROLL for (int u = 0; u < SHARE; ++u) {
      const int i = threadIdx.x + u * kOwnerThreads;
      offsets[u] = static_cast<uint32_t>(points[u] * grad.point * sizeof(T));
      if (i >= count) continue;
      const Point<TAPS> point = locate<TAPS>(s, n, points[u]);
      UNROLL for (int k = 0; k < TAPS; ++k) {
        const int x = point.axis[0].index[Point<TAPS>::at(k, 0)] - left, y = point.axis[1].index[k / 2] - top;
        if (static_cast<unsigned>(x) >= width || static_cast<unsigned>(y) >= height) continue;
        const int link = k * length + i;
        const int next = atomicExch(heads + y * width + x, link);
        links[link] = {point.weight(k), static_cast<uint16_t>(value_of(i)), static_cast<uint16_t>(next)};
      }
    }
    Vec<T, W> next[SHARE];
    const auto fetch = [&](int c) {  // threads without a point read offset 0
      UNROLL for (int u = 0; u < SHARE; ++u) {
        if (u * kOwnerThreads >= count) break;
        const char* source = reinterpret_cast<const char*>(grad.data + n * grad.image + c * grad.channel);
        UNROLL for (int k = 0; k < W; ++k) {
          if (c + k < end) next[u].at[k] = load_if<T, 1>(reinterpret_cast<const T*>(source + offsets[u]), true).at[0];
          source += grad.channel * sizeof(T);
        }
      }
    };
    fetch(begin);
    for (int c = begin; c < end; c += W) {
      __syncthreads();
      UNROLL for (int u = 0; u < SHARE; ++u) {
        const int i = threadIdx.x + u * kOwnerThreads;
        if (i < count) values[value_of(i)] = next[u];
      }
      __syncthreads();
      if (c + W < end) fetch(c + W);
      for (int i = 2 * threadIdx.x; i < width * height; i += 2 * kOwnerThreads) {
        const int x = left + (i & (width - 1)), y = top + (i >> lists.log_width);
        if (x >= s.size[0] || y >= lists.height) continue;
        float sum[2][W] = {};
        int link[2] = {heads[i], heads[i + 1]};
        while (link[0] != Link::kNone || link[1] != Link::kNone) {
          UNROLL for (int k = 0; k < 2; ++k) {
            if (link[k] == Link::kNone) continue;
            const Link l = links[link[k]];
            const Vec<T, W> v = values[l.value];
            grad.format.known([&](const auto& format) {
              UNROLL for (int j = 0; j < W; ++j) sum[k][j] = fmaf(l.weight, format.number(v.at[j]), sum[k][j]);
            });
            link[k] = l.next;
          }
        }
        T* target = output + (static_cast<int64_t>(n) * channels + c) * pixels + y * s.size[0] + x;
        UNROLL for (int k = 0; k < W; ++k, target += pixels) {
          if (c + k >= end) break;
          const Vec<T, 2> both{grad.format.rounded(sum[0][k]), grad.format.rounded(sum[1][k])};
          if (pairs) {
            store(target, both);
          } else {
            target[0] = both.at[0];
            if (x + 1 < s.size[0]) target[1] = both.at[1];
          }
        }
      }
    }
  }
}

}  // namespace svexport
