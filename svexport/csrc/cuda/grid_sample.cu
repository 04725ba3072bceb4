#include "grid_sample.h"

#include "box.cuh"
#include "overlap.cuh"
#include <cstdlib>

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
template <class T, int TAPS, int U = TAPS == 1 ? 8 : TAPS == 4 ? 4 : TAPS == 8 ? 2 : 1, int POINTS = 1>
__global__ void __launch_bounds__(kThreads) direct_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          int64_t channel, Output<T> output, int batch, int channels,
                                                          int chunk) {
  const int p = blockIdx.x * (POINTS * kThreads) + threadIdx.x, first = blockIdx.y * chunk;
  if (p >= s.points) return;
  const int count = min(chunk, channels - first);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    Taps<TAPS> taps[POINTS];
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const int point = min(p + k * kThreads, s.points - 1);
      taps[k] = Taps<TAPS>(locate<TAPS>(s, n, point), s.stride);
      if (output.mask && first == 0) output.set_mask(static_cast<int64_t>(n) * s.points + point, taps[k].offset[0]);
    }
    const char* source = reinterpret_cast<const char*>(input + n * image + first * channel);
    T* target = output.data + n * output.image + first * output.channel + p * output.point;
    auto step = [&](auto width) {
      constexpr int W = decltype(width)::value;
      T v[W][POINTS][TAPS];
#pragma unroll
      for (int u = 0; u < W; ++u) {
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
#pragma unroll
          for (int i = 0; i < TAPS; ++i) {
            v[u][k][i] = from_float<T>(0.0f);
            if (taps[k].offset[i] >= 0) {
              v[u][k][i] = *reinterpret_cast<const T*>(source + taps[k].offset[i] * uint32_t{sizeof(T)});
            }
          }
        }
        source += channel * sizeof(T);
      }
#pragma unroll
      for (int u = 0; u < W; ++u) {
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
          float sum = 0;
#pragma unroll
          for (int i = 0; i < TAPS; ++i) sum = fmaf(taps[k].weight[i], to_float(v[u][k][i]), sum);
          if (k == 0 || p + k * kThreads < s.points) target[k * kThreads * output.point] = from_float<T>(sum);
        }
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
template <class T, int TAPS>
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
    points[i] = Taps<TAPS>(locate<TAPS>(s, n, p), s.stride);
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
        Vec<T, V> v[POINTS][AT_ONCE] = {};
        float weight[POINTS][AT_ONCE] = {};
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
          if (row + k * rows >= left) continue;
          const Taps<TAPS>& taps = points[row + k * rows];
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            weight[k][j] = taps.weight[i + j];
            if (taps.offset[i + j] >= 0) v[k][j] = load<T, V>(source + taps.offset[i + j]);
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
template <class T, int TAPS>
__global__ void __launch_bounds__(kThreads) vector_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          Output<T> output, int batch, int channels, int shift,
                                                          int steps, int width, const bool* __restrict__ only) {
  constexpr int V = 16 / sizeof(T);
  wait_for_previous();
  const int first = blockIdx.x * steps * kTogether<TAPS> * (kThreads >> shift);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (only && !only[n]) continue;
    vector<T, TAPS>(s, input, image, output, n, first, (blockIdx.y << shift) * V, channels, shift, steps, width);
  }
}

// ------------------------------------------------------ NCHW: the pixels of a tile of points in shared memory

constexpr int kBoxPoints = 2;            // of a thread
constexpr int kBoxThreads = 1024;        // at most
template <class T>
constexpr int kLargestBox = 4096 * sizeof(T);  // of a channel, for 512 points; beyond, a copy in channels-last is faster

// Points as rows of `across`, and the tile of a block: `half` threads across for twice as many points, the others down.
struct Tiles {
  int across, down, half, height, count_across, count_down;
  bool pairs;  // two halves, neighbours, can be stored at once
};

// Blocks of tiles x `chunk` channels x images, as many channels at a time as fit into `memory`. `scattered`: null if
// boxes are whole planes, else (N, tiles): set where a box is too large, and nothing computed.
template <class T>
__global__ void __launch_bounds__(kBoxThreads)
    box_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, Tiles tiles,
               int batch, int channels, int chunk, int memory, int unit, bool* __restrict__ scattered) {
  constexpr int TAPS = 4, POINTS = kBoxPoints, ITEM = sizeof(T);
  constexpr bool kBeside = ITEM == 2;  // the points of a thread: side by side, or half a tile apart
  extern __shared__ uint4 memory_of_block[];
  __shared__ int edges[4];
  char* pixels = reinterpret_cast<char*>(memory_of_block);
  const int half = tiles.half, line = threadIdx.x / half, lane = threadIdx.x - line * half;
  const int row = (line & 8) | (line & 1) << 2 | (line >> 1 & 3);  // two rows of a warp lie four apart
  const int tile_y = blockIdx.x / tiles.count_across, tile_x = blockIdx.x - tile_y * tiles.count_across;
  const int y = tile_y * tiles.height + row, x = tile_x * 2 * half + (kBeside ? 2 : 1) * lane, step = kBeside ? 1 : half;
  const int first = y * tiles.across + x, begin = blockIdx.y * chunk, end = min(begin + chunk, channels);
  start_next();
  const bool valid[POINTS] = {y < tiles.down && x < tiles.across, y < tiles.down && x + step < tiles.across};

  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    const char* source = reinterpret_cast<const char*>(input + n * image);
    Box box(0, 0, s.size[0] - 1, s.size[1] - 1, s.size[0], ITEM, unit);
    int together = memory / 2 / box.bytes;  // while these are used, as many are on their way
    const auto fetch = [&](int c, int half) {
      box.fetch(pixels + half * together * box.bytes, source + c * channel * ITEM, channel * ITEM,
                min(together, end - c), unit);
    };
    if (!scattered) {
      fetch(begin, 0);
      fetch(begin + together, 1);
    }
    Point<TAPS> points[POINTS];
#pragma unroll
    for (int k = 0; k < POINTS; ++k) points[k] = locate<TAPS>(s, n, valid[k] ? first + k * step : 0);
    if (scattered) {
      bounds(points, valid, edges);
      box = Box(edges[0], edges[1], -edges[2], -edges[3], s.size[0], ITEM, unit);
      const bool large = box.bytes > kLargestBox<T>;
      if (begin == 0 && threadIdx.x == 0) scattered[static_cast<int64_t>(n) * gridDim.x + blockIdx.x] = large;
      if (large) continue;
      together = memory / 2 / box.bytes;
      fetch(begin, 0);
      fetch(begin + together, 1);
    }
    int offset[POINTS][TAPS];
    float weight[POINTS][TAPS];
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const int stride[3] = {ITEM, box.row, 0};
      const Taps<TAPS> taps(points[k], stride);
#pragma unroll
      for (int i = 0; i < TAPS; ++i) {
        offset[k][i] = valid[k] && taps.offset[i] >= 0 ? box.origin + taps.offset[i] : box.zeros();
        weight[k][i] = taps.weight[i];
      }
      if (output.mask && begin == 0 && valid[k]) {
        output.set_mask(static_cast<int64_t>(n) * s.points + first + k * step, taps.offset[0]);
      }
    }
    T* target = output.data + n * output.image + begin * output.channel + first * output.point;
    for (int c = begin, half = 0; c < end; c += together, half ^= 1) {
      __pipeline_wait_prior(1);
      __syncthreads();
      const char* from = pixels + half * together * box.bytes;
      const int count = min(together, end - c);
      const auto gather = [&](auto pairs) {
#pragma unroll 4
        for (int i = 0; i < count; ++i, target += output.channel) {
          float sum[POINTS] = {};
#pragma unroll
          for (int k = 0; k < POINTS; ++k) {
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
              const T pixel = *reinterpret_cast<const T*>(from + i * box.bytes + offset[k][j]);
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
      if (tiles.pairs) {
        gather(std::true_type());
      } else {
        gather(std::false_type());
      }
      __syncthreads();
      fetch(c + 2 * together, half);
    }
    __pipeline_wait_prior(0);
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

int of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

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
         input.sizes[0] * channels * points >= (getenv("SV_MANY") ? 1 << atoi(getenv("SV_MANY")) : 1 << 22) && pixels * channels < INT32_MAX;
}

// For box_kernel: tiles of 512 points that lie side by side in two dimensions,
Tiles square_tiles(int64_t across, int64_t down) {
  if (across < 16) across *= down, down = 1;
  const int half = down == 1 ? 256 : 16, height = 256 / half;
  return {static_cast<int>(across), static_cast<int>(down), half, height,
          static_cast<int>(ceil_div<int64_t>(across, 2 * half)),
          static_cast<int>(ceil_div<int64_t>(down, height))};
}

template <class T, int TAPS>
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
  while (steps > 1 && static_cast<int64_t>(ceil_div(s.points, steps * tile)) * across * images < enough) steps /= 2;
  return launch_early(vector_kernel<T, TAPS>, dim3(ceil_div(s.points, steps * tile), across, images), kThreads,
                      vector_memory<TAPS>(shift, steps), stream, s, data, image, output, batch, channels, shift, steps,
                      width, only);
}

template <class T>
cudaError_t launch_boxes(const Tensor& input, const Space& s, const Output<T>& output, Tiles tiles, int threads, int chunk,
                         int memory, bool* scattered, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  const uint64_t aligned = reinterpret_cast<uintptr_t>(data) | image * sizeof(T) | channel * sizeof(T) |
                           static_cast<uint64_t>(s.size[0]) * s.size[1] * sizeof(T) | 16;
  const int unit = static_cast<int>(aligned & -aligned);  // the largest power of two that divides all
  tiles.pairs = sizeof(T) == 2 && output.point == 1 && tiles.across % 2 == 0 &&
                (reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image | output.channel) % 2 == 0;
  const cudaError_t status =
      cudaFuncSetAttribute(box_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
  if (status != cudaSuccess) return status;
  const dim3 grid(tiles.count_across * tiles.count_down, ceil_div(channels, chunk), batch < 65535 ? batch : 65535);
  box_kernel<<<grid, threads, memory, stream>>>(s, data, image, channel, output, tiles, batch, channels, chunk, memory,
                                                unit, scattered);
  return cudaGetLastError();
}

template <class T, int TAPS>
cudaError_t launch(const Tensor& input, const Space& s, const Output<T>& output, void* workspace, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  const int enough = 8 * of_device(cudaDevAttrMultiProcessorCount);  // blocks
  constexpr int V = 16 / sizeof(T);
  const bool tiny = channels == V && static_cast<int64_t>(batch) * s.points <= (1 << 14);  // one access is soon done
  if (channels % V == 0 && input.aligned(1, 16) && !(tiny && TAPS <= 4)) {
    return launch_vector<T, TAPS>(s, data, image, batch, channels, output, enough, nullptr, stream);
  }

  if constexpr (TAPS == 4) {
    const int64_t plane = static_cast<int64_t>(s.size[0]) * s.size[1] * sizeof(T) + 32;  // in shared memory, at most
    const int most = of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (dense_planes(input) && s.points <= 2 * kBoxThreads && plane <= 64 * s.points && plane <= most / 2 && !getenv("SV_NOA")) {
      // Few points, and yet so many that they touch most of a plane.
      const int threads = s.points < 256 ? 128 : ceil_div(s.points, 64) * 32, bytes = static_cast<int>(plane);
      const int resident = most / 2 / bytes < 4 ? most / 2 / bytes : 4;
      int chunk = ceil_div(batch * channels, enough / 8 * resident);
      if (getenv("SV_ACHUNK")) chunk = atoi(getenv("SV_ACHUNK"));
      while (ceil_div(channels, chunk) > 65535) chunk *= 2;
      const int fit = most / resident / 2 / bytes, together = ceil_div(chunk, 2) < fit ? ceil_div(chunk, 2) : fit;
      return launch_boxes(input, s, output, Tiles{s.points, 1, threads, 1, 1, 1}, threads, chunk, 2 * together * bytes,
                          nullptr, stream);
    }
    if (workspace && many_points(input, s.points, kBilinear)) {
      const Tiles tiles = square_tiles(s.across.d, s.points / s.across.d);
      const int count = tiles.count_across * tiles.count_down, pixels = s.size[0] * s.size[1];
      T* copy = static_cast<T*>(workspace);
      bool* copied = reinterpret_cast<bool*>(copy + input.numel());
      bool* scattered = copied + batch;
      const char* e = getenv("SV_CHUNK");
      const int chunk = e ? atoi(e) : 64;
      const char* e2 = getenv("SV_MEM");
      const int mem = e2 ? atoi(e2) : 48;
      cudaError_t status = launch_boxes(input, s, output, tiles, 256, chunk, mem * 1024, scattered, stream);
      if (status != cudaSuccess || plane <= kLargestBox<T>) return status;
      status = launch_early(copy_scattered_kernel<T>, dim3(ceil_div(enough, batch), batch < 65535 ? batch : 65535), kThreads, 0, stream,
          data, image, channel, copy, scattered, count, copied, batch, channels, pixels,
          pixel_width<T>(data, image, channel));
      if (status != cudaSuccess) return status;
      Space last = s;
      last.stride[0] = channels;
      last.stride[1] = channels * s.size[0];
      return launch_vector<T, TAPS>(last, copy, static_cast<int64_t>(pixels) * channels, batch, channels, output, enough,
                                    copied, stream);
    }
  }
  int64_t extent = 1;
  for (int a = 0; a < s.axes; ++a) extent += static_cast<int64_t>(s.size[a] - 1) * s.stride[a];
  if (extent * sizeof(T) > UINT32_MAX) return cudaErrorNotSupported;
  const int blocks = ceil_div(s.points, kThreads);
  int chunk = 32;
  while (chunk > 4 && static_cast<int64_t>(blocks) * batch * ceil_div(channels, chunk) < enough) chunk /= 2;
  while (ceil_div(channels, chunk) > 65535) chunk *= 2;
  const auto run = [&](auto kernel, int points) {
    const dim3 grid(ceil_div(s.points, points * kThreads), ceil_div(channels, chunk), batch < 65535 ? batch : 65535);
    kernel<<<grid, kThreads, 0, stream>>>(s, data, image, channel, output, batch, channels, chunk);
    return cudaGetLastError();
  };
  if constexpr (TAPS <= 4) {
    if (getenv("SV_U4")) return run(direct_kernel<T, TAPS>, 1);
    if (channels == 1 && getenv("SV_P2")) return run(direct_kernel<T, TAPS, 1, 2>, 2);
    if (channels == 1 && getenv("SV_P4")) return run(direct_kernel<T, TAPS, 1, 4>, 4);
    if (channels == 1) return run(direct_kernel<T, TAPS, 1>, 1);
    if (channels == 3) return run(direct_kernel<T, TAPS, 3>, 1);
  }
  return run(direct_kernel<T, TAPS>, 1);
}

}  // namespace

size_t sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  if (grid.numel() == 0 || !many_points(input, grid.numel() / grid.sizes[0] / 2, mode)) return 0;
  if (input.sizes[1] % (16 / input.item_size()) == 0 && input.aligned(1, 16)) return 0;
  const Tiles tiles = square_tiles(grid.sizes[2], grid.sizes[1]);
  return input.numel() * input.item_size() + input.sizes[0] * (1 + int64_t{tiles.count_across} * tiles.count_down);
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
    return dispatch_taps(sampling.mode, s.axes,
                         [&](auto taps) { return launch<T, taps()>(input, s, to, workspace, stream); });
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
