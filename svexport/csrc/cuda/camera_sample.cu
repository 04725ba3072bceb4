#include "camera_sample.h"

#include <algorithm>
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
constexpr int kPasses = 2;
template <class T>
constexpr int kVector = 16 / sizeof(T);
constexpr int kMaxGroups = kThreads;  // in a block's channels: kThreads vectors, or kThreads / 2 * kPasses channels

struct Level {
  const char* data;
  int64_t sb, sk;      // bytes, from image to image and camera to camera
  int32_t sy, sx, sc;  // bytes; c: channel, or a block of them
  int height, width;   // as sampled: of the pooled map
  float scale;
  bool int8, pool;
  uint8_t block_shift;  // log2 of the channels of a block, which are neighbours: int8 in CHW32 or CHW4
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

// Of a camera, its upper three rows.
struct Matrix {
  float at[12];

  __device__ __forceinline__ Matrix(const Params& p, int64_t b, uint32_t camera) {
    const int64_t from = b * p.lidar2img_stride[0] + camera * p.lidar2img_stride[1];
#pragma unroll
    for (int i = 0; i < 12; ++i) {
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
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      raw[i] = p.points.get(b * p.points_stride[0] + q * p.points_stride[1] + i * p.points_stride[2]);
      raw[3 + i] = p.offsets.get(from + i * p.offsets_stride[3], p.has_offsets);
    }
    *this = Point(p, raw);
  }
  // Of a place in the range and an offset, or 0.
  __device__ __forceinline__ Point(const Params& p, const float (&raw)[6]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) at[i] = __fadd_rn(__fadd_rn(__fmul_rn(raw[i], p.span[i]), p.low[i]), raw[3 + i]);
  }
};

struct Projection {
  float depth, u, v;  // u and v before they are clamped
  bool seen;
};

// Rounded step by step as the reference is (no fused multiply-add, two divisions), so that both agree on what is seen.
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
#pragma unroll
  for (int i = 0; i < 3; ++i) image[i] = along(m.at[4 * i], m.at[4 * i + 1], m.at[4 * i + 2], m.at[4 * i + 3], point);
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

__device__ __forceinline__ Sample sample_at(const Level& map, const Place& place, int64_t b, const Name& name,
                                            int index, float factor) {
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
__device__ __forceinline__ int64_t channel_offset(int32_t sc, int block_shift, int channel) {
  if (std::is_same<T, int8_t>::value) {
    return static_cast<int64_t>(channel >> block_shift) * sc + (channel & ((1 << block_shift) - 1));
  }
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
__global__ void __launch_bounds__(kThreads, kOthers ? 4 : kSplit ? 8 : 7)
    camera_sample_kernel(const Params __grid_constant__ p) {
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
      const Matrix matrix(p, b, name.camera);
      const Projection at = project(p, matrix, Point(p, b, q, name.point));
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
      const Level& map = p.levels[kOthers ? s.level : 0];
      const auto add = [&](auto* stored, auto pool) {
        using S = element_t<decltype(stored)>;
        Pixels<S, N, kSplit, pool.value> pixels[kParts];
        float factor[kParts];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const char* from = s.at + channel_offset<S, kSplit>(s.sc, map.block_shift, channel[i]);
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

// ------------------------------------------------------------------ planes
//
// Where the pixels of a row are neighbours and channels far apart, a sector has one or two pixels that a sample needs, and
// the samples ask for more sectors than L2 delivers in the time of all the rest. So a block reads kPlaneChannels channels
// for many queries, which find each other's sectors in L1. That every block projects all its queries costs less than a
// kernel that does so before. For as many queries as a block has threads, or fewer with several threads each:
// 1. a thread finds the cameras that may see its query;
// 2. these views become a list, by camera and band of the image, from top to bottom: neighbours in the list ask for the
//    same lines;
// 3. a warp takes 32 views: each lane divides, so that it is known where a view is and whether it counts; then lanes
//    beside each other read the two pixels of a row, others other views;
// 4. a thread sums the views of its query.
// In which order the views of a band are listed is left to chance; no sum depends on it.

constexpr int kPlaneThreads = 1024;
constexpr int kPlaneWarps = kPlaneThreads / 32;
constexpr int kPlaneChannels = 2;
constexpr int kPlaneLevels = 4, kPlaneCams = 16;  // at most
constexpr int kPlaneBands = 16;                   // of an image, one above the other
constexpr int64_t kPlaneSize = 1 << 17;           // of a level, at most
constexpr int64_t kLeastQueries = 256;            // of a block, or there is nothing to find in L1
constexpr int kMaxViews = 1088;                   // of a list: not fewer than a camera can have

struct Planes {
  int queries;
  int at_once;      // queries of a block
  int lane_shift;   // log2 of the threads of a query
  float bounds[2];  // of the image: width and height, and a little more
  float bands;      // per pixel of the image
  int vectors;      // of 16 bytes, that are the weights of a query; 0: those of all queries are not side by side
  bool fours;       // the weights of a view are one access
  bool floats;      // points and offsets are float32
  bool pairs;       // the output can be written two channels at once
};

// A level, as it is read.
struct alignas(16) PlaneLevel {
  float width, height;
  int to_camera;   // elements
  int to_channel;  // bytes
  const char* data;
};

struct PlanesShared {
  float4 matrices[kPlaneCams][3];
  PlaneLevel levels[kPlaneLevels];
  float places[3][kPlaneThreads];
  float2 values[kMaxViews];                 // of the views, of either channel
  uint32_t views[kMaxViews];                // which query: 10 bits, camera: 4, the view before of the same thread: 11
  int positions[kPlaneCams * kPlaneBands];  // how many views, then where the next goes
  int starts[kPlaneCams + 1];               // of the views of a camera
  uint32_t nan[2][kPlaneWarps];             // of 32 queries, bit by bit: which have a weight that is NaN
};
constexpr uint32_t kNoView = 2047;

// Adds 0 or, for what is not finite, NaN.
__device__ __forceinline__ void add_zero(const Vec<__half, 8>& v, float& sum) {
  const __half2* pairs = reinterpret_cast<const __half2*>(&v);
  const __half2 zero = __floats2half2_rn(0, 0);
  __half2 total = zero;
#pragma unroll
  for (int i = 0; i < 4; ++i) total = __hfma2(pairs[i], zero, total);
  sum += __low2float(total) + __high2float(total);
}
template <class T, int N>
__device__ __forceinline__ void add_zero(const Vec<T, N>& v, float& sum) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(to_float(v.at[i]), 0, sum);
}

// Weights are of the type of the maps.
template <class T>
__global__ void __launch_bounds__(kPlaneThreads, 1)
    camera_sample_planes_kernel(const Params __grid_constant__ p, const Planes __grid_constant__ r) {
  __shared__ PlanesShared s;
  const int b = blockIdx.z, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int lanes = 1 << r.lane_shift, mine = threadIdx.x >> r.lane_shift, part = lane & (lanes - 1);
  const int channel = blockIdx.x * kPlaneChannels, channels = min(p.channels - channel, kPlaneChannels);
  const uint32_t points = p.points_of.d;
  const T* logits = static_cast<const T*>(p.weights.data) + b * p.weights_stride[0] +
                    p.group_channels.divide(channel) * p.weights_stride[3];

  // What is read first, all at once.
  float number = 0;
  if (threadIdx.x < 12 * kPlaneCams) {
    const int camera = threadIdx.x / 12, i = threadIdx.x % 12;
    number = p.lidar2img.get(b * p.lidar2img_stride[0] + camera * p.lidar2img_stride[1] +
                                 i / 4 * p.lidar2img_stride[2] + i % 4 * p.lidar2img_stride[3],
                             camera < p.cams);
  }
  int first = blockIdx.y * r.at_once;
  const int step = gridDim.y * r.at_once;
  const auto own_query = [&] { return static_cast<uint32_t>(min(first + min(mine, r.at_once - 1), r.queries - 1)); };
  float raw[6];  // a point and its offset
  const auto own_point = [&](uint32_t point) {
    const uint32_t from = own_query() * static_cast<uint32_t>(p.points_stride[1]);
    const uint32_t offset =
        own_query() * static_cast<uint32_t>(p.offsets_stride[1]) + point * static_cast<uint32_t>(p.offsets_stride[2]);
    if (r.floats) {  // as they are, which is shorter
      const float* points_of = static_cast<const float*>(p.points.data) + b * p.points_stride[0];
      const float* offsets_of = static_cast<const float*>(p.offsets.data) + b * p.offsets_stride[0];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        raw[i] = load_if<float, 1>(points_of + (from + i * static_cast<uint32_t>(p.points_stride[2])), true).at[0];
        raw[3 + i] = load_if<float, 1>(offsets_of + (offset + i * static_cast<uint32_t>(p.offsets_stride[3])),
                                       p.has_offsets).at[0];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        raw[i] = p.points.get(b * p.points_stride[0] + from + i * p.points_stride[2]);
        raw[3 + i] = p.offsets.get(b * p.offsets_stride[0] + offset + i * p.offsets_stride[3], p.has_offsets);
      }
    }
  };
  own_point(0);
  if (threadIdx.x < 12 * kPlaneCams) reinterpret_cast<float*>(s.matrices)[threadIdx.x] = number;  // 0: sees nothing
  if (threadIdx.x < kPlaneCams * kPlaneBands) s.positions[threadIdx.x] = 0;
  if (threadIdx.x < 2 * kPlaneWarps) (&s.nan[0][0])[threadIdx.x] = 0;
  if (threadIdx.x < kPlaneLevels) {
    const int l = threadIdx.x;
    const Level& map = p.levels[l];
    const bool there = l < p.num_levels;
    const char* const data = map.data + b * map.sb + static_cast<int64_t>(channel) * map.sc;
    s.levels[l] = {static_cast<float>(there ? map.width : 0), static_cast<float>(there ? map.height : 0),
                   static_cast<int>(map.sk / static_cast<int>(sizeof(T))), channels > 1 ? map.sc : 0, data};
  }
  __syncthreads();

  // Weights that are NaN, before they are activated: then the sum is, whatever is seen.
  constexpr int kVectors = 3;
  Vec<T, kVector<T>> vectors[kVectors];
  const auto load_vector = [&](int i) {
    const T* all = logits + static_cast<uint32_t>(first) * static_cast<uint32_t>(p.weights_stride[1]);
    return load_if<T, kVector<T>>(all + kVector<T> * i, i < min(r.at_once, r.queries - first) * r.vectors);
  };
  const auto check_vector = [&](const Vec<T, kVector<T>>& v, int i, uint32_t* nan) {
    float nothing = 0;
    add_zero(v, nothing);
    if (nothing != 0) {  // infinite ones are not NaN
      bool any = false;
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) any |= to_float(v.at[j]) != to_float(v.at[j]);
      if (any) atomicOr(nan + i / r.vectors / 32, 1u << i / r.vectors % 32);
    }
  };

  float sums[kPlaneChannels] = {};
  int chunk = 0;
  for (uint32_t point = 0;;) {
    const bool live = mine < r.at_once && first + mine < r.queries;
    const bool last_point = point + 1 == points, end = last_point && first + step >= r.queries;
    if (point == 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) vectors[i] = load_vector(threadIdx.x + i * kPlaneThreads);
    }
    const Point at(p, raw);
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < 3; ++i) s.places[i][mine] = at.at[i];
    }
    uint32_t cameras = 0;  // those that may see the point
    uint64_t bands = 0;    // and where, 4 bits each
    const float4(*m)[3] = s.matrices + part;
#pragma unroll 2
    for (int camera = part; camera < p.cams; camera += lanes, m += lanes) {
      const float4 rows[3] = {m[0][0], m[0][1], m[0][2]};
      float image[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) image[i] = along(rows[i].x, rows[i].y, rows[i].z, rows[i].w, at);
      // None that counts is missed: width and height are larger by more than the divisions round.
      if (live & (image[2] > p.depth_eps) & (image[0] > 0) & (image[1] > 0) & (image[0] < image[2] * r.bounds[0]) &
          (image[1] < image[2] * r.bounds[1])) {
        const int band = max(0, min(static_cast<int>(__fdividef(image[1], image[2]) * r.bands), kPlaneBands - 1));
        atomicAdd(&s.positions[camera * kPlaneBands + band], 1);
        cameras |= 1u << camera;
        bands |= static_cast<uint64_t>(band) << 4 * camera;
      }
    }
    __syncthreads();

    if (warp == 0) {  // where each place of the list begins
      constexpr int kOwn = kPlaneCams * kPlaneBands / 32;
      int counts[kOwn], total = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        counts[i] = s.positions[lane * kOwn + i];
        total += counts[i];
      }
      int until = total;
#pragma unroll
      for (int other = 1; other < 32; other *= 2) {
        const int before = __shfl_up_sync(~0u, until, other);
        until += lane >= other ? before : 0;
      }
      int next = until - total;
      if (lane * kOwn % kPlaneBands == 0) s.starts[lane * kOwn / kPlaneBands] = next;
      if (lane == 31) s.starts[kPlaneCams] = until;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        s.positions[lane * kOwn + i] = next;
        next += counts[i];
      }
    }
    if (point == 0) {
      uint32_t* const nan = s.nan[chunk & 1];
      if (r.vectors > 0) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) check_vector(vectors[i], threadIdx.x + i * kPlaneThreads, nan);
        for (int i = threadIdx.x + kVectors * kPlaneThreads; i < min(r.at_once, r.queries - first) * r.vectors;
             i += kPlaneThreads) {
          check_vector(load_vector(i), i, nan);
        }
      } else if (live) {
        const T* own = logits + own_query() * static_cast<uint32_t>(p.weights_stride[1]);
        bool any = false;
#pragma unroll 4
        for (int i = part; i < p.samples; i += lanes) {
          const float logit = to_float(own[i * static_cast<uint32_t>(p.weights_stride[2])]);
          any |= logit != logit;
        }
        if (any) atomicOr(nan + mine / 32, 1u << mine % 32);
      }
    }
    __syncthreads();

    // As many cameras at once as the list has room for.
    const int until = lane < p.cams ? s.starts[lane + 1] : 0;  // views of the cameras up to this lane's
    for (int from = 0, done = 0; from < p.cams;) {
      const int to = __popc(__ballot_sync(~0u, lane < p.cams && until - done <= kMaxViews));
      const int count = __shfl_sync(~0u, until, to - 1) - done;
      uint32_t last = kNoView;
      for (uint32_t left = cameras & ((1u << to) - 1) & ~((1u << from) - 1); left; left &= left - 1) {
        const int camera = __ffs(left) - 1, band = static_cast<int>(bands >> 4 * camera) & 15;
        const int index = atomicAdd(&s.positions[camera * kPlaneBands + band], 1) - done;
        s.views[index] = mine | camera << 10 | last << 14;
        last = index;
      }
      __syncthreads();

      if (to == p.cams) {
        if (threadIdx.x < kPlaneCams * kPlaneBands) s.positions[threadIdx.x] = 0;
        if (threadIdx.x < kPlaneWarps) s.nan[~chunk & 1][threadIdx.x] = 0;
      }
      const int column = lane & 1;
#pragma unroll 1
      for (int group = warp; 16 * group < count; group += 2 * kPlaneWarps) {
        // Two groups of 16 views, a lane each: where in the image, and by what it is weighted.
        const int own = 16 * (group + lane / 16 * kPlaneWarps) + lane % 16;
        const uint32_t name = s.views[min(own, count - 1)], query = name & 1023, own_camera = name >> 10 & 15;
        const T* of_view =
            logits + ((first + query) * static_cast<uint32_t>(p.weights_stride[1]) +
                      (own_camera * points + point) * p.num_levels * static_cast<uint32_t>(p.weights_stride[2]));
        Vec<T, kPlaneLevels> weights = load_if<T, kPlaneLevels>(of_view, r.fours);
#pragma unroll
        for (int l = 0; l < kPlaneLevels; ++l) {
          const bool there = !r.fours && l < p.num_levels;
          const Vec<T, 1> weight = load_if<T, 1>(of_view + l * static_cast<int>(p.weights_stride[2]), there);
          weights.at[l] = r.fours ? weights.at[l] : weight.at[0];
        }
        Projection seen;
        {
          Point place;
#pragma unroll
          for (int j = 0; j < 3; ++j) place.at[j] = s.places[j][query];
          const float4* rows = s.matrices[own_camera];
          float image[3];
#pragma unroll
          for (int j = 0; j < 3; ++j) image[j] = along(rows[j].x, rows[j].y, rows[j].z, rows[j].w, place);
          seen = divided(p, image[0], image[1], image[2]);
        }
        seen.u = own < count && seen.seen ? seen.u : -16;  // no pixel is near

#pragma unroll 1
        for (int i = 0; i < 2 && 16 * (group + i * kPlaneWarps) < count; ++i) {
          const int of = 16 * i + lane / 2, index = 16 * (group + i * kPlaneWarps) + lane / 2;
          const float u = __shfl_sync(~0u, seen.u, of), v = __shfl_sync(~0u, seen.v, of);
          const int camera = __shfl_sync(~0u, static_cast<int>(own_camera), of);
          T pixels[kPlaneLevels][kPlaneChannels][2];
          float fx[kPlaneLevels], fy[kPlaneLevels];
#pragma unroll
          for (int l = 0; l < kPlaneLevels; ++l) {
            // Rounded down by adding what has no bits behind the point.
            constexpr float kUnits = 12582912;
            const PlaneLevel map = s.levels[l];
            const float x = __fsub_rn(__fmul_rn(u, map.width), 0.5f), y = __fsub_rn(__fmul_rn(v, map.height), 0.5f);
            const float x0 = __fadd_rd(x, kUnits), y0 = __fadd_rd(y, kUnits);
            fx[l] = x - (x0 - kUnits);
            fy[l] = y - (y0 - kUnits);
            const uint32_t px = __float_as_uint(x0) + (column - 0x4b400000), py = __float_as_uint(y0) - 0x4b400000;
            const uint32_t width = p.levels[l].width, height = p.levels[l].height;
            const int at = camera * map.to_camera + py * (p.levels[l].sy / static_cast<int>(sizeof(T))) + px;
            const char* const pixel = map.data + at * static_cast<int64_t>(sizeof(T));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const bool inside = px < width && py + j < height;
#pragma unroll
              for (int c = 0; c < kPlaneChannels; ++c) {
                const char* const from = pixel + c * map.to_channel + j * p.levels[l].sy;
                pixels[l][c][j] = load_if<T, 1>(reinterpret_cast<const T*>(from), inside).at[0];
              }
            }
          }
          float total = 0;
#pragma unroll
          for (int l = 0; l < kPlaneLevels; ++l) {
            const float across = column ? fx[l] : 1 - fx[l], down[2] = {(1 - fy[l]) * across, fy[l] * across};
            float sum[kPlaneChannels];
#pragma unroll
            for (int c = 0; c < kPlaneChannels; ++c) {
              sum[c] = fmaf(down[1], to_float(pixels[l][c][1]), down[0] * to_float(pixels[l][c][0]));
            }
            // Each column goes on with a channel.
            const float value = (column ? sum[1] : sum[0]) + __shfl_xor_sync(~0u, column ? sum[0] : sum[1], 1);
            const float logit = __shfl_sync(~0u, to_float(weights.at[l]), of);
            total = fmaf(value == value ? value : 0, __fdividef(1, 1 + __expf(-logit)), total);
          }
          if (index < count) (&s.values[index].x)[column] = total;
        }
      }
      __syncthreads();

      while (last != kNoView) {
        const float2 value = s.values[last];
        last = s.views[last] >> 14;
        sums[0] += value.x;
        sums[1] += value.y;
      }
      done += count;
      from = to;
      if (from < p.cams) __syncthreads();
    }

    if (last_point) {
      __syncwarp();
      for (int other = 1; other < lanes; other *= 2) {
#pragma unroll
        for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, other);
      }
      if (live && part == 0) {
        if (s.nan[chunk & 1][mine / 32] >> mine % 32 & 1) sums[0] = sums[1] = NAN;
        T* out = static_cast<T*>(p.output) + b * p.output_stride[0] + own_query() * p.output_stride[1] +
                 channel * p.output_stride[2];
        if (r.pairs) {
          store(out, Vec<T, 2>{from_float<T>(sums[0]), from_float<T>(sums[1])});
        } else {
          out[0] = from_float<T>(sums[0]);
          if (channels > 1) out[p.output_stride[2]] = from_float<T>(sums[1]);
        }
      }
      if (end) break;
      sums[0] = sums[1] = 0;
      first += step;
      ++chunk;
    }
    point = last_point ? 0 : point + 1;
    own_point(point);
  }
}

// ------------------------------------------------------------------ backward
//
// 1. A block per query reads the samples again: gradients of the weights, and of what the matrices map points to
//    ("image": x, y and depth). It counts, for every pixel, the samples that read it, and numbers them.
// 2. These samples ("readers") are put side by side, pixel by pixel.
// 3. A block per few pixels sums what its readers say and writes the gradient, once and in whole sectors: most pixels
//    are read by nobody, and nothing has to be cleared before or rounded after.
// 4. A block per camera sums the gradient of its matrix.

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

int log2_ceil(int64_t x) {
  int shift = 0;
  while ((int64_t{1} << shift) < x) ++shift;
  return shift;
}

// Strides of a tensor that broadcasts in its dimensions of size 1.
template <int N>
__host__ __device__ void copy_strides(const Tensor& t, int64_t (&strides)[N]) {
  for (int i = 0; i < N; ++i) strides[i] = t.sizes[i] == 1 ? 0 : t.strides[i];
}

__host__ __device__ bool collapses(const Tensor& weights) {  // cams, points and levels
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
    const bool blocks = map.rank == 6;
    if (!map.aligned(blocks ? 5 : 2, n * map.item_size()) || (blocks && map.sizes[5] < n)) return false;
  }
  return true;
}

__host__ __device__ cudaError_t prepare(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
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

}  // namespace
}  // namespace svexport

#ifndef SVEXPORT_AOT  // csrc/aot takes the kernels only
namespace svexport {

namespace {

// Whether the kernel for planes can, and is expected to be faster; if so, how.
bool by_planes(const CameraLevel* levels, int num_levels, const Tensor& reference_points, const Tensor& weights,
               const Tensor& offsets, const Tensor& output, const Params& p, Planes& r, dim3& grid) {
  const int64_t images = output.sizes[0], queries = output.sizes[1], channels = output.sizes[2], size = output.item_size();
  const int64_t points = weights.sizes[3], groups = weights.sizes[5];
  if (p.softmax || !p.in_image || num_levels > kPlaneLevels || p.cams > kPlaneCams || weights.dtype != output.dtype ||
      (groups > 1 && channels / groups % kPlaneChannels != 0) || !(p.depth_eps >= 0) || !(p.image_width > 0) ||
      !(p.image_height > 0) || queries < kLeastQueries) {
    return false;
  }
  // Elements behind the first of an image, as 32 bits count them.
  const auto reach_of = [](const Tensor& t) {
    int64_t reach = 0;
    for (int i = 1; i < t.rank; ++i) reach += (t.sizes[i] - 1) * t.strides[i];
    return reach;
  };
  if (std::max({reach_of(weights), reach_of(reference_points), p.has_offsets ? reach_of(offsets) : 0}) > INT32_MAX) {
    return false;
  }
  for (int l = 0; l < num_levels; ++l) {
    const Tensor& map = levels[l].map;
    const int64_t reach = map.sizes[1] * map.strides[1] + (map.sizes[3] + 1) * map.strides[3] + map.sizes[4];
    if (p.levels[l].int8 || p.levels[l].pool || (map.strides[4] != 1 && map.sizes[4] != 1) || reach > INT32_MAX ||
        map.sizes[3] > kPlaneSize || map.sizes[4] > kPlaneSize) {
      return false;
    }
  }
  const int64_t processors = std::max(1, of_device(cudaDevAttrMultiProcessorCount));
  const int64_t blocks = ceil_div<int64_t>(channels, kPlaneChannels), all = blocks * images;
  int64_t parts = std::max<int64_t>(1, std::min(processors / all, queries / kLeastQueries));
  // Microseconds, as measured on 132 processors: this kernel, wave by wave, and the other.
  const double samples = static_cast<double>(queries) * points, waves = ceil_div(all * parts, processors);
  const double planes = waves * (6.25 + 0.0061 * samples / parts);
  const double other = 3.9 + 0.0027 * samples * num_levels * channels * images / processors;
  if (planes + 1.5 > other) return false;

  const int64_t of_block = ceil_div(queries, parts);
  r.queries = static_cast<int>(queries);
  r.at_once = static_cast<int>(ceil_div(of_block, ceil_div<int64_t>(of_block, kPlaneThreads)));
  while (2 * r.at_once << r.lane_shift <= kPlaneThreads) ++r.lane_shift;
  parts = std::min(parts, ceil_div<int64_t>(queries, r.at_once));
  r.bands = kPlaneBands / p.image_height;
  r.bounds[0] = p.image_width * 1.000001f;
  r.bounds[1] = p.image_height * 1.000001f;
  const bool vectors = groups == 1 && (p.weights_stride[2] == 1 || p.samples == 1) && p.samples * size % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(weights.data) % 16 == 0 && p.weights_stride[0] * size % 16 == 0 &&
                       (p.weights_stride[1] == p.samples || queries == 1);
  r.vectors = vectors ? static_cast<int>(p.samples * size / 16) : 0;
  r.floats = p.points.dtype == DType::kFloat32 && (!p.has_offsets || p.offsets.dtype == DType::kFloat32);
  const auto aligned = [&](int64_t stride) { return stride % kPlaneLevels == 0; };
  r.fours = num_levels == kPlaneLevels && p.weights_stride[2] == 1 && aligned(p.weights_stride[0]) &&
            aligned(p.weights_stride[1]) && (groups == 1 || aligned(p.weights_stride[3])) &&
            reinterpret_cast<uintptr_t>(weights.data) % (kPlaneLevels * size) == 0;
  r.pairs = channels % 2 == 0 && output.aligned(2, 2 * size);
  grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(parts), static_cast<unsigned>(images));
  return true;
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
    Planes planes{};
    dim3 blocks;
    if (by_planes(levels, num_levels, reference_points, weights, offsets, output, p, planes, blocks)) {
      camera_sample_planes_kernel<T><<<blocks, kPlaneThreads, 0, stream>>>(p, planes);
      return cudaGetLastError();
    }
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
    const bool vector = vectors(levels, num_levels, p, 16, sizeof(T)) && grad_output.aligned(2, 16);
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
#endif
