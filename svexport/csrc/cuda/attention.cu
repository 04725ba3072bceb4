#include "attention.h"

#include "mma.cuh"

namespace svexport {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// Any dtype and head dimension up to D: a thread per query and quarter of the keys.
template <class T, int D>
__global__ void __launch_bounds__(256) attention_kernel(const T* qkv, T* output, int queries, int heads, int dim) {
  constexpr int kQueries = 64, kSplits = 4, kKeys = 64, kChunk = kKeys / kSplits;
  constexpr int kMerge = 2 * (D + 2) * kQueries, kKeysValues = 2 * kKeys * D;
  __shared__ __align__(16) float shared[kMerge > kKeysValues ? kMerge : kKeysValues];
  float* keys = shared;
  float* values = shared + kKeys * D;

  const int lane = threadIdx.x % kQueries, split = threadIdx.x / kQueries;
  const int query = blockIdx.x * kQueries + lane, head = blockIdx.y % heads;
  const int64_t row = 3ll * heads * dim, first = static_cast<int64_t>(blockIdx.y / heads) * queries;
  const T* base = qkv + first * row + head * dim;
  const float scale = rsqrtf(static_cast<float>(dim)) * kLog2E;

  float q[D], sum[D] = {}, largest = -INFINITY, total = 0;
#pragma unroll
  for (int d = 0; d < D; ++d) q[d] = query < queries && d < dim ? to_float(base[query * row + d]) * scale : 0.f;

  for (int start = 0; start < queries; start += kKeys) {
    __syncthreads();
    for (int i = threadIdx.x; i < kKeys * D; i += 256) {
      const int key = start + i / D, d = i % D;
      const bool in = key < queries && d < dim;
      keys[i] = in ? to_float(base[key * row + heads * dim + d]) : 0.f;
      values[i] = in ? to_float(base[key * row + 2 * heads * dim + d]) : 0.f;
    }
    __syncthreads();
    float score[kChunk], higher = largest;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float* key = keys + (split * kChunk + i) * D;
      float s = 0;
#pragma unroll
      for (int d = 0; d < D; d += 4) {
        const Vec<float, 4> k = load<float, 4>(key + d);
#pragma unroll
        for (int j = 0; j < 4; ++j) s = fmaf(q[d + j], k.at[j], s);
      }
      score[i] = start + split * kChunk + i < queries ? s : -INFINITY;
      higher = score[i] > higher ? score[i] : higher;
    }
    if (higher == -INFINITY) {  // none of this quarter's keys so far; or scores that are not finite, which reach the sums
      if (start + split * kChunk >= queries) continue;
    }
    const float shrink = exp2f(largest - higher);
    largest = higher;
    total *= shrink;
#pragma unroll
    for (int d = 0; d < D; ++d) sum[d] *= shrink;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float* value = values + (split * kChunk + i) * D;
      const float p = exp2f(score[i] - higher);
      total += p;
#pragma unroll
      for (int d = 0; d < D; d += 4) {
        const Vec<float, 4> v = load<float, 4>(value + d);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[d + j] = fmaf(p, v.at[j], sum[d + j]);
      }
    }
  }

#pragma unroll
  for (int half = kSplits / 2; half > 0; half /= 2) {
    __syncthreads();
    float* other = shared + split % half * (D + 2) * kQueries + lane;
    if (split >= half && split < 2 * half) {
      other[0] = largest;
      other[kQueries] = total;
#pragma unroll
      for (int d = 0; d < D; ++d) other[(d + 2) * kQueries] = sum[d];
    }
    __syncthreads();
    if (split < half && !(other[0] == -INFINITY && other[kQueries] == 0)) {
      const float higher = other[0] > largest ? other[0] : largest;
      const float mine = exp2f(largest - higher), theirs = exp2f(other[0] - higher);
      largest = higher;
      total = total * mine + other[kQueries] * theirs;
#pragma unroll
      for (int d = 0; d < D; ++d) sum[d] = sum[d] * mine + other[(d + 2) * kQueries] * theirs;
    }
  }
  if (split == 0 && query < queries) {
    T* to = output + ((first + query) * heads + head) * dim;
    const float scale_out = 1.f / total;
#pragma unroll
    for (int d = 0; d < D; ++d) {
      if (d < dim) to[d] = from_float<T>(sum[d] * scale_out);
    }
  }
}

}  // namespace

cudaError_t attention(const void* qkv, void* output, int batch, int queries, int heads, int head_dim, DType dtype,
                      cudaStream_t stream) {
  if (head_dim > 64 || static_cast<int64_t>(batch) * heads > 65535) return cudaErrorNotSupported;
  if (batch == 0 || queries == 0) return cudaSuccess;
  return dispatch_float(dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const dim3 grid(ceil_div(queries, 64), batch * heads);
    const auto kernel = head_dim <= 32 ? attention_kernel<T, 32> : attention_kernel<T, 64>;
    kernel<<<grid, 256, 0, stream>>>(static_cast<const T*>(qkv), static_cast<T*>(output), queries, heads, head_dim);
    return cudaGetLastError();
  });
}

}  // namespace svexport
