// Sampling in channels-last: a thread for 16 bytes of a point, or more.
#pragma once

#include "grid_sample/output.cuh"

namespace svexport::forward {

// Blocks of (chunks of channels x points) x images. Each thread finds its own pixels, and nothing waits for another.
template <class T, int TAPS, int PADDING>
__global__ void __launch_bounds__(kThreads, TAPS <= 4 ? 4 : TAPS == 8 ? 2 : 1)
    point_kernel(Space s, const T* __restrict__ input, int64_t image, Output<T> output, int batch, int channels,
                 int chunk, Divider points) {
  constexpr int V = 16 / sizeof(T), AT_ONCE = TAPS < 4 ? TAPS : 4;
  uint32_t rest = blockIdx.x * kThreads + threadIdx.x;
  const int p = points.split(rest), first = rest * chunk, last = min(first + chunk, channels);
  if (first >= channels) return;
  for (int n = blockIdx.y; n < batch; n += gridDim.y) {
    const Taps<TAPS> taps(locate<TAPS, PADDING>(s, n, p), s.stride);
    if (output.mask && first == 0) output.set_mask(static_cast<int64_t>(n) * s.points + p, taps.offset[0]);
    const T* source = input + n * image;
    T* target = output.data + n * output.image + p * output.point;
    for (int c = first; c < last; c += V) {
      float sum[V] = {};
#pragma unroll
      for (int i = 0; i < TAPS; i += AT_ONCE) {
        Vec<T, V> v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          const int offset = taps.offset[i + j];
          v[j] = load_if<T, V>(source + (static_cast<uint32_t>(offset) + c), offset >= 0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) add_scaled(sum, taps.weight[i + j], v[j]);
      }
#pragma unroll
      for (int k = 0; k < V; ++k) target[(c + k) * output.channel] = from_float<T>(sum[k]);
    }
  }
}

}  // namespace svexport::forward
