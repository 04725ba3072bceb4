// Sampling in channels-last with any number of channels: adjacent lanes read W channels each.
#pragma once

#include "grid_sample/output.cuh"

namespace svexport::forward {

constexpr int kParts = sampler::kNarrowParts;

// Grid: points x chunks of channels x images; 1 << shift lanes share a point. The results go through a tile in shared
// memory, in which channels are `pitch` elements apart.
template <class T, int TAPS, int W>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(Space s, const T* __restrict__ input, int64_t image, Output<T> output, int batch, int channels,
                  int shift, int chunk, int tile_shift, int pitch) {
  extern __shared__ uint4 memory[];
  const int tile_points = 1 << tile_shift, first = blockIdx.x << tile_shift, left = min(tile_points, s.points - first);
  Taps<TAPS>* points = reinterpret_cast<Taps<TAPS>*>(memory);
  T* tile = reinterpret_cast<T*>(points + tile_points);
  const int lanes = 1 << shift, rows = kThreads >> shift, lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int part = lanes * W, start = blockIdx.y * chunk, end = min(start + chunk, channels);
  const int p = threadIdx.x & (tile_points - 1), line = threadIdx.x >> tile_shift, lines = kThreads >> tile_shift;
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    __syncthreads();
    for (int i = threadIdx.x; i < left; i += kThreads) {
      points[i] = Taps<TAPS>(locate<TAPS>(s, n, first + i), s.stride);
      if (output.mask && start == 0) {
        output.set_mask(static_cast<int64_t>(n) * s.points + first + i, points[i].offset[0]);
      }
    }
    __syncthreads();
    for (int begin = start; begin < end; begin += kParts * part) {
      const int c = begin + lane * W;
      const bool more = c + part < end;
      const T* source = input + n * image + c;
#pragma unroll 1
      for (int r = row; r < left && c < end; r += rows) {
        const Taps<TAPS>& taps = points[r];
        Vec<T, W> v[kParts][TAPS];
        UNROLL for (int i = 0; i < TAPS; ++i) {
          const T* pixel = source + taps.offset[i];
          const bool inside = taps.offset[i] >= 0;
          v[0][i] = load_if<T, W>(pixel, inside);
          v[1][i] = load_if<T, W>(pixel + part, inside && more);
        }
        float sum[kParts][W] = {};
        UNROLL for (int i = 0; i < TAPS; ++i) {
          const float weight = taps.weight[i];
          UNROLL for (int k = 0; k < kParts; ++k) add_scaled(sum[k], weight, v[k][i]);
        }
        T* to = tile + lane * W * pitch + r;
        UNROLL for (int k = 0; k < kParts; ++k) {
          UNROLL for (int w = 0; w < W; ++w) to[(k * part + w) * pitch] = from_float<T>(sum[k][w]);
        }
      }
      __syncthreads();
      const int count = p < left ? min(kParts * part, end - begin) : 0;
      const T* from = tile + line * pitch + p;
      T* target = output.data + n * output.image + (begin + line) * output.channel + (first + p) * output.point;
#pragma unroll 4
      for (int i = line; i < count; i += lines, from += lines * pitch, target += lines * output.channel) {
        *target = *from;
      }
      __syncthreads();
    }
  }
}

}  // namespace svexport::forward
