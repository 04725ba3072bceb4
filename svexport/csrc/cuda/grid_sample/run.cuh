// A call of the sampling launchers, and the launch of its tactic.
#pragma once

#include "grid_sample/output.cuh"
#include "planned.cuh"

namespace svexport::forward {

template <class T>
struct Call {
  const sampler::Problem& problem;
  const sampler::Tactic& tactic;
  const Gpu& gpu;
  const Tensor& input;
  const Space& s;
  const Output<T>& output;
  void* workspace;
  cudaStream_t stream;

  const T* data() const { return static_cast<const T*>(input.data); }
  int batch() const { return static_cast<int>(problem.images); }
  int channels() const { return static_cast<int>(problem.channels); }
  int64_t image() const { return input.strides[0]; }
  int64_t channel() const { return input.strides[1]; }

  template <class... Parameters, class... Arguments>
  cudaError_t run(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    return launch_planned(kernel, sampler::launch(problem, tactic, gpu), false, stream, arguments...);
  }
};

// Runs kPlanes or kSampled, which have a translation unit of their own.
template <class T>
cudaError_t run_planes(const Call<T>& call);

}  // namespace svexport::forward
