// Kernels for the tests of the emulation itself: some are right, some wrong in one way each.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

#include "bulk.cuh"
#include "tensor.h"

namespace svexport {

namespace {

// One element behind the tensor where n is its size + 1.
__global__ void filling_kernel(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = i;
}

__global__ void misaligned_kernel(float* x) {
  *reinterpret_cast<float2*>(x + 1 - reinterpret_cast<uintptr_t>(x) / 4 % 2) = {1, 2};
}

// Each block's elements the other way round; `barrier`: as it has to be.
template <bool barrier>
__global__ void reversed_kernel(float* x) {
  __shared__ float shared[64];
  shared[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncthreads();
  x[threadIdx.x] = shared[63 - threadIdx.x];
}

template <bool barrier>
__global__ void neighbours_kernel(float* x) {
  __shared__ float shared[32];
  shared[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncwarp();
  x[threadIdx.x] = shared[threadIdx.x ^ 1];
}

__global__ void unwritten_kernel(float* x) {
  __shared__ float shared[64];
  if (threadIdx.x > 0) shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = shared[threadIdx.x];
}

__global__ void deadlock_kernel(float* x) {
  if (threadIdx.x < 32) asm volatile("barrier.sync 1, 64;" ::: "memory");
  x[threadIdx.x] = 1;
}

__global__ void missing_lane_kernel(float* x) {
  if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0xffff, x[threadIdx.x], 16);
}

// The sum of each block's elements to all of them, however many threads.
__global__ void sum_kernel(const float* x, float* y, int n) {
  extern __shared__ float sums[];
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) sum += sums[w];
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = sum;
}

// Of integers: what the lanes of a warp have in common, in different ways, and counts of each value.
__global__ void votes_kernel(const int* x, int* y) {
  __shared__ int counts[4];
  const int v = x[threadIdx.x];
  if (threadIdx.x < 4) counts[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(counts + v, 1);
  __syncthreads();
  int* const row = y + threadIdx.x * 8;
  row[0] = __ballot_sync(~0u, v & 1);
  row[1] = __match_any_sync(~0u, v);
  row[2] = __reduce_min_sync(~0u, v);
  row[3] = __syncthreads_count(v == 2);
  row[4] = __any_sync(~0u, v == 3);
  row[5] = counts[v];
  row[6] = v & 1 ? __popc(__activemask()) : -1;
  row[7] = __clz(v + 1) + 100 * __ffs(v) + 10000 * __brev(v << 28);
}

// Of 16-bit types by way of others.
template <class T>
__global__ void halves_kernel(const T* x, const T* y, T* z, int n) {
  const int i = threadIdx.x;
  if (i >= n) return;
  z[i] = __hfma(x[i], y[i], T(0.5f));
  z[n + i] = T(static_cast<float>(x[i]) / static_cast<float>(y[i]));
  z[2 * n + i] = T(static_cast<float>(__float2int_rn(static_cast<float>(x[i]) * 100)));
}

// A pipeline of two copies; `wait`: for the right one.
template <bool wait>
__global__ void pipeline_kernel(const float4* x, float4* y, int n) {
  __shared__ float4 stages[2][32];
  const auto fetch = [&](int i) {
    if (i < n) __pipeline_memcpy_async(&stages[i % 2][threadIdx.x], x + i * 32 + threadIdx.x, 16);
    __pipeline_commit();
  };
  fetch(0);
  for (int i = 0; i < n; ++i) {
    fetch(i + 1);
    __pipeline_wait_prior(wait ? 1 : 2);
    y[i * 32 + threadIdx.x] = stages[i % 2][threadIdx.x];
  }
}

// Of each warp's 32 elements its neighbour's: warps 0 and 1 have a barrier between them, 2 and 3 another one. With fault
// 1, warp 2 reads of warp 1; with 2, warps 0 and 2 do not wait, they only arrive.
__global__ void pairs_kernel(float* x, int fault) {
  __shared__ float shared[128];
  const int warp = threadIdx.x / 32;
  shared[threadIdx.x] = x[threadIdx.x];
  if (fault == 2 && warp % 2 == 0) {
    asm volatile("barrier.arrive %0, 64;" ::"r"(1 + warp / 2) : "memory");
  } else {
    asm volatile("barrier.sync %0, 64;" ::"r"(1 + warp / 2) : "memory");
  }
  x[threadIdx.x] = shared[(fault == 1 && warp == 2 ? 1 : warp ^ 1) * 32 + threadIdx.x % 32];
}

// z (16, 8) = x (16, 16) y (16, 8) + 1 by ldmatrix.
template <class T>
__global__ void product_kernel(const T* x, const T* y, float* z) {
  __shared__ __align__(16) T a[16][16], b[16][8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) a[i / 16][i % 16] = x[i];
  for (int i = lane; i < 128; i += 32) b[i / 8][i % 8] = y[i];
  __syncwarp();
  uint32_t left[4], right[2], again[2], first;
  load_matrix(left, shared_address(&a[lane % 16][lane / 16 * 8]));
  const uint32_t of_b = shared_address(b[lane % 16]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(right[0]), "=r"(right[1]) : "r"(of_b));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(again[0]), "=r"(again[1])
               : "r"(shared_address(&a[lane % 16][0])));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(first) : "r"(shared_address(a[lane % 8])));
  float c[4] = {1, 1, 1, 1};
  if (again[0] == left[0] && again[1] == left[1] && first == left[0]) mma<T>(c, left, right[0], right[1]);
  for (int i = 0; i < 4; ++i) z[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

// z (16, 8) = x (16, 8) y (8, 8) of floats, by parts.
__global__ void parts_kernel(const float* x, const float* y, float* z) {
  const int group = threadIdx.x / 4, pair = threadIdx.x % 4;
  const Parts a[4] = {parts(x[group * 8 + pair]), parts(x[(group + 8) * 8 + pair]), parts(x[group * 8 + pair + 4]),
                      parts(x[(group + 8) * 8 + pair + 4])};
  float c[4] = {};
  mma_parts(c, a, parts(y[pair * 8 + group]), parts(y[(pair + 4) * 8 + group]));
  for (int i = 0; i < 4; ++i) z[(group + i / 2 * 8) * 8 + pair * 2 + i % 2] = c[i];
}

// What of engine_kernel is left out or done otherwise.
enum Fault {
  kNone, kNoWait, kEarlyArrival, kNoSyncwarp, kNoArrival, kFewBytes, kManyArrivals, kSlipped, kNoFence, kNoReadWait,
  kNoLastWait, kNoInit, kOverwritten, kUnordered
};

// y = 2 x, of n times 32 floats: warp 0 fetches with the copy engine, warp 1 multiplies and puts back with it.
__global__ void engine_kernel(const float* x, float* y, int n, int fault) {
  __shared__ __align__(128) float tiles[2][32], results[32];
  __shared__ __align__(8) uint64_t barriers[4];
  const int lane = threadIdx.x % 32;
  const auto full = [&](int i) { return shared_address(barriers + i % 2); };
  const auto empty = [&](int i) { return shared_address(barriers + 2 + i % 2); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < (fault == kNoInit ? 3 : 4); ++i) init_barrier(shared_address(barriers + i), 1);
    publish_barriers();
  }
  if (fault != kUnordered) __syncthreads();
  if (threadIdx.x < 32) {
    uint32_t elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    if (!elected) return;
    for (int i = 0; i < n; ++i) {
      if (i >= 2) wait_for(empty(i), (i / 2 - 1) & 1);
      expect_bytes(full(i), fault == kFewBytes ? 112 : 128);
      copy_bulk(tiles[i % 2], x + i * 32 + (fault == kSlipped ? 1 : 0), 128, full(i));
      if (fault == kOverwritten) tiles[i % 2][3] = 1;
    }
  } else {
    for (int i = 0; i < n; ++i) {
      if (fault != kNoWait) wait_for(full(i), i / 2 & 1);
      if (fault == kEarlyArrival) arrive_for_warp(empty(i), lane);
      const float of = tiles[i % 2][lane ^ 1];
      if (fault == kNoSyncwarp) {
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty(i)) : "memory");
      } else if (fault != kEarlyArrival && fault != kNoArrival) {
        arrive_for_warp(empty(i), lane);
        if (fault == kManyArrivals) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" ::"r"(empty(i)) : "memory");
      }
      if (fault != kNoReadWait && lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
      results[lane ^ 1] = 2 * of;
      if (fault != kNoFence) publish();
      __syncwarp();
      if (lane == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" ::"l"(y + i * 32),
                     "r"(shared_address(results))
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
    if (fault != kNoLastWait) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}

// y = x of 64 floats, which one warp copies and the other one, told by a barrier in memory, passes on. `late`: when the
// copies are there, as it has to be.
__global__ void late_kernel(const float* x, float* y, bool late) {
  __shared__ float copied[64];
  __shared__ uint64_t barrier;
  const uint32_t at = shared_address(&barrier);
  if (threadIdx.x == 0) init_barrier(at, 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    __pipeline_memcpy_async(copied + threadIdx.x, x + threadIdx.x, 4);
    __pipeline_memcpy_async(copied + 63 - threadIdx.x, x + 63 - threadIdx.x, 4);
    if (late) {
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
    } else {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
  } else {
    wait_for(at, 0);
    for (int i = threadIdx.x % 32; i < 64; i += 32) y[i] = copied[i];
  }
}

// z (64, 8) = x (64, 16) y (16, 8) by wgmma of registers and shared memory; `fence`: as it has to be.
__global__ void wide_product_kernel(const __half* x, const __half* y, float* z, bool fence) {
  extern __shared__ __align__(128) char shared[];  // of the launch: descriptors reach no further
  auto* const columns = reinterpret_cast<__half(*)[8][8]>(shared);  // eight of K, of each column, eight of K
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  columns[threadIdx.x / 64][threadIdx.x / 8 % 8][threadIdx.x % 8] =
      y[(threadIdx.x / 64 * 8 + threadIdx.x % 8) * 8 + threadIdx.x / 8 % 8];
  if (fence) publish();
  __syncthreads();
  uint32_t a[4];
  for (int r = 0; r < 4; ++r) {
    a[r] = *reinterpret_cast<const uint32_t*>(x + (row + r % 2 * 8) * 16 + r / 2 * 8 + lane % 4 * 2);
  }
  const uint64_t matrix = uint64_t{128 / 16} << 32 | uint64_t{128 / 16} << 16 | shared_address(columns) / 16;
  float c[4] = {};
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])::"memory");
#endif
  for (int i = 0; i < 4; ++i) z[(row + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

// Returns from two places; not all lanes of a warp call it.
__device__ __noinline__ float called(const float* x, int i, float otherwise) {
  if (i % 3 == 0) return otherwise;
  return x[i] + 1;
}

__global__ void calls_kernel(const float* x, float* y, int n) {
  const int i = threadIdx.x;
  if (i < n && i % 4 != 1) y[i] = called(x, i, -5) + called(x, n - 1 - i, i);
}

// Sums and products, rounded down and up.
__global__ void directed_kernel(const float* x, const float* y, float* z, int n) {
  const int i = threadIdx.x;
  z[i] = __fadd_rd(x[i], y[i]);
  z[n + i] = __fadd_ru(x[i], y[i]);
  z[2 * n + i] = __fmaf_rd(x[i], y[i], 1e-20f);
  z[3 * n + i] = __fmul_ru(x[i], y[i]);
}

}  // namespace

cudaError_t emulated(int which, const Tensor& x, const Tensor& y, const Tensor& z, int n, cudaStream_t stream) {
  auto* const a = static_cast<float*>(x.data);
  auto* const b = static_cast<float*>(y.data);
  switch (which) {
    case 0: filling_kernel<<<(n + 63) / 64, 64, 0, stream>>>(a, n); break;
    case 1: misaligned_kernel<<<1, 1, 0, stream>>>(a); break;
    case 2: reversed_kernel<true><<<1, 64, 0, stream>>>(a); break;
    case 3: reversed_kernel<false><<<1, 64, 0, stream>>>(a); break;
    case 4: neighbours_kernel<true><<<1, 32, 0, stream>>>(a); break;
    case 5: neighbours_kernel<false><<<1, 32, 0, stream>>>(a); break;
    case 6: unwritten_kernel<<<1, 64, 0, stream>>>(a); break;
    case 7: deadlock_kernel<<<1, 64, 0, stream>>>(a); break;
    case 8: missing_lane_kernel<<<1, 32, 0, stream>>>(a); break;
    case 9: sum_kernel<<<1, 96, 12, stream>>>(a, b, n); break;
    case 10: votes_kernel<<<1, 32, 0, stream>>>(static_cast<int*>(x.data), static_cast<int*>(y.data)); break;
    case 11:
      if (x.dtype == DType::kFloat16) {
        halves_kernel<<<1, 256, 0, stream>>>(static_cast<__half*>(x.data), static_cast<__half*>(y.data),
                                             static_cast<__half*>(z.data), n);
      } else {
        halves_kernel<<<1, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(x.data), static_cast<__nv_bfloat16*>(y.data),
                                             static_cast<__nv_bfloat16*>(z.data), n);
      }
      break;
    case 12: pipeline_kernel<true><<<1, 32, 0, stream>>>(reinterpret_cast<float4*>(a), reinterpret_cast<float4*>(b), n); break;
    case 13: pipeline_kernel<false><<<1, 32, 0, stream>>>(reinterpret_cast<float4*>(a), reinterpret_cast<float4*>(b), n); break;
    case 14: filling_kernel<<<1, 2048, 0, stream>>>(a, n); break;
    case 15: pairs_kernel<<<1, 128, 0, stream>>>(a, n); break;
    case 16:
      if (x.dtype == DType::kFloat16) {
        product_kernel<<<1, 32, 0, stream>>>(static_cast<__half*>(x.data), static_cast<__half*>(y.data),
                                             static_cast<float*>(z.data));
      } else if (x.dtype == DType::kBFloat16) {
        product_kernel<<<1, 32, 0, stream>>>(static_cast<__nv_bfloat16*>(x.data), static_cast<__nv_bfloat16*>(y.data),
                                             static_cast<float*>(z.data));
      } else {
        parts_kernel<<<1, 32, 0, stream>>>(a, b, static_cast<float*>(z.data));
      }
      break;
    case 17: engine_kernel<<<1, 64, 0, stream>>>(a, b, static_cast<int>(x.sizes[0]) / 32, n); break;
    case 18: late_kernel<<<1, 64, 0, stream>>>(a, b, n == 0); break;
    case 19:
      wide_product_kernel<<<1, 128, 256, stream>>>(static_cast<__half*>(x.data), static_cast<__half*>(y.data),
                                                 static_cast<float*>(z.data), n == 0);
      break;
    case 20: calls_kernel<<<1, 64, 0, stream>>>(a, b, n); break;
    case 21: directed_kernel<<<1, n, 0, stream>>>(a, b, static_cast<float*>(z.data), n); break;
    default: return cudaErrorNotSupported;
  }
  return cudaGetLastError();
}

}  // namespace svexport
