// The gradient of sampling with image and sums in channels-last: a thread has 16 bytes of a point's channels.
#pragma once

#include "grid_sample/backward.cuh"

namespace svexport::backward {

// Grid: chunks of 256 >> shift points x images; (16 bytes << shift) of channels at a time. For nearest and bilinear
// points, the grid may be one row of fewer blocks, which walk over the chunks of all images. input: (N, pixels, C), C
// innermost, otherwise any strides; sums: (N, pixels, C), contiguous, or null.
template <class T, int TAPS>
__global__ void __launch_bounds__(kThreads, TAPS <= 4 ? 4 : 1)
    vector_kernel(Space s, Dense dense, const T* __restrict__ input, int64_t image, Gradient<T> grad,
                  float* __restrict__ sums, AnyFloat grad_grid, int batch, int channels, int64_t pixels, int shift,
                  int width, Left left, Left images) {
  constexpr int V = 16 / sizeof(T);
  __shared__ uint4 tile[kThreads];  // points x granules of the gradient
  const int lanes = 1 << shift, rows = kThreads >> shift, lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int bits = tile_bits(shift, width);
  start_next();
  wait_for_previous();
  const uint32_t chunks = (s.points + rows - 1) / static_cast<uint32_t>(rows);
  uint32_t at = blockIdx.x;  // this block's next chunk, counted from the first chunk of the current image
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (!images(n)) continue;
    if (TAPS <= 4 && at >= chunks) {
      at -= chunks;
      continue;
    }
    const bool add = sums && left(n);
    do {
      const int first = at * rows, p = first + row;
      Point<TAPS> point;
      if (p < s.points) point = locate<TAPS>(s, n, p);
      const Taps<TAPS> from(point, s.stride), to(point, dense.stride);
      float dot[TAPS] = {};
      for (int block_channel = 0; block_channel < channels; block_channel += V << shift) {
        if (width > 0) {
          const T* source = grad.data + n * grad.image + first * grad.point + block_channel * grad.channel;
          __syncthreads();
          with_constant<8, 4, 1>(width, [&](auto w) {
            constexpr int W = w.value;
            if constexpr (W <= 4) {
              read_points<W>(tile, bits, shift, rows, source, grad.channel, grad.point, s.points - first,
                               channels - block_channel);
            }
          });
          __syncthreads();
        }
        if (p >= s.points) continue;
        // Each lane takes four channels at a time, so that adjacent lanes add to adjacent memory.
        UNROLL for (int part = 0; part < V / 4; ++part) {
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
            UNROLL for (int i = 0; i < TAPS; ++i) {
              v[i] = load_if<T, 4>(source + from.offset[i], from.offset[i] >= 0);
            }
          }
          if (add) {
            UNROLL for (int i = 0; i < TAPS; ++i) {
              float scaled[4];
              UNROLL for (int k = 0; k < 4; ++k) scaled[k] = to.weight[i] * to_float(g.at[k]);
              if (to.offset[i] >= 0) atomic_add(target + to.offset[i], scaled);
            }
          }
          if (grad_grid.data && TAPS > 1) {
            UNROLL for (int i = 0; i < TAPS; ++i) {
              if (from.offset[i] < 0) continue;
              UNROLL for (int k = 0; k < 4; ++k) dot[i] = fmaf(to_float(g.at[k]), to_float(v[i].at[k]), dot[i]);
            }
          }
        }
      }
      if (grad_grid.data == nullptr) continue;
      float gradient[3] = {};
      if (TAPS > 1 && p < s.points) to_coordinates(point, dot, gradient);
      UNROLL for (int a = 0; a < Point<TAPS>::AXES; ++a) {
        for (int mask = lanes / 2; mask > 0; mask /= 2) gradient[a] += __shfl_xor_sync(~0u, gradient[a], mask);
      }
      if (lane == 0 && p < s.points) {
        UNROLL for (int a = 0; a < Point<TAPS>::AXES; ++a) {
          if (a < s.axes) grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, gradient[a]);
        }
      }
    } while (TAPS <= 4 && (at += gridDim.x) < chunks);
    if (TAPS <= 4) at -= chunks;
  }
}

}  // namespace svexport::backward
