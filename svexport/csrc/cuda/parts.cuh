// Sums in parts, which blocks have left for a kernel behind them.
#pragma once

#include "overlap.cuh"

namespace svexport {

constexpr int kPartThreads = 256, kPartColumns = 32;  // of a block, which adds up so many elements

// Calls write(i, sum) for each element of the block. parts: (count, size).
template <class F>
__device__ __forceinline__ void add_parts(const float* parts, int count, int64_t size, F&& write) {
  __shared__ float sums[kPartThreads];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPartColumns + threadIdx.x % kPartColumns;
  float sum = 0.0f;
  wait_for_previous();
  if (i < size) {
#pragma unroll 8
    for (int part = threadIdx.x / kPartColumns; part < count; part += kPartThreads / kPartColumns) {
      sum += parts[part * size + i];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kPartColumns || i >= size) return;
#pragma unroll
  for (int j = 1; j < kPartThreads / kPartColumns; ++j) sum += sums[threadIdx.x + j * kPartColumns];
  write(i, sum);
}

}  // namespace svexport
