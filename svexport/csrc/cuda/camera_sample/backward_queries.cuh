// The first kernel of camera_sample's gradients: it computes the gradients per query, and lists the readers of pixels.
#pragma once

#include "camera_sample/sampling.cuh"
#include "camera_sample/tensors.h"

namespace svexport {
namespace {

struct Link {
  int pixel, rank;  // rank among the readers of the pixel; -1: no pixel
  float weight;     // of the pixel; sign bit set: some channels of the sample are NaN and have no gradient
};

struct Reader {
  int link;
  float weight;  // that of the link, times the sample's weight if there is one group
};

struct Backward {
  AnyFloat grad_output, grad_points, grad_lidar2img, grad_weights, grad_offsets;
  void* grad_maps[kMaxCameraLevels];
  int64_t pixels, first_pixel[kMaxCameraLevels];  // pixels of all levels are numbered consecutively
  int first_tile[kMaxCameraLevels + 1], tile_pixels[kMaxCameraLevels];
  int* counts;          // readers per pixel, then of all pixels
  int* firsts;          // index of the first reader of each pixel
  Link* links;          // (B, Q, samples, 4)
  Reader* readers;      // as many as links
  float* weights;       // (B, Q, samples, G), activated; set for seen samples only
  float* grad_sampled;  // (B, Q, samples, G): gradients of the activated weights
  float* image;         // (B, Q, cams, points, 3): gradients of x, y and depth
  float2* norms;        // (B, Q, G)
  int queries;
  bool any_map, any_place, deterministic;
};

// Prefix sums over runs of adjacent lanes: each lane gets the sum from lane `from` up to itself.
__device__ __forceinline__ float scan(float x, int from) {
  UNROLL for (int offset = 1; offset < 32; offset *= 2) {
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

// Maps the gradients of "image" to points: the gradients of the offsets, and their sum, that of the reference point.
__device__ __forceinline__ void write_place_gradient(const Params& p, const Backward& r, int64_t query, int b,
                                                     float* parts) {
  const float* image = r.image + query * p.cams * static_cast<int>(p.points_of.d) * 3;
  float sum[3] = {};
  for (int point = threadIdx.x; point < static_cast<int>(p.points_of.d); point += kThreads) {
    float grad[3] = {};
    for (int camera = 0; camera < p.cams; ++camera) {
      UNROLL for (int i = 0; i < 3; ++i) {
        const float g = image[(camera * static_cast<int>(p.points_of.d) + point) * 3 + i];
        if (g == 0) continue;  // not seen: the matrix need not be finite
        UNROLL for (int j = 0; j < 3; ++j) {
          const float m = p.lidar2img.get(b * p.lidar2img_stride[0] + camera * p.lidar2img_stride[1] +
                                          i * p.lidar2img_stride[2] + j * p.lidar2img_stride[3]);
          grad[j] = fmaf(g, m, grad[j]);
        }
      }
    }
    UNROLL for (int j = 0; j < 3; ++j) {
      if (r.grad_offsets.data) r.grad_offsets.set((query * static_cast<int>(p.points_of.d) + point) * 3 + j, grad[j]);
      sum[j] += grad[j];
    }
  }
  if (!r.grad_points.data) return;
  UNROLL for (int j = 0; j < 3; ++j) {
    sum[j] = warp_sum(sum[j]);
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
  __shared__ float2 grad_place[kThreads];   // gradients of u and v
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

  // A row, which is a warp or a part of one, works on all channels of a sample.
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
        UNROLL for (int i = 0; i < 4; ++i) {
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
        UNROLL for (int i = 0; i < kParts; ++i) {
          const int first = begin + i * stride + (kSplit ? lane >> 1 : lane * N), channel = min(first, p.channels - N);
          const bool active = live && first == channel;
          const T* grad_at = static_cast<const T*>(r.grad_output.data) + query * p.channels + channel;
          groups[i] = p.group_channels.divide(channel);
          grads[i] = load_if<T, N>(grad_at, active);
          pixels[i].read(s, active ? s.inside : 0, s.at + channel_offset<T, kSplit>(s.sc, 0, channel), column);
        }
        UNROLL for (int i = 0; i < kParts; ++i) {
          if (begin + i * stride >= p.channels) break;
          const int group = groups[i];
          if (begin + i == 0 || p.groups > 1) {
            const float2 norm = norms[group];
            const float logit = p.weights.get(logits + s.index * p.weights_stride[2] + group * p.weights_stride[3]);
            weight = activate(p.softmax, logit, norm.x) * (p.softmax ? norm.y : 1);
          }
          float by_weight = 0, by_x = 0, by_y = 0;
          UNROLL for (int n = 0; n < N; ++n) {
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
              UNROLL for (int j = 0; j < 4; ++j) u[j] = pixels[i].at(j < pixels[i].kPixels ? j : 0, n);
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
            // the lanes of a group are adjacent, after those of the previous channels
            const int before = group * static_cast<int>(p.group_channels.d) - (begin + i * stride);
            const int from_lane = row_start + max(0, kSplit ? 2 * before : before / N);
            const float sum = scan(grad_weight, from_lane);
            const int next = __shfl_down_sync(~0u, group, 1);
            const bool last = lane == (1 << p.row_shift) - 1 || next != group;
            grad_weight = 0;
            if (live && last) {
              grad_sampled[at + group] += sum;  // += because a group wider than a row ends in several lanes
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

}  // namespace
}  // namespace svexport
