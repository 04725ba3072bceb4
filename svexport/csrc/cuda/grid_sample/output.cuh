// The output of the sampling kernels.
#pragma once

#include "grid_sample/sampling.cuh"
#include "grid_sample/tactics.h"

namespace svexport::forward {

using sampler::kThreads;

// The result of image n, channel c and point p is at n * image + c * channel + p * point.
template <class T>
struct Output {
  T* data;
  int64_t image, channel, point;
  T* mask;  // (N, points), or null

  __device__ __forceinline__ void set_mask(int64_t i, int offset) const {
    mask[i] = from_float<T>(offset < 0 ? 0.0f : 1.0f);
  }
};

}  // namespace svexport::forward
