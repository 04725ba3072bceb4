// Sampling of images of any strides: a thread per point.
#pragma once

#include "grid_sample/output.cuh"

namespace svexport::forward {

// Blocks of points x chunks of channels x images; U channels at a time.
template <class T, int TAPS, int PADDING = kAnyPadding, int U = TAPS == 1 ? 8 : TAPS == 4 ? 4 : TAPS == 8 ? 2 : 1>
__global__ void __launch_bounds__(kThreads) direct_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          int64_t channel, Output<T> output, int batch, int channels,
                                                          int chunk) {
  const int p = blockIdx.x * kThreads + threadIdx.x, first = blockIdx.y * chunk;
  if (p >= s.points) return;
  const int count = min(chunk, channels - first);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    const Taps<TAPS> taps(locate<TAPS, PADDING>(s, n, p), s.stride);
    const char* source = reinterpret_cast<const char*>(input + n * image + first * channel);
    T* target = output.data + n * output.image + first * output.channel + p * output.point;
    if (output.mask && first == 0) output.set_mask(static_cast<int64_t>(n) * s.points + p, taps.offset[0]);
    auto step = [&](auto width) {
      constexpr int W = decltype(width)::value;
      T v[W][TAPS];
#pragma unroll
      for (int u = 0; u < W; ++u) {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          const T* pixel = reinterpret_cast<const T*>(source + taps.offset[i] * uint32_t{sizeof(T)});
          v[u][i] = load_if<T, 1>(pixel, taps.offset[i] >= 0).at[0];
        }
        source += channel * sizeof(T);
      }
#pragma unroll
      for (int u = 0; u < W; ++u) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) sum = fmaf(taps.weight[i], to_float(v[u][i]), sum);
        *target = from_float<T>(sum);
        target += output.channel;
      }
    };
    int c = 0;
    for (; c + U <= count; c += U) step(std::integral_constant<int, U>());
    if constexpr (U > 1) {
      for (; c < count; ++c) step(std::integral_constant<int, 1>());
    }
  }
}

}  // namespace svexport::forward
