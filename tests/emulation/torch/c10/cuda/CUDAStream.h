// In place of torch's, for bindings on the emulated device: there is one.
#pragma once

#include <cuda_runtime_api.h>

namespace c10::cuda {
struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream() { return {}; }
}  // namespace c10::cuda
