// Sampling of int8 images: a thread for a few channels of a point.
#pragma once

#include "grid_sample/output.cuh"

namespace svexport::forward {

// An int8 image. Channels lie in blocks of 1 << shift neighbours: 32 in CHW32, 4 in CHW4, else one.
struct Codes {
  const int8_t* data;
  int64_t image, block;  // strides
  int shift;
  float scale;  // what a step is worth

  __device__ __forceinline__ const int8_t* at(int n, int channel) const {
    return data + n * image + (channel >> shift) * block + (channel & ((1 << shift) - 1));
  }
};

// Blocks of (points x chunks of channels) x images; W channels, neighbours, are read at once, by 1 << shift lanes side by
// side those next to them, so that a sector is asked for once. `inner` is the number of what lanes differ in then: points
// where these are neighbours in the output, else chunks.
template <class T, int TAPS, int PADDING, int W>
__global__ void __launch_bounds__(kThreads)
    codes_kernel(Space s, Codes codes, Output<T> output, int batch, int channels, int chunk, int shift, Divider inner,
                 bool points_inside) {
  constexpr int AT_ONCE = TAPS < 4 ? TAPS : 4, V = W < 16 / static_cast<int>(sizeof(T)) ? W : 16 / sizeof(T);
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  uint32_t outer = thread >> shift;
  const uint32_t rest = inner.split(outer);
  const int p = points_inside ? rest : outer, first = (points_inside ? outer : rest) * chunk;
  if (p >= s.points || first >= channels) return;
  const int begin = first + (thread & ((1 << shift) - 1)) * W, last = min(first + chunk, channels);
  for (int n = blockIdx.y; n < batch; n += gridDim.y) {
    const Taps<TAPS> taps(locate<TAPS, PADDING>(s, n, p), s.stride);
    T* target = output.data + n * output.image + p * output.point;
    const bool together = output.channel == 1 && reinterpret_cast<uintptr_t>(target + begin) % sizeof(Vec<T, V>) == 0;
#pragma unroll(W == 1 ? 4 : 1)
    for (int c = begin; c < last; c += W << shift) {
      const int8_t* source = codes.at(n, c);
      float sum[W] = {};
#pragma unroll
      for (int i = 0; i < TAPS; i += AT_ONCE) {
        Vec<int8_t, W> v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          v[j] = load_if<int8_t, W>(source + taps.offset[i + j], taps.offset[i + j] >= 0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) add_scaled(sum, taps.weight[i + j], v[j]);
      }
#pragma unroll
      for (int k = 0; k < W; k += V) {
        Vec<T, V> v;
#pragma unroll
        for (int i = 0; i < V; ++i) v.at[i] = from_float<T>(sum[k + i] * codes.scale);
        if (together && c + k + V <= last) {
          store(target + c + k, v);
          continue;
        }
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (c + k + i < last) target[(c + k + i) * output.channel] = v.at[i];
        }
      }
    }
  }
}

}  // namespace svexport::forward
