// A box of pixels of each plane of an NCHW image, copied to shared memory. Points that lie close together gather from
// there instead of from L2, where every pixel costs a sector.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "grid_sample/sampling.cuh"

namespace svexport {

// Bytes per channel of a box. Points whose pixels are neighbours need a small or usual box, whose size, the distance
// between channels, is a constant for the compiler. If a box is larger than the largest, its points scatter.
template <class T>
constexpr int kSmallBox = 1024 * sizeof(T);
template <class T>
constexpr int kUsualBox = 1536 * sizeof(T);
template <class T>
constexpr int kLargestBox = 4096 * sizeof(T);

// The row of a tile that a thread of line 0 .. 15 takes: the rows of a warp lie four apart, in different banks.
__device__ __forceinline__ int row_of_line(int line) { return (line & 8) | (line & 1) << 2 | (line >> 1 & 3); }

// Box::unit for an NCHW image. image, channel: strides in elements; pixels: elements of a plane.
template <class T>
int unit_of(const T* data, int64_t image, int64_t channel, int64_t pixels) {
  const uint64_t all = reinterpret_cast<uintptr_t>(data) | image * sizeof(T) | channel * sizeof(T) | pixels * sizeof(T);
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

// The layout of a box in shared memory. Whole rows keep their distance in the plane; other rows lie closer, such that
// source and target addresses agree in their last bits and `unit` bytes (16, 4 or 2) can be copied at a time. The
// pixels of a channel are followed by 16 bytes of zeros, which stand for pixels outside the image.
struct Box {
  int start;   // bytes from the first pixel of the plane to that of the box
  int origin;  // bytes from the start of the channel in shared memory to where the first pixel of the plane would be
  int plane_row, row, rows, length;  // bytes between rows of the plane and in shared memory; rows; bytes of a row
  int chunks;                        // of `unit` bytes per row, at most
  int bytes;                         // from channel to channel
  int unit;

  // Holds columns left .. right and rows top .. bottom of the image; left > right: no pixel is needed.
  __device__ __forceinline__ Box(int left, int top, int right, int bottom, int width, int item, int unit)
      : plane_row(width * item), unit(unit) {
    const auto up = [unit](int x) { return (x + unit - 1) & -unit; };
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
    chunks = (length + 2 * unit - 2) >> (31 - __clz(unit));
    bytes = (shift + (rows - 1) * row + length + 15) / 16 * 16 + 16;
  }

  __device__ __forceinline__ int zeros() const { return bytes - 16; }

  // Rounds the distance between channels up to one that the compiler knows, if one is large enough.
  template <class T>
  __device__ __forceinline__ void widen() {
    bytes = bytes <= kSmallBox<T> ? kSmallBox<T> : max(bytes, kUsualBox<T>);
  }

  // Writes the zeros of `channels` channels; all Threads of a block take part.
  template <int Threads>
  __device__ __forceinline__ void clear(char* shared, int channels) const {
    for (int i = threadIdx.x; i < channels; i += Threads) {
      *reinterpret_cast<uint4*>(shared + i * bytes + zeros()) = uint4{};
    }
  }

  // Byte offsets of chunk i of a channel in the plane (from) and in shared memory (to). False: there is no chunk i.
  __device__ __forceinline__ bool chunk(int i, int& from, int& to) const {
    const int r = i / chunks, in_plane = start + r * plane_row, at = (i - r * chunks) * unit;
    from = (in_plane & -unit) + at;
    to = (((start & (unit - 1)) + r * row) & -unit) + at;
    return r < rows && from < in_plane + length;
  }
};

// A thread's share of the copying: one chunk of every `step`th channel from `first` on; in large boxes, more chunks.
struct Share {
  int index, slots, first, step, from, to;
  bool any;

  __device__ __forceinline__ explicit Share(const Box& box) {
    const int all = box.rows * box.chunks, threads = blockDim.x;
    slots = min(all, threads);
    step = threads / slots;
    first = threadIdx.x / slots;
    index = first < step ? threadIdx.x - first * slots : all;
    any = box.chunk(index, from, to);
  }

  // Starts to copy `count` channels (maybe none), which lie `channel` bytes apart; all threads of a block take part.
  __device__ __forceinline__ void copy(const Box& box, char* shared, const char* plane, int64_t channel,
                                       int count) const {
    bool there = any && first < count;
    int in_plane = from, in_shared = to;
    for (int i = index;;) {
      if (there) {
        char* target = shared + first * box.bytes + in_shared;
        const char* source = plane + first * channel + in_plane;
        const int between = step * box.bytes;
        const int64_t between_sources = step * channel;
        const auto each = [&](auto unit) {
#pragma unroll 1
          for (int c = first; c < count; c += step) {
            if constexpr (unit.value >= 4) {
              __pipeline_memcpy_async(target, source, unit.value);
            } else {
              *reinterpret_cast<uint16_t*>(target) = *reinterpret_cast<const uint16_t*>(source);
            }
            target += between;
            source += between_sources;
          }
        };
        with_constant<16, 4, 2>(box.unit, each);
      }
      i += slots;
      if (i >= box.rows * box.chunks) break;
      there = box.chunk(i, in_plane, in_shared) && first < count;
    }
    __pipeline_commit();
  }
};

// Finds the columns and rows that the points of a block need. edges, in shared memory: left, top, -right, -bottom.
template <int TAPS, int POINTS>
__device__ __forceinline__ void bounds(const Point<TAPS> (&points)[POINTS], const bool (&valid)[POINTS],
                                       int (&edges)[4]) {
  int low[4] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};
  UNROLL for (int k = 0; k < POINTS; ++k) {
    UNROLL for (int a = 0; a < 2; ++a) {
      UNROLL for (int i = 0; i < Point<TAPS>::K; ++i) {
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
  UNROLL for (int i = 0; i < 4; ++i) {
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
