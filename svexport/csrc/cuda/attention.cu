#include "attention.h"

#include "mma.cuh"
#include "overlap.cuh"

namespace svexport {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// Any device, dtype and head dimension up to D, in fp32: a thread per query and quarter of the keys.
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

  wait_for_previous();
  start_next();
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

// 16-bit types, head dimension D: 16 queries a warp, 64 keys at a time, the next on their way.
template <class T, int D>
__global__ void __launch_bounds__(128) attention_mma_kernel(const T* qkv, T* output, int queries, int heads) {
  constexpr int kKeys = 64, kPitch = D + 8;  // of a row in shared memory, against bank conflicts
  __shared__ __align__(16) T shared[2][2][kKeys * kPitch];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4, head = blockIdx.y % heads;
  const int64_t row = 3ll * heads * D, first = static_cast<int64_t>(blockIdx.y / heads) * queries;
  const T* base = qkv + first * row + head * D;
  const int tiles = ceil_div(queries, kKeys);

  auto fetch = [&](int tile) {
    if (tile < tiles) {
#pragma unroll
      for (int i = 0; i < 2 * kKeys * D / 8 / 128; ++i) {
        const int piece = i * 128 + threadIdx.x, which = piece / (kKeys * D / 8), at = piece % (kKeys * D / 8);
        const int key = at / (D / 8), d = at % (D / 8) * 8, from = tile * kKeys + key;
        const bool in = from < queries;
        copy_async(&shared[tile % 2][which][key * kPitch + d], base + (in ? from : 0) * row + (which + 1) * heads * D + d, in);
      }
    }
    copy_async_commit();
  };

  wait_for_previous();
  start_next();
  fetch(0);
  uint32_t query[D / 16][4];
  const int query0 = blockIdx.x * 64 + threadIdx.x / 32 * 16 + group;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int q = query0 + i % 2 * 8;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const T* from = base + (q < queries ? q : 0) * row + k * 16 + i / 2 * 8 + pair * 2;
      query[k][i] = *reinterpret_cast<const uint32_t*>(from);
    }
  }
  const float scale = rsqrtf(static_cast<float>(D)) * kLog2E;
  float sum[D / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<0>();
    __syncthreads();
    fetch(tile + 1);
    const uint32_t keys = shared_address(shared[tile % 2][0]), values = shared_address(shared[tile % 2][1]);
    float score[kKeys / 8][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        load_matrix(b, keys + ((n * 16 + lane / 16 * 8 + lane % 8) * kPitch + k * 16 + lane / 8 % 2 * 8) * 2);
        mma<T>(score[2 * n], query[k], b[0], b[1]);
        mma<T>(score[2 * n + 1], query[k], b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[n][i] = tile * kKeys + n * 8 + pair * 2 + i % 2 < queries ? score[n][i] * scale : -INFINITY;
      }
    }
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // rows group and group + 8
      const float higher = row_max(score, r, largest[r]), shrink = exp2f(largest[r] - higher);
      largest[r] = higher;
      total[r] *= shrink;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const float p = exp2f(score[n][2 * r] - higher), q = exp2f(score[n][2 * r + 1] - higher);
        total[r] += p + q;
        weights[n / 2][n % 2 * 2 + r] = pack<T>(p, q);
      }
#pragma unroll
      for (int n = 0; n < D / 8; ++n) sum[n][2 * r] *= shrink, sum[n][2 * r + 1] *= shrink;
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        load_matrix_transposed(b, values + ((k * 16 + lane / 8 % 2 * 8 + lane % 8) * kPitch + n * 16 + lane / 16 * 8) * 2);
        mma<T>(sum[2 * n], weights[k], b[0], b[1]);
        mma<T>(sum[2 * n + 1], weights[k], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float all = quad_sum(total[r]);
    const int q = query0 + r * 8;
    if (q >= queries) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      *reinterpret_cast<uint32_t*>(output + ((first + q) * heads + head) * D + n * 8 + pair * 2) =
          pack<T>(sum[n][2 * r] / all, sum[n][2 * r + 1] / all);
    }
  }
}

// What scores are counted from: the largest so far, or 0 while there is none, which all are as far below.
__device__ __forceinline__ float base_of(float largest) { return largest == -INFINITY ? 0.f : largest; }

// fp32, head dimension D, the same by products of tf32 parts. Dimensions of a fragment are permuted so that a lane has four
// adjacent ones, keys so that it has the scores where it needs the weights. Two warps have the same queries and half of
// each tile's keys: of 900 queries with 8 heads there is one block for a multiprocessor, whose schedulers wait with one warp.
template <int D>
__global__ void __launch_bounds__(256) attention_float_kernel(const float* qkv, float* output, int queries, int heads) {
  constexpr int kKeys = D > 32 ? 32 : 64, kHalf = kKeys / 2;
  constexpr int kKeyPitch = D + 16, kValuePitch = D + 4;  // against bank conflicts
  __shared__ __align__(16) float shared[2][kKeys * (kKeyPitch + kValuePitch)];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4, head = blockIdx.y % heads;
  const int half = threadIdx.x / 128;
  const int64_t row = 3ll * heads * D, first = static_cast<int64_t>(blockIdx.y / heads) * queries;
  const float* base = qkv + first * row + head * D;
  const int tiles = ceil_div(queries, kKeys);

  auto fetch = [&](int tile) {
    if (tile < tiles) {
#pragma unroll
      for (int i = 0; i < 2 * kKeys * D / 4 / 256; ++i) {
        const int piece = i * 256 + threadIdx.x, which = piece / (kKeys * D / 4), at = piece % (kKeys * D / 4);
        const int key = at / (D / 4), d = at % (D / 4) * 4, from = tile * kKeys + key;
        const bool in = from < queries;
        float* to = shared[tile % 2] + (which ? kKeys * kKeyPitch + key * kValuePitch : key * kKeyPitch) + d;
        copy_async(to, base + (in ? from : 0) * row + (which + 1) * heads * D + d, in);
      }
    }
    copy_async_commit();
  };

  wait_for_previous();
  start_next();
  fetch(0);
  const float scale = rsqrtf(static_cast<float>(D)) * kLog2E;
  Parts query[D / 8][4];
  const int query0 = blockIdx.x * 64 + threadIdx.x % 128 / 32 * 16 + group;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = query0 + r * 8;
      const Vec<float, 4> v = load<float, 4>(base + (q < queries ? q : 0) * row + k * 16 + pair * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) query[2 * k + j / 2][j % 2 * 2 + r] = parts(v.at[j] * scale);
    }
  }
  float sum[D / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<0>();
    __syncthreads();
    fetch(tile + 1);
    const float *keys = shared[tile % 2] + half * kHalf * kKeyPitch;
    const float* values = shared[tile % 2] + kKeys * kKeyPitch + half * kHalf * kValuePitch;
    float score[kHalf / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kHalf / 8; ++n) {
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        const Vec<float, 4> v = load<float, 4>(keys + (n * 8 + group) * kKeyPitch + k * 16 + pair * 4);
#pragma unroll
        for (int j = 0; j < 2; ++j) mma_parts(score[n], query[2 * k + j], parts(v.at[2 * j]), parts(v.at[2 * j + 1]));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (tile * kKeys + half * kHalf + n * 8 + pair * 2 + i % 2 >= queries) score[n][i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // rows group and group + 8
      const float before = largest[r];
      largest[r] = row_max(score, r, before);
      const float base = base_of(largest[r]), shrink = exp2f(before - base);
      total[r] *= shrink;
#pragma unroll
      for (int n = 0; n < kHalf / 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) total[r] += score[n][i] = exp2f(score[n][i] - base);
      }
#pragma unroll
      for (int n = 0; n < D / 8; ++n) sum[n][2 * r] *= shrink, sum[n][2 * r + 1] *= shrink;
    }
    float tile_sum[D / 8][4] = {};  // tensor cores cut off what they add: long sums are ours
#pragma unroll
    for (int k = 0; k < kHalf / 8; ++k) {
      const Parts weights[4] = {parts(score[k][0]), parts(score[k][2]), parts(score[k][1]), parts(score[k][3])};
      const float* from = values + (k * 8 + pair * 2) * kValuePitch + group;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) mma_parts(tile_sum[n], weights, parts(from[n * 8]), parts(from[kValuePitch + n * 8]));
    }
#pragma unroll
    for (int i = 0; i < D / 2; ++i) sum[i / 4][i % 4] += tile_sum[i / 4][i % 4];
  }

  // The second half of the warps leave theirs to the first, a column of shared memory each.
  __syncthreads();
  float* left = shared[0] + threadIdx.x % 128;
#pragma unroll
  for (int r = 0; r < 2 && half; ++r) {
    left[r * 128] = largest[r], left[(2 + r) * 128] = total[r];
#pragma unroll
    for (int i = 0; i < D / 4; ++i) left[(4 + r * D / 4 + i) * 128] = sum[i / 2][2 * r + i % 2];
  }
  __syncthreads();
  if (half) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float base = base_of(fmaxf(largest[r], left[r * 128]));
    const float mine = exp2f(largest[r] - base), theirs = exp2f(left[r * 128] - base);
    const float all = quad_sum(total[r] * mine + left[(2 + r) * 128] * theirs);
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      float& to = sum[i / 2][2 * r + i % 2];
      to = to * mine + left[(4 + r * D / 4 + i) * 128] * theirs;
    }
    const int q = query0 + r * 8;
    if (q >= queries) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      *reinterpret_cast<float2*>(output + ((first + q) * heads + head) * D + n * 8 + pair * 2) =
          make_float2(sum[n][2 * r] / all, sum[n][2 * r + 1] / all);
    }
  }
}

template <class T>
cudaError_t launch_mma(const T* qkv, T* output, int batch, int queries, int heads, int head_dim, cudaStream_t stream) {
  const dim3 grid(ceil_div(queries, 64), batch * heads);
  if constexpr (sizeof(T) == 2) {
    const auto kernel = head_dim == 32 ? attention_mma_kernel<T, 32> : attention_mma_kernel<T, 64>;
    return launch(kernel, grid, 128, 0, stream, true, qkv, output, queries, heads);
  } else {
    const auto kernel = head_dim == 32 ? attention_float_kernel<32> : attention_float_kernel<64>;
    return launch(kernel, grid, 256, 0, stream, true, qkv, output, queries, heads);
  }
}

}  // namespace

cudaError_t attention(const void* qkv, void* output, int batch, int queries, int heads, int head_dim, DType dtype,
                      cudaStream_t stream) {
  if (head_dim > 64 || static_cast<int64_t>(batch) * heads > 65535) return cudaErrorNotSupported;
  if (batch == 0 || queries == 0) return cudaSuccess;
  const bool mma = has_mma(dtype);
  const uintptr_t bits = reinterpret_cast<uintptr_t>(qkv) | reinterpret_cast<uintptr_t>(output);
  return dispatch_float(dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    if (mma && (head_dim == 32 || head_dim == 64) && bits % 16 == 0) {
      return launch_mma(static_cast<const T*>(qkv), static_cast<T*>(output), batch, queries, heads, head_dim, stream);
    }
    const dim3 grid(ceil_div(queries, 64), batch * heads);
    const auto kernel = head_dim <= 32 ? attention_kernel<T, 32> : attention_kernel<T, 64>;
    return launch(kernel, grid, 256, 0, stream, true, static_cast<const T*>(qkv), static_cast<T*>(output), queries, heads,
                  head_dim);
  });
}

}  // namespace svexport
