// The gradient of sampling nearest points in half types: each pixel has a chain of its points, and is written once.
// Sums in float32, to be cleared before and rounded after, cost more than the pixels.
#pragma once

#include "grid_sample_backward.cuh"

namespace svexport::backward {

// The points of each pixel.
struct Chains {
  int* heads;  // (N, pixels): a point + 1, or 0
  int* runs;   // (N), behind them: Lists::kFull where a pixel has more than kMost points, 0 elsewhere
  int* next;   // (N, points): of a point the next of its pixel + 1, or 0

  static constexpr int kMost = 64;

  // In memory for sums up to runs, of which nothing is wanted before chains turn out too long.
  Chains(float* sums, int* runs, int64_t batch, int64_t pixels)
      : heads(runs - batch * pixels), runs(runs), next(reinterpret_cast<int*>(sums)) {}
};

// Blocks of points x images. grad_grid: (N, points, axes), contiguous, or null; nearest points have none.
static __global__ void __launch_bounds__(kThreads)
    link_kernel(Space s, Dense dense, Chains chains, AnyFloat grad_grid, int batch, int64_t pixels) {
  const int p = blockIdx.x * kThreads + threadIdx.x;
  start_next();
  for (int n = blockIdx.z; n < batch && p < s.points; n += gridDim.z) {
    const int pixel = locate<1>(s, n, p).offset(0, dense.stride);
    const int64_t i = static_cast<int64_t>(n) * s.points + p;
    wait_for_previous();
    if (pixel >= 0) chains.next[i] = atomicExch(chains.heads + n * pixels + pixel, p + 1);
    if (grad_grid.data == nullptr) continue;
    for (int a = 0; a < s.axes; ++a) grad_grid.set(i * s.axes + a, 0);
  }
  wait_for_previous();
}

// Two pixels of `chunk` channels a thread, blocks of pixels x chunks x images. output: (N, C, pixels), contiguous;
// pairs: two pixels can be stored at once.
template <class T>
__global__ void __launch_bounds__(kThreads)
    linked_kernel(Chains chains, Gradient<T> grad, T* __restrict__ output, int batch, int channels, int64_t pixels,
                  int64_t points, int chunk, bool pairs) {
  constexpr int U = 2, W = 4;
  const int64_t first = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) * U;
  const int begin = blockIdx.y * chunk, end = min(begin + chunk, channels);
  start_next();
  wait_for_previous();
  for (int n = blockIdx.z; n < batch && first < pixels; n += gridDim.z) {
    const int* next = chains.next + n * points - 1;
    int head[U], second[U];
#pragma unroll
    for (int u = 0; u < U; ++u) head[u] = first + u < pixels ? chains.heads[n * pixels + first + u] : 0;
#pragma unroll
    for (int u = 0; u < U; ++u) second[u] = head[u] ? next[head[u]] : 0;
    bool crowded = false;
    for (int c = begin; c < end && !crowded; c += W) {
      const T* source = grad.data + n * grad.image + c * grad.channel;
      const auto value = [&](int point, int k) {
        const bool there = point && c + k < end;
        return to_float(load_if<T, 1>(source + k * grad.channel + (point - 1) * grad.point, there).at[0]);
      };
      float sum[U][W];
#pragma unroll
      for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int k = 0; k < W; ++k) sum[u][k] = value(head[u], k);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        int links = 0;
        for (int i = second[u]; i && !crowded; i = next[i]) {
#pragma unroll
          for (int k = 0; k < W; ++k) sum[u][k] += value(i, k);
          crowded = ++links >= Chains::kMost;
        }
      }
      T* target = output + (static_cast<int64_t>(n) * channels + c) * pixels + first;
#pragma unroll
      for (int k = 0; k < W; ++k, target += pixels) {
        if (c + k >= end) break;
        const Vec<T, 2> both{from_float<T>(sum[0][k]), from_float<T>(sum[1][k])};
        if (pairs) {
          store(target, both);
        } else {
          target[0] = both.at[0];
          if (first + 1 < pixels) target[1] = both.at[1];
        }
      }
    }
    if (crowded) atomicOr(chains.runs + n, Lists::kFull);
  }
}

// Adds up the points of images that are left; few blocks. sums: (N, C, pixels).
template <class T>
__global__ void __launch_bounds__(kThreads)
    crowded_kernel(Space s, Dense dense, Gradient<T> grad, float* __restrict__ sums, int batch, int channels,
                   int64_t pixels, Left left) {
  start_next();
  wait_for_previous();
  for (int n = 0; n < batch; ++n) {
    if (!left(n)) continue;
    for (int64_t p = blockIdx.x * kThreads + threadIdx.x; p < s.points; p += gridDim.x * kThreads) {
      const int pixel = locate<1>(s, n, static_cast<int>(p)).offset(0, dense.stride);
      if (pixel < 0) continue;
      const T* source = grad.data + n * grad.image + p * grad.point;
      float* target = sums + static_cast<int64_t>(n) * channels * pixels + pixel;
      for (int c = 0; c < channels; ++c) atomicAdd(target + c * pixels, to_float(source[c * grad.channel]));
    }
  }
}

}  // namespace svexport::backward
