// From a planner's launch to CUDA's.
#pragma once

#include <cuda_runtime.h>

#include "planner.h"

namespace svexport {

template <class Arguments>
cudaError_t launch_planned(void (*kernel)(Arguments), const Launch& l, cudaStream_t stream, const Arguments& arguments) {
  // More than every kernel may have, what it has of static memory among it.
  if (l.shared_memory > 46 * 1024) {
    const auto status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, l.shared_memory);
    if (status != cudaSuccess) return status;
  }
  const dim3 threads(l.block[0], l.block[1], l.block[2]);
  kernel<<<dim3(static_cast<unsigned>(l.blocks()), l.grid_y, l.grid_z), threads, l.shared_memory, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace svexport
