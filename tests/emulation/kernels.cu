// Kernels for the tests of the emulation itself: some are right, some wrong in one way each.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

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
    default: return cudaErrorNotSupported;
  }
  return cudaGetLastError();
}

}  // namespace svexport
