// The gradients of camera_sample:
//
// 1. A block per query reads the samples again: gradients of the weights, and of what the matrices map points to
//    ("image": x, y and depth). It counts, for every pixel, the samples that read it, and numbers them.
// 2. These samples ("readers") are put side by side, pixel by pixel.
// 3. A block per few pixels sums what its readers say and writes the gradient, once and in whole sectors: most pixels
//    are read by nobody, and nothing has to be cleared before or rounded after.
// 4. A block per camera sums the gradient of its matrix.
#include <algorithm>

#include "camera_sample/sampling.cuh"
#include "camera_sample/tensors.h"

namespace svexport {
namespace {

struct Link {
  int pixel, rank;  // rank among the readers of the pixel; -1: no pixel
  float weight;     // of the pixel; its sign bit: some channels of the sample are NaN and have no gradient
};

struct Reader {
  int link;
  float weight;  // as of Link, times that of the sample if there is one group
};

struct Backward {
  AnyFloat grad_output, grad_points, grad_lidar2img, grad_weights, grad_offsets;
  void* grad_maps[kMaxCameraLevels];
  int64_t pixels, first_pixel[kMaxCameraLevels];  // of all levels, numbered
  int first_tile[kMaxCameraLevels + 1], tile_pixels[kMaxCameraLevels];
  int* counts;          // of the readers of each pixel, then of all
  int* firsts;          // where the readers of each pixel start
  Link* links;          // (B, Q, samples, 4)
  Reader* readers;      // as many
  float* weights;       // (B, Q, samples, G), activated; of seen samples only
  float* grad_sampled;  // (B, Q, samples, G): by the activated weights
  float* image;         // (B, Q, cams, points, 3)
  float2* norms;        // (B, Q, G)
  int queries;
  bool any_map, any_place, deterministic;
};

// The sums of runs of neighbouring lanes: for each lane those from lane `from` up to itself.
__device__ __forceinline__ float scan(float x, int from) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float before = __shfl_up_sync(~0u, x, offset);
    if (static_cast<int>(threadIdx.x % 32) - offset >= from) x += before;
  }
  return x;
}

// Softmax: d(logit) = weight * (d(weight) - sum of weight * d(weight)); sigmoid: weight * (1 - weight) * d(weight).
__device__ __forceinline__ void write_weights_gradient(const Params& p, const Backward& r, int64_t query,
                                                       int64_t logits, float* parts) {
  const float* grads = r.grad_sampled + query * p.samples * p.groups;
  const float2* norms = r.norms + query * p.groups;
  for (int first = 0; first < p.groups; first += kMaxGroups) {
    const int count = min(kMaxGroups, p.groups - first), width = min(count, kThreads);
    const int slots = min(kThreads / width, p.samples), slot = threadIdx.x / width;
    const auto each = [&](int g, auto&& f) {
      if (slot >= slots) return;
      const float2 norm = norms[first + g];
      for (int i = slot; i < p.samples; i += slots) {
        const float logit = p.weights.get(logits + i * p.weights_stride[2] + (first + g) * p.weights_stride[3]);
        const float weight = activate(p.softmax, logit, norm.x) * (p.softmax ? norm.y : 1);
        const int64_t at = static_cast<int64_t>(i) * p.groups + first + g;
        f(at, weight, grads[at]);
      }
    };
    if (p.softmax) {
      for (int g = threadIdx.x % width; g < count; g += kThreads) {
        float sum = 0;
        each(g, [&](int64_t, float weight, float grad) { sum = fmaf(weight, grad, sum); });
        if (slot < slots) parts[slot * count + g] = sum;
      }
      __syncthreads();
    }
    for (int g = threadIdx.x % width; g < count; g += kThreads) {
      float sum = 0;
      for (int i = 0; p.softmax && i < slots; ++i) sum += parts[i * count + g];
      each(g, [&](int64_t at, float weight, float grad) {
        r.grad_weights.set(query * p.samples * p.groups + at,
                           p.softmax ? weight * (grad - sum) : weight * (1 - weight) * grad);
      });
    }
    __syncthreads();
  }
}

// From the image to places: gradients of the offsets, and of the reference point, their sum.
__device__ __forceinline__ void write_place_gradient(const Params& p, const Backward& r, int64_t query, int b,
                                                     float* parts) {
  const float* image = r.image + query * p.cams * static_cast<int>(p.points_of.d) * 3;
  float sum[3] = {};
  for (int point = threadIdx.x; point < static_cast<int>(p.points_of.d); point += kThreads) {
    float grad[3] = {};
    for (int camera = 0; camera < p.cams; ++camera) {
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const float g = image[(camera * static_cast<int>(p.points_of.d) + point) * 3 + i];
        if (g == 0) continue;  // not seen: whatever the matrix is
#pragma unroll
        for (int j = 0; j < 3; ++j) {
          const float m = p.lidar2img.get(b * p.lidar2img_stride[0] + camera * p.lidar2img_stride[1] +
                                          i * p.lidar2img_stride[2] + j * p.lidar2img_stride[3]);
          grad[j] = fmaf(g, m, grad[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      if (r.grad_offsets.data) r.grad_offsets.set((query * static_cast<int>(p.points_of.d) + point) * 3 + j, grad[j]);
      sum[j] += grad[j];
    }
  }
  if (!r.grad_points.data) return;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], lane);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32 * 3 + j] = sum[j];
  }
  __syncthreads();
  if (threadIdx.x < 3) {
    float total = 0;
    for (int w = 0; w < kWarps; ++w) total += parts[w * 3 + threadIdx.x];
    r.grad_points.set(query * 3 + threadIdx.x, total * p.span[threadIdx.x]);
  }
}

template <class T, int N, bool kSplit>
__global__ void __launch_bounds__(kThreads, 4)
    camera_sample_backward_kernel(const Params __grid_constant__ p, const Backward __grid_constant__ r) {
  constexpr int kParts = kSplit ? kPasses : 1;
  __shared__ Sample samples[kThreads];
  __shared__ float2 beyond[kThreads];       // fx, fy of the samples
  __shared__ float2 grad_place[kThreads];   // by u and v
  __shared__ float parts[2 * kMaxGroups];
  __shared__ int counts[kWarps];

  const int64_t query = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int q = blockIdx.x, b = blockIdx.y;
  const int64_t logits = b * p.weights_stride[0] + q * p.weights_stride[1];
  const int pairs = p.cams * static_cast<int>(p.points_of.d);
  float* image = r.image + query * pairs * 3;
  float* weights = r.weights + query * p.samples * p.groups;
  float* grad_sampled = r.grad_sampled + query * p.samples * p.groups;
  float2* norms = r.norms + query * p.groups;

  for (int i = threadIdx.x; i < pairs * 3; i += kThreads) image[i] = 0;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(p.samples) * p.groups; i += kThreads) grad_sampled[i] = 0;
  for (int first = 0; first < p.groups; first += kMaxGroups) {
    const int count = min(kMaxGroups, p.groups - first);
    const int slots = partial_norms(p, logits, first, count, reinterpret_cast<float2*>(parts));
    __syncthreads();
    merge_norms(p, count, slots, reinterpret_cast<const float2*>(parts), norms + first);
    __syncthreads();
  }

  // One warp, or a part of it (a row), does all channels of a sample.
  const int rows = kThreads >> p.row_shift, row = threadIdx.x >> p.row_shift;
  const int lane = threadIdx.x & ((1 << p.row_shift) - 1), column = kSplit ? lane & 1 : 0;
  const int row_start = static_cast<int>(threadIdx.x % 32) - lane;
  const int stride = kSplit ? 1 << p.row_shift >> 1 : 0;
  const int chunk = kSplit ? stride * kPasses : N << p.row_shift;

  const int tile = kThreads / p.num_levels * p.num_levels;  // the levels of a point stay together
  for (int base = 0; base < p.samples; base += tile) {
    const int index = base + threadIdx.x;
    Sample mine;
    Place place{};
    mine.inside = 0;
    if (threadIdx.x < tile && index < p.samples) {
      const Name name(p, index);
      const Matrix matrix(p, b, name.camera);
      const Projection projection = project(p, matrix, Point(p, b, q, name.point));
      const Level& map = p.levels[name.level];
      if (projection.seen) {
        place = locate(p, map, projection);
        mine = sample_at(map, place, b, name, index, 0);
      }
      if (r.any_map) {
        const int64_t image_of = static_cast<int64_t>(b) * p.cams + name.camera;
        const int64_t corner = r.first_pixel[name.level] + (image_of * map.height + place.top) * map.width + place.left;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Link link{0, -1, 0};
          if (r.grad_maps[name.level] && mine.inside >> i & 1) {
            link.pixel = static_cast<int>(corner + (i >> 1 ? map.width : 0) + (i & 1));
            link.rank = atomicAdd(r.counts + link.pixel, 1);
            link.weight = mine.weight[i];
          }
          r.links[(query * p.samples + index) * 4 + i] = link;
        }
      }
    }
    if (base > 0) __syncthreads();
    int count;
    const int at = position(mine.inside != 0, counts, count);
    if (mine.inside) {
      samples[at] = mine;
      beyond[at] = {place.fx, place.fy};
    }
    __syncthreads();

    for (int k = row; k - row < count; k += rows) {
      const bool live = k < count;
      const Sample& s = samples[live ? k : 0];
      const float fx = beyond[live ? k : 0].x, fy = beyond[live ? k : 0].y;
      const int64_t at = static_cast<int64_t>(s.index) * p.groups;
      float grad_x = 0, grad_y = 0, grad_weight = 0, weight = 0;
      bool nan = false;
      for (int begin = 0; begin < p.channels; begin += chunk) {
        Pixels<T, N, kSplit, false> pixels[kParts];
        Vec<T, N> grads[kParts];
        int groups[kParts];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const int first = begin + i * stride + (kSplit ? lane >> 1 : lane * N), channel = min(first, p.channels - N);
          const bool active = live && first == channel;
          const T* grad_at = static_cast<const T*>(r.grad_output.data) + query * p.channels + channel;
          groups[i] = p.group_channels.divide(channel);
          grads[i] = load_if<T, N>(grad_at, active);
          pixels[i].read(s, active ? s.inside : 0, s.at + channel_offset<T, kSplit>(s.sc, 0, channel), column);
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          if (begin + i * stride >= p.channels) break;
          const int group = groups[i];
          if (begin + i == 0 || p.groups > 1) {
            const float2 norm = norms[group];
            const float logit = p.weights.get(logits + s.index * p.weights_stride[2] + group * p.weights_stride[3]);
            weight = activate(p.softmax, logit, norm.x) * (p.softmax ? norm.y : 1);
          }
          float by_weight = 0, by_x = 0, by_y = 0;
#pragma unroll
          for (int n = 0; n < N; ++n) {
            const float grad = to_float(grads[i].at[n]);
            float sum, dx, dy;
            if (kSplit) {
              const float above = pixels[i].at(0, n), below = pixels[i].at(1, n);
              sum = (column ? s.weight[1] : s.weight[0]) * above + (column ? s.weight[3] : s.weight[2]) * below;
              dx = (1 - fy) * above + fy * below;
              dx = column ? dx : -dx;
              dy = (column ? fx : 1 - fx) * (below - above);
            } else {
              float u[4];
#pragma unroll
              for (int j = 0; j < 4; ++j) u[j] = pixels[i].at(j < pixels[i].kPixels ? j : 0, n);
              sum = s.weight[0] * u[0] + s.weight[1] * u[1] + s.weight[2] * u[2] + s.weight[3] * u[3];
              dx = (1 - fy) * (u[1] - u[0]) + fy * (u[3] - u[2]);
              dy = (1 - fx) * (u[2] - u[0]) + fx * (u[3] - u[1]);
            }
            const float whole = kSplit ? sum + __shfl_xor_sync(~0u, sum, 1) : sum;
            if (whole == whole) {
              by_weight = fmaf(grad, sum, by_weight);
              by_x = fmaf(grad, dx, by_x);
              by_y = fmaf(grad, dy, by_y);
            } else {
              nan = true;
            }
          }
          grad_x = fmaf(weight, by_x, grad_x);
          grad_y = fmaf(weight, by_y, grad_y);
          grad_weight += by_weight;
          if (p.groups > 1) {
            // the lanes of a group lie side by side, behind those of the channels before it
            const int before = group * static_cast<int>(p.group_channels.d) - (begin + i * stride);
            const int from_lane = row_start + max(0, kSplit ? 2 * before : before / N);
            const float sum = scan(grad_weight, from_lane);
            const int next = __shfl_down_sync(~0u, group, 1);
            const bool last = lane == (1 << p.row_shift) - 1 || next != group;
            grad_weight = 0;
            if (live && last) {
              grad_sampled[at + group] += sum;  // the last lane is another where a group is wider than a row
              weights[at + group] = weight;
            }
            __syncwarp();
          }
        }
      }
      for (int other = 1 << p.row_shift >> 1; other > 0; other /= 2) {
        grad_x += __shfl_xor_sync(~0u, grad_x, other);
        grad_y += __shfl_xor_sync(~0u, grad_y, other);
        grad_weight += __shfl_xor_sync(~0u, grad_weight, other);
      }
      const uint32_t nans = __ballot_sync(~0u, nan) >> row_start & (~0u >> (32 - (1 << p.row_shift)));
      if (live && lane == 0) {
        grad_place[k] = {grad_x * p.levels[s.level].width, grad_y * p.levels[s.level].height};
        if (p.groups == 1) {
          grad_sampled[at] = grad_weight;
          weights[at] = weight;
        }
        if (nans && r.grad_maps[s.level]) {
          for (int i = 0; i < 4; ++i) {
            Link& link = r.links[(query * p.samples + s.index) * 4 + i];
            if (s.inside >> i & 1) link.weight = -link.weight;
          }
        }
      }
    }

    __syncthreads();
    if (r.any_place && threadIdx.x < count) {
      const Name name(p, samples[threadIdx.x].index);
      const auto pair_of = [&](int k) { return p.levels_of.divide(samples[k].index); };
      const uint32_t pair = pair_of(threadIdx.x);
      if (threadIdx.x == 0 || pair_of(threadIdx.x - 1) != pair) {
        float u = 0, v = 0;
        for (int k = threadIdx.x; k < count && pair_of(k) == pair; ++k) {
          u += grad_place[k].x;
          v += grad_place[k].y;
        }
        const Matrix matrix(p, b, name.camera);
        const Projection projection = project(p, matrix, Point(p, b, q, name.point));
        if (clamped(p, projection.u) != projection.u) u = 0;
        if (clamped(p, projection.v) != projection.v) v = 0;
        image[pair * 3] = u / projection.depth / p.image_width;
        image[pair * 3 + 1] = v / projection.depth / p.image_height;
        image[pair * 3 + 2] = -(u * projection.u + v * projection.v) / projection.depth;
      }
    }
  }
  __syncthreads();
  if (r.grad_weights.data) write_weights_gradient(p, r, query, logits, parts);
  if (r.grad_points.data || r.grad_offsets.data) write_place_gradient(p, r, query, b, parts);
}

// Where the readers of each pixel start, in any order of the pixels.
__global__ void __launch_bounds__(256) camera_sample_backward_firsts_kernel(const Backward __grid_constant__ r) {
  __shared__ int sums[8], base;
  const int64_t pixel = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int count = pixel < r.pixels ? r.counts[pixel] : 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = count;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
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

constexpr int kTileBytes = 128;  // of one channel, at most: a line
constexpr int kTileChannels = 64;
constexpr int kTileThreads = 256;

// Whether channels of a sample are NaN: bit i for channel + 32 * i.
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

// The 32 readers of a pixel that come next, one per lane; returns how many of these there are.
// In order they are those with the smallest links above the last of those before.
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

// A block per tile of pixels of one image of one level, and kTileChannels channels.
template <class T>
__global__ void __launch_bounds__(kTileThreads, 3)
    camera_sample_backward_maps_kernel(const Params __grid_constant__ p, const Backward __grid_constant__ r) {
  constexpr int kPixels = kTileBytes / sizeof(T);
  constexpr int kPitch = kPixels + 4 / sizeof(T);  // an odd number of banks
  constexpr int kAtOnce = sizeof(T) == 2 ? 4 : 2;  // readers, as registers allow
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

  const uint32_t there = (lane < channels) | (lane + 32 < channels) << 1;  // of the channels lane and lane + 32
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
#pragma unroll
        for (int j = 0; j < 2; ++j) {
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
#pragma unroll
    for (int j = 0; j < 2; ++j) tile[(lane + 32 * j) * kPitch + pixel] = from_float<T>(sum[j]);
  }
  __syncthreads();
  T* out = static_cast<T*>(r.grad_maps[level]) + (static_cast<int64_t>(image) * p.channels + begin) * plane + first;
  for (int c = warp; c < channels; c += kTileThreads / 32) {
    if (sizeof(T) == 2 && plane % 2 == 0) {  // two at once
      for (int i = 2 * lane; i < pixels; i += 64) {
        store(out + c * plane + i, read ? load<T, 2>(&tile[c * kPitch + i]) : Vec<T, 2>{});
      }
    } else {
      for (int i = lane; i < pixels; i += 32) out[c * plane + i] = read ? tile[c * kPitch + i] : from_float<T>(0);
    }
  }
}

// A block per matrix: d(image) times the place.
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
    if (image[0] == 0 && image[1] == 0 && image[2] == 0) continue;  // not seen: wherever it is
    const Point at(p, b, q, point);
#pragma unroll
    for (int j = 0; j < 12; ++j) sum[j] += image[j / 4] * (j % 4 < 3 ? at.at[j % 4 < 3 ? j % 4 : 0] : 1);
  }
#pragma unroll
  for (int j = 0; j < 12; ++j) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], lane);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][j] = sum[j];
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    float total = 0;
    for (int w = 0; w < kTileThreads / 32 && threadIdx.x < 12; ++w) total += parts[w][threadIdx.x];
    r.grad_lidar2img.set(blockIdx.x * 16 + threadIdx.x, total);
  }
}

// Parts of the workspace, one after the other. Returns its size.
size_t divide(const CameraLevel* levels, int num_levels, const Tensor& weights, void* workspace, Backward& r) {
  size_t used = 0;
  const auto take = [&](auto*& part, int64_t count) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(static_cast<char*>(workspace) + used);
    used += (count * sizeof(*part) + 15) / 16 * 16;
  };
  r.pixels = 0;
  for (int l = 0; l < num_levels; ++l) {
    const int64_t* sizes = levels[l].map.sizes;
    r.first_pixel[l] = r.pixels;
    r.pixels += sizes[0] * sizes[1] * sizes[3] * sizes[4];
  }
  const int64_t queries = weights.sizes[0] * weights.sizes[1], pairs = queries * weights.sizes[2] * weights.sizes[3];
  take(r.counts, r.pixels + 1);
  take(r.firsts, r.pixels);
  take(r.links, pairs * weights.sizes[4] * 4);
  take(r.readers, pairs * weights.sizes[4] * 4);
  take(r.weights, weights.numel());
  take(r.grad_sampled, weights.numel());
  take(r.image, pairs * 3);
  take(r.norms, queries * weights.sizes[5]);
  return used;
}

}  // namespace

size_t camera_sample_backward_workspace(const CameraLevel* levels, int num_levels, const Tensor& weights) {
  const Tensor none{};
  const AnyFloat null{none};
  Backward r{null, null, null, null, null};
  return num_levels > kMaxCameraLevels ? 0 : divide(levels, num_levels, weights, nullptr, r);
}

cudaError_t camera_sample_backward(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
                                   const Tensor& lidar2img, const Tensor& weights, const Tensor& offsets,
                                   const CameraSampleOptions& options, const Tensor& grad_output,
                                   const CameraSampleGradients& gradients, bool deterministic, void* workspace,
                                   cudaStream_t stream) {
  Params p{AnyFloat(reference_points), AnyFloat(lidar2img), AnyFloat(weights), AnyFloat(offsets)};
  cudaError_t status =
      prepare(levels, num_levels, reference_points, lidar2img, weights, offsets, options, grad_output, p);
  if (status != cudaSuccess) return status;
  Backward r{AnyFloat(grad_output), AnyFloat(gradients.reference_points), AnyFloat(gradients.lidar2img),
             AnyFloat(gradients.weights), AnyFloat(gradients.offsets)};
  divide(levels, num_levels, weights, workspace, r);
  const int64_t queries = weights.sizes[0] * weights.sizes[1], images = weights.sizes[0] * p.cams;
  if (queries * p.samples > INT32_MAX / 4 || p.channels == 0 || !grad_output.contiguous()) return cudaErrorNotSupported;
  r.queries = static_cast<int>(weights.sizes[1]);
  r.deterministic = deterministic;
  r.any_place = gradients.reference_points.data || gradients.lidar2img.data || gradients.offsets.data;
  int64_t tiles = 0;
  for (int l = 0; l < num_levels; ++l) {
    const Level& level = p.levels[l];
    if (level.int8 || level.pool) return cudaErrorNotSupported;
    const int64_t plane = static_cast<int64_t>(level.height) * level.width;
    r.grad_maps[l] = gradients.maps[l].data;
    r.any_map |= r.grad_maps[l] != nullptr;
    r.first_tile[l] = static_cast<int>(tiles);
    // Pixels of small levels have many readers each: fewer of them to a block.
    r.tile_pixels[l] = static_cast<int>(kTileBytes / grad_output.item_size()) / (plane < 2048 ? 4 : 1);
    tiles += r.grad_maps[l] ? images * ceil_div<int64_t>(plane, r.tile_pixels[l]) : 0;
    if (tiles > INT32_MAX || r.pixels > INT32_MAX) return cudaErrorNotSupported;
  }
  r.first_tile[num_levels] = static_cast<int>(tiles);

  return dispatch_float(grad_output.dtype, [&](auto* t) {
    using T = element_t<decltype(t)>;
    if (r.any_map) {
      status = cudaMemsetAsync(r.counts, 0, (r.pixels + 1) * sizeof(int), stream);
      if (status != cudaSuccess) return status;
    }
    const bool vector = has_vectors(levels, num_levels, p.channels, p.groups, sizeof(T)) && grad_output.aligned(2, 16);
    const int64_t threads = vector ? p.channels / kVector<T> : 2 * int64_t{p.channels};
    p.row_shift = log2_ceil(threads < 1 ? 1 : threads < 32 ? threads : 32);
    if (queries > 0) {
      const dim3 blocks(static_cast<unsigned>(weights.sizes[1]), static_cast<unsigned>(weights.sizes[0]));
      vector ? camera_sample_backward_kernel<T, kVector<T>, false><<<blocks, kThreads, 0, stream>>>(p, r)
             : camera_sample_backward_kernel<T, 1, true><<<blocks, kThreads, 0, stream>>>(p, r);
    }
    if (tiles > 0) {
      const int links = static_cast<int>(queries * p.samples * 4);
      camera_sample_backward_firsts_kernel<<<static_cast<unsigned>(ceil_div<int64_t>(r.pixels, 256)), 256, 0, stream>>>(
          r);
      if (links > 0) {
        camera_sample_backward_readers_kernel<<<ceil_div(links, 256), 256, 0, stream>>>(r, links, p.groups == 1);
      }
      const dim3 grid(static_cast<unsigned>(tiles), ceil_div(p.channels, kTileChannels));
      camera_sample_backward_maps_kernel<T><<<grid, kTileThreads, 0, stream>>>(p, r);
    }
    if (r.grad_lidar2img.data && images > 0) {
      camera_sample_backward_lidar2img_kernel<<<static_cast<unsigned>(images), kTileThreads, 0, stream>>>(p, r);
    }
    return cudaGetLastError();
  });
}

}  // namespace svexport
