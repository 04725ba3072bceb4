#include <algorithm>

#include "bilinear_sample.h"
#include "box.cuh"
#include "grid_sample.h"
#include "pixel_lists.cuh"

namespace svexport {
namespace {

constexpr int kThreads = 256;

// How direct_kernel adds up the gradient of the image.
enum Sums {
  kPixelSums,  // (N, C, pixels): every pixel of a point by itself
  kPairSums,   // (N, C, rows, width + 1, 2): the pixels to the left and right of a point together
  kListSums,   // not: it lists the points for owner_kernel
};

// p[0] += x, p[1] += y atomically, nothing returned; p aligned to 8 bytes.
__device__ __forceinline__ void add_pair(float* p, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
#else
  atomicAdd(p, x);
  atomicAdd(p + 1, y);
#endif
}

// Distances between the pixels of a dense image, `unit` elements from one pixel to the next.
struct Dense {
  int stride[3];

  Dense(const Space& s, int unit) : stride{unit, unit * s.size[0], unit * s.size[0] * (s.axes == 3 ? s.size[1] : 1)} {}
};

// The gradient of a point's coordinates, from the sum over channels of the output's gradient times each pixel.
template <int TAPS>
__device__ __forceinline__ void to_coordinates(const Point<TAPS>& point, const float (&dot)[TAPS],
                                               float (&gradient)[3]) {
#pragma unroll
  for (int a = 0; a < Point<TAPS>::AXES; ++a) {
    gradient[a] = 0;
#pragma unroll
    for (int i = 0; i < TAPS; ++i) gradient[a] = fmaf(point.slope(i, a), dot[i], gradient[a]);
  }
}

// ------------------------------------------------------------------------------------- any strides: a thread per point

// Blocks of points x images; 1 << shift threads share the channels of a point, each U at a time. sums: (N, C, pixels),
// contiguous, or null; grad_grid: (N, points, axes), contiguous, or null. Waits for the kernel before, which cleared
// the sums or counters, only when it needs them.
template <class T, int TAPS, int PADDING, int U, int SUMS>
__global__ void __launch_bounds__(kThreads, TAPS == 4 && U > 1 ? 4 : 1)
    direct_kernel(Space s, Dense dense, const T* __restrict__ input, int64_t image, int64_t channel, Gradient<T> grad,
                  float* __restrict__ sums, AnyFloat grad_grid, int batch, int channels, int64_t pixels, int shift,
                  Lists lists, Left left) {
  __shared__ float partial[3][kThreads];
  const int tile = kThreads >> shift, row = threadIdx.x & (tile - 1), part = threadIdx.x / tile, parts = 1 << shift;
  const int p = blockIdx.x * tile + row;
  start_next();
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    float gradient[3] = {};
    Point<TAPS> point;
    if (sums && left.runs) {
      wait_for_previous();
      if (!left(n)) continue;
    }
    if (p < s.points) {
      point = locate<TAPS, PADDING>(s, n, p);
      const Taps<TAPS> from(point, s.stride), to(point, dense.stride);
      float dot[TAPS] = {};
      const bool read = grad_grid.data && TAPS > 1;
      const T* g = grad.data + n * grad.image + p * grad.point;
      const T* source = input + n * image;
      float* target = sums + static_cast<int64_t>(n) * channels * pixels;
#pragma unroll 1
      for (int begin = part; begin < channels; begin += U * parts) {
        float scales[U], values[U][TAPS];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int c = begin + u * parts;
          scales[u] = to_float(load_if<T, 1>(g + c * grad.channel, c < channels).at[0]);
#pragma unroll
          for (int i = 0; i < TAPS; ++i) {
            const bool inside = read && from.offset[i] >= 0 && c < channels;
            values[u][i] = to_float(load_if<T, 1>(source + c * channel + from.offset[i], inside).at[0]);
          }
        }
        if (sums) wait_for_previous();  // which the reads above need not
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int c = begin + u * parts;
          const float scale = scales[u];
          if (c >= channels) break;
#pragma unroll
          for (int i = 0; i < TAPS; ++i) {
            if (from.offset[i] >= 0) dot[i] = fmaf(scale, values[u][i], dot[i]);
          }
          if (!sums) continue;
          if constexpr (SUMS == kPairSums) {
            const Pixels<2>& x = point.axis[0];
            const int first = x.index[0] >= 0 ? x.index[0] + 1 : x.index[1];  // -1: neither is inside
#pragma unroll
            for (int i = 0; i < TAPS; i += 2) {
              int row = 0, outside = first;
#pragma unroll
              for (int a = Point<TAPS>::AXES - 1; a > 0; --a) {
                const int index = point.axis[a].index[Point<TAPS>::at(i, a)];
                row = row * s.size[a] + index;
                outside |= index;
              }
              const int64_t pair = static_cast<int64_t>(row) * (s.size[0] + 1) + first;
              if (outside >= 0) {
                add_pair(target + c * pixels + 2 * pair, point.weight(i) * scale, point.weight(i + 1) * scale);
              }
            }
          } else {
#pragma unroll
            for (int i = 0; i < TAPS; ++i) {
              if (to.offset[i] >= 0) atomicAdd(target + c * pixels + to.offset[i], to.weight[i] * scale);
            }
          }
        }
      }
      if (TAPS > 1) to_coordinates(point, dot, gradient);
    }
    if constexpr (SUMS == kListSums) {
      wait_for_previous();
      list(s, lists, n, part == 0 ? p : s.points, point);
    }
    if (grad_grid.data == nullptr) continue;
    if (parts == 1) {
#pragma unroll
      for (int a = 0; a < Point<TAPS>::AXES; ++a) {
        if (p < s.points && a < s.axes) {
          grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, gradient[a]);
        }
      }
      continue;
    }
#pragma unroll
    for (int a = 0; a < 3; ++a) partial[a][threadIdx.x] = gradient[a];
    __syncthreads();
    if (part == 0 && p < s.points) {
      for (int a = 0; a < s.axes; ++a) {
        float sum = 0;
        for (int i = 0; i < parts; ++i) sum += partial[a][row + i * tile];
        grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, sum);
      }
    }
    __syncthreads();
  }
  wait_for_previous();
}

// The same sums in one order: a thread per channel of an image, one point after the other.
template <class T, int TAPS>
__global__ void __launch_bounds__(kThreads)
    ordered_kernel(Space s, Dense dense, Gradient<T> grad, float* __restrict__ sums, int batch, int channels,
                   int64_t pixels) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= static_cast<int64_t>(batch) * channels) return;
  const int n = static_cast<int>(i / channels), c = static_cast<int>(i % channels);
  float* target = sums + i * pixels;
  for (int p = 0; p < s.points; ++p) {
    const Taps<TAPS> taps(locate<TAPS>(s, n, p), dense.stride);
    const float g = to_float(grad.data[n * grad.image + c * grad.channel + p * grad.point]);
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
      if (taps.offset[k] >= 0) target[taps.offset[k]] += taps.weight[k] * g;
    }
  }
}

// ------------------------------------------------------------- channels-last image and sums: 16 bytes of a point each

// Blocks of 256 >> shift points x images, (16 bytes << shift) of channels at a time. input: (N, pixels, C) with C
// innermost, any strides else; sums: (N, pixels, C), contiguous, or null.
template <class T, int TAPS, int PADDING>
__global__ void __launch_bounds__(kThreads, TAPS <= 4 ? 4 : 1)
    vector_kernel(Space s, Dense dense, const T* __restrict__ input, int64_t image, Gradient<T> grad,
                  float* __restrict__ sums, AnyFloat grad_grid, int batch, int channels, int64_t pixels, int shift,
                  int width, Left left, bool only_left) {
  constexpr int V = 16 / sizeof(T);
  __shared__ uint4 tile[kThreads];  // points x granules of the gradient
  const int lanes = 1 << shift, rows = kThreads >> shift, lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int bits = tile_bits(shift, width);
  start_next();
  wait_for_previous();
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (only_left && !left(n)) continue;
    const bool add = sums && left(n);
    uint32_t at = blockIdx.x * rows;
    do {
      const int first = at;
      const int p = first + row;
      Point<TAPS> point;
      if (p < s.points) point = locate<TAPS, PADDING>(s, n, p);
      const Taps<TAPS> from(point, s.stride), to(point, dense.stride);
      float dot[TAPS] = {};
      for (int block_channel = 0; block_channel < channels; block_channel += V << shift) {
        if (width > 0) {
          const T* source = grad.data + n * grad.image + first * grad.point + block_channel * grad.channel;
          __syncthreads();
          dispatch_width(width, [&](auto w) {
            constexpr int W = decltype(w)::value;
            if constexpr (W <= 4) {
              read_points<W>(tile, bits, shift, rows, source, grad.channel, grad.point, s.points - first,
                               channels - block_channel);
            }
          });
          __syncthreads();
        }
        if (p >= s.points) continue;
        // Four channels of each lane at a time, so that lanes side by side add to memory side by side.
#pragma unroll
        for (int part = 0; part < V / 4; ++part) {
          const int in_block = (part * lanes + lane) * 4, c = block_channel + in_block;
          if (c >= channels) break;
          Vec<T, 4> g;
          if (width > 0) {
            const char* granule = reinterpret_cast<const char*>(&tile[swizzled(row * lanes + in_block / V, bits)]);
            memcpy(&g, granule + in_block % V * sizeof(T), sizeof(g));
          } else {
            g = load<T, 4>(grad.data + n * grad.image + p * grad.point + c);
          }
          const T* source = input + n * image + c;
          float* target = sums + n * pixels * channels + c;
          Vec<T, 4> v[TAPS];
          if (grad_grid.data && TAPS > 1) {
#pragma unroll
            for (int i = 0; i < TAPS; ++i) {
              v[i] = load_if<T, 4>(source + from.offset[i], from.offset[i] >= 0);
            }
          }
          if (add) {
#pragma unroll
            for (int i = 0; i < TAPS; ++i) {
              float scaled[4];
#pragma unroll
              for (int k = 0; k < 4; ++k) scaled[k] = to.weight[i] * to_float(g.at[k]);
              if (to.offset[i] >= 0) atomic_add(target + to.offset[i], scaled);
            }
          }
          if (grad_grid.data && TAPS > 1) {
#pragma unroll
            for (int i = 0; i < TAPS; ++i) {
              if (from.offset[i] < 0) continue;
#pragma unroll
              for (int k = 0; k < 4; ++k) dot[i] = fmaf(to_float(g.at[k]), to_float(v[i].at[k]), dot[i]);
            }
          }
        }
      }
      if (grad_grid.data == nullptr) continue;
      float gradient[3] = {};
      if (TAPS > 1 && p < s.points) to_coordinates(point, dot, gradient);
#pragma unroll
      for (int a = 0; a < Point<TAPS>::AXES; ++a) {
        for (int mask = lanes / 2; mask > 0; mask /= 2) gradient[a] += __shfl_xor_sync(~0u, gradient[a], mask);
      }
      if (lane == 0 && p < s.points) {
#pragma unroll
        for (int a = 0; a < Point<TAPS>::AXES; ++a) {
          if (a < s.axes) grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, gradient[a]);
        }
      }
    } while (TAPS == 4 && (at += gridDim.x * rows) < s.points);
  }
}

// -------------------------------------------------- NCHW, points close together: the pixels of a tile in shared memory

// Tiles of 32 x 16 points: two of a thread, side by side or half a tile apart.
constexpr int kTileAcross = 32, kTileDown = 16;
constexpr int kBoxMemory = 56 << 10;
// Bytes of a row and a channel of the gradient of a tile: rows that lie four apart use different banks.
template <class T>
constexpr int kGradientRow = kTileAcross * sizeof(T) + 16;
template <class T>
constexpr int kGradientTile = kTileDown * kGradientRow<T>;

// The gradient of bilinear points in images that are not left; blocks of tiles x images. Half as many channels at once
// as fit into the memory: while these are used, the next are on their way. unit: as of Box; copied: the gradient of the
// output is read by way of shared memory, 16 bytes at a time.
template <class T, int PADDING>
__global__ void __launch_bounds__(kThreads, 4)
    box_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Gradient<T> grad,
               AnyFloat grad_grid, int batch, int channels, int across, int down, bool copied, int unit, Left left) {
  constexpr int TAPS = 4, POINTS = 2, ITEM = sizeof(T);
  constexpr bool kBeside = ITEM == 2;
  extern __shared__ uint4 box_of_block[];
  __shared__ int edges[4];
  start_next();
  char* const memory = reinterpret_cast<char*>(box_of_block);
  const int line = threadIdx.x / 16, lane = threadIdx.x % 16;
  const int row = row_of_line(line);
  const int tiles_across = ceil_div(across, kTileAcross), tile_y = blockIdx.x / tiles_across;
  const int tile_x = blockIdx.x - tile_y * tiles_across;
  const int x = tile_x * kTileAcross + (kBeside ? 2 : 1) * lane, y = tile_y * kTileDown + row;
  const int step = kBeside ? 1 : kTileAcross / 2, first = y * across + x;
  const bool valid[POINTS] = {y < down && x < across, y < down && x + step < across};
  // Of the gradient, a thread copies one chunk of every channel or two.
  constexpr int kChunks = kTileAcross * ITEM / 16, kSlots = kTileDown * kChunks, kStep = kThreads / kSlots;
  const int chunk = threadIdx.x % kSlots, chunk_row = chunk / kChunks, chunk_x = chunk % kChunks * (16 / ITEM);
  const int from_y = tile_y * kTileDown + chunk_row, from_x = tile_x * kTileAcross + chunk_x;
  const bool any_chunk = copied && from_y < down && from_x < across;
  wait_for_previous();
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (left(n)) continue;
    Point<TAPS> points[POINTS];
#pragma unroll
    for (int k = 0; k < POINTS; ++k) points[k] = locate<TAPS, PADDING>(s, n, valid[k] ? first + k * step : 0);
    bounds(points, valid, edges);
    Box box(edges[0], edges[1], -edges[2], -edges[3], s.size[0], ITEM, unit);
    const bool large = box.bytes > kLargestBox<T>;
    int offset[POINTS][TAPS];
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const int stride[3] = {ITEM, large ? s.stride[1] * ITEM : box.row, 0};
#pragma unroll
      for (int i = 0; i < TAPS; ++i) offset[k][i] = valid[k] ? points[k].offset(i, stride) : -1;
    }
    const T* source = grad.data + n * grad.image + first * grad.point;
    float dot[POINTS][TAPS] = {};
    if (large) {  // one of few
      for (int c = 0; c < channels; ++c, source += grad.channel) {
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
          const float g = to_float(load_if<T, 1>(source + k * step * grad.point, valid[k]).at[0]);
#pragma unroll
          for (int i = 0; i < TAPS; ++i) {
            const char* from = reinterpret_cast<const char*>(input + n * image + c * channel) + offset[k][i];
            const T pixel = load_if<T, 1>(reinterpret_cast<const T*>(from), offset[k][i] >= 0).at[0];
            dot[k][i] = fmaf(g, to_float(pixel), dot[k][i]);
          }
        }
      }
    } else {
      box.widen<T>();
      const int together = kBoxMemory / 2 / (box.bytes + kGradientTile<T>);
      char* const gradients = memory + 2 * together * box.bytes;
      const Share share(box);
      box.clear<kThreads>(memory, 2 * together);
#pragma unroll
      for (int k = 0; k < POINTS; ++k) {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) offset[k][i] = offset[k][i] >= 0 ? box.origin + offset[k][i] : box.zeros();
      }
      const auto gather = [&](const char* from, const char* g_from, int count, auto bytes, auto copied) {
        const int distance = bytes.value ? bytes.value : box.bytes;
#pragma unroll 4
        for (int c = 0; c < count; ++c) {
          T g[POINTS];
#pragma unroll
          for (int k = 0; k < POINTS; ++k) {
            if constexpr (copied.value) {
              g[k] = *reinterpret_cast<const T*>(g_from + c * kGradientTile<T> + k * step * ITEM);
            } else {
              g[k] = load_if<T, 1>(source + k * step * grad.point, valid[k]).at[0];
            }
          }
          source += grad.channel;
#pragma unroll
          for (int k = 0; k < POINTS; ++k) {
#pragma unroll
            for (int i = 0; i < TAPS; ++i) {
              const T pixel = *reinterpret_cast<const T*>(from + c * distance + offset[k][i]);
              dot[k][i] = fmaf(to_float(g[k]), to_float(pixel), dot[k][i]);
            }
          }
        }
      };
      for (int c = -2 * together, buffer = 0; c < channels; c += together, buffer ^= 1) {
        char* const at = memory + buffer * together * box.bytes;
        char* const g_at = gradients + buffer * together * kGradientTile<T>;
        if (c >= 0) {
          __pipeline_wait_prior(1);
          __syncthreads();
          const int count = min(together, channels - c);
          const char* g_from = g_at + row * kGradientRow<T> + (kBeside ? 2 : 1) * lane * ITEM;
          if (copied && box.bytes == kSmallBox<T>) {
            gather(at, g_from, count, std::integral_constant<int, kSmallBox<T>>(), std::true_type());
          } else if (copied && box.bytes == kUsualBox<T>) {
            gather(at, g_from, count, std::integral_constant<int, kUsualBox<T>>(), std::true_type());
          } else if (copied) {
            gather(at, g_from, count, std::integral_constant<int, 0>(), std::true_type());
          } else {
            gather(at, g_from, count, std::integral_constant<int, 0>(), std::false_type());
          }
          __syncthreads();
        }
        const int next = c + 2 * together, count = min(together, channels - next);
        if (any_chunk) {
          const T* chunk_of = grad.data + n * grad.image + from_y * across + from_x;
          for (int i = threadIdx.x / kSlots; i < count; i += kStep) {
            __pipeline_memcpy_async(g_at + i * kGradientTile<T> + chunk_row * kGradientRow<T> + chunk_x * ITEM,
                                    chunk_of + (next + i) * grad.channel, 16);
          }
        }
        share.copy(box, at, reinterpret_cast<const char*>(input + n * image + next * channel), channel * ITEM, count);
      }
      __pipeline_wait_prior(0);
    }
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      if (!valid[k]) continue;
      const int p = first + k * step;
      const Point<TAPS> point = locate<TAPS, PADDING>(s, n, p);
      float gradient[3];
#pragma unroll
      for (int i = 0; i < TAPS; ++i) {
        if (point.offset(i, s.stride) < 0) dot[k][i] = 0;
      }
      to_coordinates(point, dot[k], gradient);
#pragma unroll
      for (int a = 0; a < 2; ++a) grad_grid.set((static_cast<int64_t>(n) * s.points + p) * 2 + a, gradient[a]);
    }
  }
}

// ------------------------------------------------------------------ few points: pixels of a channel in shared memory

constexpr int kPlaneThreads = 512, kPlanePixels = 28000;  // two blocks in the shared memory of a multiprocessor

// Blocks of (image, channel, `tile` pixels): each adds up its part of the gradient and writes it once.
// output: (N, C, pixels), contiguous. grad_grid: (N, points, axes), contiguous, or null; of images of one channel only.
template <class T, int TAPS>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_kernel(Space s, Dense dense, const T* __restrict__ input, int64_t image, Gradient<T> grad,
                 T* __restrict__ output, AnyFloat grad_grid, int channels, int pixels, int tile, int tiles) {
  extern __shared__ float sums[];  // (tile)
  const int block = blockIdx.x / tiles, c = block % channels, n = block / channels;
  const int begin = blockIdx.x % tiles * tile, size = min(tile, pixels - begin);
  start_next();
  for (int i = threadIdx.x; i < size; i += kPlaneThreads) sums[i] = 0;
  __syncthreads();
  const T* source = grad.data + n * grad.image + c * grad.channel;
  for (int p = threadIdx.x; p < s.points; p += kPlaneThreads) {
    const Point<TAPS> point = locate<TAPS>(s, n, p);
    const Taps<TAPS> taps(point, dense.stride);
    const float g = to_float(source[p * grad.point]);
#pragma unroll
    for (int i = 0; i < TAPS; ++i) {
      const int at = taps.offset[i] - begin;
      if (taps.offset[i] >= 0 && at >= 0 && at < size) atomicAdd(sums + at, taps.weight[i] * g);
    }
    if (grad_grid.data == nullptr || begin > 0) continue;
    float dot[TAPS] = {}, gradient[3] = {};
    if (TAPS > 1) {
#pragma unroll
      for (int i = 0; i < TAPS; ++i) {
        const int from = point.offset(i, s.stride);
        if (from >= 0) dot[i] = g * to_float(input[n * image + from]);
      }
      to_coordinates(point, dot, gradient);
    }
#pragma unroll
    for (int a = 0; a < Point<TAPS>::AXES; ++a) {
      if (a < s.axes) grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, gradient[a]);
    }
  }
  __syncthreads();
  T* target = output + static_cast<int64_t>(block) * pixels + begin;
  for (int i = threadIdx.x; i < size; i += kPlaneThreads) target[i] = from_float<T>(sums[i]);
}

// ------------------------------------------------------------------------------------------------------ copies

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    to_channels_last_kernel(const T* __restrict__ from, int64_t image, int64_t channel, T* __restrict__ to, int batch,
                            int channels, int pixels, int width, Left left) {
  start_next();
  wait_for_previous();
  each_left(batch, left, [&](int n, int count) {
    to_channels_last(from + n * image, image, channel, to + static_cast<int64_t>(n) * channels * pixels, count,
                     channels, pixels, width);
  });
}

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    from_channels_last_kernel(const float* __restrict__ from, T* __restrict__ to, int batch, int channels, int pixels,
                              int width, Left left) {
  start_next();
  wait_for_previous();
  each_left(batch, left, [&](int n, int count) {
    const int64_t first = static_cast<int64_t>(n) * channels * pixels;
    from_channels_last(from + first, to + first, count, channels, pixels, width);
  });
}

// Images of `size` floats each, 4 at a time where aligned.
__global__ void __launch_bounds__(kThreads) zero_kernel(float* __restrict__ to, int batch, int64_t size, Left left) {
  start_next();
  wait_for_previous();
  each_left(batch, left, [&](int first, int count) {
    float* from = to + first * size;
    const int64_t n = count * size;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
    for (int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) * 4; i < n;
         i += static_cast<int64_t>(gridDim.x) * kThreads * 4) {
      if (aligned && i + 4 <= n) {
        store(from + i, Vec<float, 4>{});
      } else {
        for (int64_t j = i; j < n && j < i + 4; ++j) from[j] = 0;
      }
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const float* __restrict__ from, T* __restrict__ to, int batch, int64_t size, Left left) {
  start_next();
  wait_for_previous();
  each_left(batch, left, [&](int image, int count) {
    const int64_t first = image * size, n = count * size;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
      to[first + i] = from_float<T>(from[first + i]);
    }
  });
}

// from: (rows, width + 1, 2) to (rows, width), across: width; n: rows * width.
template <class T>
__global__ void __launch_bounds__(kThreads)
    add_pairs_kernel(const float* __restrict__ from, T* __restrict__ to, Divider across, int n) {
  start_next();
  wait_for_previous();
  uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= static_cast<uint32_t>(n)) return;
  const uint32_t i = row, x = across.split(row);
  const float* pair = from + 2 * (i + row);  // to the left of the pixel
  to[i] = from_float<T>(pair[1] + pair[2]);
}

// ------------------------------------------------------------------------------------------------------ the choice

int64_t pixels_of(const Tensor& input) {
  int64_t pixels = 1;
  for (int i = 2; i < input.rank; ++i) pixels *= input.sizes[i];
  return pixels;
}

size_t padded(size_t bytes) { return ceil_div<size_t>(bytes, 256) * 256; }

// How the gradients are computed, and in how much memory. What is said of bilinear points is not done in other modes.
struct Plan {
  bool plane;   // the image's by plane_kernel,
  bool listed;  // or of bilinear points by owner_kernel, as far as these lie close together,
  bool vector;  // the others by vector_kernel, else by direct_kernel,
  bool pairs;   // of bilinear points with sums of pairs of pixels
  bool copied;  // the image transposed to channels-last first
  int tile;
  Lists lists;
  size_t sums = 0, list = 0, copy = 0;  // bytes

  Plan(const Tensor& input, const Tensor& grid, bool input_gradient, bool grid_gradient)
      : lists(static_cast<int>(input.sizes[input.rank - 1]), static_cast<int>(input.sizes[input.rank - 2]),
              grid.numel() / grid.sizes[0] / (grid.rank - 2), input.sizes[1] <= 4) {
    const int64_t v = 16 / input.item_size(), pixels = pixels_of(input), batch = input.sizes[0];
    const int64_t points = grid.numel() / batch / (grid.rank - 2), channels = input.sizes[1];
    tile = static_cast<int>(pixels < kPlanePixels ? pixels : kPlanePixels);
    plane = input_gradient && 4 * points * ceil_div<int64_t>(pixels, tile) <= pixels &&
            batch * channels * ceil_div<int64_t>(pixels, tile) < INT32_MAX;
    const bool last = input.strides[1] == 1 && input.aligned(1, 16);
    int64_t pixel = 1;
    const bool dense = Space::evenly_spaced(input, 2, input.rank - 1, pixel) && pixel == 1 && 2 * points >= pixels;
    const bool large = batch * points * channels >= (1 << 19);  // worth three or four kernels
    vector = channels % v == 0 && channels > 4 && pixels * channels < INT32_MAX &&
             (large ? last || dense : last && !input_gradient);
    copied = vector && !last && grid_gradient;
    listed = input.rank == 4 && input_gradient && !plane && points <= 4 * pixels && pixels <= 32 * points &&
             points < Lists::kFull && batch * points * channels >= (1 << 19) &&
             (batch * points * channels >= (1 << 23) || batch * pixels * channels >= (1 << 22));
    pairs = input_gradient && !plane && !vector && !listed && 2 * points >= pixels && input.item_size() == 2 &&
            input.numel() >= (1 << 17) && input.numel() <= (1 << 20);
    if (listed) list = padded(lists.bytes(batch));
    if (pairs) {
      sums = padded(2 * (input.numel() + input.numel() / input.sizes[input.rank - 1]) * sizeof(float));
    } else if (input_gradient && (vector || input.dtype != DType::kFloat32)) {
      sums = padded(input.numel() * sizeof(float));
    }
    if (copied) copy = padded(input.numel() * input.item_size());
  }
};

unsigned limited(int64_t blocks) { return static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20); }

// Writes what pixels the listed points make.
template <class T, int PADDING>
cudaError_t launch_owner(const Space& s, const Lists& lists, const Gradient<T>& gradient, T* output, int batch,
                         int channels, cudaStream_t stream) {
  const unsigned images = batch < 65535 ? batch : 65535;
  const bool pairs = s.size[0] % 2 == 0 && reinterpret_cast<uintptr_t>(output) % (2 * sizeof(T)) == 0;
  const auto with = [&](auto width) {
    constexpr int W = width.value;
    const int enough = 8 * of_device(cudaDevAttrMultiProcessorCount);
    int chunk = ceil_div(channels, W) * W;
    while (chunk >= 4 * W && static_cast<int64_t>(lists.tiles) * ceil_div(channels, chunk) * images < enough) {
      chunk = ceil_div(chunk, 2 * W) * W;
    }
    const auto kernel = owner_kernel<T, W, PADDING>;
    const int memory = static_cast<int>(owner_memory<T, W>(lists));
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (status != cudaSuccess) return status;
    return launch(kernel, dim3(lists.tiles, ceil_div(channels, chunk), images), kOwnerThreads, memory, stream, true, s,
                  lists, gradient, output, batch, channels, chunk, pairs);
  };
  if constexpr (sizeof(T) == 2) {
    if (channels > 4) return with(std::integral_constant<int, 8>());
  }
  return with(std::integral_constant<int, 4>());
}

// Whether there are so many tiles of points that box_kernel fills the device; by measurement fewer do in float32.
template <class T>
bool many_tiles(const Space& s, int batch) {
  const int across = s.across.d, down = s.points / across;
  return across >= 16 && static_cast<int64_t>(ceil_div(across, kTileAcross)) * ceil_div(down, kTileDown) * batch >=
                             static_cast<int>(8 / sizeof(T)) * of_device(cudaDevAttrMultiProcessorCount);
}

// The gradient of points in images in NCHW that are not left.
template <class T, int PADDING>
cudaError_t launch_boxes(const Tensor& input, const Space& s, const Gradient<T>& gradient, const Tensor& grad_grid,
                         const Left& left, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int across = s.across.d, down = s.points / across;
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  const int64_t plane = static_cast<int64_t>(s.size[0]) * s.size[1];
  const bool copied = gradient.point == 1 &&
                      (reinterpret_cast<uintptr_t>(gradient.data) | gradient.image * sizeof(T) |
                       gradient.channel * sizeof(T) | across * sizeof(T)) % 16 == 0;
  const auto kernel = box_kernel<T, PADDING>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBoxMemory);
  if (status != cudaSuccess) return status;
  const dim3 blocks(ceil_div(across, kTileAcross) * ceil_div(down, kTileDown), 1, batch < 65535 ? batch : 65535);
  return launch(kernel, blocks, kThreads, kBoxMemory, stream, true, s, data, image, channel, gradient,
                AnyFloat(grad_grid), batch, channels, across, down, copied, unit_of(data, image, channel, plane), left);
}

template <class T, int TAPS>
cudaError_t run(const Tensor& grad, int64_t point, const Tensor& input, const Space& space, const Tensor& grad_input,
                const Tensor& grad_grid, bool deterministic, const Plan& plan, void* workspace, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int pixels = static_cast<int>(pixels_of(input));
  const Gradient<T> gradient{static_cast<const T*>(grad.data), grad.strides[0], grad.strides[1], point};
  const unsigned images = batch < 65535 ? batch : 65535;
  constexpr int V = 16 / sizeof(T), kUsual = TAPS == 4 || TAPS == 8 ? kZeros : kAnyPadding;  // padding
  T* output = static_cast<T*>(grad_input.data);
  const bool ordered = output && deterministic, plane = output && !ordered && plan.plane;
  const bool add = output && !ordered && !plane;  // by atomics
  const bool listed = add && plan.listed && TAPS == 4 && space.points * point * sizeof(T) <= UINT32_MAX;
  constexpr bool kPairs = TAPS == 4 || TAPS == 8;
  const bool pairs = add && plan.pairs && kPairs;
  float* sums = plan.sums ? static_cast<float*>(workspace) : reinterpret_cast<float*>(output);
  const int64_t tiles = ceil_div<int64_t>(pixels, kTilePoints) * ceil_div(channels, 8 * V) * batch;
  const T* data = static_cast<const T*>(input.data);
  int64_t image = input.strides[0];
  Space s = space;
  const int64_t n = input.numel(), size = static_cast<int64_t>(channels) * pixels;
  const int64_t plane_sums = pairs ? 2 * (static_cast<int64_t>(pixels) + pixels / s.size[0]) : pixels;
  const int64_t cleared = plane_sums * batch * channels;
  const bool short_chain = add && !plan.vector && n <= (1 << 20);  // of kernels that overlap
  Lists lists = plan.lists;
  Left left;

  int shift = 0;  // more threads for each point where there are few points, or many channels
  while (shift < 5 && (2 << shift) <= channels &&
         ((16 << shift) <= channels ||
          static_cast<int64_t>(ceil_div(s.points, kThreads >> shift)) * batch < (TAPS == 8 || channels <= 4 ? 128 : 512))) {
    ++shift;
  }
  // Behind another kernel it may begin early: nothing else writes what it reads before it waits.
  const auto direct = [&](float* sums, const AnyFloat& grad_grid, bool early, auto how) {
    constexpr int U = TAPS == 16 || (TAPS == 8 && sizeof(T) == 4) ? 1 : how.value == kPairSums ? 2 : 4;
    const auto with = [&](auto kernel) {
      return launch(kernel, dim3(ceil_div(s.points, kThreads >> shift), 1, images), kThreads, 0, stream, early, s,
                    Dense(s, 1), data, image, input.strides[1], gradient, sums, grad_grid, batch, channels, plane_sums,
                    shift, lists, left);
    };
    const auto choose = [&](auto padding) {
      constexpr int PADDING = padding.value;
      const int each = ceil_div(channels, 1 << shift);
      return each == 1   ? with(direct_kernel<T, TAPS, PADDING, 1, how.value>)
             : each == 2 ? with(direct_kernel<T, TAPS, PADDING, std::min(U, 2), how.value>)
                         : with(direct_kernel<T, TAPS, PADDING, U, how.value>);
    };
    return s.padding == kUsual ? choose(std::integral_constant<int, kUsual>())
                               : choose(std::integral_constant<int, kAnyPadding>());
  };

  const bool boxes = listed && plan.copied && many_tiles<T>(s, batch);
  if constexpr (TAPS == 4) {
    const auto with_lists = [&](auto padding) {
      constexpr int PADDING = padding.value;
      const int64_t counters = lists.counters(batch);
      zero_kernel<<<limited(ceil_div<int64_t>(counters, 4 * kThreads)), kThreads, 0, stream>>>(
          reinterpret_cast<float*>(lists.counts), 1, counters, Left());
      cudaError_t status;
      if (plan.vector || !grad_grid.data) {
        status = launch(list_kernel<PADDING>, dim3(ceil_div(s.points, kListThreads), 1, images), kListThreads, 0,
                        stream, true, s, lists, batch);
      } else {
        status = direct(nullptr, AnyFloat(grad_grid), true, std::integral_constant<int, kListSums>());
      }
      if (status != cudaSuccess) return status;
      left = {lists.runs, lists.most};
      status = launch_owner<T, PADDING>(s, lists, gradient, output, batch, channels, stream);
      if (status != cudaSuccess || !boxes) return status;
      return launch_boxes<T, PADDING>(input, s, gradient, grad_grid, left, stream);
    };
    if (listed) {
      lists.in(static_cast<char*>(workspace) + plan.sums, batch);
      const cudaError_t status = s.padding == kZeros ? with_lists(std::integral_constant<int, kZeros>())
                                                     : with_lists(std::integral_constant<int, kAnyPadding>());
      if (status != cudaSuccess) return status;
    }
  }
  const int few = 4 * of_device(cudaDevAttrMultiProcessorCount);  // blocks: most often there is nothing to do
  const auto blocks_of = [&](int64_t work) {
    return listed ? dim3(static_cast<unsigned>(work < few ? work : few), images) : dim3(limited(work));
  };
  if (listed || short_chain) {
    const cudaError_t status =
        launch(zero_kernel, blocks_of(ceil_div<int64_t>(listed ? size : cleared, 4 * kThreads)), kThreads, 0, stream,
               listed, sums, listed ? batch : 1, listed ? size : cleared, left);
    if (status != cudaSuccess) return status;
  } else if (ordered || add) {
    const cudaError_t status = cudaMemsetAsync(sums, 0, n * sizeof(float), stream);
    if (status != cudaSuccess) return status;
  }
  if (ordered) {
    const unsigned blocks = ceil_div<int64_t>(static_cast<int64_t>(batch) * channels, kThreads);
    ordered_kernel<T, TAPS><<<blocks, kThreads, 0, stream>>>(s, Dense(s, 1), gradient, sums, batch, channels, pixels);
  }
  if (plane) {
    const int memory = plan.tile * static_cast<int>(sizeof(float)), parts = ceil_div(pixels, plan.tile);
    const auto kernel = plane_kernel<T, TAPS>;
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (status != cudaSuccess) return status;
    kernel<<<batch * channels * parts, kPlaneThreads, memory, stream>>>(
        s, Dense(s, 1), data, image, gradient, output, channels == 1 ? AnyFloat(grad_grid) : AnyFloat(Tensor{}),
        channels, pixels, plan.tile, parts);
    if (channels == 1) return cudaGetLastError();
  }
  if (plan.vector && (add || grad_grid.data)) {
    if (plan.copied) {
      T* copy = reinterpret_cast<T*>(static_cast<char*>(workspace) + plan.sums + plan.list);
      const cudaError_t status =
          launch(to_channels_last_kernel<T>, boxes ? blocks_of(tiles) : dim3(limited(tiles)), kTileThreads, 0, stream,
                 listed, data, image, input.strides[1], copy, batch, channels, pixels,
                 pixel_width<T>(data, image, input.strides[1]), boxes ? left : Left());
      if (status != cudaSuccess) return status;
      data = copy;
      image = static_cast<int64_t>(pixels) * channels;
      for (int a = 0; a < 3; ++a) s.stride[a] = Dense(s, channels).stride[a];
    }
    shift = 0;
    while (shift < 3 && (V << shift) < channels) ++shift;
    const bool last = grad.strides[1] == 1 && (reinterpret_cast<uintptr_t>(grad.data) | point * sizeof(T) |
                                               grad.strides[0] * sizeof(T)) % 16 == 0;
    const int width = last ? 0 : point == 1 ? pixel_width<T>(grad.data, grad.strides[0], grad.strides[1], 4) : 1;
    const auto kernel =
        s.padding == kUsual ? vector_kernel<T, TAPS, kUsual> : vector_kernel<T, TAPS, kAnyPadding>;
    const bool only_left = listed && (boxes || !grad_grid.data);
    const int blocks = ceil_div(s.points, kThreads >> shift);
    cudaError_t status = launch(kernel, dim3(only_left && few < blocks ? few : blocks, 1, images), kThreads, 0, stream,
                                listed, s, Dense(s, channels), data, image, gradient, add ? sums : nullptr,
                                AnyFloat(grad_grid), batch, channels, pixels, shift, width, left, only_left);
    if (status != cudaSuccess) return status;
    if (add) {
      return launch(from_channels_last_kernel<T>, blocks_of(tiles), kTileThreads, 0, stream, listed, sums, output,
                    batch, channels, pixels, pixel_width<T>(output, pixels, pixels), left);
    }
  } else if (add || grad_grid.data) {
    const AnyFloat others(listed ? Tensor{} : grad_grid);
    float* to = add ? sums : nullptr;
    const bool early = short_chain || listed || plane;
    cudaError_t status;
    if constexpr (kPairs) {
      status = pairs ? direct(to, others, early, std::integral_constant<int, kPairSums>())
                     : direct(to, others, early, std::integral_constant<int, kPixelSums>());
    } else {
      status = direct(to, others, early, std::integral_constant<int, kPixelSums>());
    }
    if (status != cudaSuccess) return status;
  }
  if (pairs) {
    return launch(add_pairs_kernel<T>, limited(ceil_div<int64_t>(n, kThreads)), kThreads, 0, stream, true, sums, output,
                  Divider(s.size[0]), static_cast<int>(n));
  }
  if ((ordered || (add && !plan.vector)) && sums != reinterpret_cast<float*>(output)) {
    return launch(round_kernel<T>, blocks_of(ceil_div<int64_t>(listed ? size : n, kThreads)), kThreads, 0, stream,
                  short_chain || listed, sums, output, listed ? batch : 1, listed ? size : n, left);
  }
  return cudaGetLastError();
}

}  // namespace

size_t sample_backward_workspace(const Tensor& input, const Tensor& grid, bool input_gradient, bool grid_gradient) {
  if (input.numel() == 0 || grid.numel() == 0) return 0;
  const Plan plan(input, grid, input_gradient, grid_gradient);
  return plan.sums + plan.list + plan.copy;
}

cudaError_t sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                            const Tensor& grad_grid, const Sampling& sampling, bool deterministic, void* workspace,
                            cudaStream_t stream) {
  if (input.numel() == 0 || grid.numel() == 0) {
    for (const Tensor* t : {&grad_input, &grad_grid}) {
      if (t->data == nullptr || t->numel() == 0) continue;
      const cudaError_t status = cudaMemsetAsync(t->data, 0, t->numel() * t->item_size(), stream);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }
  Space s(grid);
  int64_t point = 1;
  if (grad.dtype != input.dtype || !is_float(input) || !is_float(grid) || input.sizes[0] > INT32_MAX ||
      input.sizes[1] > INT32_MAX || pixels_of(input) > INT32_MAX || !Space::of(input, grid, sampling, s) ||
      !Space::evenly_spaced(grad, 2, grad.rank - 1, point)) {
    return cudaErrorNotSupported;
  }
  const Plan plan(input, grid, grad_input.data, grad_grid.data);
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) {
      return run<T, taps()>(grad, point, input, s, grad_input, grad_grid, deterministic, plan, workspace, stream);
    });
  });
}

size_t grid_sample_backward_workspace(const Tensor& input, const Tensor& grid, bool input_gradient,
                                      bool grid_gradient) {
  return sample_backward_workspace(input, grid, input_gradient, grid_gradient);
}

cudaError_t grid_sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                                 const Tensor& grad_grid, int mode, int padding, bool align_corners, bool deterministic,
                                 void* workspace, cudaStream_t stream) {
  return sample_backward(grad, input, grid, grad_input, grad_grid, Sampling{mode, padding, align_corners},
                         deterministic, workspace, stream);
}

}  // namespace svexport
