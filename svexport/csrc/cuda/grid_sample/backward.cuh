// Shared by the kernels of the gradient of sampling.
#pragma once

#include "grid_sample/pixel_lists.cuh"

namespace svexport::backward {

using sampler::kThreads;

// *p += x atomically if `there`, without a branch.
__device__ __forceinline__ void add_if(float* p, float x, bool there) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p red.global.add.f32 [%0], %1;}" ::"l"(p), "f"(x),
               "r"(static_cast<int>(there))
               : "memory");
}

// The strides of pixels of a dense image; `unit`: elements from one pixel to the next.
struct Dense {
  int stride[3];

  Dense(const Space& s, int unit) : stride{unit, unit * s.size[0], unit * s.size[0] * (s.axes == 3 ? s.size[1] : 1)} {}
};

// The gradient of a point's coordinates, from the sum over channels of the output's gradient times each pixel.
template <int TAPS>
__device__ __forceinline__ void to_coordinates(const Point<TAPS>& point, const float (&dot)[TAPS],
                                               float (&gradient)[3]) {
  UNROLL for (int a = 0; a < Point<TAPS>::AXES; ++a) {
    gradient[a] = 0;
    UNROLL for (int i = 0; i < TAPS; ++i) gradient[a] = fmaf(point.slope(i, a), dot[i], gradient[a]);
  }
}

using sampler::gradient::Problem;
using sampler::gradient::Sums;
using sampler::gradient::Tactic;

// The arguments of a call. point: stride of the output's gradient from one point to the next.
struct Call {
  const Problem& problem;
  const Tactic& tactic;
  const Gpu& gpu;
  const Tensor &grad, &input, &grad_input, &grad_grid;
  int64_t point;
  Space s;
  void* workspace;
  cudaStream_t stream;
};

// T: float or Narrow; grid_sample_backward_narrow.cu has the latter.
template <class T>
cudaError_t run_backward(const Call& call);

}  // namespace svexport::backward
