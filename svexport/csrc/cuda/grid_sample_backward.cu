#include <algorithm>
#include <climits>
#include <cmath>

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
  kNeighbourSums,  // as kPixelSums, with what points side by side add to the same pixel together
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

// *p += x atomically where it is to.
__device__ __forceinline__ void add_if(float* p, float x, bool there) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p red.global.add.f32 [%0], %1;}" ::"l"(p), "f"(x),
               "r"(static_cast<int>(there))
               : "memory");
}

// p[0] += x, p[1] += y atomically where it is to; p aligned to 8 bytes there.
__device__ __forceinline__ void add_pair_if(float* p, float x, float y, bool there) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p red.global.add.v2.f32 [%0], {%1, %2};}" ::"l"(p), "f"(x),
               "f"(y), "r"(static_cast<int>(there))
               : "memory");
#else
  add_if(p, x, there);
  add_if(p + 1, y, there);
#endif
}

// *p where it is there, 0 elsewhere, of what is not read again: sums stay in the second cache instead.
__device__ __forceinline__ float read_once_if(const float* p, bool there) {
  float x;
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.cs.nc.f32 %0, [%1];}"
      : "=f"(x)
      : "l"(p), "r"(static_cast<int>(there)));
  return x;
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
    if (left.runs) {
      wait_for_previous();
      if (SUMS == kListSums ? lists.runs[n] == Lists::kDone : !left(n)) continue;
    }
    if (SUMS == kNeighbourSums || p < s.points) {
      const bool there = SUMS != kNeighbourSums || p < s.points;
      point = locate<TAPS, PADDING>(s, n, there ? p : 0);
      const Taps<TAPS> from(point, s.stride), to(point, dense.stride);
      float dot[TAPS] = {};
      const bool read = grad_grid.data && TAPS > 1 && there;
      bool hands = false, takes = false;  // a right pixel to the next lane, the left from the one before
      bool together = false;              // most lanes are in the pixels of the next, or those beside
      if constexpr (SUMS == kNeighbourSums) {
        const int lane = threadIdx.x % 32;
        const bool any = there && (point.axis[0].inside[0] || point.axis[0].inside[1]) &&
                         (point.axis[1].inside[0] || point.axis[1].inside[1]);
        const int cell = any ? point.axis[1].first * (s.size[0] + 2) + point.axis[0].first : INT_MIN / 2;
        const int next = __shfl_down_sync(~0u, cell, 1);
        hands = next == cell + 1 && lane < 31;
        takes = __shfl_up_sync(~0u, static_cast<int>(hands), 1) && lane > 0;
        together = __popc(__ballot_sync(~0u, hands || next == cell)) >= 16;
      }
      const T* g = grad.data + n * grad.image + p * grad.point;
      const T* source = input + n * image;
      float* target = sums + static_cast<int64_t>(n) * channels * pixels;
#pragma unroll 1
      for (int begin = part; begin < channels; begin += U * parts) {
        float scales[U], values[U][TAPS];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int c = begin + u * parts;
          scales[u] = to_float(load_if<T, 1>(g + c * grad.channel, c < channels && there).at[0]);
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
          } else if constexpr (SUMS == kNeighbourSums) {
#pragma unroll
            for (int i = 0; i < TAPS; i += 2) {
              const int at = to.offset[i] >= 0 ? to.offset[i] : to.offset[i + 1] - 1;
              const bool left = there && to.offset[i] >= 0, right = there && to.offset[i + 1] >= 0;
              float* const pixel = target + c * pixels + at;
              float x = to.weight[i] * scale, y = to.weight[i + 1] * scale;
              if (together) {
                const float taken = __shfl_up_sync(~0u, y, 1);
                if (takes) x += taken;
                add_if(pixel, x, left);
                add_if(pixel + 1, y, right && !hands);
              } else {
                const bool pair = left && right && reinterpret_cast<uintptr_t>(pixel) % 8 == 0;
                add_pair_if(pixel, x, y, pair);
                add_if(pixel, x, left && !pair);
                add_if(pixel + 1, y, right && !pair);
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

// ------------------------------------------- points close together: neighbours add up before they add to memory

// Points of a tile: a lane takes a column, or where an image is enlarged 2 x 2.
constexpr int kCloseAcross = 32, kCloseDown = 2, kEnlargedAcross = 64;

// The image, of which n, channel c, pixel p lie at n * image + c * channel + p * pixel, and how the work is divided.
struct Close {
  const float* input;
  int64_t image, channel, pixel = 1;
  float* output;   // (N, C, pixels), contiguous
  int down;        // points along y
  Divider across;  // by the number of tiles along x
  int tiles;
  int shift = 0;       // 1 << shift warps share the channels of a tile
  int64_t step[3];     // from a channel of a warp to its next: of the image, the gradient and the output
  int64_t row, below;  // from pixels and points to those below

  // point, plane: from a point and a channel of the output's gradient to the next; enough: tiles that are not shared.
  Close(const Space& s, const Tensor& input, int64_t point, int64_t plane, float* output, int tile_across, int enough)
      : input(static_cast<const float*>(input.data)),
        image(input.strides[0]),
        channel(input.strides[1]),
        output(output),
        down(s.points / s.across.d),
        across(ceil_div<int>(s.across.d, tile_across)),
        tiles(tiles_of(s, tile_across)) {
    const int64_t all = tiles * input.sizes[0];
    while (log_tiles() > 0 && (2 << shift) <= input.sizes[1] && all << shift < enough) ++shift;
    Space::evenly_spaced(input, 2, input.rank - 1, pixel);
    step[0] = channel << shift;
    step[1] = plane << shift;
    step[2] = static_cast<int64_t>(s.size[0]) * s.size[1] << shift;
    row = s.size[0] * pixel;
    below = s.across.d * point;
  }
  static int tiles_of(const Space& s, int tile_across) {
    const int across = s.across.d;
    return ceil_div(across, tile_across) * ceil_div<int>(s.points / across, kCloseDown);
  }
  // A block has 1 << log_tiles() of them.
  __host__ __device__ int log_tiles() const { return 3 - shift; }
  __host__ __device__ int blocks() const { return (tiles + (1 << log_tiles()) - 1) >> log_tiles(); }
  __device__ __forceinline__ int parts() const { return 1 << shift; }
  __device__ __forceinline__ int part() const { return threadIdx.x / 32 >> log_tiles(); }
  __device__ __forceinline__ int tile(int block) const {
    return (block << log_tiles()) + (threadIdx.x / 32 & ((1 << log_tiles()) - 1));
  }
};

// What a point, at `position` between its four pixels, adds to the gradient of this.
__device__ __forceinline__ void add_slopes(float (&sum)[2], const float (&position)[2], float g, float left,
                                           float right, float lower_left, float lower_right) {
  const float difference = (lower_right - lower_left) - (right - left);
  sum[0] = fmaf(g, fmaf(position[1], difference, right - left), sum[0]);
  sum[1] = fmaf(g, fmaf(position[0], difference, lower_left - left), sum[1]);
}

// Writes the gradients of a lane's points, which the warps that share the channels of a tile add up first.
// index(k): of a point of the image; valid(k): whether it is there.
template <int PADDING, int POINTS, class Valid, class Index>
__device__ __forceinline__ void set_gradients(const Space& s, int n, const Close& close, const AnyFloat& grad_grid,
                                              const float (&sum)[POINTS][2], Valid&& valid, Index&& index) {
  __shared__ float partial[POINTS][2][kThreads];
  const int tile = kThreads >> close.shift, row = threadIdx.x & (tile - 1), parts = close.parts();
  const auto set = [&](int k, int a, float gradient) {
    grad_grid.set((static_cast<int64_t>(n) * s.points + index(k)) * 2 + a, gradient);
  };
#pragma unroll
  for (int k = 0; k < POINTS; ++k) {
    const auto slope = [&](int a) {
      return PADDING == kZeros ? s.slope[a] : locate<4, PADDING>(s, n, valid(k) ? index(k) : 0).axis[a].slope[1];
    };
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const float gradient = slope(a) * sum[k][a];
      if (parts > 1) {
        partial[k][a][threadIdx.x] = gradient;
      } else if (valid(k)) {
        set(k, a, gradient);
      }
    }
  }
  if (parts == 1) return;
  __syncthreads();
#pragma unroll 1
  for (int i = close.part(); i < POINTS * 2; i += parts) {
    const int k = i / 2, a = i % 2;
    if (!valid(k)) continue;
    float gradient = 0;
#pragma unroll 1
    for (int j = 0; j < parts; ++j) gradient += partial[k][a][row + j * tile];
    set(k, a, gradient);
  }
  __syncthreads();
}

// Adds to the gradient of image n and writes that of its bilinear points; grad_grid: (N, points, 2), contiguous, or
// null. What falls to the same pixel the points below each other and side by side add up first: one atomic is left of a
// point instead of four, and L2 takes no more than 42 sectors a clock. All blocks of blockIdx.x together.
template <int PADDING>
__device__ __forceinline__ void add_close(const Space& s, int n, const Close& close, const Gradient<float>& grad,
                                          const AnyFloat& grad_grid, int channels) {
  constexpr int kDown = kCloseDown, kNowhere = INT_MIN / 2;
  const int parts = close.parts(), part = close.part(), lane = threadIdx.x % 32, width = s.size[0];
  const int across = s.across.d, down = close.down, blocks = close.blocks();
  const int64_t pixels = static_cast<int64_t>(width) * s.size[1];
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    uint32_t tile_y = close.tile(block);
    const int x = close.across.split(tile_y) * kCloseAcross + lane, y = tile_y * kDown, first = y * across + x;
    const auto valid = [&](int k) { return x < across && y + k < down; };
    // Of each point the upper left pixel, by a number that no pixel to the left of a row shares; then whether that and
    // the other three are inside.
    int to[kDown], pixel_of[kDown];
    bool inside[kDown][2][2];
    float position[kDown][2], sum[kDown][2] = {};  // of the point between its pixels; of its gradient
    bool idle = true, even = true;
    {
      int64_t offset[kDown];
      float coordinate[kDown][3];
#pragma unroll
      for (int k = 0; k < kDown; ++k) {
        offset[k] = n * s.grid_image + (valid(k) ? x * s.grid_stride[0] + (y + k) * s.grid_stride[1] : 0);
      }
      read_coordinates<2>(s, offset, coordinate);
#pragma unroll
      for (int k = 0; k < kDown; ++k) {
        Pixels<2> axis[2];
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          axis[a] = ::svexport::pixels<2>(coordinate[k][a], a, 2, s, PADDING == kAnyPadding ? s.padding : PADDING);
          position[k][a] = axis[a].weight[1];
          for (int i = 0; i < 2; ++i) inside[k][a][i] = valid(k) && axis[a].inside[i];
        }
        const bool any = (inside[k][0][0] || inside[k][0][1]) && (inside[k][1][0] || inside[k][1][1]);
        to[k] = axis[1].first * width + axis[0].first;
        pixel_of[k] = any ? to[k] + 2 * axis[1].first : kNowhere;
        idle = idle && !any;
        even = even && (k == 0 ? axis[1].first >= 0 && axis[1].first + kDown < s.size[1]
                               : pixel_of[k] == pixel_of[k - 1] + width + 2);
      }
    }
    even = __all_sync(~0u, idle || even);
    // Whether its right pixels belong to the next lane; whether its left ones come with those of the lane before.
    const auto share = [&](int k, bool& hands, bool& takes) {
      hands = __shfl_down_sync(~0u, pixel_of[k], 1) == pixel_of[k] + 1 && lane < 31;
      takes = __shfl_up_sync(~0u, static_cast<int>(hands), 1) && lane > 0;
    };
    const float* g_at = grad.data + n * grad.image + part * grad.channel + first * grad.point;
    const float* source = close.input + n * close.image + part * close.channel;
    float* target = close.output + (static_cast<int64_t>(n) * channels + part) * pixels;
    // Two pixels of a row, the right one unless it belongs to the next lane.
    const auto add = [&](float* pixel, float x, float y, bool takes, bool stores, bool stores_right) {
      const float taken = __shfl_up_sync(~0u, y, 1);
      if (takes) x += taken;
      add_if(pixel, x, stores);
      add_if(pixel + 1, y, stores_right);
    };
    if (even) {
      bool hands, takes;
      share(0, hands, takes);
      const bool stores = inside[0][0][0] && !idle, stores_right = inside[0][0][1] && !idle && !hands;
      const bool reads[2] = {stores && grad_grid.data, inside[0][0][1] && !idle && grad_grid.data};
      source += to[0] * close.pixel;
      target += to[0];
      float g_of[kDown], next[kDown + 1][2];
      const auto fetch = [&](bool there) {
#pragma unroll
        for (int k = 0; k < kDown; ++k) g_of[k] = read_once_if(g_at + k * close.below, there && !idle);
        const float* from = source;
#pragma unroll
        for (int k = 0; k <= kDown; ++k, from += close.row) {
#pragma unroll
          for (int i = 0; i < 2; ++i) next[k][i] = read_once_if(from + i * close.pixel, there && reads[i]);
        }
        source += close.step[0];
        g_at += close.step[1];
      };
      fetch(true);
#pragma unroll
      for (int k = 0; k <= kDown; ++k) {  // or the compiler puts the reads behind
        asm volatile("" ::"f"(g_of[k % kDown]), "f"(next[k][0]), "f"(next[k][1]) : "memory");
      }
      wait_for_previous();
      start_next();
#pragma unroll 1
      for (int c = part; c < channels; c += parts) {
        float g[kDown], pixel[kDown + 1][2];
#pragma unroll
        for (int k = 0; k < kDown; ++k) g[k] = g_of[k];
#pragma unroll
        for (int k = 0; k <= kDown; ++k) pixel[k][0] = next[k][0], pixel[k][1] = next[k][1];
        fetch(c + parts < channels);  // while these are added
        float below[2] = {}, *to_row = target, one = 1;
        asm volatile("" : "+f"(one));  // or the compiler keeps all differences to it
#pragma unroll
        for (int k = 0; k < kDown; ++k, to_row += width) {
          add_slopes(sum[k], position[k], g[k], pixel[k][0], pixel[k][1], pixel[k + 1][0], pixel[k + 1][1]);
          const float left = one - position[k][0], right = position[k][0];
          const float upper = g[k] * (one - position[k][1]), lower = g[k] * position[k][1];
          add(to_row, fmaf(upper, left, below[0]), fmaf(upper, right, below[1]), takes, stores, stores_right);
          below[0] = lower * left;
          below[1] = lower * right;
        }
        add(to_row, below[0], below[1], takes, stores, stores_right);
        target += close.step[2];
      }
    } else {
      // Of each corner whether it is inside, then whether the right ones belong to the next lane, whether the left ones
      // come with those of the lane before, and whether the lower ones are the upper ones of the next point.
      constexpr int kHands = 16, kTakes = 32, kCarries = 64, kBits = 7;
      static_assert(kDown * kBits <= 32);
      uint32_t flags = 0, stored = 0;  // stored: points of which some lane has to store the lower corners
#pragma unroll
      for (int k = 0; k < kDown; ++k) {
        bool hands, takes;
        share(k, hands, takes);
        const bool carries = k + 1 < kDown && (idle || pixel_of[k + 1 < kDown ? k + 1 : k] == pixel_of[k] + width + 2);
        uint32_t bits = (hands ? kHands : 0) | (takes ? kTakes : 0) | (carries ? kCarries : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) bits |= inside[k][0][i % 2] && inside[k][1][i / 2] ? 1 << i : 0;
        flags |= bits << (k * kBits);
        stored |= __any_sync(~0u, !carries) ? 1 << k : 0;
      }
      const auto is = [&](int k, int bit) { return (flags & bit << (k * kBits)) != 0; };
      wait_for_previous();
      start_next();
#pragma unroll 1
      for (int c = part; c < channels; c += parts) {
        float below[2] = {}, g[kDown], pixel[kDown][4];
#pragma unroll
        for (int k = 0; k < kDown; ++k) g[k] = read_once_if(g_at + k * close.below, valid(k));
#pragma unroll
        for (int k = 0; k < kDown; ++k) {
          const float* const corner = source + to[k] * close.pixel;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* const from = corner + (i % 2 + i / 2 * width) * close.pixel;
            const bool known = i < 2 && k > 0 && is(k - 1, kCarries);
            pixel[k][i] = read_once_if(from, is(k, 1 << i) && !known && grad_grid.data);
          }
        }
#pragma unroll
        for (int k = 0; k < kDown; ++k) {
          if (k > 0 && is(k - 1, kCarries)) pixel[k][0] = pixel[k - 1][2], pixel[k][1] = pixel[k - 1][3];
          add_slopes(sum[k], position[k], g[k], pixel[k][0], pixel[k][1], pixel[k][2], pixel[k][3]);
          const float upper = g[k] * (1 - position[k][1]), lower = g[k] * position[k][1];
          float* const corner = target + to[k];
          const bool carries = is(k, kCarries), takes = is(k, kTakes), hands = is(k, kHands);
          add(corner, fmaf(upper, 1 - position[k][0], below[0]), fmaf(upper, position[k][0], below[1]), takes, is(k, 1),
              is(k, 2) && !hands);
          below[0] = lower * (1 - position[k][0]);
          below[1] = lower * position[k][0];
          if (stored >> k & 1) {
            const float taken = __shfl_up_sync(~0u, carries ? 0.0f : below[1], 1);
            if (takes) below[0] += taken;
            add_if(corner + width, below[0], is(k, 4) && !carries);
            add_if(corner + width + 1, below[1], is(k, 8) && !carries && !hands);
            if (!carries) below[0] = below[1] = 0;
          }
        }
        source += close.step[0];
        g_at += close.step[1];
        target += close.step[2];
      }
    }
    if (grad_grid.data == nullptr) continue;
    set_gradients<PADDING>(s, n, close, grad_grid, sum, valid, [&](int k) { return first + k * across; });
  }
}

// The same of an image that is enlarged, about two points a pixel along both axes: 2 x 2 of a lane are in the same
// pixels, or in those beside. If rows of points are rows of pixels, an atomic is left of every pixel that they add to.
template <int PADDING>
__device__ __forceinline__ void add_enlarged(const Space& s, int n, const Close& close, const Gradient<float>& grad,
                                             const AnyFloat& grad_grid, int channels) {
  constexpr int kPoints = 4, kNowhere = INT_MIN / 2;  // row by row
  const int parts = close.parts(), part = close.part(), lane = threadIdx.x % 32;
  const int width = s.size[0], height = s.size[1], across = s.across.d, down = close.down, blocks = close.blocks();
  const int64_t pixels = static_cast<int64_t>(width) * height;
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    uint32_t tile_y = close.tile(block);
    const int x = close.across.split(tile_y) * kEnlargedAcross + 2 * lane, y = tile_y * kCloseDown;
    const auto valid = [&](int k) { return x + k % 2 < across && y + k / 2 < down; };
    int column[kPoints], line[kPoints];  // of the upper left pixel
    float position[kPoints][2], sum[kPoints][2] = {};
    bool any[kPoints], idle = true, regular = true;
    {
      int64_t offset[kPoints];
      float coordinate[kPoints][3];
#pragma unroll
      for (int k = 0; k < kPoints; ++k) {  // of points that are not there, those beside them
        offset[k] = n * s.grid_image + min(x + k % 2, across - 1) * s.grid_stride[0] +
                    min(y + k / 2, down - 1) * s.grid_stride[1];
      }
      read_coordinates<2>(s, offset, coordinate);
#pragma unroll
      for (int k = 0; k < kPoints; ++k) {
        Pixels<2> axis[2];
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          axis[a] = ::svexport::pixels<2>(coordinate[k][a], a, 2, s, PADDING == kAnyPadding ? s.padding : PADDING);
        }
        any[k] = valid(0) && (axis[0].inside[0] || axis[0].inside[1]) && (axis[1].inside[0] || axis[1].inside[1]);
        column[k] = axis[0].first;
        line[k] = axis[1].first;
        for (int a = 0; a < 2; ++a) position[k][a] = any[k] ? axis[a].weight[1] : 0.0f;
        idle = idle && !any[k];
        regular = regular && any[k];
      }
    }
    const bool shifted = column[1] != column[0];
    regular = regular && column[2] == column[0] && column[3] == column[1] && line[1] == line[0] && line[3] == line[2] &&
              column[1] - column[0] == static_cast<int>(shifted);
    const int leader = max(__ffs(__ballot_sync(~0u, !idle)) - 1, 0);
    const int top = __shfl_sync(~0u, line[0], leader), lower = __shfl_sync(~0u, line[2], leader);
    const bool stepped = lower != top;
    const bool even = __all_sync(~0u, idle || (regular && line[0] == top && line[2] == lower &&
                                               lower - top == static_cast<int>(stepped)));
    const int64_t first = static_cast<int64_t>(y) * across + x;
    const float* g_at = grad.data + n * grad.image + part * grad.channel + first * grad.point;
    const float* source = close.input + n * close.image + part * close.channel;
    float* target = close.output + (static_cast<int64_t>(n) * channels + part) * pixels;
    if (even) {
      const int left = idle ? kNowhere : column[0];
      const bool hands = __shfl_down_sync(~0u, left, 1) == left + 1 && lane < 31;  // all but its first column
      const bool takes = __shfl_up_sync(~0u, static_cast<int>(hands), 1) && lane > 0;
      bool inside[3], rows[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        inside[i] = !idle && static_cast<uint32_t>(column[0] + i) < static_cast<uint32_t>(width) && (i < 2 || shifted);
        rows[i] = static_cast<uint32_t>(top + i) < static_cast<uint32_t>(height) && (i < 2 || stepped);
      }
      source += (top * width + column[0]) * close.pixel;
      target += top * width + column[0];
#pragma unroll 1
      for (int c = part; c < channels; c += parts) {
        float g[kPoints], pixel[3][3], sums[3][3] = {};
#pragma unroll
        for (int k = 0; k < kPoints; ++k) {
          g[k] = read_once_if(g_at + k / 2 * close.below + k % 2 * grad.point, !idle && valid(k));
        }
        const float* from = source;
#pragma unroll
        for (int i = 0; i < 3; ++i, from += close.row) {
#pragma unroll
          for (int j = 0; j < 3; ++j) {
            pixel[i][j] = read_once_if(from + j * close.pixel, rows[i] && inside[j] && grad_grid.data);
          }
        }
        wait_for_previous();  // which the reads need not
        start_next();
        const auto add_point = [&](auto index, auto first) {
          constexpr int k = index.value, i = first.value;
          const bool right = k % 2 && shifted;
          add_slopes(sum[k], position[k], g[k], right ? pixel[i][1] : pixel[i][0], right ? pixel[i][2] : pixel[i][1],
                     right ? pixel[i + 1][1] : pixel[i + 1][0], right ? pixel[i + 1][2] : pixel[i + 1][1]);
#pragma unroll
          for (int below = 0; below < 2; ++below) {
            const float scaled = g[k] * (below ? position[k][1] : 1 - position[k][1]);
            const float from_left = scaled * (1 - position[k][0]), from_right = scaled * position[k][0];
            float(&to)[3] = sums[i + below];
            to[0] += right ? 0.0f : from_left;
            to[1] += right ? from_left : from_right;
            to[2] += right ? from_right : 0.0f;
          }
        };
        add_point(std::integral_constant<int, 0>(), std::integral_constant<int, 0>());
        add_point(std::integral_constant<int, 1>(), std::integral_constant<int, 0>());
        if (stepped) {
          add_point(std::integral_constant<int, 2>(), std::integral_constant<int, 1>());
          add_point(std::integral_constant<int, 3>(), std::integral_constant<int, 1>());
        } else {
          add_point(std::integral_constant<int, 2>(), std::integral_constant<int, 0>());
          add_point(std::integral_constant<int, 3>(), std::integral_constant<int, 0>());
        }
        float* to_row = target;
#pragma unroll
        for (int i = 0; i < 3; ++i, to_row += width) {
          if (!rows[i]) continue;
          float(&of)[3] = sums[i];
          const float right = __shfl_up_sync(~0u, of[2], 1);
          if (takes) of[1] += right;
          const float middle = __shfl_up_sync(~0u, of[1], 1);
          if (takes) of[0] += middle;
#pragma unroll
          for (int j = 0; j < 3; ++j) add_if(to_row + j, of[j], inside[j] && (j == 0 || !hands));
        }
        source += close.step[0];
        g_at += close.step[1];
        target += close.step[2];
      }
    } else {
      wait_for_previous();
      start_next();
#pragma unroll 1
      for (int k = 0; k < kPoints; ++k) {
        if (!valid(k)) continue;
        const Point<4> point = locate<4, PADDING>(s, n, (y + k / 2) * across + x + k % 2);
        const int stride[3] = {1, width, 0};
        const Taps<4> taps(point, stride);
        const float* g_from = g_at + k / 2 * close.below + k % 2 * grad.point;
        const float* from = source;
        float dot[4] = {}, *to = target;
#pragma unroll 1
        for (int c = part; c < channels; c += parts) {
          const float g = read_once_if(g_from, true);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool inside = taps.offset[i] >= 0;
            const float pixel = read_once_if(from + taps.offset[i] * close.pixel, inside && grad_grid.data);
            if (inside) dot[i] = fmaf(g, pixel, dot[i]);
            add_if(to + taps.offset[i], taps.weight[i] * g, inside);
          }
          from += close.step[0];
          g_from += close.step[1];
          to += close.step[2];
        }
        const float beside = point.axis[0].weight[1], below = point.axis[1].weight[1];
        const float gradient[2] = {fmaf(below, dot[3] - dot[2], (1 - below) * (dot[1] - dot[0])),
                                   fmaf(beside, dot[3] - dot[1], (1 - beside) * (dot[2] - dot[0]))};
#pragma unroll
        for (int i = 0; i < kPoints * 2; ++i) sum[i / 2][i % 2] = i / 2 == k ? gradient[i % 2] : sum[i / 2][i % 2];
      }
    }
    if (grad_grid.data == nullptr) continue;
    set_gradients<PADDING>(s, n, close, grad_grid, sum, valid,
                           [&](int k) { return (y + k / 2) * across + x + k % 2; });
  }
}

// What is done with an image, by how far apart points that follow each other are, in pixels along columns and rows.
struct Choice {
  float narrow, wide, tilted;  // of close points
  bool listed;                 // of the others, those for which there are lists:
  float turned;                // less apart along both

  // Of image n, by a sample of as many points as the block has threads: what runs begins with.
  __device__ __forceinline__ int operator()(const Space& s, int n) const {
    const int i = threadIdx.x, p = min(i * (s.points / kThreads) + i, s.points - 2);
    float x[2][3], distance[2];
    coordinates<2>(s, n, {p, p + 1}, x);
#pragma unroll
    for (int a = 0; a < 2; ++a) distance[a] = fabsf(x[1][a] - x[0][a]) * (s.padding == kPixels ? 1.0f : s.slope[a]);
    const auto most = [](bool is) { return 4 * __syncthreads_count(is) >= 3 * kThreads; };
    if (most(distance[0] > narrow && distance[0] < wide && distance[1] < tilted)) return Lists::kDone;
    return listed && most(!(distance[0] > 3 * turned || distance[1] > turned)) ? 0 : Lists::kScattered;
  }
};

// Images that are done, and if there is no other kernel for them those that are left. The next kernel begins when the
// one before has ended, and can read what that chose.
template <int PADDING, bool ENLARGED>
__global__ void __launch_bounds__(kThreads, ENLARGED ? 3 : 4)
    close_kernel(Space s, Choice choice, Close close, Gradient<float> grad, AnyFloat grad_grid, int batch, int channels,
                 Left left, bool also_left) {
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (choice(s, n) != Lists::kDone) {
      if (!also_left) continue;
      wait_for_previous();
      if (!left(n)) continue;
    }
    if constexpr (ENLARGED) {
      add_enlarged<PADDING>(s, n, close, grad, grad_grid, channels);
    } else {
      add_close<PADDING>(s, n, close, grad, grad_grid, channels);
    }
  }
  wait_for_previous();
}

// ------------------------------------------------------------- channels-last image and sums: 16 bytes of a point each

// Blocks of chunks of 256 >> shift points x images, (16 bytes << shift) of channels at a time; of bilinear points with
// fewer blocks than chunks, and one row of them, all images' chunks one after the other. input: (N, pixels, C) with C
// innermost, any strides else; sums: (N, pixels, C), contiguous, or null.
template <class T, int TAPS, int PADDING>
__global__ void __launch_bounds__(kThreads, TAPS <= 4 ? 4 : 1)
    vector_kernel(Space s, Dense dense, const T* __restrict__ input, int64_t image, Gradient<T> grad,
                  float* __restrict__ sums, AnyFloat grad_grid, int batch, int channels, int64_t pixels, int shift,
                  int width, Left left, Left images) {
  constexpr int V = 16 / sizeof(T);
  __shared__ uint4 tile[kThreads];  // points x granules of the gradient
  const int lanes = 1 << shift, rows = kThreads >> shift, lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int bits = tile_bits(shift, width);
  start_next();
  if (!left.wait(0, 1, batch)) return;
  const uint32_t chunks = (s.points + rows - 1) / static_cast<uint32_t>(rows);
  uint32_t at = blockIdx.x;  // of the chunks of the images that are left
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (!images(n)) continue;
    if (TAPS == 4 && at >= chunks) {
      at -= chunks;
      continue;
    }
    const bool add = sums && left(n);
    do {
      const int first = at * rows, p = first + row;
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
    } while (TAPS == 4 && (at += gridDim.x) < chunks);
    if (TAPS == 4) at -= chunks;
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
  if (!left.wait(blockIdx.z, gridDim.z, batch, Lists::kScattered)) return;
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (left(n) || left.runs[n] == Lists::kDone) continue;
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

// Calls f(n, pixels, c) for 4 pixels of 4 channels from c on, C being a multiple of 4, which a thread transposes; all
// blockIdx.x together. A warp has 64 pixels of 8 channels, a lane 4 pixels SIDE_BY_SIDE, all there, or every 16th.
template <bool SIDE_BY_SIDE, class F>
__device__ __forceinline__ void each_square(int batch, int channels, int pixels, F&& f) {
  const uint32_t lane = threadIdx.x % 32, step = gridDim.x * (kThreads / 32);
  const uint32_t down = ceil_div(channels, 8), all = ceil_div(pixels, 64) * down;
  for (uint32_t i = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; i < all * batch; i += step) {
    const uint32_t n = i / all, in_image = i - n * all, column = in_image / down, first = column * 64;
    const int c = (in_image - column * down) * 8 + lane % 2 * 4;
    int p[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) p[k] = first + (SIDE_BY_SIDE ? lane / 2 * 4 + k : lane / 2 + k * 16);
    if (c < channels && p[0] < pixels) f(n, p, c);
  }
}

// Between planes, (N, C, pixels) with the pixels innermost, and channels-last, (N, pixels, C), contiguous: TO_PLANES,
// or from them. wide: every 4 pixels of a plane can be read or written at once.
template <bool TO_PLANES, class Planes, class Last>
__device__ __forceinline__ void copy_squares(Planes* __restrict__ planes, int64_t image, int64_t channel,
                                             Last* __restrict__ last, int batch, int channels, int pixels, bool wide) {
  const auto copy = [&](auto side_by_side) {
    constexpr bool SIDE_BY_SIDE = side_by_side.value;
    each_square<SIDE_BY_SIDE>(batch, channels, pixels, [&](int n, const int(&p)[4], int c) {
      Planes* plane = planes + n * image + c * channel;
      const auto pixel = [&](int k) { return last + (static_cast<int64_t>(n) * pixels + k) * channels + c; };
      float v[4][4];  // channels, pixels
      if constexpr (TO_PLANES) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const Vec<float, 4> of = load<float, 4>(pixel(SIDE_BY_SIDE ? p[k] : min(p[k], pixels - 1)));
#pragma unroll
          for (int j = 0; j < 4; ++j) v[j][k] = of.at[j];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j, plane += channel) {
          if constexpr (SIDE_BY_SIDE) {
            store(plane + p[0], Vec<float, 4>{v[j][0], v[j][1], v[j][2], v[j][3]});
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (p[k] < pixels) plane[p[k]] = v[j][k];
            }
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j, plane += channel) {
          if constexpr (SIDE_BY_SIDE) {
            const Vec<float, 4> of = load_if<float, 4>(plane + p[0], true);
#pragma unroll
            for (int k = 0; k < 4; ++k) v[j][k] = of.at[k];
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) v[j][k] = load_if<float, 1>(plane + p[k], p[k] < pixels).at[0];
          }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (!SIDE_BY_SIDE && p[k] >= pixels) break;
          store(pixel(p[k]), Vec<float, 4>{v[0][k], v[1][k], v[2][k], v[3][k]});
        }
      }
    });
  };
  wide ? copy(std::true_type()) : copy(std::false_type());
}

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    to_channels_last_kernel(const T* __restrict__ from, int64_t image, int64_t channel, T* __restrict__ to, int batch,
                            int channels, int pixels, int width, Left left) {
  each_left(batch, left, [&](int n, int count) {
    const T* const source = from + n * image;
    T* const target = to + static_cast<int64_t>(n) * channels * pixels;
    if constexpr (sizeof(T) == 4) {
      copy_squares<false>(source, image, channel, target, count, channels, pixels, width == 4);
    } else {
      to_channels_last(source, image, channel, target, count, channels, pixels, width);
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    from_channels_last_kernel(const float* __restrict__ from, T* __restrict__ to, int batch, int channels, int pixels,
                              int width, Left left) {
  each_left(batch, left, [&](int n, int count) {
    const int64_t size = static_cast<int64_t>(channels) * pixels;
    const float* const source = from + n * size;
    T* const target = to + n * size;
    if constexpr (sizeof(T) == 4) {
      copy_squares<true>(target, size, pixels, source, count, channels, pixels, width == 4);
    } else {
      from_channels_last(source, target, count, channels, pixels, width);
    }
  });
}

// The threads of all blockIdx.x together, 16 bytes at a time.
__device__ __forceinline__ void clear(float* to, int64_t size) {
  const int64_t before = (16 - reinterpret_cast<uintptr_t>(to) % 16) % 16 / 4, head = before < size ? before : size;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x,
                step = gridDim.x * static_cast<int64_t>(kThreads);
  if (i < head) to[i] = 0;
  to += head;
  size -= head;
  for (int64_t j = i; j < size / 4; j += step) store(to + 4 * j, Vec<float, 4>{});
  if (i < size % 4) to[size / 4 * 4 + i] = 0;
}

// Images of `size` floats each.
__global__ void __launch_bounds__(kThreads) zero_kernel(float* __restrict__ to, int batch, int64_t size, Left left) {
  each_left(batch, left, [&](int first, int count) { clear(to + first * size, count * size); });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const float* __restrict__ from, T* __restrict__ to, int batch, int64_t size, Left left) {
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

// Finds the choice from a sample, so that all blocks find the same without a word, and makes ready what the kernels
// after it need: runs; of images that are close together a cleared output, of others a copy in channels-last, if
// wanted, and cleared sums, or if there are lists cleared counters. Blocks of whatever x images.
__global__ void __launch_bounds__(kTileThreads)
    choose_kernel(Space s, Choice choice, Lists lists, Close close, float* __restrict__ copy, int width,
                  float* __restrict__ sums, int batch, int channels) {
  static_assert(kTileThreads == kThreads, "of clear and the choice");
  start_next();
  const int pixels = s.size[0] * s.size[1];
  const int64_t size = static_cast<int64_t>(channels) * pixels,
                count = static_cast<int64_t>(lists.tiles) * Lists::kApart;
  for (int n = blockIdx.y; n < batch; n += gridDim.y) {
    const int runs = choice(s, n);
    if (blockIdx.x == 0 && threadIdx.x == 0) lists.runs[n] = runs;
    if (runs == Lists::kDone) {
      clear(close.output + n * size, size);
      continue;
    }
    if (choice.listed) {
      clear(reinterpret_cast<float*>(lists.counts) + n * count, count);
    } else {
      clear(sums + n * size, size);
    }
    if (copy) {
      copy_squares<false>(close.input + n * close.image, close.image, close.channel, copy + n * size, 1, channels,
                          pixels, width == 4);
    }
  }
}

// ------------------------------------------------------------------------------------------------------ the choice

int64_t pixels_of(const Tensor& input) {
  int64_t pixels = 1;
  for (int i = 2; i < input.rank; ++i) pixels *= input.sizes[i];
  return pixels;
}

size_t padded(size_t bytes) { return ceil_div<size_t>(bytes, 256) * 256; }

// Whether there are so many tiles of points that box_kernel fills the device; by measurement fewer do in float32.
bool many_tiles(int64_t across, int64_t down, int64_t batch, int64_t item) {
  return across >= 16 && ceil_div<int64_t>(across, kTileAcross) * ceil_div<int64_t>(down, kTileDown) * batch >=
                             8 / item * of_device(cudaDevAttrMultiProcessorCount);
}

// How the gradients are computed, and in how much memory. What is said of bilinear points is not done in other modes.
struct Plan {
  bool plane;   // the image's by plane_kernel,
  bool listed;  // or of bilinear points by owner_kernel, as far as these lie close together,
  bool vector;  // the others by vector_kernel, else by direct_kernel,
  bool pairs;   // of bilinear points with sums of pairs of pixels
  bool copied;  // the image transposed to channels-last first
  bool close;   // but for images whose points are close together: those by add_close or add_enlarged
  bool summed;  // sums in the second cache, or of few channels; others are sooner written once, by lists
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
    const bool even = Space::evenly_spaced(input, 2, input.rank - 1, pixel);
    const bool dense = even && pixel == 1 && 2 * points >= pixels;
    const bool large = batch * points * channels >= (1 << 19);  // worth three or four kernels
    vector = channels % v == 0 && channels > 4 && pixels * channels < INT32_MAX &&
             (large ? last || dense : last && !input_gradient);
    copied = vector && !last && grid_gradient;
    listed = input.rank == 4 && input_gradient && !plane && points <= 4 * pixels && pixels <= 32 * points &&
             points < Lists::kFull && batch * points * channels >= (1 << 19) &&
             (batch * points * channels >= (1 << 23) || batch * pixels * channels >= (1 << 22));
    // Where few channels are enlarged, neighbours add to the same pixels.
    listed = listed && !(input.item_size() == 4 && channels <= 4 && 2 * points >= 5 * pixels);
    pairs = input_gradient && !plane && !vector && !listed && 2 * points >= pixels && input.item_size() == 2 &&
            input.numel() >= (1 << 17) && input.numel() <= (1 << 20);
    close = input.rank == 4 && input.item_size() == 4 && input_gradient && !plane && even && grid.sizes[2] >= 32 &&
            grid.sizes[1] >= kCloseDown;
    summed = input.numel() <= (1 << 23) || channels < 16;
    if (vector) {
      const bool many = listed && many_tiles(grid.sizes[2], grid.sizes[1], batch, 4);
      close = close && !last && (!many || summed);
      // With few tiles what scatters is added up no slower than by lists, with many box_kernel has its share.
      listed = listed && (!close || many);
    } else {
      close = close && listed;
      if (close) lists.most = Lists::kFull - 1;  // however the points lie
    }
    if (listed) {
      list = padded(lists.bytes(batch));
    } else if (close) {
      list = padded(batch * sizeof(int));
    }
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
                         int channels, const Left& left, cudaStream_t stream) {
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
                  lists, gradient, output, batch, channels, chunk, pairs, left);
  };
  if constexpr (sizeof(T) == 2) {
    if (channels > 4) return with(std::integral_constant<int, 8>());
  }
  return with(std::integral_constant<int, 4>());
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
  // Blocks for copies, and how many pixels side by side can be read at once.
  const int64_t squares = ceil_div<int64_t>(pixels, 64) * ceil_div(channels, 8) * batch;
  const int64_t tiles = sizeof(T) == 4 ? ceil_div<int64_t>(squares, kThreads / 32)
                                       : ceil_div<int64_t>(pixels, kTilePoints) * ceil_div(channels, 8 * V) * batch;
  const int copy_width =
      sizeof(T) == 4 && pixels % 4 != 0 ? 1 : pixel_width<T>(input.data, input.strides[0], input.strides[1]);
  const T* data = static_cast<const T*>(input.data);
  int64_t image = input.strides[0];
  Space s = space;
  const int64_t n = input.numel(), size = static_cast<int64_t>(channels) * pixels;
  const int64_t plane_sums = pairs ? 2 * (static_cast<int64_t>(pixels) + pixels / s.size[0]) : pixels;
  const int64_t cleared = plane_sums * batch * channels;
  constexpr bool kChoice = TAPS == 4 && sizeof(T) == 4;
  const bool chosen = add && plan.close && kChoice;  // how, on the device
  const bool deferred = listed || chosen;            // until then: kernels may find nothing to do
  const bool short_chain = add && !plan.vector && !chosen && n <= (1 << 20);  // of kernels that overlap
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
      constexpr bool kSpills = PADDING == kAnyPadding && how.value == kNeighbourSums;
      const int each = ceil_div(channels, 1 << shift);
      return each == 1   ? with(direct_kernel<T, TAPS, PADDING, 1, how.value>)
             : each == 2 ? with(direct_kernel<T, TAPS, PADDING, std::min(U, 2), how.value>)
                         : with(direct_kernel<T, TAPS, PADDING, kSpills ? 2 : U, how.value>);
    };
    return s.padding == kUsual ? choose(std::integral_constant<int, kUsual>())
                               : choose(std::integral_constant<int, kAnyPadding>());
  };

  // One channel is sooner added up than handed on; with more threads for a point warps are not of neighbours.
  const bool neighbours = TAPS == 4 && sizeof(T) == 4 && add && channels > 1 && shift <= 3;
  const bool boxes = listed && plan.copied && many_tiles(s.across.d, s.points / s.across.d, batch, sizeof(T));
  const int few = 4 * of_device(cudaDevAttrMultiProcessorCount);  // blocks, where most often there is nothing to do
  T* const copy = plan.copied ? reinterpret_cast<T*>(static_cast<char*>(workspace) + plan.sums + plan.list) : nullptr;
  if (deferred) lists.in(static_cast<char*>(workspace) + plan.sums, listed ? batch : 0);
  // By measurement; without vectors lists are best however the points lie.
  const float tilted = boxes                               ? 0.09f
                       : !plan.vector && !plan.summed      ? 0.035f
                       : channels < (plan.vector ? 32 : 9) ? 0.25f
                                                           : 0.1f;
  const float turned = !plan.vector ? INFINITY : boxes ? 0.8f : 0.5f;
  // With few tiles and many channels a warp has too many of these one after the other.
  const int64_t points = s.points, doubled = static_cast<int64_t>(Close::tiles_of(s, kEnlargedAcross)) * batch;
  const bool enlarged = chosen && plan.vector && 2 * points >= 5 * (size / channels) && channels <= 2 * doubled;
  Choice choice{0.5f, 1.5f, tilted, listed, turned};
  if (enlarged) choice = {0.25f, 0.75f, 0.01f, listed, turned};
  const Close close(s, input, point, gradient.channel, static_cast<float*>(grad_input.data),
                    enlarged ? kEnlargedAcross : kCloseAcross, 4 * few);
  const auto close_images = [&] {
    if constexpr (kChoice) {
      const auto with = [&](auto kernel) {
        return launch(kernel, dim3(std::min(close.blocks(), few), 1, images), kThreads, 0, stream, true, s, choice,
                      close, gradient, AnyFloat(grad_grid), batch, channels, left, !plan.vector);
      };
      if (enlarged) {
        return s.padding == kZeros ? with(close_kernel<kZeros, true>) : with(close_kernel<kAnyPadding, true>);
      }
      return s.padding == kZeros ? with(close_kernel<kZeros, false>) : with(close_kernel<kAnyPadding, false>);
    }
    return cudaErrorNotSupported;
  };
  if constexpr (kChoice) {
    if (chosen) {
      choose_kernel<<<dim3(std::max<unsigned>(1, few / images), images), kTileThreads, 0, stream>>>(
          s, choice, lists, close, boxes ? nullptr : copy, copy_width, sums, batch, channels);
      left = {lists.runs, lists.most, plan.vector};
      if (left.chosen) {
        const cudaError_t status = close_images();
        if (status != cudaSuccess) return status;
      }
    }
  }
  if constexpr (TAPS == 4) {
    const auto with_lists = [&](auto padding) {
      constexpr int PADDING = padding.value;
      const int64_t counters = lists.counters(batch);
      if (!chosen) {
        zero_kernel<<<limited(ceil_div<int64_t>(counters, 4 * kThreads)), kThreads, 0, stream>>>(
            reinterpret_cast<float*>(lists.counts), 1, counters, Left());
      }
      cudaError_t status;
      if (plan.vector || !grad_grid.data) {
        const unsigned all = ceil_div(s.points, kListThreads), some = std::max<unsigned>(1, 2 * few / images);
        status = launch(list_kernel<PADDING>, dim3(chosen ? std::min(all, some) : all, 1, images), kListThreads, 0,
                        stream, true, s, lists, batch, left);
      } else {
        status = direct(nullptr, AnyFloat(grad_grid), true, std::integral_constant<int, kListSums>());
      }
      if (status != cudaSuccess) return status;
      left = {lists.runs, lists.most, left.chosen};
      status = launch_owner<T, PADDING>(s, lists, gradient, output, batch, channels, left, stream);
      if (status != cudaSuccess || !boxes) return status;
      return launch_boxes<T, PADDING>(input, s, gradient, grad_grid, left, stream);
    };
    if (listed) {
      const cudaError_t status = s.padding == kZeros ? with_lists(std::integral_constant<int, kZeros>())
                                                     : with_lists(std::integral_constant<int, kAnyPadding>());
      if (status != cudaSuccess) return status;
    }
  }
  // Images whose sums the second cache does not hold together come one after the other.
  const unsigned some = n <= (1 << 23) ? std::max<unsigned>(1, few / images) : few;
  const auto blocks_of = [&](int64_t work) {
    return deferred ? dim3(std::min(limited(work), some), images) : dim3(limited(work));
  };
  if (listed || short_chain) {
    const cudaError_t status =
        launch(zero_kernel, blocks_of(ceil_div<int64_t>(listed ? size : cleared, 4 * kThreads)), kThreads, 0, stream,
               listed, sums, listed ? batch : 1, listed ? size : cleared, left);
    if (status != cudaSuccess) return status;
  } else if (ordered || (add && !chosen)) {
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
    const Left rest = !deferred                  ? Left()
                      : boxes || !grad_grid.data ? left
                      : chosen                   ? Left{lists.runs, Lists::kDone, true}
                                                 : Left();
    if (copy) {
      if (!chosen || boxes) {
        const cudaError_t status =
            launch(to_channels_last_kernel<T>, rest.runs ? blocks_of(tiles) : dim3(limited(tiles)), kTileThreads, 0,
                   stream, deferred, data, image, input.strides[1], copy, batch, channels, pixels,
                   copy_width, rest);
        if (status != cudaSuccess) return status;
      }
      data = copy;
      image = static_cast<int64_t>(pixels) * channels;
      for (int a = 0; a < 3; ++a) s.stride[a] = Dense(s, channels).stride[a];
    }
    shift = 0;
    while (shift < 3 && (V << shift) < channels) ++shift;
    const bool last = grad.strides[1] == 1 && (reinterpret_cast<uintptr_t>(grad.data) | point * sizeof(T) |
                                               grad.strides[0] * sizeof(T)) % 16 == 0;
    const int width = last ? 0 : point == 1 ? pixel_width<T>(grad.data, grad.strides[0], grad.strides[1], 4) : 1;
    const auto kernel = s.padding == kUsual ? vector_kernel<T, TAPS, kUsual> : vector_kernel<T, TAPS, kAnyPadding>;
    const unsigned blocks = ceil_div(s.points, kThreads >> shift);
    const unsigned resident = static_cast<unsigned>(std::min<int64_t>(few, static_cast<int64_t>(blocks) * batch));
    cudaError_t status = launch(kernel, rest.runs ? dim3(resident) : dim3(blocks, 1, images), kThreads, 0, stream,
                                deferred, s, Dense(s, channels), data, image, gradient, add ? sums : nullptr,
                                AnyFloat(grad_grid), batch, channels, pixels, shift, width, left, rest);
    if (status != cudaSuccess) return status;
    if (add) {
      return launch(from_channels_last_kernel<T>, blocks_of(tiles), kTileThreads, 0, stream, deferred, sums, output,
                    batch, channels, pixels, pixel_width<T>(output, pixels, pixels), left);
    }
  } else if (chosen) {
    return close_images();
  } else if (add || grad_grid.data) {
    const AnyFloat others(listed ? Tensor{} : grad_grid);
    float* to = add ? sums : nullptr;
    const bool early = short_chain || deferred || plane;
    cudaError_t status;
    if (neighbours) {
      status = cudaErrorNotSupported;
      if constexpr (TAPS == 4 && sizeof(T) == 4) {
        status = direct(to, others, early, std::integral_constant<int, kNeighbourSums>());
      }
    } else if constexpr (kPairs) {
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
