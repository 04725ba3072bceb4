// Copies by the engine that multiprocessors have from sm_90 on, and barriers in shared memory that count what has come.
// A copy begins and ends where 16 bytes do.
#pragma once

#include "mma.cuh"

namespace svexport {

// Barriers are given by their address in shared memory. A phase of one ends with `count` arrivals and all bytes expected.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}

// After init_barrier, by the same thread: for copies, and for the other blocks of a cluster.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// An arrival, and so many bytes more to come in this phase.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// For a warp, behind what its lanes have done: an arrival of one lane; of each in a build for racecheck, to which one's
// says nothing of the others.
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

// Until a phase has ended; parity: whether its number is odd.
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

// From global to shared memory; the barrier counts the bytes.
__device__ __forceinline__ void copy_bulk(const void* to, const void* from, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// So that the engine, and wgmma, see what this thread has written to shared memory; for those of others a barrier follows.
__device__ __forceinline__ void publish() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace svexport
