// The gradients of camera_sample's maps, summed over the readers of each pixel, and of its matrices.
#pragma once

#include "camera_sample/backward_queries.cuh"

namespace svexport {
namespace {

// Assigns each pixel the start of its readers. The order of the pixels is arbitrary.
__global__ void __launch_bounds__(256) camera_sample_backward_firsts_kernel(const Backward __grid_constant__ r) {
  __shared__ int sums[8], base;
  const int64_t pixel = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int count = pixel < r.pixels ? r.counts[pixel] : 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = count;
  UNROLL for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(~0u, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == 31) sums[warp] = before;
  before -= count;
  __syncthreads();
  int total = 0;
  for (int w = 0; w < 8; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  if (threadIdx.x == 0) base = total ? atomicAdd(r.counts + r.pixels, total) : 0;
  __syncthreads();
  if (count) r.firsts[pixel] = base + before;
}

__global__ void __launch_bounds__(256)
    camera_sample_backward_readers_kernel(const Backward __grid_constant__ r, int links, bool with_weight) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= links) return;
  const Link link = r.links[i];
  if (link.rank >= 0) {
    r.readers[r.firsts[link.pixel] + link.rank] = {i, with_weight ? link.weight * r.weights[i >> 2] : link.weight};
  }
}

constexpr int kTileBytes = 128;  // per channel, at most: a cache line
constexpr int kTileChannels = 64;
constexpr int kTileThreads = 256;

// Which channels of a sample are NaN: bit i for channel + 32 * i.
template <class T>
__device__ __noinline__ uint32_t nan_channels(const Params& p, int queries, int sample, int channel, int end) {
  const int query = sample / p.samples, index = sample % p.samples, b = query / queries, q = query % queries;
  const Name name(p, index);
  const Level& map = p.levels[name.level];
  const Matrix matrix(p, b, name.camera);
  const Projection at = project(p, matrix, Point(p, b, q, name.point));
  const Sample s = sample_at(map, locate(p, map, at), b, name, index, 0);
  uint32_t nans = 0;
  for (int bit = 0; channel < end; ++bit, channel += 32) {
    Pixels<T, 1, false, false> pixels;
    pixels.read(s, s.inside, s.at + channel_offset<T, true>(s.sc, 0, channel), 0);
    float sum[1];
    pixels.sum(s, 0, sum);
    nans |= static_cast<uint32_t>(sum[0] != sum[0]) << bit;
  }
  return nans;
}

// Takes the next 32 readers of a pixel, one per lane; returns how many there are.
// in_order: takes those with the smallest links above `last`, the largest taken so far.
__device__ __forceinline__ int next_readers(const Reader* readers, int count, int begin, bool in_order, int& last,
                                            Reader& mine) {
  const int lane = threadIdx.x % 32;
  if (!in_order) {
    mine = begin + lane < count ? readers[begin + lane] : Reader{0, 0};
    return min(32, count - begin);
  }
  mine = {INT32_MAX, 0};
  for (int from = 0; from < count; from += 32) {
    const Reader candidate = from + lane < count ? readers[from + lane] : Reader{0, 0};
    for (int i = 0; i < min(32, count - from); ++i) {
      const Reader other = {__shfl_sync(~0u, candidate.link, i), __shfl_sync(~0u, candidate.weight, i)};
      if (other.link <= last) continue;
      const int before = __popc(__ballot_sync(~0u, mine.link < other.link));
      const Reader up = {__shfl_up_sync(~0u, mine.link, 1), __shfl_up_sync(~0u, mine.weight, 1)};
      if (lane >= before) mine = lane == before ? other : up;
    }
  }
  last = __shfl_sync(~0u, mine.link, 31);
  return min(32, count - begin);
}

// Grid: tiles of pixels of all levels and images x chunks of kTileChannels channels.
template <class T>
__global__ void __launch_bounds__(kTileThreads, 3)
    camera_sample_backward_maps_kernel(const Params __grid_constant__ p, const Backward __grid_constant__ r) {
  constexpr int kPixels = kTileBytes / sizeof(T);
  constexpr int kPitch = kPixels + 4 / sizeof(T);  // an odd number of banks
  constexpr int kAtOnce = sizeof(T) == 2 ? 4 : 2;  // readers per unrolled step, limited by registers
  __shared__ alignas(16) T tile[kTileChannels * kPitch];
  __shared__ int firsts[kPixels], counts[kPixels];

  int level = 0;
  while (static_cast<int>(blockIdx.x) >= r.first_tile[level + 1]) ++level;
  const Level& map = p.levels[level];
  const int64_t plane = static_cast<int64_t>(map.height) * map.width;
  const int tiles = static_cast<int>(ceil_div<int64_t>(plane, r.tile_pixels[level]));  // of an image
  const int image = (blockIdx.x - r.first_tile[level]) / tiles;
  const int64_t first = static_cast<int64_t>((blockIdx.x - r.first_tile[level]) % tiles) * r.tile_pixels[level];
  const int pixels = static_cast<int>(min(static_cast<int64_t>(r.tile_pixels[level]), plane - first));
  const int begin = blockIdx.y * kTileChannels, channels = min(kTileChannels, p.channels - begin);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  int count = 0;
  if (threadIdx.x < pixels) {
    const int64_t pixel = r.first_pixel[level] + image * plane + first + threadIdx.x;
    count = r.counts[pixel];
    counts[threadIdx.x] = count;
    firsts[threadIdx.x] = count ? r.firsts[pixel] : 0;
  }
  const bool read = __syncthreads_or(count);

  const uint32_t there = (lane < channels) | (lane + 32 < channels) << 1;  // whether channels lane and lane + 32 exist
  const int group[2] = {static_cast<int>(p.group_channels.divide(begin + min(lane, channels - 1))),
                        static_cast<int>(p.group_channels.divide(begin + min(lane + 32, channels - 1)))};
  for (int pixel = warp; read && pixel < pixels; pixel += kTileThreads / 32) {
    float sum[2] = {};
    const int all = counts[pixel];
    int last = -1;
    for (int done = 0; done < all; done += 32) {
      Reader mine;
      const int some = next_readers(r.readers + firsts[pixel], all, done, r.deterministic, last, mine);
      const auto add = [&](int i, float weight, uint32_t channels_there) {
        const int sample = __shfl_sync(~0u, mine.link, i) >> 2;
        const int64_t query = sample / p.samples;
        const T* grad = static_cast<const T*>(r.grad_output.data) + query * p.channels + begin + lane;
        UNROLL for (int j = 0; j < 2; ++j) {
          const float g = to_float(load_if<T, 1>(grad + 32 * j, channels_there >> j & 1).at[0]);
          const float factor = p.groups > 1 ? r.weights[static_cast<int64_t>(sample) * p.groups + group[j]] : 1;
          sum[j] = fmaf(weight * factor, g, sum[j]);
        }
      };
#pragma unroll kAtOnce
      for (int i = 0; i < some; ++i) {
        const float weight = __shfl_sync(~0u, mine.weight, i);
        add(i, weight, signbit(weight) ? 0 : there);
      }
      if (!__any_sync(~0u, lane < some && signbit(mine.weight))) continue;
#pragma unroll 1
      for (int i = 0; i < some; ++i) {
        const float weight = __shfl_sync(~0u, mine.weight, i);
        if (!signbit(weight)) continue;
        const uint32_t nans = nan_channels<T>(p, r.queries, __shfl_sync(~0u, mine.link, i) >> 2, begin + lane,
                                              begin + channels);
        add(i, -weight, there & ~nans);
      }
    }
    UNROLL for (int j = 0; j < 2; ++j) tile[(lane + 32 * j) * kPitch + pixel] = from_float<T>(sum[j]);
  }
  __syncthreads();
  T* out = static_cast<T*>(r.grad_maps[level]) + (static_cast<int64_t>(image) * p.channels + begin) * plane + first;
  for (int c = warp; c < channels; c += kTileThreads / 32) {
    if (sizeof(T) == 2 && plane % 2 == 0) {  // two pixels per store
      for (int i = 2 * lane; i < pixels; i += 64) {
        store(out + c * plane + i, read ? load<T, 2>(&tile[c * kPitch + i]) : Vec<T, 2>{});
      }
    } else {
      for (int i = lane; i < pixels; i += 32) out[c * plane + i] = read ? tile[c * kPitch + i] : from_float<T>(0);
    }
  }
}

// A block per matrix sums d(image) times the point.
__global__ void __launch_bounds__(kTileThreads)
    camera_sample_backward_lidar2img_kernel(const Params __grid_constant__ p, const Backward __grid_constant__ r) {
  __shared__ float parts[kTileThreads / 32][12];
  const int b = blockIdx.x / p.cams, camera = blockIdx.x % p.cams;
  const int64_t count = static_cast<int64_t>(r.queries) * p.points_of.d;
  float sum[12] = {};
  for (int64_t i = threadIdx.x; i < count; i += kTileThreads) {
    const int q = static_cast<int>(i / p.points_of.d), point = static_cast<int>(i % p.points_of.d);
    const int64_t query = static_cast<int64_t>(b) * r.queries + q;
    const float* image = r.image + ((query * p.cams + camera) * static_cast<int>(p.points_of.d) + point) * 3;
    if (image[0] == 0 && image[1] == 0 && image[2] == 0) continue;  // not seen: the point need not be finite
    const Point at(p, b, q, point);
    UNROLL for (int j = 0; j < 12; ++j) sum[j] += image[j / 4] * (j % 4 < 3 ? at.at[j % 4 < 3 ? j % 4 : 0] : 1);
  }
  UNROLL for (int j = 0; j < 12; ++j) {
    sum[j] = warp_sum(sum[j]);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][j] = sum[j];
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    float total = 0;
    for (int w = 0; w < kTileThreads / 32 && threadIdx.x < 12; ++w) total += parts[w][threadIdx.x];
    r.grad_lidar2img.set(blockIdx.x * 16 + threadIdx.x, total);
  }
}

}  // namespace
}  // namespace svexport
