// Helpers around wgmma, the matrix products of groups of four warps, which only sm_90a has.
#pragma once

#include "bulk.cuh"

namespace svexport {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Keeps the compiler from moving reads and writes of these registers across, into the time of products in flight.
__device__ __forceinline__ void hold(float (&x)[4]) {
  asm volatile("" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])::"memory");
}
__device__ __forceinline__ void hold(float (&x)[8]) {
  asm volatile(""
               : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]),
                 "+f"(x[7])::"memory");
}
__device__ __forceinline__ void hold(uint32_t (&x)[4]) {
  asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])::"memory");
}
template <int J>
__device__ __forceinline__ void hold(float (&x)[J][4]) {
  UNROLL for (int j = 0; j < J; ++j) hold(x[j]);
}

// Called before the first product, after the last, and to wait until all have ended.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#endif

}  // namespace svexport
