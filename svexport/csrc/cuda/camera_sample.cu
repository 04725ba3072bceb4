#include "camera_sample.h"

#include <type_traits>

#include "device.cuh"

namespace svexport {
namespace {

// A block of kThreads computes channels of one query, in two steps that a barrier separates:
// 1. a thread per sample, that is per camera, point and level, projects the point. Most cameras do not see it: what is
//    left goes into shared memory as where to read and with which weights;
// 2. rows of threads, one thread per few channels, read these samples and sum them.
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// Channels of a thread. Vector: neighbours in memory, read in one access; both pixels of a row by the same thread.
// Split: kPasses of them, whatever their stride, and the two pixels of a row by two lanes beside each other: planes are
// read as few separate sectors as there are.
constexpr int kPasses = 4;
template <class T>
constexpr int kVector = 16 / sizeof(T);
constexpr int kMaxGroups = kThreads * 2;  // in a block's channels: kThreads vectors, or kThreads / 2 * kPasses channels

struct Level {
  const char* data;
  int64_t sb, sk;      // bytes, from image to image and camera to camera
  int32_t sy, sx, sc;  // bytes; c: channel, or 32 of them in CHW32
  int height, width;   // as sampled: of the pooled map
  float scale;
  bool int8, pool;
};

struct Params {
  AnyFloat points, lidar2img, weights, offsets;
  void* output;
  int64_t points_stride[3], lidar2img_stride[4], weights_stride[4], offsets_stride[4], output_stride[3];
  // weights: b, q, sample, group
  Divider levels_of, points_of, group_channels;
  int cams, num_levels, samples, channels, groups;
  int row_shift;  // log2 of the threads that read a sample together
  float image_height, image_width, low[3], span[3], depth_eps, clamp_low, clamp_high;
  bool in_image, softmax, has_offsets;
  Level levels[kMaxCameraLevels];
};

// Which sample a number is: (camera * points + point) * levels + level.
struct Name {
  uint32_t camera, point, level;

  __device__ __forceinline__ Name(const Params& p, uint32_t index) : camera(index) {
    level = p.levels_of.split(camera);
    point = p.points_of.split(camera);
  }
};

// The place of a point in metres.
__device__ __forceinline__ void place_of(const Params& p, int64_t b, int64_t q, uint32_t point, float (&place)[3]) {
  float x[3], offset[3] = {};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    x[i] = p.points.get(b * p.points_stride[0] + q * p.points_stride[1] + i * p.points_stride[2]);
  }
  if (p.has_offsets) {
    const int64_t at = b * p.offsets_stride[0] + q * p.offsets_stride[1] + point * p.offsets_stride[2];
#pragma unroll
    for (int i = 0; i < 3; ++i) offset[i] = p.offsets.get(at + i * p.offsets_stride[3]);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) place[i] = __fadd_rn(__fadd_rn(__fmul_rn(x[i], p.span[i]), p.low[i]), offset[i]);
}

struct Projection {
  float depth, u, v;  // u and v before they are clamped
  bool seen;
};

// Rounded step by step as the reference is (no fused multiply-add, two divisions), so that both agree on what is seen.
__device__ __forceinline__ Projection project(const Params& p, int64_t b, uint32_t camera, const float (&place)[3]) {
  const int64_t at = b * p.lidar2img_stride[0] + camera * p.lidar2img_stride[1];
  float m[3][4], image[3];
#pragma unroll
  for (int i = 0; i < 12; ++i) {
    m[i / 4][i % 4] = p.lidar2img.get(at + i / 4 * p.lidar2img_stride[2] + i % 4 * p.lidar2img_stride[3]);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const float sum = __fadd_rn(__fmul_rn(place[0], m[i][0]), __fmul_rn(place[1], m[i][1]));
    image[i] = __fadd_rn(__fadd_rn(sum, __fmul_rn(place[2], m[i][2])), m[i][3]);
  }
  Projection r{image[2], 0, 0, image[2] > p.depth_eps};
  if (!r.seen) return r;
  r.u = __fdiv_rn(__fdiv_rn(image[0], r.depth), p.image_width);
  r.v = __fdiv_rn(__fdiv_rn(image[1], r.depth), p.image_height);
  if (p.in_image) {
    const float x = __fsub_rn(2 * r.u, 1), y = __fsub_rn(2 * r.v, 1);
    r.seen = x > -1 && x < 1 && y > -1 && y < 1;
  } else {
    r.seen = r.u == r.u && r.v == r.v;
  }
  return r;
}

__device__ __forceinline__ float clamped(const Params& p, float u) {
  return p.in_image ? u : fminf(fmaxf(u, p.clamp_low), p.clamp_high);
}

// The pixel to the upper left of a projected point on a level, and how far the point lies beyond it.
struct Place {
  int left, top;
  float fx, fy;
  uint32_t inside;  // bit 2*j + i: whether the pixel of row top + j, column left + i is in the map
};

__device__ __forceinline__ Place locate(const Params& p, const Level& map, const Projection& at) {
  const float x = __fsub_rn(__fmul_rn(clamped(p, at.u), static_cast<float>(map.width)), 0.5f);
  const float y = __fsub_rn(__fmul_rn(clamped(p, at.v), static_cast<float>(map.height)), 0.5f);
  const float left = floorf(x), top = floorf(y);
  const uint32_t in_x = (left >= 0 && left < map.width) | (left >= -1 && left < map.width - 1) << 1;
  const uint32_t in_y = (top >= 0 && top < map.height) | (top >= -1 && top < map.height - 1) << 2;
  const uint32_t rows = (in_y & 1 ? 3 : 0) | (in_y & 4 ? 12 : 0);
  return {static_cast<int>(left), static_cast<int>(top), x - left, y - top, in_x * 5 & rows};
}

// Where a sample is read and with which weights.
struct alignas(16) Sample {
  const char* at;   // the pixel to the upper left, its channel 0; maybe outside of the map
  int32_t sy, sx;   // to the next row and column, of the map
  float weight[4];  // of the pixels, by 2*j + i
  uint16_t inside;  // as of Place
  uint16_t level;
  int index;
  int32_t sc;
  float factor;     // its activated weight, if it has one only and that needs no other
};

__device__ __forceinline__ Sample sample_at(const Level& map, const Place& place, int64_t b, const Name& name, int index,
                                            float factor) {
  Sample s;
  const int64_t y = static_cast<int64_t>(place.top) << map.pool, x = static_cast<int64_t>(place.left) << map.pool;
  s.at = map.data + b * map.sb + name.camera * map.sk + y * map.sy + x * map.sx;
  s.sy = map.sy;
  s.sx = map.sx;
  const float weight[2] = {(1 - place.fx) * map.scale, place.fx * map.scale};
#pragma unroll
  for (int i = 0; i < 4; ++i) s.weight[i] = (i >> 1 ? place.fy : 1 - place.fy) * weight[i & 1];
  s.inside = static_cast<uint16_t>(place.inside);
  s.level = static_cast<uint16_t>(name.level);
  s.index = index;
  s.sc = map.sc;
  s.factor = factor;
  return s;
}

// From channel 0 of a pixel.
template <class T, bool kSplit>
__device__ __forceinline__ int64_t channel_offset(int32_t sc, int channel) {
  if (std::is_same<T, int8_t>::value) return static_cast<int64_t>(channel >> 5) * sc + (channel & 31);
  return kSplit ? static_cast<int64_t>(channel) * sc : channel * static_cast<int>(sizeof(T));
}

// As torch's max_pool2d: NaN wins.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

// What one thread reads of a sample: kPixels (of one column, or all four), or their 2x2 blocks.
template <class T, int N, bool kSplit, bool kPool>
struct Pixels {
  static constexpr int kPixels = kSplit ? 2 : 4, kReads = kPool ? 4 : 1;
  Vec<T, N> v[kPixels][kReads];

  __device__ __forceinline__ void read(const Sample& s, uint32_t inside, const char* at, int column) {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const int row = kSplit ? i : i >> 1, col = kSplit ? column : i & 1;
      const char* pixel = at + (row ? static_cast<int64_t>(s.sy) << kPool : 0) +
                          (col ? static_cast<int64_t>(s.sx) << kPool : 0);
#pragma unroll
      for (int j = 0; j < kReads; ++j) {
        const char* from = pixel + (j >> 1 ? s.sy : 0) + (j & 1 ? s.sx : 0);
        v[i][j] = load_if<T, N>(reinterpret_cast<const T*>(from), inside >> (2 * row + col) & 1);
      }
    }
  }
  __device__ __forceinline__ float at(int i, int n) const {
    float x = to_float(v[i][0].at[n]);
#pragma unroll
    for (int j = 1; j < kReads; ++j) x = larger(to_float(v[i][j].at[n]), x);
    return x;
  }
  __device__ __forceinline__ void sum(const Sample& s, int column, float (&sums)[N]) const {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const float weight = kSplit ? (column ? s.weight[2 * i + 1] : s.weight[2 * i]) : s.weight[i];
#pragma unroll
      for (int n = 0; n < N; ++n) sums[n] = i == 0 ? weight * at(i, n) : fmaf(weight, at(i, n), sums[n]);
    }
  }
};

// What the logits of a group become weights by. Softmax: exp(logit - max) * scale. Sigmoid: scale is 1, or NaN if a
// logit is: a weight of NaN makes its group NaN even where nothing is seen.
struct Norm {
  float max, sum;
};

__device__ __forceinline__ Norm merge(bool softmax, Norm a, Norm b) {
  if (!softmax) return {0, a.sum * b.sum};
  const float max = fmaxf(a.max, b.max);
  // an infinite maximum is no reason for NaN before the end
  return {max, (a.max == max ? a.sum : a.sum * expf(a.max - max)) + (b.max == max ? b.sum : b.sum * expf(b.max - max))};
}

__device__ __forceinline__ float activate(bool softmax, float logit, float max) {
  const float e = expf(softmax ? logit - max : -logit);
  return softmax ? e : __fdividef(1, 1 + e);
}

// First half of the norms of `count` groups from `first`: a part per slot, in shared memory. Returns the slots.
__device__ __forceinline__ int partial_norms(const Params& p, int64_t logits, int first, int count, float2* parts) {
  const int width = min(count, kThreads), slots = kThreads / width, slot = threadIdx.x / width;
  const bool by_warp = !(width & (width - 1)) && width <= 32;  // lanes of a group are merged in registers first
  for (int g = threadIdx.x % width; g < count; g += kThreads) {
    Norm norm = {p.softmax ? -INFINITY : 0.0f, p.softmax ? 0.0f : 1.0f};
#pragma unroll 4
    for (int i = slot < slots ? slot : p.samples; i < p.samples; i += slots) {
      const float logit = p.weights.get(logits + i * p.weights_stride[2] + (first + g) * p.weights_stride[3]);
      norm = merge(p.softmax, norm, p.softmax ? Norm{logit, 1} : Norm{0, logit == logit ? 1 : logit});
    }
    if (by_warp) {
#pragma unroll 1
      for (int lane = 16; lane >= width; lane /= 2) {
        const Norm other = {__shfl_xor_sync(~0u, norm.max, lane), __shfl_xor_sync(~0u, norm.sum, lane)};
        norm = merge(p.softmax, norm, other);
      }
      if (threadIdx.x % 32 < width) parts[threadIdx.x / 32 * count + g] = {norm.max, norm.sum};
    } else if (slot < slots) {
      parts[slot * count + g] = {norm.max, norm.sum};
    }
  }
  return by_warp ? kWarps : slots;
}

__device__ __forceinline__ void merge_norms(const Params& p, int count, int slots, const float2* parts, float2* norms) {
  for (int g = threadIdx.x; g < count; g += kThreads) {
    Norm norm = {parts[g].x, parts[g].y};
#pragma unroll 1
    for (int slot = 1; slot < slots; ++slot) {
      norm = merge(p.softmax, norm, {parts[slot * count + g].x, parts[slot * count + g].y});
    }
    norms[g] = {norm.max, p.softmax ? (isinf(norm.max) ? NAN : 1 / norm.sum) : norm.sum};
  }
}

// Where the valid ones go to stand side by side, in order, and how many they are. One barrier.
__device__ __forceinline__ int position(bool valid, int* counts, int& total) {
  const uint32_t ballot = __ballot_sync(~0u, valid);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = __popc(ballot);
  __syncthreads();
  int before = __popc(ballot & ((1u << threadIdx.x % 32) - 1));
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < threadIdx.x / 32 ? counts[w] : 0;
    total += counts[w];
  }
  return before;
}

// kOthers: some levels are pooled or int8.
template <class T, int N, bool kSplit, bool kOthers>
__global__ void __launch_bounds__(kThreads, kOthers ? 1 : kSplit ? 6 : 7)
    camera_sample_kernel(const __grid_constant__ Params p) {
  constexpr int kParts = kSplit ? kPasses : 1;
  constexpr int kSums = kThreads * (kSplit ? kPasses / 2 : N);
  __shared__ Sample samples[kThreads];
  __shared__ float sums[kSums > 2 * kMaxGroups ? kSums : 2 * kMaxGroups];
  __shared__ float2 norms[kMaxGroups];
  __shared__ int counts[kWarps];

  const int q = blockIdx.x, b = blockIdx.y;
  const int rows = kThreads >> p.row_shift, row = threadIdx.x >> p.row_shift;
  const int lane = threadIdx.x & ((1 << p.row_shift) - 1), column = kSplit ? lane & 1 : 0;
  const int stride = kSplit ? 1 << p.row_shift >> 1 : 0;  // between the channels of a thread
  const int chunk = kSplit ? stride * kPasses : N << p.row_shift;
  const int begin = blockIdx.z * chunk, end = min(begin + chunk, p.channels);
  const int64_t logits = b * p.weights_stride[0] + q * p.weights_stride[1];
  const bool simple = !p.softmax && p.groups == 1;  // a weight is the sigmoid of a number: nothing to do before

  int first_group = 0, groups = 1, slots = 0;
  if (!simple) {
    first_group = p.group_channels.divide(begin);
    groups = p.group_channels.divide(end - 1) - first_group + 1;
    slots = partial_norms(p, logits, first_group, groups, reinterpret_cast<float2*>(sums));
  }

  int channel[kParts], group[kParts];
  float sum[kParts][N] = {};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    // those beyond the end repeat the last and are not written
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
      float place[3];
      place_of(p, b, q, name.point, place);
      const Projection at = project(p, b, name.camera, place);
      if (at.seen) {
        const Level& map = p.levels[name.level];
        mine = sample_at(map, locate(p, map, at), b, name, index, activate(false, logit, 0));
      }
      nan |= logit != logit;
    }
    if (base > 0) __syncthreads();  // the samples before have been read
    int count;
    const int at = position(mine.inside != 0, counts, count);
    if (mine.inside) samples[at] = mine;
    if (base == 0 && !simple) merge_norms(p, groups, slots, reinterpret_cast<const float2*>(sums), norms);
    __syncthreads();

#pragma unroll 2
    for (int k = row; k - row < count; k += rows) {  // as often in every row: lanes exchange below
      const bool live = k < count;
      const Sample& s = samples[live ? k : 0];
      const uint32_t inside = live ? s.inside : 0;
      const auto add = [&](auto* stored, auto pool) {
        using S = element_t<decltype(stored)>;
        Pixels<S, N, kSplit, pool.value> pixels[kParts];
        float factor[kParts];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const char* from = s.at + channel_offset<S, kSplit>(s.sc, channel[i]);
          pixels[i].read(s, begin + i * stride < end ? inside : 0, from, column);
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          factor[i] = i == 0 ? s.factor : factor[0];
          if (simple || (i > 0 && p.groups == 1)) continue;
          const float logit = p.weights.get(logits + s.index * p.weights_stride[2] + group[i] * p.weights_stride[3]);
          factor[i] = activate(p.softmax, logit, norms[group[i] - first_group].x);
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          float v[N];
          pixels[i].sum(s, column, v);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            if (kSplit) v[n] += __shfl_xor_sync(~0u, v[n], 1);
            if (live && v[n] == v[n]) sum[i][n] = fmaf(factor[i], v[n], sum[i][n]);
          }
        }
      };
      T* stored = nullptr;
      int8_t* codes = nullptr;
      const Level& map = p.levels[kOthers ? s.level : 0];
      if (!kOthers || !(map.int8 || map.pool)) {
        add(stored, std::false_type{});
      } else if (!map.int8) {
        add(stored, std::true_type{});
      } else if (!map.pool) {
        add(codes, std::false_type{});
      } else {
        add(codes, std::true_type{});
      }
    }
  }

  // The sums of the rows, in order.
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
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

// ------------------------------------------------------------------ backward
//
// 1. A block per query reads the samples again: gradients of the weights, and of what the matrices map points to
//    ("image": x, y and depth). It lists, for every pixel, the samples that read it.
// 2. A block per few pixels sums what their lists say and writes their gradient, once and in whole lines: most pixels
//    are read by nobody, and nothing has to be cleared before or rounded after.
// 3. A block per camera sums the gradient of its matrix.

struct Link {
  int next;      // of the samples that read the same pixel; -1: none
  float weight;  // of the pixel; its sign bit: some channels of the sample are NaN and have no gradient
};

struct Backward {
  AnyFloat grad_output, grad_points, grad_lidar2img, grad_weights, grad_offsets;
  void* grad_maps[kMaxCameraLevels];
  int64_t grad_stride;                  // of grad_output, between queries
  int64_t first_pixel[kMaxCameraLevels];  // of the levels in heads
  int first_tile[kMaxCameraLevels + 1];
  int* heads;           // of every pixel of every level: the first link, -1: none
  Link* links;          // (B, Q, samples, 4)
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
__device__ __forceinline__ void write_weights_gradient(const Params& p, const Backward& r, int64_t query, int64_t logits,
                                                       float* parts) {
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
__global__ void __launch_bounds__(kThreads, 1)
    camera_sample_backward_kernel(const __grid_constant__ Params p, const __grid_constant__ Backward r) {
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
    Place place;
    mine.inside = 0;
    if (threadIdx.x < tile && index < p.samples) {
      const Name name(p, index);
      float at[3];
      place_of(p, b, q, name.point, at);
      const Projection projection = project(p, b, name.camera, at);
      const Level& map = p.levels[name.level];
      if (projection.seen) {
        place = locate(p, map, projection);
        mine = sample_at(map, place, b, name, index, 0);
      }
      if (mine.inside && r.grad_maps[name.level]) {
        const int64_t image_of = static_cast<int64_t>(b) * p.cams + name.camera;
        const int64_t corner = r.first_pixel[name.level] + (image_of * map.height + place.top) * map.width + place.left;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (mine.inside >> i & 1) {
            const int64_t link = (query * p.samples + index) * 4 + i;
            const int64_t pixel = corner + (i >> 1 ? map.width : 0) + (i & 1);
            r.links[link] = {atomicExch(r.heads + pixel, static_cast<int>(link)), mine.weight[i]};
          }
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
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          if (begin + i * stride >= p.channels) break;
          const int first = begin + i * stride + (kSplit ? lane >> 1 : lane * N), channel = min(first, p.channels - N);
          const bool active = live && first == channel;
          const int group = p.group_channels.divide(channel);
          const uint32_t inside = active ? s.inside : 0;
          const T* grad_at = static_cast<const T*>(r.grad_output.data) + query * r.grad_stride + channel;
          const Vec<T, N> g = load_if<T, N>(grad_at, active);
          if (begin + i == 0 || p.groups > 1) {
            const float2 norm = norms[group];
            const float logit = p.weights.get(logits + s.index * p.weights_stride[2] + group * p.weights_stride[3]);
            weight = activate(p.softmax, logit, norm.x) * (p.softmax ? norm.y : 1);
          }
          Pixels<T, N, kSplit, false> pixels;
          pixels.read(s, inside, s.at + channel_offset<T, kSplit>(s.sc, channel), column);
          float by_weight = 0, by_x = 0, by_y = 0;
#pragma unroll
          for (int n = 0; n < N; ++n) {
            const float grad = to_float(g.at[n]);
            float sum, dx, dy;
            if (kSplit) {
              const float above = pixels.at(0, n), below = pixels.at(1, n);
              sum = (column ? s.weight[1] : s.weight[0]) * above + (column ? s.weight[3] : s.weight[2]) * below;
              dx = (1 - fy) * above + fy * below;
              dx = column ? dx : -dx;
              dy = (column ? fx : 1 - fx) * (below - above);
            } else {
              float u[4];
#pragma unroll
              for (int j = 0; j < 4; ++j) u[j] = pixels.at(j < pixels.kPixels ? j : 0, n);
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
            // the lanes of a group lie side by side
            const int before = group * static_cast<int>(p.group_channels.d) - (begin + i * stride);  // channels before it in the row
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
        float at[3];
        place_of(p, b, q, name.point, at);
        const Projection projection = project(p, b, name.camera, at);
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

constexpr int kTileBytes = 128;  // of one channel: a line
constexpr int kTileChannels = 256;
constexpr int kTileThreads = 256;

// Whether channels of a sample are NaN: bit i for channel + 32 * i.
template <class T>
__device__ __noinline__ uint32_t nan_channels(const Params& p, int64_t queries, int64_t query, int index, int channel, int end) {
  const int64_t b = query / queries, q = query % queries;
  const Name name(p, index);
  const Level& map = p.levels[name.level];
  float at[3];
  place_of(p, b, q, name.point, at);
  const Sample s = sample_at(map, locate(p, map, project(p, b, name.camera, at)), b, name, index, 0);
  uint32_t nans = 0;
  for (int bit = 0; channel < end; ++bit, channel += 32) {
    Pixels<T, 1, false, false> pixels;
    pixels.read(s, s.inside, s.at + channel_offset<T, true>(s.sc, channel), 0);
    float sum[1];
    pixels.sum(s, 0, sum);
    nans |= static_cast<uint32_t>(sum[0] != sum[0]) << bit;
  }
  return nans;
}

// A block per tile of pixels of one image of one level, and up to kTileChannels channels.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    camera_sample_backward_maps_kernel(const __grid_constant__ Params p, const __grid_constant__ Backward r) {
  constexpr int kPixels = kTileBytes / sizeof(T);
  constexpr int kPitch = kPixels + 4 / sizeof(T);  // an odd number of banks
  constexpr int kSums = kTileChannels / 32;
  __shared__ T tile[kTileChannels * kPitch];
  __shared__ int heads[kPixels];

  int level = 0;
  while (static_cast<int>(blockIdx.x) >= r.first_tile[level + 1]) ++level;
  const Level& map = p.levels[level];
  const int64_t plane = static_cast<int64_t>(map.height) * map.width;
  const int tiles = static_cast<int>(ceil_div<int64_t>(plane, kPixels));  // of an image
  const int image = (blockIdx.x - r.first_tile[level]) / tiles;
  const int64_t first = static_cast<int64_t>((blockIdx.x - r.first_tile[level]) % tiles) * kPixels;
  const int pixels = static_cast<int>(min(static_cast<int64_t>(kPixels), plane - first));
  const int begin = blockIdx.y * kTileChannels, channels = min(kTileChannels, p.channels - begin);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  int head = -1;
  if (threadIdx.x < pixels) head = r.heads[r.first_pixel[level] + image * plane + first + threadIdx.x];
  if (threadIdx.x < kPixels) heads[threadIdx.x] = head;
  const bool read = __syncthreads_or(head >= 0);

  for (int pixel = warp; read && pixel < pixels; pixel += kTileThreads / 32) {
    float sum[kSums] = {};
    int last = -1;  // of the links in order that are done, if deterministic
    for (int link = heads[pixel]; link >= 0;) {
      // Up to 32 links, one per lane: the first of the list, or the smallest of those not done.
      int mine = INT32_MAX, count = 0;
      while (link >= 0 && (r.deterministic || count < 32)) {
        if (!r.deterministic) {
          if (lane == count) mine = link;
          ++count;
        } else if (link > last) {
          const int before = __popc(__ballot_sync(~0u, mine < link)), up = __shfl_up_sync(~0u, mine, 1);
          mine = lane < before ? mine : lane == before ? link : up;
        }
        link = r.links[link].next;
      }
      if (r.deterministic) {
        count = __popc(__ballot_sync(~0u, mine != INT32_MAX));
        last = __shfl_sync(~0u, mine, 31);  // INT32_MAX: that was all
        link = last == INT32_MAX ? -1 : heads[pixel];
      }
      const float weight = lane < count ? r.links[mine].weight : 0;
      for (int i = 0; i < count; ++i) {
        const int sample = __shfl_sync(~0u, mine, i) >> 2;
        const float factor = __shfl_sync(~0u, weight, i);
        const int64_t query = sample / p.samples;
        const uint32_t nans = __float_as_uint(factor) >> 31
                                  ? nan_channels<T>(p, r.queries, query, sample % p.samples, begin + lane, begin + channels)
                                  : 0;
        const T* grad = static_cast<const T*>(r.grad_output.data) + query * r.grad_stride + begin;
        const float* weights = r.weights + static_cast<int64_t>(sample) * p.groups;
        float by_weight = fabsf(factor) * weights[0];
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
          const int c = lane + 32 * j;
          if (c >= channels) break;
          if (p.groups > 1) by_weight = fabsf(factor) * weights[p.group_channels.divide(begin + c)];
          if (!(nans >> j & 1)) sum[j] = fmaf(by_weight, to_float(grad[c]), sum[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      if (lane + 32 * j < channels) tile[(lane + 32 * j) * kPitch + pixel] = from_float<T>(sum[j]);
    }
  }
  __syncthreads();
  T* out = static_cast<T*>(r.grad_maps[level]) + (static_cast<int64_t>(image) * p.channels + begin) * plane + first;
  for (int c = warp; c < channels; c += kTileThreads / 32) {
    if (sizeof(T) == 2 && plane % 2 == 0) {  // two at once
      for (int i = 2 * lane; i < pixels; i += 64) {
        const Vec<T, 2> v = read ? load<T, 2>(&tile[c * kPitch + i]) : Vec<T, 2>{};
        store(out + c * plane + i, v);
      }
    } else {
      for (int i = lane; i < pixels; i += 32) out[c * plane + i] = read ? tile[c * kPitch + i] : from_float<T>(0);
    }
  }
}

// A block per matrix: d(image) times the place.
__global__ void __launch_bounds__(kTileThreads)
    camera_sample_backward_lidar2img_kernel(const __grid_constant__ Params p, const __grid_constant__ Backward r) {
  __shared__ float parts[kTileThreads / 32][12];
  const int b = blockIdx.x / p.cams, camera = blockIdx.x % p.cams;
  const int64_t count = static_cast<int64_t>(r.queries) * p.points_of.d;
  float sum[12] = {};
  for (int64_t i = threadIdx.x; i < count; i += kTileThreads) {
    const int q = static_cast<int>(i / static_cast<int>(p.points_of.d)), point = static_cast<int>(i % static_cast<int>(p.points_of.d));
    const int64_t query = static_cast<int64_t>(b) * r.queries + q;
    const float* image = r.image + ((query * p.cams + camera) * static_cast<int>(p.points_of.d) + point) * 3;
    if (image[0] == 0 && image[1] == 0 && image[2] == 0) continue;  // not seen: wherever it is
    float at[3];
    place_of(p, b, q, point, at);
#pragma unroll
    for (int j = 0; j < 12; ++j) sum[j] = fmaf(image[j / 4], j % 4 < 3 ? at[j % 4 < 3 ? j % 4 : 0] : 1, sum[j]);
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

int log2_ceil(int64_t x) {
  int shift = 0;
  while ((int64_t{1} << shift) < x) ++shift;
  return shift;
}

// Strides of a tensor that broadcasts in its dimensions of size 1.
template <int N>
void copy_strides(const Tensor& t, int64_t (&strides)[N]) {
  for (int i = 0; i < N; ++i) strides[i] = t.sizes[i] == 1 ? 0 : t.strides[i];
}

bool collapses(const Tensor& weights) {  // cams, points and levels
  for (int i = 2; i < 4; ++i) {
    int64_t expected = weights.strides[4];
    for (int j = i + 1; j < 5; ++j) expected *= weights.sizes[j];
    if (weights.sizes[i] != 1 && weights.strides[i] != expected) return false;
  }
  return true;
}

// Whether every vector of channels is one aligned access, in one group.
bool vectors(const CameraLevel* levels, int num_levels, const Params& p, int64_t bytes, int64_t item_size) {
  const int64_t n = bytes / item_size;
  if (p.channels % n != 0 || p.group_channels.d % n != 0) return false;
  for (int l = 0; l < num_levels; ++l) {
    const Tensor& map = levels[l].map;
    if (!map.aligned(map.dtype == DType::kInt8 ? 5 : 2, map.dtype == DType::kInt8 ? n : bytes)) return false;
  }
  return true;
}

cudaError_t prepare(const CameraLevel* levels, int num_levels, const Tensor& reference_points, const Tensor& lidar2img,
                    const Tensor& weights, const Tensor& offsets, const CameraSampleOptions& options,
                    const Tensor& output, Params& p) {
  constexpr int64_t kMany = 1 << 30;
  const int64_t points = weights.sizes[3], groups = weights.sizes[5];
  if (num_levels < 1 || num_levels > kMaxCameraLevels || !is_float(reference_points) || !is_float(lidar2img) ||
      !is_float(weights) || !is_float(output) || (offsets.data != nullptr && !is_float(offsets)) ||
      !collapses(weights) || weights.sizes[0] > 65535 || weights.sizes[1] > kMany || output.sizes[2] > kMany ||
      weights.sizes[2] * points * num_levels > kMany || weights.sizes[2] * points == 0) {
    return cudaErrorNotSupported;
  }
  for (int l = 0; l < num_levels; ++l) {
    const Tensor& map = levels[l].map;
    const int64_t size = map.item_size();
    const bool int8 = map.dtype == DType::kInt8;
    if (int8 ? map.rank != 6 || map.sizes[5] != 32 || map.strides[5] != 1 : map.dtype != output.dtype) {
      return cudaErrorNotSupported;
    }
    for (int i = 2; i < 5; ++i) {
      if (map.sizes[i] > kMany || map.strides[i] * size > kMany) return cudaErrorNotSupported;
    }
    Level& level = p.levels[l];
    level.data = static_cast<const char*>(map.data);
    level.sb = map.strides[0] * size;
    level.sk = map.strides[1] * size;
    level.sc = static_cast<int32_t>(map.strides[2] * size);
    level.sy = static_cast<int32_t>(map.strides[3] * size);
    level.sx = static_cast<int32_t>(map.strides[4] * size);
    level.int8 = int8;
    level.pool = levels[l].pool;
    level.height = static_cast<int>(map.sizes[3]) >> level.pool;
    level.width = static_cast<int>(map.sizes[4]) >> level.pool;
    level.scale = int8 ? levels[l].scale : 1;
  }
  copy_strides(reference_points, p.points_stride);
  copy_strides(lidar2img, p.lidar2img_stride);
  copy_strides(output, p.output_stride);
  p.output = output.data;
  p.has_offsets = offsets.data != nullptr;
  if (p.has_offsets) copy_strides(offsets, p.offsets_stride);
  p.weights_stride[0] = weights.strides[0];
  p.weights_stride[1] = weights.strides[1];
  p.weights_stride[2] = weights.sizes[4] != 1 ? weights.strides[4] : points != 1 ? weights.strides[3] : weights.strides[2];
  p.weights_stride[3] = weights.strides[5];
  p.channels = static_cast<int>(output.sizes[2]);
  p.groups = static_cast<int>(groups);
  p.levels_of = Divider(num_levels);
  p.points_of = Divider(points < 1 ? 1 : points);
  p.group_channels = Divider(p.channels < 1 || groups < 1 ? 1 : p.channels / groups);
  p.cams = static_cast<int>(weights.sizes[2]);
  p.num_levels = num_levels;
  p.samples = static_cast<int>(p.cams * points * num_levels);
  p.image_height = static_cast<float>(options.image_size[0]);
  p.image_width = static_cast<float>(options.image_size[1]);
  for (int i = 0; i < 3; ++i) {
    p.low[i] = static_cast<float>(options.pc_range[i]);
    p.span[i] = static_cast<float>(options.pc_range[i + 3] - options.pc_range[i]);
  }
  p.depth_eps = static_cast<float>(options.depth_eps);
  p.clamp_low = static_cast<float>(options.uv_clamp[0]);
  p.clamp_high = static_cast<float>(options.uv_clamp[1]);
  p.in_image = options.in_image;
  p.softmax = options.activation == 1;
  return cudaSuccess;
}

}  // namespace

cudaError_t camera_sample(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
                          const Tensor& lidar2img, const Tensor& weights, const Tensor& offsets,
                          const CameraSampleOptions& options, const Tensor& output, cudaStream_t stream) {
  Params p{AnyFloat(reference_points), AnyFloat(lidar2img), AnyFloat(weights), AnyFloat(offsets)};
  const cudaError_t status =
      prepare(levels, num_levels, reference_points, lidar2img, weights, offsets, options, output, p);
  if (status != cudaSuccess || output.numel() == 0) return status;
  bool others = false;
  for (int l = 0; l < num_levels; ++l) others |= p.levels[l].int8 || p.levels[l].pool;
  return dispatch_float(output.dtype, [&](auto* t) {
    using T = element_t<decltype(t)>;
    const bool vector = vectors(levels, num_levels, p, 16, sizeof(T));
    const int64_t threads = vector ? p.channels / kVector<T> : 2 * int64_t{p.channels};
    p.row_shift = log2_ceil(threads < kThreads ? threads : kThreads);
    const int chunk = vector ? kVector<T> << p.row_shift : (1 << p.row_shift) / 2 * kPasses;
    const dim3 grid(static_cast<unsigned>(output.sizes[1]), static_cast<unsigned>(output.sizes[0]),
                    ceil_div(p.channels, chunk));
    if (vector) {
      others ? camera_sample_kernel<T, kVector<T>, false, true><<<grid, kThreads, 0, stream>>>(p)
             : camera_sample_kernel<T, kVector<T>, false, false><<<grid, kThreads, 0, stream>>>(p);
    } else {
      others ? camera_sample_kernel<T, 1, true, true><<<grid, kThreads, 0, stream>>>(p)
             : camera_sample_kernel<T, 1, true, false><<<grid, kThreads, 0, stream>>>(p);
    }
    return cudaGetLastError();
  });
}

namespace {

// Parts of the workspace, one after the other. Returns its size.
size_t divide(const CameraLevel* levels, int num_levels, const Tensor& weights, void* workspace, Backward& r) {
  size_t used = 0;
  const auto take = [&](auto*& part, int64_t count) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(static_cast<char*>(workspace) + used);
    used += (count * sizeof(*part) + 15) / 16 * 16;
  };
  int64_t pixels = 0;
  for (int l = 0; l < num_levels; ++l) {
    const int64_t* sizes = levels[l].map.sizes;
    r.first_pixel[l] = pixels;
    pixels += sizes[0] * sizes[1] * sizes[3] * sizes[4];
  }
  const int64_t queries = weights.sizes[0] * weights.sizes[1], pairs = queries * weights.sizes[2] * weights.sizes[3];
  take(r.heads, pixels);
  take(r.links, pairs * weights.sizes[4] * 4);
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
  r.grad_stride = p.channels;
  r.queries = static_cast<int>(weights.sizes[1]);
  r.deterministic = deterministic;
  r.any_place = gradients.reference_points.data || gradients.lidar2img.data || gradients.offsets.data;
  int64_t pixels = 0, tiles = 0;
  for (int l = 0; l < num_levels; ++l) {
    const Level& level = p.levels[l];
    if (level.int8 || level.pool) return cudaErrorNotSupported;
    const int64_t plane = static_cast<int64_t>(level.height) * level.width;
    r.grad_maps[l] = gradients.maps[l].data;
    r.any_map |= r.grad_maps[l] != nullptr;
    r.first_tile[l] = static_cast<int>(tiles);
    tiles += r.grad_maps[l] ? images * ceil_div<int64_t>(plane, kTileBytes / grad_output.item_size()) : 0;
    pixels += images * plane;
    if (tiles > INT32_MAX) return cudaErrorNotSupported;
  }
  r.first_tile[num_levels] = static_cast<int>(tiles);

  return dispatch_float(grad_output.dtype, [&](auto* t) {
    using T = element_t<decltype(t)>;
    if (r.any_map) {
      status = cudaMemsetAsync(r.heads, -1, pixels * sizeof(int), stream);
      if (status != cudaSuccess) return status;
    }
    const bool vector = vectors(levels, num_levels, p, 16, sizeof(T)) && grad_output.aligned(2, 16);
    const int64_t threads = vector ? p.channels / kVector<T> : 2 * int64_t{p.channels};
    p.row_shift = log2_ceil(threads < 1 ? 1 : threads < 32 ? threads : 32);
    if (queries > 0) {
      const dim3 blocks(static_cast<unsigned>(weights.sizes[1]), static_cast<unsigned>(weights.sizes[0]));
      vector ? camera_sample_backward_kernel<T, kVector<T>, false><<<blocks, kThreads, 0, stream>>>(p, r)
             : camera_sample_backward_kernel<T, 1, true><<<blocks, kThreads, 0, stream>>>(p, r);
    }
    if (tiles > 0) {
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
