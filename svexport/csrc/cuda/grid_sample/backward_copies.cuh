// The gradient of sampling: kernels that run before and after. They change layouts, and clear and round sums.
#pragma once

#include "grid_sample/backward.cuh"

namespace svexport::backward {

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    from_channels_last_kernel(const float* __restrict__ from, T* __restrict__ to, int batch, int channels, int pixels,
                              int width, Left left) {
  left.each(batch, [&](int n, int count) {
    const int64_t size = static_cast<int64_t>(channels) * pixels;
    from_channels_last(from + n * size, to + n * size, count, channels, pixels, width);
  });
}

// Clears `size` floats, 16 bytes at a time; the threads of all blockIdx.x share the work.
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

// Clears the images that are left, of `size` floats each.
static __global__ void __launch_bounds__(kThreads) zero_kernel(float* __restrict__ to, int batch, int64_t size, Left left) {
  left.each(batch, [&](int first, int count) { clear(to + first * size, count * size); });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const float* __restrict__ from, T* __restrict__ to, int batch, int64_t size, Format<T> format,
                 Left left) {
  left.each(batch, [&](int image, int count) {
    const int64_t first = image * size, n = count * size;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
      to[first + i] = format.rounded(from[first + i]);
    }
  });
}

// Merges the sums of pairs, (rows, width + 1, 2), into (rows, width). across: divides by width; n: rows * width.
template <class T>
__global__ void __launch_bounds__(kThreads)
    add_pairs_kernel(const float* __restrict__ from, T* __restrict__ to, Divider across, int n, Format<T> format) {
  start_next();
  wait_for_previous();
  uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= static_cast<uint32_t>(n)) return;
  const uint32_t i = row, x = across.split(row);
  const float* pair = from + 2 * (i + row);  // the pair to the left of the pixel
  to[i] = format.rounded(pair[1] + pair[2]);
}

}  // namespace svexport::backward
