#include "camera_sample.h"

#include <type_traits>

#include "device.cuh"

namespace svexport {
namespace {

// A block of kThreads computes the channels of one query, in two steps that a barrier separates:
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
  int64_t sb, sk, sc, sy, sx;  // bytes; k: camera, c: channel, or 32 of them in CHW32
  int height, width;           // as sampled: of the pooled map
  float scale;
  bool int8, pool;
};

struct Params {
  Level levels[kMaxCameraLevels];
  AnyFloat points, lidar2img, weights, offsets, output;
  int64_t points_stride[3], lidar2img_stride[4], weights_stride[4], offsets_stride[4], output_stride[3];
  // weights: b, q, sample, group
  int queries, cams, points_per_query, num_levels, samples, channels, groups, group_channels;
  int row_shift;  // log2 of the threads that read a sample together
  float image_height, image_width, low[3], span[3], depth_eps, clamp_low, clamp_high;
  bool in_image, softmax, has_offsets;
};

// Where a sample is read, if anywhere.
struct alignas(16) Sample {
  const char* at;   // the upper left of the four pixels, of channel 0; maybe outside of the map
  uint32_t inside;  // bit 2*j + i: whether the pixel of row j, column i is in the map
  int index;        // of the sample: (camera * points + point) * levels + level
  float weight[4];  // of the pixels, by the same 2*j + i
};

// A place in metres.
__device__ __forceinline__ void place_of(const Params& p, int b, int q, int point, float (&place)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const float x = p.points.get(b * p.points_stride[0] + q * p.points_stride[1] + i * p.points_stride[2]);
    place[i] = __fadd_rn(__fmul_rn(x, p.span[i]), p.low[i]);
    if (p.has_offsets) {
      place[i] = __fadd_rn(place[i], p.offsets.get(b * p.offsets_stride[0] + q * p.offsets_stride[1] +
                                                   point * p.offsets_stride[2] + i * p.offsets_stride[3]));
    }
  }
}

struct Projection {
  float depth, u, v;  // u and v before they are clamped
  bool seen;
};

// Rounded step by step as the reference is (no fused multiply-add, two divisions), so that both agree on what is seen.
__device__ __forceinline__ Projection project(const Params& p, int b, int camera, const float (&place)[3]) {
  const int64_t at = b * p.lidar2img_stride[0] + camera * p.lidar2img_stride[1];
  float image[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    float row[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) row[j] = p.lidar2img.get(at + i * p.lidar2img_stride[2] + j * p.lidar2img_stride[3]);
    const float sum = __fadd_rn(__fmul_rn(place[0], row[0]), __fmul_rn(place[1], row[1]));
    image[i] = __fadd_rn(__fadd_rn(sum, __fmul_rn(place[2], row[2])), row[3]);
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

// The sample of a projected point on a level; inside is 0 if it lies beyond the border.
__device__ __forceinline__ Sample locate(const Params& p, int b, int camera, int level, int index, float u, float v) {
  const Level& map = p.levels[level];
  const float x = __fsub_rn(__fmul_rn(clamped(p, u), static_cast<float>(map.width)), 0.5f);
  const float y = __fsub_rn(__fmul_rn(clamped(p, v), static_cast<float>(map.height)), 0.5f);
  const float left = floorf(x), top = floorf(y), fx = x - left, fy = y - top;
  const bool in_x[2] = {left >= 0 && left < map.width, left >= -1 && left < map.width - 1};
  const bool in_y[2] = {top >= 0 && top < map.height, top >= -1 && top < map.height - 1};
  Sample s;
  s.inside = 0;
  s.index = index;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool in = in_y[i >> 1] && in_x[i & 1];
    s.inside |= in << i;
    s.weight[i] = in ? (i >> 1 ? fy : 1 - fy) * (i & 1 ? fx : 1 - fx) * map.scale : 0.0f;
  }
  if (s.inside) {
    s.at = map.data + b * map.sb + camera * map.sk + (static_cast<int64_t>(top) << map.pool) * map.sy +
           (static_cast<int64_t>(left) << map.pool) * map.sx;
  }
  return s;
}

// N channels of a pixel where `in`, otherwise zeros.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_if(bool in, const char* at) {
  Vec<T, N> v = {};
  if (in) v = load<T, N>(reinterpret_cast<const T*>(at));
  return v;
}

// As torch's max_pool2d: NaN wins.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

// Adds the pixels (columns first, first + step, ..) of a sample to sum, weighted.
template <class T, int N, bool kSplit, bool kPool>
__device__ __forceinline__ void add_pixels(const Sample& s, uint32_t inside, const Level& map, const char* at, int column,
                                           float (&sum)[N]) {
  constexpr int kPixels = kSplit ? 2 : 4;
  constexpr int kReads = kPool ? 4 : 1;
  Vec<T, N> v[kPixels][kReads];
  const int64_t sx = map.sx << kPool, sy = map.sy << kPool;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    const int row = kSplit ? i : i >> 1, col = kSplit ? column : i & 1;
    const char* pixel = at + (row ? sy : 0) + (col ? sx : 0);
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      v[i][j] = load_if<T, N>(inside >> (2 * row + col) & 1, pixel + (j >> 1 ? map.sy : 0) + (j & 1 ? map.sx : 0));
    }
  }
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    const float weight = kSplit ? (column ? s.weight[2 * i + 1] : s.weight[2 * i]) : s.weight[i];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float x = to_float(v[i][0].at[n]);
#pragma unroll
      for (int j = 1; j < kReads; ++j) x = larger(to_float(v[i][j].at[n]), x);
      sum[n] = fmaf(weight, x, sum[n]);
    }
  }
}

template <class T, bool kSplit>
__device__ __forceinline__ int64_t channel_offset(const Level& map, int channel) {
  if (std::is_same<T, int8_t>::value) return (channel >> 5) * map.sc + (channel & 31);
  return kSplit ? channel * map.sc : channel * static_cast<int64_t>(sizeof(T));
}

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
  return softmax ? expf(logit - max) : __fdividef(1, 1 + expf(-logit));
}

// First half of the norms of `count` groups from `first`: a part per slot, in shared memory. Returns the slots.
__device__ __forceinline__ int partial_norms(const Params& p, int64_t logits, int first, int count, float2* parts) {
  const int width = min(count, kThreads), slots = kThreads / width;
  const Norm none = {p.softmax ? -INFINITY : 0.0f, p.softmax ? 0.0f : 1.0f};
  const bool by_warp = !(width & (width - 1)) && width <= 32;  // lanes of a group are merged in registers first
  for (int g = threadIdx.x % width; g < count; g += kThreads) {
    const int slot = threadIdx.x / width;
    Norm norm = none;
    for (int i = slot; i < p.samples && slot < slots; i += slots) {
      const float logit = p.weights.get(logits + i * p.weights_stride[2] + (first + g) * p.weights_stride[3]);
      norm = merge(p.softmax, norm, p.softmax ? Norm{logit, 1} : Norm{0, logit == logit ? 1 : logit});
    }
    if (by_warp) {
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
    for (int slot = 1; slot < slots; ++slot) {
      norm = merge(p.softmax, norm, {parts[slot * count + g].x, parts[slot * count + g].y});
    }
    norms[g] = {norm.max, p.softmax ? (isinf(norm.max) ? NAN : 1 / norm.sum) : norm.sum};
  }
}

// Moves the samples that are somewhere to the front, in order; returns how many. Two barriers.
__device__ __forceinline__ int compact(bool valid, const Sample& sample, Sample* samples, int* counts) {
  const uint32_t ballot = __ballot_sync(~0u, valid);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = __popc(ballot);
  __syncthreads();
  int before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < threadIdx.x / 32 ? counts[w] : 0;
    total += counts[w];
  }
  if (valid) samples[before + __popc(ballot & ((1u << threadIdx.x % 32) - 1))] = sample;
  __syncthreads();
  return total;
}

template <class T, int N, bool kSplit, bool kOthers>
__global__ void __launch_bounds__(kThreads) camera_sample_kernel(const __grid_constant__ Params p) {
  constexpr int kParts = kSplit ? kPasses : 1;
  __shared__ Sample samples[kThreads];
  __shared__ float sums[kThreads * (kSplit ? kPasses / 2 : N) < 2 * kMaxGroups ? 2 * kMaxGroups
                                                                              : kThreads * (kSplit ? kPasses / 2 : N)];
  __shared__ float2 norms[kMaxGroups];
  __shared__ int counts[kWarps];

  const int b = blockIdx.x / p.queries, q = blockIdx.x % p.queries;
  const int rows = kThreads >> p.row_shift, row = threadIdx.x >> p.row_shift;
  const int lane = threadIdx.x & ((1 << p.row_shift) - 1), column = kSplit ? lane & 1 : 0;
  const int stride = kSplit ? 1 << p.row_shift >> 1 : 0;  // between the channels of a thread
  const int chunk = kSplit ? stride * kPasses : N << p.row_shift;
  const int begin = blockIdx.y * chunk, end = min(begin + chunk, p.channels);
  const int first = begin + (kSplit ? lane >> 1 : lane * N);

  const int64_t logits = b * p.weights_stride[0] + q * p.weights_stride[1];
  const int first_group = begin / p.group_channels, groups = (end - 1) / p.group_channels - first_group + 1;
  const int slots = partial_norms(p, logits, first_group, groups, reinterpret_cast<float2*>(sums));

  int channel[kParts], group[kParts];
  float sum[kParts][N] = {};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    channel[i] = min(first + i * stride, p.channels - N);  // those beyond the end repeat the last and are not written
    group[i] = channel[i] / p.group_channels;
  }
  for (int base = 0; base == 0 || base < p.samples; base += kThreads) {
    const int index = base + threadIdx.x;
    Sample mine;
    mine.inside = 0;
    if (index < p.samples) {
      const int pair = index / p.num_levels, camera = pair / p.points_per_query;
      float place[3];
      place_of(p, b, q, pair % p.points_per_query, place);
      const Projection at = project(p, b, camera, place);
      if (at.seen) mine = locate(p, b, camera, index % p.num_levels, index, at.u, at.v);
    }
    if (base > 0) __syncthreads();  // the samples before have been read
    const int count = compact(mine.inside != 0, mine, samples, counts);
    if (base == 0) {
      merge_norms(p, groups, slots, reinterpret_cast<const float2*>(sums), norms);
      __syncthreads();
    }
#pragma unroll 2
    for (int k = row; k - row < count; k += rows) {  // as often in every row: lanes exchange below
      const bool live = k < count;
      const Sample& s = samples[live ? k : 0];
      const Level& map = p.levels[s.index % p.num_levels];
      const int64_t at = logits + s.index * p.weights_stride[2];
      const auto add = [&](auto* stored, auto pool) {
        using S = element_t<decltype(stored)>;
        float logit = 0, weight = 0;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          if (begin + i * stride >= end) break;
          const bool change = i == 0 || p.groups > 1;
          if (change) logit = p.weights.get(at + group[i] * p.weights_stride[3]);
          float v[N] = {};
          add_pixels<S, N, kSplit, pool.value>(s, live ? s.inside : 0, map, s.at + channel_offset<S, kSplit>(map, channel[i]),
                                               column, v);
          if (change) weight = activate(p.softmax, logit, norms[group[i] - first_group].x);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            if (kSplit) v[n] += __shfl_xor_sync(~0u, v[n], 1);
            if (live && v[n] == v[n]) sum[i][n] = fmaf(weight, v[n], sum[i][n]);
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
      if (!kSplit || column == 0) sums[row * chunk + first - begin + i * stride + n] = sum[i][n];
    }
  }
  __syncthreads();
  for (int c = begin + threadIdx.x; c < end; c += kThreads) {
    float total = 0;
    for (int r = 0; r < rows; ++r) total += sums[r * chunk + c - begin];
    total *= norms[c / p.group_channels - first_group].y;
    p.output.set(b * p.output_stride[0] + q * p.output_stride[1] + c * p.output_stride[2], total);
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
  if (p.channels % n != 0 || p.group_channels % n != 0) return false;
  for (int l = 0; l < num_levels; ++l) {
    const Tensor& map = levels[l].map;
    if (!map.aligned(map.dtype == DType::kInt8 ? 5 : 2, map.dtype == DType::kInt8 ? n : bytes)) return false;
  }
  return true;
}

cudaError_t prepare(const CameraLevel* levels, int num_levels, const Tensor& reference_points, const Tensor& lidar2img,
                    const Tensor& weights, const Tensor& offsets, const CameraSampleOptions& options,
                    const Tensor& output, Params& p) {
  if (num_levels < 1 || num_levels > kMaxCameraLevels || !is_float(reference_points) || !is_float(lidar2img) ||
      !is_float(weights) || !is_float(output) || (offsets.data != nullptr && !is_float(offsets)) || !collapses(weights)) {
    return cudaErrorNotSupported;
  }
  for (int i = 0; i < 5; ++i) {
    if (weights.sizes[i] > INT32_MAX) return cudaErrorNotSupported;
  }
  if (weights.sizes[2] * weights.sizes[3] * weights.sizes[4] > INT32_MAX / 2 ||
      weights.sizes[0] * weights.sizes[1] > INT32_MAX || output.sizes[2] > INT32_MAX / 2) {
    return cudaErrorNotSupported;
  }
  for (int l = 0; l < num_levels; ++l) {
    const Tensor& map = levels[l].map;
    const bool int8 = map.dtype == DType::kInt8;
    const int y = int8 ? 3 : 3, x = y + 1;
    if (!int8 && map.dtype != output.dtype) return cudaErrorNotSupported;
    if (int8 && (map.rank != 6 || map.sizes[5] != 32 || map.strides[5] != 1)) return cudaErrorNotSupported;
    const int64_t size = map.item_size();
    Level& level = p.levels[l];
    level.data = static_cast<const char*>(map.data);
    level.sb = map.strides[0] * size;
    level.sk = map.strides[1] * size;
    level.sc = map.strides[2] * size;
    level.sy = map.strides[y] * size;
    level.sx = map.strides[x] * size;
    level.int8 = int8;
    level.pool = levels[l].pool;
    if (map.sizes[y] > INT32_MAX / 2 || map.sizes[x] > INT32_MAX / 2) return cudaErrorNotSupported;
    level.height = static_cast<int>(map.sizes[y]) >> level.pool;
    level.width = static_cast<int>(map.sizes[x]) >> level.pool;
    level.scale = int8 ? levels[l].scale : 1;
  }
  copy_strides(reference_points, p.points_stride);
  copy_strides(lidar2img, p.lidar2img_stride);
  copy_strides(output, p.output_stride);
  p.has_offsets = offsets.data != nullptr;
  if (p.has_offsets) copy_strides(offsets, p.offsets_stride);
  p.weights_stride[0] = weights.strides[0];
  p.weights_stride[1] = weights.strides[1];
  p.weights_stride[2] = weights.sizes[4] != 1 ? weights.strides[4]
                        : weights.sizes[3] != 1 ? weights.strides[3] : weights.strides[2];
  p.weights_stride[3] = weights.strides[5];
  p.queries = static_cast<int>(weights.sizes[1]);
  p.cams = static_cast<int>(weights.sizes[2]);
  p.points_per_query = static_cast<int>(weights.sizes[3]);
  p.num_levels = num_levels;
  p.samples = p.cams * p.points_per_query * num_levels;
  p.channels = static_cast<int>(output.sizes[2]);
  p.groups = static_cast<int>(weights.sizes[5]);
  p.group_channels = p.groups == 0 ? 0 : p.channels / p.groups;
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
  Params p{{}, AnyFloat(reference_points), AnyFloat(lidar2img), AnyFloat(weights), AnyFloat(offsets), AnyFloat(output)};
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
    const dim3 grid(static_cast<unsigned>(output.sizes[0] * output.sizes[1]), ceil_div(p.channels, chunk));
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

}  // namespace svexport
