// A box of the pixels of planes of an NCHW image in shared memory, where points gather without a sector of L2 for each.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "sampling.cuh"

namespace svexport {

// How the box lies in shared memory: rows at their distance in the plane if they are whole, else side by side, so that
// addresses of both sides agree in their last bits and `unit` bytes (16, 8, 4 or 2) are copied at a time. Behind the
// pixels of a channel come 16 bytes of zeros, for pixels outside of the image.
struct Box {
  int start;   // bytes from the first pixel of the plane to that of the box
  int origin;  // bytes from the start of the channel in shared memory to where the first pixel of the plane would be
  int plane_row, row, rows, length;  // bytes between rows of the plane and in shared memory, of a row
  int bytes;                         // of a channel

  // Columns left .. right and rows top .. bottom; left > right: empty.
  __device__ __forceinline__ Box(int left, int top, int right, int bottom, int width, int item, int unit)
      : plane_row(width * item) {
    const auto up = [unit](int x) { return (x + unit - 1) / unit * unit; };
    if (left > right || top > bottom) left = top = right = bottom = 0;
    start = top * plane_row + left * item;
    length = (right - left + 1) * item;
    rows = bottom - top + 1;
    const int shift = start & (unit - 1), uneven = plane_row & (unit - 1);
    if (length == plane_row) {
      row = plane_row;
      length *= rows;
      rows = 1;
    } else {
      row = uneven ? up(length + 2 * unit) + uneven : up(shift + length);
      if (unit == 16 && row % 32 == 0) row += 16;  // rows that lie four apart use different banks
    }
    origin = shift - top * row - left * item;
    bytes = (shift + (rows - 1) * row + length + 15) / 16 * 16 + 16;
  }

  __device__ __forceinline__ int zeros() const { return bytes - 16; }

  // Starts to copy `count` channels, `channel` bytes apart, or none; all threads of a block together.
  __device__ __forceinline__ void fetch(char* shared, const char* plane, int64_t channel, int count, int unit) const {
    const int chunks = (length + 2 * unit - 2) / unit;  // of a row, at most
    const int all = rows * chunks, slots = min(all, static_cast<int>(blockDim.x));
    const int group = threadIdx.x / slots, groups = blockDim.x / slots;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      *reinterpret_cast<uint4*>(shared + i * bytes + zeros()) = uint4{};
    }
    for (int i = group < groups ? threadIdx.x - group * slots : all; i < all; i += slots) {
      const int r = i / chunks, in_plane = start + r * plane_row, at = (i - r * chunks) * unit;
      const int from = (in_plane & -unit) + at, to = (((start & (unit - 1)) + r * row) & -unit) + at;
      if (from >= in_plane + length) continue;
      const char* source = plane + from;
      char* target = shared + to;
      switch (unit) {
        case 16: copy<16>(target, source, channel, group, groups, count); break;
        case 8: copy<8>(target, source, channel, group, groups, count); break;
        case 4: copy<4>(target, source, channel, group, groups, count); break;
        default: copy<2>(target, source, channel, group, groups, count);
      }
    }
    __pipeline_commit();
  }

  template <int UNIT>
  __device__ __forceinline__ void copy(char* target, const char* source, int64_t channel, int first, int step,
                                       int count) const {
#pragma unroll 4
    for (int c = first; c < count; c += step) {
      if constexpr (UNIT >= 4) {
        __pipeline_memcpy_async(target + c * bytes, source + c * channel, UNIT);
      } else {
        *reinterpret_cast<uint16_t*>(target + c * bytes) = *reinterpret_cast<const uint16_t*>(source + c * channel);
      }
    }
  }
};

// The columns and rows that the points of a block need, in shared memory: left, top, -right, -bottom.
template <int TAPS, int POINTS>
__device__ __forceinline__ void bounds(const Point<TAPS> (&points)[POINTS], const bool (&valid)[POINTS], int (&edges)[4]) {
  int low[4] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};
#pragma unroll
  for (int k = 0; k < POINTS; ++k) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
#pragma unroll
      for (int i = 0; i < Point<TAPS>::K; ++i) {
        const int index = points[k].axis[a].index[i];
        if (!valid[k] || index < 0) continue;
        low[a] = min(low[a], index);
        low[a + 2] = min(low[a + 2], -index);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < 4) edges[threadIdx.x] = INT32_MAX;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if __CUDA_ARCH__ >= 800
    const int least = __reduce_min_sync(~0u, low[i]);
    if (threadIdx.x % 32 == 0) atomicMin(edges + i, least);
#else
    atomicMin(edges + i, low[i]);
#endif
  }
  __syncthreads();
}

}  // namespace svexport
