// Bulk asynchronous copies (from sm_90 on), and barriers in shared memory that count the bytes that have arrived.
// Address and size of a copy are multiples of 16 bytes.
#pragma once

#include "mma.cuh"

namespace svexport {

// A barrier is given by its address in shared memory. A phase ends after `count` arrivals and all expected bytes.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}

// Makes barriers visible to copies and to the other blocks of a cluster; for the thread that called init_barrier.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives, and expects `bytes` more bytes in this phase.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Arrives for a warp, after what its lanes have done. One lane arrives; in a build for racecheck every lane does,
// because racecheck does not see that one lane's arrival covers the others.
#ifdef SVEXPORT_EVERY_LANE_ARRIVES
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

__device__ __forceinline__ void arrive_for_warp(uint32_t barrier, int lane) {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  if (lane < kArrivals) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Waits until a phase has ended; parity: whether its number is odd.
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}

// Starts a copy from global to shared memory; the barrier counts its bytes.
__device__ __forceinline__ void copy_bulk(const void* to, const void* from, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// Makes this thread's writes to shared memory visible to copies and wgmma; a barrier must follow if others start them.
__device__ __forceinline__ void publish() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace svexport
