// The gradient of sampling for any strides: a thread per point; in a fixed order, a thread per channel; for few points,
// a block per channel, which sums its pixels in shared memory.
#pragma once

#include <climits>

#include "grid_sample/backward.cuh"

namespace svexport::backward {

// How direct_kernel sums the gradient of the image.
enum PointSums {
  kPixelSums,  // (N, C, pixels): one atomic per pixel of a point
  kPairSums,   // (N, C, rows, width + 1, 2): one atomic for the pixels to the left and right of a point
  kListSums,   // none: it lists the points for owner_kernel
  kNeighbourSums,  // as kPixelSums, but adjacent points first combine what they add to the same pixel
};

// p[0] += x, p[1] += y atomically, returning nothing; p is aligned to 8 bytes.
__device__ __forceinline__ void add_pair(float* p, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
#else
  atomicAdd(p, x);
  atomicAdd(p + 1, y);
#endif
}

// p[0] += x, p[1] += y atomically if `there`; then p is aligned to 8 bytes.
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

// Grid: points x images; 1 << shift threads share the channels of a point, U at a time each. sums: (N, C, pixels),
// contiguous, or null; grad_grid: (N, points, axes), contiguous, or null; channels is 0 if both are null. The previous
// kernel cleared the sums or counters; this one waits for it only when it needs them.
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
      if (!left(n)) continue;
    }
    if (SUMS == kNeighbourSums || p < s.points) {
      const bool there = SUMS != kNeighbourSums || p < s.points;
      point = locate<TAPS, PADDING>(s, n, there ? p : 0);
      const Taps<TAPS> from(point, s.stride), to(point, dense.stride);
      float dot[TAPS] = {};
      const bool read = grad_grid.data && TAPS > 1 && there;
      bool hands = false, takes = false;  // hands a right pixel to the next lane, takes one from the previous
      bool together = false;              // most lanes lie in the same pixels as the next lane, or one pixel beside
      if constexpr (SUMS == kNeighbourSums) {
        const int lane = threadIdx.x % 32;
        bool any = there;
        int64_t cell = 0;
        UNROLL for (int a = Point<TAPS>::AXES - 1; a >= 0; --a) {
          any = any && (point.axis[a].inside[0] || point.axis[a].inside[1]);
          cell = cell * (s.size[a] + 2) + point.axis[a].first;
        }
        if (!any) cell = INT64_MIN / 2;
        const int64_t next = __shfl_down_sync(~0u, cell, 1);
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
        UNROLL for (int u = 0; u < U; ++u) {
          const int c = begin + u * parts;
          scales[u] = grad.format.number(load_if<T, 1>(g + c * grad.channel, c < channels && there).at[0]);
          UNROLL for (int i = 0; i < TAPS; ++i) {
            const bool inside = read && from.offset[i] >= 0 && c < channels;
            values[u][i] = grad.format.number(load_if<T, 1>(source + c * channel + from.offset[i], inside).at[0]);
          }
        }
        if (sums) wait_for_previous();  // the reads above need not wait
        UNROLL for (int u = 0; u < U; ++u) {
          const int c = begin + u * parts;
          const float scale = scales[u];
          if (c >= channels) break;
          UNROLL for (int i = 0; i < TAPS; ++i) {
            if (from.offset[i] >= 0) dot[i] = fmaf(scale, values[u][i], dot[i]);
          }
          if (!sums) continue;
          if constexpr (SUMS == kPairSums) {
            const Pixels<2>& x = point.axis[0];
            const int first = x.index[0] >= 0 ? x.index[0] + 1 : x.index[1];  // -1: neither is inside
            UNROLL for (int i = 0; i < TAPS; i += 2) {
              int row = 0, outside = first;
              UNROLL for (int a = Point<TAPS>::AXES - 1; a > 0; --a) {
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
            UNROLL for (int i = 0; i < TAPS; i += 2) {
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
            UNROLL for (int i = 0; i < TAPS; ++i) {
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
      UNROLL for (int a = 0; a < Point<TAPS>::AXES; ++a) {
        if (p < s.points && a < s.axes) {
          grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, gradient[a]);
        }
      }
      continue;
    }
    UNROLL for (int a = 0; a < 3; ++a) partial[a][threadIdx.x] = gradient[a];
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

// The same sums in a fixed order: a thread per channel of an image adds one point after the other.
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
    const float g = grad.format.number(grad.data[n * grad.image + c * grad.channel + p * grad.point]);
    UNROLL for (int k = 0; k < TAPS; ++k) {
      if (taps.offset[k] >= 0) target[taps.offset[k]] += taps.weight[k] * g;
    }
  }
}

using sampler::gradient::kPlaneThreads;

// Grid: (image, channel, tile of `tile` pixels). A block sums its part of the gradient and writes it once. output:
// (N, C, pixels), contiguous. grad_grid: (N, points, axes), contiguous, or null; only for images of one channel.
template <class T, int TAPS>
__global__ void __launch_bounds__(kPlaneThreads, 2)
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
    const float g = grad.format.number(source[p * grad.point]);
    const Point<TAPS> point = locate<TAPS>(s, n, p);
    const Taps<TAPS> taps(point, dense.stride);
    UNROLL for (int i = 0; i < TAPS; ++i) {
      const int at = taps.offset[i] - begin;
      if (taps.offset[i] >= 0 && at >= 0 && at < size) atomicAdd(sums + at, taps.weight[i] * g);
    }
    if (grad_grid.data == nullptr || begin > 0) continue;
    float dot[TAPS] = {}, gradient[3] = {};
    if (TAPS > 1) {
      UNROLL for (int i = 0; i < TAPS; ++i) {
        const int from = point.offset(i, s.stride);
        const float value = grad.format.number(load_if<T, 1>(input + n * image + from, from >= 0).at[0]);
        if (from >= 0) dot[i] = g * value;
      }
      to_coordinates(point, dot, gradient);
    }
    UNROLL for (int a = 0; a < Point<TAPS>::AXES; ++a) {
      if (a < s.axes) grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, gradient[a]);
    }
  }
  __syncthreads();
  T* target = output + static_cast<int64_t>(block) * pixels + begin;
  for (int i = threadIdx.x; i < size; i += kPlaneThreads) target[i] = grad.format.rounded(sums[i]);
}

}  // namespace svexport::backward
