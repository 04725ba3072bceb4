// The gradient of sampling: what comes before and after. Layouts, cleared and rounded sums, the choice for each image.
#pragma once

#include "grid_sample/backward_close.cuh"

namespace svexport::backward {

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
static __global__ void __launch_bounds__(kThreads) zero_kernel(float* __restrict__ to, int batch, int64_t size, Left left) {
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
static __global__ void __launch_bounds__(kTileThreads)
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

}  // namespace svexport::backward
