// Sampling of images of any strides and types: a thread computes a few channels of a point.
#pragma once

#include "grid_sample/output.cuh"

namespace svexport::forward {

// An image of a float type, or of int8, one step of which is worth `scale`. Adjacent channels lie in blocks of
// 1 << shift: 32 in CHW32, 4 in CHW4, else 1.
template <class F>
struct Image {
  const F* data;
  int64_t image, block;  // strides
  int shift = 0;
  float scale = 1;

  __device__ __forceinline__ const F* at(int n, int channel) const {
    return data + n * image + (channel >> shift) * block + (channel & ((1 << shift) - 1));
  }
};

// Reads of W channels that a thread keeps in flight: several if W is 1.
template <int TAPS, int W>
constexpr int kGroups = W > 1 ? 1 : TAPS == 1 ? 8 : TAPS == 4 ? 4 : TAPS == 8 ? 2 : 1;

// Grid: (points x chunks of channels) x images. A lane reads W adjacent channels at once, and 1 << shift adjacent lanes
// read the next ones, so that a sector is requested once. `inner` counts what varies fastest from there: points if they
// are adjacent in the output, else chunks. Threads locate their own pixels and never wait for each other.
template <class F, class T, int TAPS, int PADDING, int W, int GROUPS = kGroups<TAPS, W>>
__global__ void __launch_bounds__(kThreads, W == 1 || sizeof(F) == 1 ? 1 : TAPS <= 4 ? 4 : TAPS == 8 ? 2 : 1)
    points_kernel(Space s, Image<F> image, Output<T> output, int batch, int channels, int chunk, int shift, Divider inner,
                  bool points_inside) {
  constexpr bool CODES = sizeof(F) == 1, INTEGERS = kIntegers<F, T, W> && TAPS >= 4;
  constexpr int AT_ONCE = W == 1 && !CODES ? TAPS : TAPS < 4 ? TAPS : 4;  // loads in flight per group
  constexpr int V = W < 16 / static_cast<int>(sizeof(T)) ? W : 16 / sizeof(T);
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  uint32_t outer = thread >> shift;
  const uint32_t rest = inner.split(outer);
  const int p = points_inside ? rest : outer, first = (points_inside ? outer : rest) * chunk;
  if (p >= s.points || first >= channels) return;
  const int begin = first + (thread & ((1 << shift) - 1)) * W, last = min(first + chunk, channels);
  for (int n = blockIdx.y; n < batch; n += gridDim.y) {
    const Taps<TAPS> taps(locate<TAPS, PADDING>(s, n, p), s.stride);
    if (output.mask && begin == 0) output.set_mask(static_cast<int64_t>(n) * s.points + p, taps.offset[0]);
    T* target = output.data + n * output.image + begin * output.channel + p * output.point;
    const bool together = output.channel == 1 && reinterpret_cast<uintptr_t>(target) % sizeof(Vec<T, V>) == 0;
    const F* source = image.at(n, begin);
    CodeWeights integers[INTEGERS ? TAPS / 4 : 1];
    const float factor = fmaf(0.0f, taps.weight[0], image.scale / CodeWeights::kOne);  // NaN if the weights are NaN
    UNROLL for (int i = 0; i < TAPS && INTEGERS; i += 4) {
      integers[i / 4] = CodeWeights(taps.weight[i], taps.weight[i + 1], taps.weight[i + 2], taps.weight[i + 3]);
    }
    int c = begin;
    const auto step = [&](auto groups) {
      constexpr int U = groups.value;
      float sum[U][W] = {};
      const F* from[U];
      UNROLL for (int u = 0; u < U; ++u) {
        from[u] = source;
        c += W << shift;
        if constexpr (CODES) {
          source = image.at(n, c);
        } else {
          source += (W << shift) * (W == 1 ? image.block : 1);
        }
      }
      UNROLL for (int i = 0; i < TAPS; i += AT_ONCE) {
        Vec<F, W> v[U][AT_ONCE];
        UNROLL for (int u = 0; u < U; ++u) {
          UNROLL for (int j = 0; j < AT_ONCE; ++j) {
            v[u][j] = load_if<F, W>(from[u] + taps.offset[i + j], taps.offset[i + j] >= 0);
          }
        }
        UNROLL for (int u = 0; u < U; ++u) {
          if constexpr (INTEGERS) {
            add_scaled(sum[u], factor, integers[i / 4], v[u]);
          } else {
            UNROLL for (int j = 0; j < AT_ONCE; ++j) add_scaled(sum[u], taps.weight[i + j], v[u][j]);
          }
        }
      }
      UNROLL for (int u = 0; u < U; ++u) {
        const int of = c - ((U - u) * W << shift);
        const bool whole = !CODES || W == 1 || of + W <= last;
        T* to = target;
        UNROLL for (int k = 0; k < W; k += V) {
          Vec<T, V> v;
          UNROLL for (int i = 0; i < V; ++i) {
            v.at[i] = from_float<T>(CODES && !INTEGERS ? sum[u][k + i] * image.scale : sum[u][k + i]);
          }
          if (together && of + k + V <= last) {
            store(target + k, v);
          } else if (whole) {
            UNROLL for (int i = 0; i < V; ++i, to = opaque(to + output.channel)) *to = v.at[i];
          } else {
            UNROLL for (int i = 0; i < V; ++i) {
              if (of + k + i < last) target[(k + i) * output.channel] = v.at[i];
            }
          }
        }
        target += (W << shift) * output.channel;
      }
    };
    while (c + (GROUPS - 1) * (W << shift) < last) step(Int<GROUPS>());
    if constexpr (GROUPS > 1) {
      while (c < last) step(Int<1>());
    }
  }
}

}  // namespace svexport::forward
