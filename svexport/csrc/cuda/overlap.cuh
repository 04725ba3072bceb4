// Programmatic dependent launch: a kernel begins before the previous one has ended, so that its first part overlaps the
// end of that one. It is for the chains of short kernels that some operators consist of.
#pragma once

#include "device.cuh"

namespace svexport {

// Lets the next kernel begin once all blocks have called this. The next kernel waits for the results itself.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernels have ended; does nothing if the launch was an ordinary one.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether a kernel, as compiled for this device, may have blocks of `threads` threads.
template <class Kernel>
bool has_threads(Kernel kernel, int threads) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.maxThreadsPerBlock >= threads;
  cudaGetLastError();  // clears the error, or the next caller would see it
  return false;
}

// Launches a kernel. early: programmatic dependent launch, only for a kernel that calls wait_for_previous().
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int memory, cudaStream_t stream, bool early,
                   Arguments... arguments) {
  // Beyond what every kernel may have without asking, static shared memory included.
  if (memory > 46 * 1024) {
    const auto status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = memory;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early && of_device(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace svexport
