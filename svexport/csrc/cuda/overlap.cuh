// Kernels that begin before the one before has ended: what they do first overlaps with its end. For the chains of short
// kernels of which some operators consist.
#pragma once

#include "device.cuh"

namespace svexport {

// Lets the next kernel begin, when all blocks are here; it waits for the results itself.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernels before have ended; nothing where the launch was an ordinary one.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether blocks of a kernel, as it was compiled for this device, may have so many threads.
template <class Kernel>
bool has_threads(Kernel kernel, int threads) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.maxThreadsPerBlock >= threads;
  cudaGetLastError();  // or the next to ask is told of it
  return false;
}

// A launch; `early` only of a kernel that calls wait_for_previous().
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int memory, cudaStream_t stream, bool early,
                   Arguments... arguments) {
  // More than every kernel may have, what it has of static memory among it.
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
