// Shared by camera_sample and its gradients: projection of points, the pixels of a sample, activation of weights.
#pragma once

#include <type_traits>

#include "bilinear.cuh"
#include "camera_sample/launch.h"
#include "camera_sample/tactics.h"

namespace svexport {

using namespace camera;

// A block of kThreads computes channels of one query, in two steps with a barrier between them:
// 1. A thread per sample (camera, point and level) projects the point. Most cameras do not see it. For the samples that
//    are seen, the thread writes the address and the weights to shared memory.
// 2. Rows of threads, each thread with a few channels, read these samples and sum them.
constexpr int kWarps = kThreads / 32;

// Channels per thread. Vector: adjacent channels, read in one access; a thread reads both pixels of a row.
// Split: kPasses channels of any stride; two adjacent lanes read the two pixels of a row, which requests the fewest
// sectors of planes.
template <class T>
constexpr int kVector = 16 / sizeof(T);
constexpr int kMaxGroups = kThreads;  // per block, which has kThreads vectors or kThreads / 2 * kPasses channels

struct Level {
  const char* data;
  int64_t sb, sk;      // strides in bytes, of images and cameras
  int32_t sy, sx, sc;  // strides in bytes, of rows, columns and channels or blocks of channels
  int height, width;   // as sampled, that is after pooling
  float scale;
  bool int8, pool;
  uint8_t block_shift;  // log2 of the adjacent channels of a block: int8 in CHW32 or CHW4
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

// The sample of an index: (camera * points + point) * levels + level.
struct Name {
  uint32_t camera, point, level;

  __device__ __forceinline__ Name(const Params& p, uint32_t index) : camera(index) {
    level = p.levels_of.split(camera);
    point = p.points_of.split(camera);
  }
};

// The upper three rows of a camera's matrix.
struct Matrix {
  float at[12];

  __device__ __forceinline__ Matrix(const Params& p, int64_t b, uint32_t camera) {
    const int64_t from = b * p.lidar2img_stride[0] + camera * p.lidar2img_stride[1];
    UNROLL for (int i = 0; i < 12; ++i) {
      at[i] = p.lidar2img.get(from + i / 4 * p.lidar2img_stride[2] + i % 4 * p.lidar2img_stride[3]);
    }
  }
};

// A point, in metres.
struct Point {
  float at[3];

  Point() = default;
  __device__ __forceinline__ Point(const Params& p, int64_t b, int64_t q, uint32_t point) {
    const int64_t from = b * p.offsets_stride[0] + q * p.offsets_stride[1] + point * p.offsets_stride[2];
    float raw[6];
    UNROLL for (int i = 0; i < 3; ++i) {
      raw[i] = p.points.get(b * p.points_stride[0] + q * p.points_stride[1] + i * p.points_stride[2]);
      raw[3 + i] = p.offsets.get(from + i * p.offsets_stride[3], p.has_offsets);
    }
    *this = Point(p, raw);
  }
  // raw: the reference point in the range, 0 to 1, and the offset in metres, or 0.
  __device__ __forceinline__ Point(const Params& p, const float (&raw)[6]) {
    UNROLL for (int i = 0; i < 3; ++i) at[i] = __fadd_rn(__fadd_rn(__fmul_rn(raw[i], p.span[i]), p.low[i]), raw[3 + i]);
  }
};

struct Projection {
  float depth, u, v;  // u and v before they are clamped
  bool seen;
};

// Rounds every step as the reference does (no fused multiply-add, two divisions), so that both agree on what is seen.
__device__ __forceinline__ float along(float x, float y, float z, float w, const Point& point) {
  const float sum = __fadd_rn(__fmul_rn(point.at[0], x), __fmul_rn(point.at[1], y));
  return __fadd_rn(__fadd_rn(sum, __fmul_rn(point.at[2], z)), w);
}

__device__ __forceinline__ Projection divided(const Params& p, float x, float y, float depth) {
  Projection r{depth, 0, 0, depth > p.depth_eps};
  if (!r.seen) return r;
  r.u = __fdiv_rn(__fdiv_rn(x, depth), p.image_width);
  r.v = __fdiv_rn(__fdiv_rn(y, depth), p.image_height);
  if (p.in_image) {
    const float u = __fsub_rn(2 * r.u, 1), v = __fsub_rn(2 * r.v, 1);
    r.seen = u > -1 && u < 1 && v > -1 && v < 1;
  } else {
    r.seen = r.u == r.u && r.v == r.v;
  }
  return r;
}

__device__ __forceinline__ Projection project(const Params& p, const Matrix& m, const Point& point) {
  float image[3];
  UNROLL for (int i = 0; i < 3; ++i) {
    image[i] = along(m.at[4 * i], m.at[4 * i + 1], m.at[4 * i + 2], m.at[4 * i + 3], point);
  }
  return divided(p, image[0], image[1], image[2]);
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

// A sample that is seen: its address and its weights.
struct alignas(16) Sample {
  const char* at;   // channel 0 of the upper left pixel, which may lie outside the map
  int32_t sy, sx;   // strides of the map's rows and columns, in bytes
  float weight[4];  // of pixel 2*j + i; with integers, CodeWeights (2 numbers) and the factor
  uint16_t inside;  // that of Place
  uint16_t level;
  int index;
  int32_t sc;
  float factor;     // the activated weight, if there is one group and the activation is a sigmoid
};

__device__ __forceinline__ Sample sample_at(const Level& map, const Place& place, int64_t b, const Name& name,
                                            int index, float factor, bool integers = false) {
  Sample s;
  const int64_t y = static_cast<int64_t>(place.top) << map.pool, x = static_cast<int64_t>(place.left) << map.pool;
  s.at = map.data + b * map.sb + name.camera * map.sk + y * map.sy + x * map.sx;
  s.sy = map.sy;
  s.sx = map.sx;
  const float scale = integers ? 1 : map.scale, weight[2] = {(1 - place.fx) * scale, place.fx * scale};
  UNROLL for (int i = 0; i < 4; ++i) s.weight[i] = (i >> 1 ? place.fy : 1 - place.fy) * weight[i & 1];
  if (integers) {
    const CodeWeights codes(s.weight[0], s.weight[1], s.weight[2], s.weight[3]);
    s.weight[0] = codes.upper, s.weight[1] = codes.lower, s.weight[2] = map.scale / CodeWeights::kOne;
  }
  s.inside = static_cast<uint16_t>(place.inside);
  s.level = static_cast<uint16_t>(name.level);
  s.index = index;
  s.sc = map.sc;
  s.factor = factor;
  return s;
}

// Bytes from channel 0 of a pixel.
template <class T, bool kSplit>
__device__ __forceinline__ int64_t channel_offset(int32_t sc, int block_shift, int channel) {
  if (std::is_same<T, int8_t>::value) {
    return static_cast<int64_t>(channel >> block_shift) * sc + (channel & ((1 << block_shift) - 1));
  }
  return kSplit ? static_cast<int64_t>(channel) * sc : channel * static_cast<int>(sizeof(T));
}

// As torch's max_pool2d: NaN wins.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

// The pixels of a sample that one thread reads: all four, or the two of one column; 2x2 blocks of each if pooled.
template <class T, int N, bool kSplit, bool kPool, bool INTEGERS = false>
struct Pixels {
  static constexpr int kPixels = kSplit ? 2 : 4, kReads = kPool ? 4 : 1;
  Vec<T, N> v[kPixels][kReads];

  __device__ __forceinline__ void read(const Sample& s, uint32_t inside, const char* at, int column) {
    UNROLL for (int i = 0; i < kPixels; ++i) {
      const int row = kSplit ? i : i >> 1, col = kSplit ? column : i & 1;
      const char* pixel = at + (row ? static_cast<int64_t>(s.sy) << kPool : 0) +
                          (col ? static_cast<int64_t>(s.sx) << kPool : 0);
      UNROLL for (int j = 0; j < kReads; ++j) {
        const char* from = pixel + (j >> 1 ? s.sy : 0) + (j & 1 ? s.sx : 0);
        v[i][j] = load_if<T, N>(reinterpret_cast<const T*>(from), inside >> (2 * row + col) & 1);
      }
    }
  }
  __device__ __forceinline__ float at(int i, int n) const { return to_float(v[i][0].at[n]); }
  __device__ __forceinline__ void sum(const Sample& s, int column, float (&sums)[N]) const {
    if constexpr (INTEGERS) {
      const Vec<T, N> codes[] = {v[0][0], v[1][0], v[2][0], v[3][0]};
      UNROLL for (int n = 0; n < N; ++n) sums[n] = 0;
      add_scaled(sums, s.weight[2], CodeWeights(s.weight[0], s.weight[1]), codes);
      return;
    }
    UNROLL for (int i = 0; i < kPixels; ++i) {
      const float weight = kSplit ? (column ? s.weight[2 * i + 1] : s.weight[2 * i]) : s.weight[i];
      float x[kReads][N];
      UNROLL for (int j = 0; j < kReads; ++j) to_floats(v[i][j], x[j]);
      UNROLL for (int n = 0; n < N; ++n) {
        UNROLL for (int j = 1; j < kReads; ++j) x[0][n] = larger(x[j][n], x[0][n]);
        sums[n] = i == 0 ? weight * x[0][n] : fmaf(weight, x[0][n], sums[n]);
      }
    }
  }
};

// The state of a group's activation. Softmax: a weight is exp(logit - max) / sum. Sigmoid: sum is 1, or NaN if a logit
// is NaN: a weight of NaN makes its group NaN even where nothing is seen.
struct Norm {
  float max, sum;
};

__device__ __forceinline__ Norm merge(bool softmax, Norm a, Norm b) {
  if (!softmax) return {0, a.sum * b.sum};
  const float max = fmaxf(a.max, b.max);
  // an infinite maximum must not cause NaN before the end
  return {max, (a.max == max ? a.sum : a.sum * expf(a.max - max)) + (b.max == max ? b.sum : b.sum * expf(b.max - max))};
}

__device__ __forceinline__ float activate(bool softmax, float logit, float max) {
  const float e = expf(softmax ? logit - max : -logit);
  return softmax ? e : __fdividef(1, 1 + e);
}

// Begins the norms of `count` groups from `first` on: a partial norm per slot, in shared memory. Returns the slots.
__device__ __forceinline__ int partial_norms(const Params& p, int64_t logits, int first, int count, float2* parts) {
  const int width = min(count, kThreads), slots = kThreads / width, slot = threadIdx.x / width;
  const bool by_warp = !(width & (width - 1)) && width <= 32;  // merges the lanes of a group in registers first
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

// Compacts over a block: returns how many threads before this one are valid; total: how many in all. Has one barrier.
__device__ __forceinline__ int position(bool valid, int* counts, int& total) {
  const uint32_t ballot = __ballot_sync(~0u, valid);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = __popc(ballot);
  __syncthreads();
  int before = __popc(ballot & ((1u << threadIdx.x % 32) - 1));
  total = 0;
  UNROLL for (int w = 0; w < kWarps; ++w) {
    before += w < threadIdx.x / 32 ? counts[w] : 0;
    total += counts[w];
  }
  return before;
}

// Copies the strides of a tensor, 0 for dimensions of size 1, which broadcast.
template <int N>
__host__ __device__ inline void copy_strides(const Tensor& t, int64_t (&strides)[N]) {
  for (int i = 0; i < N; ++i) strides[i] = t.sizes[i] == 1 ? 0 : t.strides[i];
}

__host__ __device__ inline bool collapses(const Tensor& weights) {  // cams, points and levels into one dimension
  int64_t expected = -1;  // unknown until an axis is larger than 1
  for (int i = 4; i >= 2; --i) {
    if (weights.sizes[i] == 1) continue;
    if (expected >= 0 && weights.strides[i] != expected) return false;
    expected = weights.sizes[i] * weights.strides[i];
  }
  return true;
}

__host__ __device__ inline cudaError_t prepare(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
                                        const Tensor& lidar2img, const Tensor& weights, const Tensor& offsets,
                                        const CameraSampleOptions& options, const Tensor& output, Params& p) {
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
    const bool int8 = map.dtype == DType::kInt8, blocks = int8 && map.rank == 6;
    if ((!int8 && map.dtype != output.dtype) || map.rank != (blocks ? 6 : 5) ||
        (blocks && ((map.sizes[5] != 32 && map.sizes[5] != 4) || map.strides[5] != 1))) {
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
    level.block_shift = !blocks ? 0 : map.sizes[5] == 32 ? 5 : 2;
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
  p.weights_stride[2] = weights.strides[num_levels != 1 ? 4 : points != 1 ? 3 : 2];
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

}  // namespace svexport
