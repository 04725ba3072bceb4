// Sampling in channels-last: a thread reads 16 bytes of a point's channels; a block locates its points once.
#pragma once

#include "grid_sample/output.cuh"
#include "overlap.cuh"

namespace svexport::forward {

template <int TAPS>
constexpr int kTogether = sampler::vectors_together(TAPS);  // points that a thread has in flight

// Computes `steps` times kTogether * (256 >> shift) points of image n from point `first` on, in (16 bytes << shift) of
// channels from `block_channel` on. width: points per store if the output has points innermost, 0 if it has channels.
template <class T, int TAPS, int PADDING>
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
    points[i] = Taps<TAPS>(locate<TAPS, PADDING>(s, n, p), s.stride);
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
      UNROLL for (int i = 0; i < TAPS; i += AT_ONCE) {
        Vec<T, V> v[POINTS][AT_ONCE];
        float weight[POINTS][AT_ONCE];
        UNROLL for (int k = 0; k < POINTS; ++k) {
          const bool there = row + k * rows < left;
          const Taps<TAPS>& taps = points[row + k * rows];
          UNROLL for (int j = 0; j < AT_ONCE; ++j) {
            weight[k][j] = taps.weight[i + j];
            v[k][j] = load_if<T, V>(source + taps.offset[i + j], there && taps.offset[i + j] >= 0);
          }
        }
        UNROLL for (int k = 0; k < POINTS; ++k) {
          UNROLL for (int j = 0; j < AT_ONCE; ++j) add_scaled(sums[k], weight[k][j], v[k][j]);
        }
      }
    }
    T* target = output.data + n * output.image + first * output.point + block_channel * output.channel;
    if (width == 0) {
      UNROLL for (int k = 0; k < POINTS; ++k) {
        const int p = row + k * rows;
        if (p < left && c < channels) store(target + p * output.point + lane * V, rounded<T>(sums[k]));
      }
      continue;
    }
    UNROLL for (int k = 0; k < POINTS; ++k) {
      const Vec<T, V> v = rounded<T>(sums[k]);
      memcpy(&tile[swizzled((row + k * rows) * lanes + lane, bits)], &v, 16);
    }
    __syncthreads();
    with_constant<8, 4, 1>(width, [&](auto w) {
      constexpr int W = w.value;
      if constexpr (W <= V) {
        write_points<W>(tile, bits, shift, POINTS * rows, target, output.channel, output.point, left,
                          channels - block_channel);
      }
    });
    __syncthreads();
  }
}

// Grid: points x channels x images. Computes all images, or those marked in `only`.
template <class T, int TAPS, int PADDING = kAnyPadding>
__global__ void __launch_bounds__(kThreads, TAPS == 4 ? 4 : 1)
    vector_kernel(Space s, const T* __restrict__ input, int64_t image, Output<T> output, int batch, int channels,
                  int shift, int steps, int width, const bool* __restrict__ only) {
  constexpr int V = 16 / sizeof(T);
  wait_for_previous();
  const int first = blockIdx.x * steps * kTogether<TAPS> * (kThreads >> shift);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (only && !only[n]) continue;
    vector<T, TAPS, PADDING>(s, input, image, output, n, first, (blockIdx.y << shift) * V, channels, shift, steps,
                             width);
  }
}

}  // namespace svexport::forward
