#include "grid_sample.h"

#include <algorithm>

#include "box.cuh"
#include "overlap.cuh"

namespace svexport {
namespace {

constexpr int kThreads = 256;

// Where the results go: image n, channel c, point p at n * image + c * channel + p * point.
template <class T>
struct Output {
  T* data;
  int64_t image, channel, point;
  T* mask;  // (N, points), or null

  __device__ __forceinline__ void set_mask(int64_t i, int offset) const {
    mask[i] = from_float<T>(offset < 0 ? 0.0f : 1.0f);
  }
};

// ------------------------------------------------------------------------------------- any strides: a thread per point

// Blocks of points x chunks of channels x images; U channels at a time.
template <class T, int TAPS, int PADDING = kAnyPadding, int U = TAPS == 1 ? 8 : TAPS == 4 ? 4 : TAPS == 8 ? 2 : 1>
__global__ void __launch_bounds__(kThreads) direct_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          int64_t channel, Output<T> output, int batch, int channels,
                                                          int chunk) {
  const int p = blockIdx.x * kThreads + threadIdx.x, first = blockIdx.y * chunk;
  if (p >= s.points) return;
  const int count = min(chunk, channels - first);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    const Taps<TAPS> taps(locate<TAPS, PADDING>(s, n, p), s.stride);
    const char* source = reinterpret_cast<const char*>(input + n * image + first * channel);
    T* target = output.data + n * output.image + first * output.channel + p * output.point;
    if (output.mask && first == 0) output.set_mask(static_cast<int64_t>(n) * s.points + p, taps.offset[0]);
    auto step = [&](auto width) {
      constexpr int W = decltype(width)::value;
      T v[W][TAPS];
#pragma unroll
      for (int u = 0; u < W; ++u) {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          const T* pixel = reinterpret_cast<const T*>(source + taps.offset[i] * uint32_t{sizeof(T)});
          v[u][i] = load_if<T, 1>(pixel, taps.offset[i] >= 0).at[0];
        }
        source += channel * sizeof(T);
      }
#pragma unroll
      for (int u = 0; u < W; ++u) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) sum = fmaf(taps.weight[i], to_float(v[u][i]), sum);
        *target = from_float<T>(sum);
        target += output.channel;
      }
    };
    int c = 0;
    for (; c + U <= count; c += U) step(std::integral_constant<int, U>());
    if constexpr (U > 1) {
      for (; c < count; ++c) step(std::integral_constant<int, 1>());
    }
  }
}

// ----------------------------------------------------------------------------- channels-last: 16 bytes of a point each

template <int TAPS>
constexpr int kTogether = TAPS <= 4 ? 2 : 1;  // points that a thread has in flight

// The dynamic shared memory of vector(): a tile of results and the points of a block.
template <int TAPS>
constexpr int vector_memory(int shift, int steps) {
  return kTogether<TAPS> * (kThreads * 16 + steps * (kThreads >> shift) * static_cast<int>(sizeof(Taps<TAPS>)));
}

// `steps` times kTogether * (256 >> shift) points of image n, from point `first` on, in (16 bytes << shift) of channels
// from `block_channel` on. width: points per access to an output with points innermost, 0 if it has channels innermost.
template <class T, int TAPS, int PADDING>
__device__ __forceinline__ void vector(const Space& s, const T* __restrict__ input, int64_t image,
                                       const Output<T>& output, int n, int first, int block_channel, int channels,
                                       int shift, int steps, int width) {
  constexpr int V = 16 / sizeof(T), POINTS = kTogether<TAPS>;
  extern __shared__ uint4 tile[];
  Taps<TAPS>* points = reinterpret_cast<Taps<TAPS>*>(tile + POINTS * kThreads);
  const int lanes = 1 << shift, rows = kThreads >> shift, lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int c = block_channel + lane * V, bits = tile_bits(shift, width);
  __syncthreads();
  for (int i = threadIdx.x; i < steps * POINTS * rows; i += kThreads) {
    const int p = first + i;
    if (p >= s.points) continue;
    points[i] = Taps<TAPS>(locate<TAPS, PADDING>(s, n, p), s.stride);
    if (output.mask && block_channel == 0) {
      output.set_mask(static_cast<int64_t>(n) * s.points + p, points[i].offset[0]);
    }
  }
  __syncthreads();
  const T* source = input + n * image + c;
  for (int step = 0; step < steps && first < s.points; ++step, first += POINTS * rows, points += POINTS * rows) {
    constexpr int AT_ONCE = TAPS < 4 ? TAPS : 4;  // loads in flight for each point
    float sums[POINTS][V] = {};
    const int left = s.points - first;
    if (c < channels) {
#pragma unroll
      for (int i = 0; i < TAPS; i += AT_ONCE) {
        Vec<T, V> v[POINTS][AT_ONCE];
        float weight[POINTS][AT_ONCE];
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
          const bool there = row + k * rows < left;
          const Taps<TAPS>& taps = points[row + k * rows];
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            weight[k][j] = taps.weight[i + j];
            v[k][j] = load_if<T, V>(source + taps.offset[i + j], there && taps.offset[i + j] >= 0);
          }
        }
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) add_scaled(sums[k], weight[k][j], v[k][j]);
        }
      }
    }
    T* target = output.data + n * output.image + first * output.point + block_channel * output.channel;
    if (width == 0) {
#pragma unroll
      for (int k = 0; k < POINTS; ++k) {
        const int p = row + k * rows;
        if (p < left && c < channels) store(target + p * output.point + lane * V, rounded<T>(sums[k]));
      }
      continue;
    }
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const Vec<T, V> v = rounded<T>(sums[k]);
      memcpy(&tile[swizzled((row + k * rows) * lanes + lane, bits)], &v, 16);
    }
    __syncthreads();
    dispatch_width(width, [&](auto w) {
      constexpr int W = decltype(w)::value;
      if constexpr (W <= V) {
        write_points<W>(tile, bits, shift, POINTS * rows, target, output.channel, output.point, left,
                          channels - block_channel);
      }
    });
    __syncthreads();
  }
}

// Blocks of points x channels x images: all, or those marked in `only`.
template <class T, int TAPS, int PADDING = kAnyPadding>
__global__ void __launch_bounds__(kThreads, TAPS == 4 ? 4 : 1)
    vector_kernel(Space s, const T* __restrict__ input, int64_t image, Output<T> output, int batch, int channels,
                  int shift, int steps, int width, const bool* __restrict__ only) {
  constexpr int V = 16 / sizeof(T);
  wait_for_previous();
  const int first = blockIdx.x * steps * kTogether<TAPS> * (kThreads >> shift);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (only && !only[n]) continue;
    vector<T, TAPS, PADDING>(s, input, image, output, n, first, (blockIdx.y << shift) * V, channels, shift, steps,
                             width);
  }
}

// ------------------------------------------------------ NCHW: the pixels of a tile of points in shared memory

// Points as rows of `across`, and the tile of a block: 1 << half threads across for twice as many points, the others
// down.
struct Tiles {
  int across, down, half, height, count_down;
  Divider count_across;
  bool pairs;  // two halves, neighbours, can be stored at once
};

constexpr int kStages = 3;  // parts of the shared memory of a block: one is used, the others are on their way

// Blocks of tiles x `chunk` channels x images, as many channels at a time as fit into a part of `memory`. scattered:
// (N, tiles), set where the box is too large, and nothing computed.
template <class T, int PADDING>
__global__ void __launch_bounds__(kThreads, 4)
    box_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, Tiles tiles,
               int batch, int channels, int chunk, int memory, int unit, bool* __restrict__ scattered) {
  constexpr int TAPS = 4, POINTS = 2, ITEM = sizeof(T);
  constexpr bool kBeside = ITEM == 2;  // the points of a thread: side by side, or half a tile apart
  extern __shared__ uint4 pixels_of_block[];
  __shared__ int edges[4];
  start_next();
  char* pixels = reinterpret_cast<char*>(pixels_of_block);
  const int half = 1 << tiles.half, line = threadIdx.x >> tiles.half, lane = threadIdx.x & (half - 1);
  const int row = row_of_line(line);
  uint32_t tile_y = blockIdx.x;
  const int tile_x = tiles.count_across.split(tile_y);
  const int x = tile_x * 2 * half + (kBeside ? 2 : 1) * lane, step = kBeside ? 1 : half;
  const int y = tile_y * tiles.height + row, first = y * tiles.across + x;
  const int begin = blockIdx.y * chunk, end = min(begin + chunk, channels);
  const bool valid[POINTS] = {y < tiles.down && x < tiles.across, y < tiles.down && x + step < tiles.across};

  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    Point<TAPS> points[POINTS];
    locate<TAPS, PADDING>(s, n, {valid[0] ? first : 0, valid[1] ? first + step : 0}, points);
    bounds(points, valid, edges);
    Box box(edges[0], edges[1], -edges[2], -edges[3], s.size[0], ITEM, unit);
    const bool large = box.bytes > kLargestBox<T>;
    if (begin == 0 && threadIdx.x == 0) scattered[static_cast<int64_t>(n) * gridDim.x + blockIdx.x] = large;
    if (large) continue;
    box.widen<T>();
    const int together = memory / kStages / box.bytes, part = together * box.bytes;
    const Share share(box);
    box.clear<kThreads>(pixels, kStages * together);

    int offset[POINTS][TAPS];
    float weight[POINTS][TAPS];
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const Pixels<2>&across = points[k].axis[0], &down = points[k].axis[1];
      const int corner = box.origin + across.first * ITEM + down.first * box.row;
#pragma unroll
      for (int i = 0; i < TAPS; ++i) {
        const bool inside = valid[k] && across.inside[i % 2] && down.inside[i / 2];
        offset[k][i] = inside ? corner + i % 2 * ITEM + i / 2 * box.row : box.zeros();
        weight[k][i] = points[k].weight(i);
      }
      if (output.mask && begin == 0 && valid[k]) {
        const bool seen = across.inside[0] && down.inside[0];
        output.set_mask(static_cast<int64_t>(n) * s.points + first + k * step, seen ? 0 : -1);
      }
    }
    T* target = output.data + n * output.image + begin * output.channel + first * output.point;
    const char* source = reinterpret_cast<const char*>(input + n * image);
    const auto fetch = [&](int c, int stage) {
      share.copy(box, pixels + stage * part, source + c * channel * ITEM, channel * ITEM, min(together, end - c));
    };
    const auto gather = [&](const char* from, int count, auto bytes, auto pairs) {
      const int distance = bytes.value ? bytes.value : box.bytes;
#pragma unroll 4
      for (int i = 0; i < count; ++i, target += output.channel) {
        float sum[POINTS] = {};
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
#pragma unroll
          for (int j = 0; j < TAPS; ++j) {
            const T pixel = *reinterpret_cast<const T*>(from + i * distance + offset[k][j]);
            sum[k] = fmaf(weight[k][j], to_float(pixel), sum[k]);
          }
        }
        if constexpr (kBeside && pairs.value) {
          if (valid[0]) store(target, rounded<T>(sum));
        } else {
#pragma unroll
          for (int k = 0; k < POINTS; ++k) {
            if (valid[k]) target[k * step * output.point] = from_float<T>(sum[k]);
          }
        }
      }
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) fetch(begin + stage * together, stage);
#pragma unroll 1
    for (int c = begin, stage = 0; c < end; c += together) {
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();
      fetch(c + (kStages - 1) * together, stage == 0 ? kStages - 1 : stage - 1);
      const char* from = pixels + stage * part;
      const int count = min(together, end - c);
      if (tiles.pairs && box.bytes == kSmallBox<T>) {
        gather(from, count, std::integral_constant<int, kSmallBox<T>>(), std::true_type());
      } else if (tiles.pairs && box.bytes == kUsualBox<T>) {
        gather(from, count, std::integral_constant<int, kUsualBox<T>>(), std::true_type());
      } else {
        gather(from, count, std::integral_constant<int, 0>(), std::false_type());
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    __pipeline_wait_prior(0);
  }
}

// -------------------------------------------------- NCHW, bilinear, a dense grid, float32 or of the type of the image

// Blocks of points x chunks of channels x images; POINTS side by side of a thread.
template <class T, class G, int PADDING, int POINTS>
__global__ void __launch_bounds__(1024)
    planes_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, int channels,
                  int chunk) {
  const int p = (blockIdx.x * blockDim.x + threadIdx.x) * POINTS, begin = blockIdx.y * chunk, n = blockIdx.z;
  if (p >= s.points) return;
  const int64_t index = static_cast<int64_t>(n) * s.points + p;
  const auto coordinates = load_if<G, 2 * POINTS>(static_cast<const G*>(s.grid.data) + 2 * index, true);
  int offset[POINTS];  // of the first pixel
  bool inside[POINTS][2][2];
  float weight[POINTS][2][2];
#pragma unroll
  for (int k = 0; k < POINTS; ++k) {
    Point<4> point;
#pragma unroll
    for (int a = 0; a < 2; ++a) point.axis[a] = pixels<2>(to_float(coordinates.at[2 * k + a]), a, 2, s, PADDING);
    offset[k] = static_cast<uint32_t>(point.axis[1].first) * s.stride[1] + point.axis[0].first;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      inside[k][i / 2][i % 2] = point.axis[0].inside[i % 2] && point.axis[1].inside[i / 2];
      weight[k][i / 2][i % 2] = point.weight(i);
    }
  }
  const T* plane = input + n * image + begin * channel;
  T* target = output.data + n * output.image + begin * output.channel + p;
  const int count = POINTS > 1 ? 1 : min(chunk, channels - begin);
#pragma unroll 4
  for (int c = 0; c < count; ++c, plane += channel, target += output.channel) {
    float sum[POINTS] = {};
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      T v[2][2];
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const T* row = plane + (offset[k] + y * s.stride[1]);
#pragma unroll
        for (int x = 0; x < 2; ++x) v[y][x] = load_if<T, 1>(row + x, inside[k][y][x]).at[0];
      }
#pragma unroll
      for (int y = 0; y < 2; ++y) {
#pragma unroll
        for (int x = 0; x < 2; ++x) sum[k] = fmaf(weight[k][y][x], to_float(v[y][x]), sum[k]);
      }
    }
    store(target, rounded<T>(sum));
  }
  if (output.mask && begin == 0) {
#pragma unroll
    for (int k = 0; k < POINTS; ++k) output.set_mask(index + k, inside[k][0][0] ? 0 : -1);
  }
}

// Copies the images that have scattered points from (N, C, pixels) to (N, pixels, C), and says which these are.
template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_scattered_kernel(const T* __restrict__ input, int64_t image, int64_t channel, T* __restrict__ copy,
                          const bool* __restrict__ scattered, int tiles, bool* __restrict__ copied, int batch,
                          int channels, int pixels, int width) {
  start_next();
  wait_for_previous();
  for (int n = blockIdx.y; n < batch; n += gridDim.y) {
    bool any = false;
    for (int i = threadIdx.x; i < tiles; i += kThreads) any |= scattered[static_cast<int64_t>(n) * tiles + i];
    any = __syncthreads_or(any);
    if (blockIdx.x == 0 && threadIdx.x == 0) copied[n] = any;
    if (!any) continue;
    to_channels_last(input + n * image, image, channel, copy + static_cast<int64_t>(n) * pixels * channels, 1, channels,
                     pixels, width);
  }
}

}  // namespace
}  // namespace svexport

#ifndef SVEXPORT_AOT  // csrc/aot takes the kernels only
namespace svexport {
namespace {

// ------------------------------------------------------------------------------------------------------ the choice

// Whether an image is read by planes: NCHW, with rows that need not be aligned.
bool dense_planes(const Tensor& input) {
  int64_t pixel = 1;
  return input.rank == 4 && Space::evenly_spaced(input, 2, 3, pixel) && pixel == 1;
}

// Whether an NCHW image has so many points that they are gathered from boxes, or from a copy in channels-last.
bool many_points(const Tensor& input, int64_t points, int mode) {
  const int64_t channels = input.sizes[1], pixels = input.sizes[2] * input.sizes[3];
  return mode == kBilinear && dense_planes(input) && channels * input.item_size() % 16 == 0 &&
         channels * input.item_size() >= 64 && 2 * points >= pixels && points < (1 << 30) &&
         input.sizes[0] * channels * points >= (1 << 22) && pixels * channels < INT32_MAX;
}

// Tiles of 32 x 16 points, or 512 after each other.
Tiles tiles_of(int64_t across, int64_t down) {
  if (across < 16) across *= down, down = 1;
  const int half = down == 1 ? 8 : 4, height = kThreads >> half;
  return {static_cast<int>(across), static_cast<int>(down), half, height,
          static_cast<int>(ceil_div<int64_t>(down, height)), Divider(ceil_div<int64_t>(across, 2 << half)), false};
}

template <class T, int TAPS, int PADDING>
cudaError_t launch_vector(const Space& s, const T* data, int64_t image, int batch, int channels,
                          const Output<T>& output, int enough, const bool* only, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  int shift = 0;
  while (shift < 3 && (V << shift) < channels) ++shift;
  const int tile = kTogether<TAPS> * (kThreads >> shift), across = ceil_div(channels, V << shift);
  const unsigned images = batch < 65535 ? batch : 65535;
  int width = 0;
  if (output.channel != 1) {
    width = output.point == 1 ? pixel_width<T>(output.data, output.image, output.channel, tile / 8) : 1;
  } else if ((reinterpret_cast<uintptr_t>(output.data) | (s.points > 1 ? output.point * sizeof(T) : 0) |
              (batch > 1 ? output.image * sizeof(T) : 0)) % 16) {
    return cudaErrorNotSupported;
  }
  int steps = kThreads / tile > 1 ? kThreads / tile : 1;
  if (only) steps *= 4;  // most often there is nothing to do: few blocks
  while (steps > 1 && static_cast<int64_t>(ceil_div(s.points, steps * tile)) * across * images < enough) steps /= 2;
  return launch(vector_kernel<T, TAPS, PADDING>, dim3(ceil_div(s.points, steps * tile), across, images), kThreads,
                vector_memory<TAPS>(shift, steps), stream, only != nullptr, s, data, image, output, batch, channels,
                shift, steps, width, only);
}

// Gathers from boxes; where points scatter, from a copy in channels-last.
template <class T, int PADDING>
cudaError_t launch_boxes(const Tensor& input, const Space& s, const Output<T>& output, int enough, void* workspace,
                         cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const int pixels = s.size[0] * s.size[1], images = batch < 65535 ? batch : 65535;
  const T* data = static_cast<const T*>(input.data);
  Tiles tiles = tiles_of(s.across.d, s.points / s.across.d);
  tiles.pairs = output.point == 1 &&
                (sizeof(T) == 4 || ((reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image |
                                     output.channel | tiles.across) % 2 == 0));
  const int count = tiles.count_across.d * tiles.count_down;
  constexpr int kChannels = 64, kMemory = 48 << 10;  // of a block: the more channels in it the better
  T* copy = static_cast<T*>(workspace);
  bool* copied = reinterpret_cast<bool*>(copy + input.numel());
  bool* scattered = copied + batch;

  const auto kernel = box_kernel<T, PADDING>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory);
  if (status != cudaSuccess) return status;
  status = launch(kernel, dim3(count, ceil_div(channels, kChannels), images), kThreads, kMemory, stream, false, s, data,
                  image, channel, output, tiles, batch, channels, kChannels, kMemory,
                  unit_of(data, image, channel, pixels), scattered);
  if (status != cudaSuccess) return status;
  status = launch(copy_scattered_kernel<T>, dim3(ceil_div(enough, images), images), kThreads, 0, stream, true, data,
                  image, channel, copy, scattered, count, copied, batch, channels, pixels,
                  pixel_width<T>(data, image, channel));
  if (status != cudaSuccess) return status;
  Space last = s;
  last.stride[0] = channels;
  last.stride[1] = channels * s.size[0];
  return launch_vector<T, 4, PADDING>(last, copy, static_cast<int64_t>(pixels) * channels, batch, channels, output,
                                      enough, copied, stream);
}

constexpr int kSmallPlane = 4096;  // bytes of a plane that the first cache keeps, whatever the points

// A thread for each point, or for two of one channel.
template <class T, class G, int PADDING>
cudaError_t launch_planes(const Tensor& input, const Space& s, const Output<T>& output, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const uint64_t pairs = reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image | s.points |
                         reinterpret_cast<uintptr_t>(s.grid.data) / (2 * sizeof(G));
  const int points = channels == 1 && pairs % 2 == 0 ? 2 : 1, all = ceil_div(s.points, points);
  const int threads = all <= 1024 ? ceil_div(all, 32) * 32 : kThreads, blocks = ceil_div(all, threads);
  const int processors = std::max(1, of_device(cudaDevAttrMultiProcessorCount));
  const int of_processor = std::max(1, of_device(cudaDevAttrMaxThreadsPerMultiProcessor) / threads);  // blocks
  const int64_t of_channel = static_cast<int64_t>(blocks) * batch;
  int chunk = ceil_div<int64_t>(channels, std::max<int64_t>(1, processors * of_processor / of_channel));
  chunk = std::max(chunk, 4);  // each has to find its pixels
  if (blocks == 1) {           // the points of a plane meet in the first cache, if it has room for all planes in use
    const int64_t used = std::min<int64_t>(of_processor, ceil_div<int64_t>(batch * ceil_div(channels, 4), processors));
    const int64_t plane = static_cast<int64_t>(s.size[0]) * s.size[1] * sizeof(T);
    chunk = std::min<int64_t>(chunk, of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (used * plane));
    chunk = std::max(chunk, 1);
  }
  const dim3 grid(blocks, ceil_div(channels, chunk), batch);
  if (grid.y > 65535 || grid.z > 65535) return cudaErrorNotSupported;
  const auto kernel = points == 2 ? planes_kernel<T, G, PADDING, 2> : planes_kernel<T, G, PADDING, 1>;
  return launch(kernel, grid, threads, 0, stream, false, s, static_cast<const T*>(input.data), input.strides[0],
                input.strides[1], output, channels, chunk);
}

template <class T, int TAPS, int PADDING>
cudaError_t run(const Tensor& input, const Space& s, const Output<T>& output, void* workspace, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  const int enough = 8 * of_device(cudaDevAttrMultiProcessorCount);  // blocks
  constexpr int V = 16 / sizeof(T);
  // Not worth the way through shared memory: one or two accesses for each of few points.
  const bool few = TAPS <= 4 && channels <= 2 * V && static_cast<int64_t>(batch) * s.points <= (1 << 14);
  if (channels % V == 0 && input.aligned(1, 16) && !few) {
    return launch_vector<T, TAPS, PADDING>(s, data, image, batch, channels, output, enough, nullptr, stream);
  }

  if constexpr (TAPS == 4) {
    const bool many = workspace && many_points(input, s.points, kBilinear);
    const bool small = static_cast<int64_t>(s.size[0]) * s.size[1] * sizeof(T) <= kSmallPlane;
    if ((!many || small) && s.stride[0] == 1 && output.point == 1 && s.grid_dense && s.grid_pairs) {
      const auto with = [&](auto padding) {
        if (s.grid.dtype == input.dtype) return launch_planes<T, T, padding.value>(input, s, output, stream);
        if (s.grid.dtype == DType::kFloat32) return launch_planes<T, float, padding.value>(input, s, output, stream);
        return cudaErrorNotSupported;
      };
      cudaError_t status;
      if constexpr (PADDING != kAnyPadding) {
        status = with(std::integral_constant<int, PADDING>());
      } else {
        status = s.padding == kBorder ? with(std::integral_constant<int, kBorder>())
                                      : with(std::integral_constant<int, kReflection>());
      }
      if (status != cudaErrorNotSupported) return status;
    }
    if (many) return launch_boxes<T, PADDING>(input, s, output, enough, workspace, stream);
  }
  int64_t extent = 1;
  for (int a = 0; a < s.axes; ++a) extent += static_cast<int64_t>(s.size[a] - 1) * s.stride[a];
  if (extent * sizeof(T) > UINT32_MAX) return cudaErrorNotSupported;
  const int blocks = ceil_div(s.points, kThreads);
  int chunk = 32;
  const int least = static_cast<int64_t>(batch) * s.points < (1 << 15) ? 4 : 8;  // each has to find its pixels
  while (chunk > least && static_cast<int64_t>(blocks) * batch * ceil_div(channels, chunk) < enough) chunk /= 2;
  while (ceil_div(channels, chunk) > 65535) chunk *= 2;
  const dim3 grid(blocks, ceil_div(channels, chunk), batch < 65535 ? batch : 65535);
  const auto with = [&](auto kernel) {
    return launch(kernel, grid, kThreads, 0, stream, false, s, data, image, channel, output, batch, channels, chunk);
  };
  if constexpr (TAPS <= 4) {
    if (channels == 3 && channel == 1) return with(direct_kernel<T, TAPS, PADDING, 3>);
    if (channels <= 3) return with(direct_kernel<T, TAPS, PADDING, 1>);
  }
  return with(direct_kernel<T, TAPS, PADDING>);
}

}  // namespace

size_t sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  if (grid.numel() == 0 || !many_points(input, grid.numel() / grid.sizes[0] / 2, mode)) return 0;
  if (input.sizes[1] % (16 / input.item_size()) == 0 && input.aligned(1, 16)) return 0;
  const Tiles tiles = tiles_of(grid.sizes[2], grid.sizes[1]);
  return input.numel() * input.item_size() + input.sizes[0] * (1 + int64_t{tiles.count_across.d} * tiles.count_down);
}

cudaError_t sample(const Tensor& input, const Tensor& grid, const Tensor& output, const Tensor& mask,
                   const Sampling& sampling, cudaStream_t stream, void* workspace) {
  Space s(grid);
  if (output.numel() == 0 && mask.data == nullptr) return cudaSuccess;
  if (output.numel() == 0 || input.sizes[0] > INT32_MAX || input.sizes[1] > INT32_MAX || !is_float(grid) ||
      !Space::of(input, grid, sampling, s)) {
    return cudaErrorNotSupported;
  }
  int64_t point = 1;
  if (!Space::evenly_spaced(output, 2, output.rank - 1, point)) return cudaErrorNotSupported;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Output<T> to{static_cast<T*>(output.data), output.strides[0], output.strides[1], point,
                       static_cast<T*>(mask.data)};
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) {
      if constexpr (taps.value == 4) {
        if (s.padding == kZeros) return run<T, 4, kZeros>(input, s, to, workspace, stream);
        if (s.padding == kPixels) return run<T, 4, kPixels>(input, s, to, workspace, stream);
      }
      return run<T, taps.value, kAnyPadding>(input, s, to, workspace, stream);
    });
  });
}

size_t grid_sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  return sample_workspace(input, grid, mode);
}

cudaError_t grid_sample(const Tensor& input, const Tensor& grid, const Tensor& output, int mode, int padding,
                        bool align_corners, cudaStream_t stream, void* workspace) {
  return sample(input, grid, output, Tensor{}, Sampling{mode, padding, align_corners}, stream, workspace);
}

}  // namespace svexport
#endif
