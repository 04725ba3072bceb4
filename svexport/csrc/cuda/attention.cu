#include "attention.h"

#include "mma.cuh"
#include "overlap.cuh"

namespace svexport {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// Factor on the products of queries and keys, so that exp2 of the result is exp of the scaled product.
template <int D>
__device__ __forceinline__ float scale() {
  return rsqrtf(static_cast<float>(D)) * kLog2E;
}

// Any device, dtype and head dimension up to D, in fp32: one thread per query and quarter of the keys.
template <class T, int D>
__global__ void __launch_bounds__(256) attention_kernel(const T* qkv, T* output, Format<T> format, int queries,
                                                        int heads, int dim) {
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
  UNROLL for (int d = 0; d < D; ++d) q[d] = query < queries && d < dim ? format.number(base[query * row + d]) * scale : 0.f;

  for (int start = 0; start < queries; start += kKeys) {
    __syncthreads();
    for (int i = threadIdx.x; i < kKeys * D; i += 256) {
      const int key = start + i / D, d = i % D;
      const bool in = key < queries && d < dim;
      keys[i] = in ? format.number(base[key * row + heads * dim + d]) : 0.f;
      values[i] = in ? format.number(base[key * row + 2 * heads * dim + d]) : 0.f;
    }
    __syncthreads();
    float score[kChunk], higher = largest;
    UNROLL for (int i = 0; i < kChunk; ++i) {
      const float* key = keys + (split * kChunk + i) * D;
      float s = 0;
      UNROLL for (int d = 0; d < D; d += 4) {
        const Vec<float, 4> k = load<float, 4>(key + d);
        UNROLL for (int j = 0; j < 4; ++j) s = fmaf(q[d + j], k.at[j], s);
      }
      score[i] = start + split * kChunk + i < queries ? s : -INFINITY;
      higher = score[i] > higher ? score[i] : higher;
    }
    if (higher == -INFINITY) {  // no key of this quarter yet, or scores that are not finite: these must reach the sums
      if (start + split * kChunk >= queries) continue;
    }
    const float shrink = exp2f(largest - higher);
    largest = higher;
    total *= shrink;
    UNROLL for (int d = 0; d < D; ++d) sum[d] *= shrink;
    UNROLL for (int i = 0; i < kChunk; ++i) {
      const float* value = values + (split * kChunk + i) * D;
      const float p = exp2f(score[i] - higher);
      total += p;
      UNROLL for (int d = 0; d < D; d += 4) {
        const Vec<float, 4> v = load<float, 4>(value + d);
        UNROLL for (int j = 0; j < 4; ++j) sum[d + j] = fmaf(p, v.at[j], sum[d + j]);
      }
    }
  }

  UNROLL for (int half = kSplits / 2; half > 0; half /= 2) {
    __syncthreads();
    float* other = shared + split % half * (D + 2) * kQueries + lane;
    if (split >= half && split < 2 * half) {
      other[0] = largest;
      other[kQueries] = total;
      UNROLL for (int d = 0; d < D; ++d) other[(d + 2) * kQueries] = sum[d];
    }
    __syncthreads();
    if (split < half && !(other[0] == -INFINITY && other[kQueries] == 0)) {
      const float higher = other[0] > largest ? other[0] : largest;
      const float mine = exp2f(largest - higher), theirs = exp2f(other[0] - higher);
      largest = higher;
      total = total * mine + other[kQueries] * theirs;
      UNROLL for (int d = 0; d < D; ++d) sum[d] = sum[d] * mine + other[(d + 2) * kQueries] * theirs;
    }
  }
  if (split == 0 && query < queries) {
    T* to = output + ((first + query) * heads + head) * dim;
    const float scale_out = 1.f / total;
    UNROLL for (int d = 0; d < D; ++d) {
      if (d < dim) to[d] = format.rounded(sum[d] * scale_out);
    }
  }
}

// Products of a warp's 16 queries of head dimension D with kKeys keys, and of their weights with values, on tensor
// cores. This is for 16-bit types. group and pair: the lane's.
template <class T, int D>
struct Products {
  static constexpr int kKeys = 32, kKeyPitch = D + 8, kValuePitch = D + 8;  // row pitches without bank conflicts
  uint32_t query[D / 16][4];

  // rows: queries group and group + 8.
  __device__ __forceinline__ Products(const T* const (&rows)[2], int, int pair) {
    UNROLL for (int k = 0; k < D / 16; ++k) {
      UNROLL for (int i = 0; i < 4; ++i) {
        query[k][i] = *reinterpret_cast<const uint32_t*>(rows[i % 2] + k * 16 + i / 2 * 8 + pair * 2);
      }
    }
  }

  __device__ __forceinline__ void scores(const T* keys, float (&score)[kKeys / 8][4]) const {
    const int lane = threadIdx.x % 32;
    const uint32_t from = shared_address(keys);
    UNROLL for (int k = 0; k < D / 16; ++k) {
      UNROLL for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        const int key = n * 16 + lane / 16 * 8 + lane % 8;
        load_matrix(b, from + (key * kKeyPitch + k * 16 + lane / 8 % 2 * 8) * 2);
        mma<T>(score[2 * n], query[k], b[0], b[1]);
        mma<T>(score[2 * n + 1], query[k], b[2], b[3]);
      }
    }
    UNROLL for (int i = 0; i < kKeys / 2; ++i) score[i / 4][i % 4] *= scale<D>();
  }

  __device__ __forceinline__ void add(const T* values, const float (&weight)[kKeys / 8][4],
                                      float (&sum)[D / 8][4]) const {
    const int lane = threadIdx.x % 32;
    const uint32_t from = shared_address(values);
    UNROLL for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t weights[4];
      UNROLL for (int i = 0; i < 4; ++i) {
        weights[i] = pack<T>(weight[2 * k + i / 2][i % 2 * 2], weight[2 * k + i / 2][i % 2 * 2 + 1]);
      }
      UNROLL for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        const int key = k * 16 + lane / 8 % 2 * 8 + lane % 8;
        load_matrix_transposed(b, from + (key * kValuePitch + n * 16 + lane / 16 * 8) * 2);
        mma<T>(sum[2 * n], weights, b[0], b[1]);
        mma<T>(sum[2 * n + 1], weights, b[2], b[3]);
      }
    }
  }
};

// For fp32, as tf32 parts. A fragment's dimensions are permuted so that a lane has four adjacent ones, and its keys so
// that a lane has the scores where it needs the weights.
template <int D>
struct Products<float, D> {
  static constexpr int kKeys = D > 32 ? 16 : 32, kKeyPitch = D + 16, kValuePitch = D + 4;
  int group, pair;
  Parts query[D / 8][4];

  __device__ __forceinline__ Products(const float* const (&rows)[2], int group, int pair) : group(group), pair(pair) {
    UNROLL for (int k = 0; k < D / 16; ++k) {
      UNROLL for (int r = 0; r < 2; ++r) {
        const Vec<float, 4> v = load<float, 4>(rows[r] + k * 16 + pair * 4);
        UNROLL for (int j = 0; j < 4; ++j) query[2 * k + j / 2][j % 2 * 2 + r] = parts(v.at[j] * scale<D>());
      }
    }
  }

  __device__ __forceinline__ void scores(const float* keys, float (&score)[kKeys / 8][4]) const {
    UNROLL for (int n = 0; n < kKeys / 8; ++n) {
      UNROLL for (int k = 0; k < D / 16; ++k) {
        const Vec<float, 4> v = load<float, 4>(keys + (n * 8 + group) * kKeyPitch + k * 16 + pair * 4);
        UNROLL for (int j = 0; j < 2; ++j) {
          mma_parts(score[n], query[2 * k + j], parts(v.at[2 * j]), parts(v.at[2 * j + 1]));
        }
      }
    }
  }

  __device__ __forceinline__ void add(const float* values, const float (&weight)[kKeys / 8][4],
                                      float (&sum)[D / 8][4]) const {
    float tile_sum[D / 8][4] = {};  // tensor cores truncate what they add, so only short sums are theirs
    UNROLL for (int k = 0; k < kKeys / 8; ++k) {
      const Parts weights[4] = {parts(weight[k][0]), parts(weight[k][2]), parts(weight[k][1]), parts(weight[k][3])};
      const float* from = values + (k * 8 + pair * 2) * kValuePitch + group;
      UNROLL for (int n = 0; n < D / 8; ++n) {
        mma_parts(tile_sum[n], weights, parts(from[n * 8]), parts(from[kValuePitch + n * 8]));
      }
    }
    UNROLL for (int i = 0; i < D / 2; ++i) sum[i / 4][i % 4] += tile_sum[i / 4][i % 4];
  }
};

// What is subtracted from scores: the largest so far, or 0 while that is -inf.
__device__ __forceinline__ float base_of(float largest) { return largest == -INFINITY ? 0.f : largest; }

// For head dimension D, where tensor cores multiply the type. One tile of keys is used while the next is fetched. Two
// warps have the same queries and half of a tile each: 900 queries with 8 heads make one block a multiprocessor, whose
// schedulers would wait with one warp.
template <class T, int D>
__global__ void __launch_bounds__(256) attention_mma_kernel(const T* qkv, T* output, int queries, int heads) {
  using P = Products<T, D>;
  constexpr int kKeys = 2 * P::kKeys, V = 16 / sizeof(T), kPieces = kKeys * D / V;
  constexpr int kTile = kKeys * (P::kKeyPitch + P::kValuePitch), kShared = 2 * kTile * sizeof(T);
  static_assert(128 * (4 + D / 2) * sizeof(float) <= kShared);  // for what the second half leaves at the end
  __shared__ __align__(16) char bytes[kShared];
  T* const shared = reinterpret_cast<T*>(bytes);
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4, half = threadIdx.x / 128;
  const int head = blockIdx.y % heads;
  const int64_t row = 3ll * heads * D, first = static_cast<int64_t>(blockIdx.y / heads) * queries;
  const T* base = qkv + first * row + head * D;
  const int tiles = ceil_div(queries, kKeys);

  auto fetch = [&](int tile) {
    if (tile < tiles) {
      UNROLL for (int i = threadIdx.x; i < kPieces; i += 256) {
        const int key = i / (D / V), d = i % (D / V) * V, from = tile * kKeys + key;
        const bool in = from < queries;
        T* const to = shared + tile % 2 * kTile + d;
        const T* const of = base + (in ? from : 0) * row + heads * D + d;
        copy_async(to + key * P::kKeyPitch, of, in);
        copy_async(to + kKeys * P::kKeyPitch + key * P::kValuePitch, of + heads * D, in);
      }
    }
    copy_async_commit();
  };

  wait_for_previous();
  start_next();
  fetch(0);
  const int query0 = blockIdx.x * 64 + threadIdx.x % 128 / 32 * 16 + group;
  const P products({base + (query0 < queries ? query0 : 0) * row, base + (query0 + 8 < queries ? query0 + 8 : 0) * row},
                   group, pair);
  float sum[D / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<0>();
    __syncthreads();
    fetch(tile + 1);
    const T* keys = shared + tile % 2 * kTile + half * P::kKeys * P::kKeyPitch;
    const T* values = shared + tile % 2 * kTile + kKeys * P::kKeyPitch + half * P::kKeys * P::kValuePitch;
    float score[P::kKeys / 8][4] = {};  // later the weights
    products.scores(keys, score);
    UNROLL for (int n = 0; n < P::kKeys / 8; ++n) {
      UNROLL for (int i = 0; i < 4; ++i) {
        if (tile * kKeys + half * P::kKeys + n * 8 + pair * 2 + i % 2 >= queries) score[n][i] = -INFINITY;
      }
    }
    UNROLL for (int r = 0; r < 2; ++r) {  // rows group and group + 8
      const float before = largest[r];
      largest[r] = row_max(score, r, before);
      const float from = base_of(largest[r]), shrink = exp2f(before - from);
      total[r] *= shrink;
      UNROLL for (int n = 0; n < P::kKeys / 8; ++n) {
        float &p = score[n][2 * r], &q = score[n][2 * r + 1];
        p = exp2f(p - from), q = exp2f(q - from);
        total[r] += p + q;
      }
      UNROLL for (int n = 0; n < D / 8; ++n) sum[n][2 * r] *= shrink, sum[n][2 * r + 1] *= shrink;
    }
    products.add(values, score, sum);
  }

  // The second half of the warps hands its results to the first, one column of shared memory per thread.
  __syncthreads();
  float* const left = reinterpret_cast<float*>(bytes) + threadIdx.x % 128;
  UNROLL for (int r = 0; r < 2 && half; ++r) {
    left[r * 128] = largest[r], left[(2 + r) * 128] = total[r];
    UNROLL for (int i = 0; i < D / 4; ++i) left[(4 + r * D / 4 + i) * 128] = sum[i / 2][2 * r + i % 2];
  }
  __syncthreads();
  if (half) return;
  UNROLL for (int r = 0; r < 2; ++r) {
    const float from = base_of(fmaxf(largest[r], left[r * 128]));
    const float mine = exp2f(largest[r] - from), theirs = exp2f(left[r * 128] - from);
    const float all = quad_sum(total[r] * mine + left[(2 + r) * 128] * theirs);
    const int q = query0 + r * 8;
    if (q >= queries) continue;
    UNROLL for (int n = 0; n < D / 8; ++n) {
      Vec<T, 2> y;
      UNROLL for (int i = 0; i < 2; ++i) {
        const float other = left[(4 + r * D / 4 + 2 * n + i) * 128];
        y.at[i] = from_float<T>((sum[n][2 * r + i] * mine + other * theirs) / all);
      }
      store(output + ((first + q) * heads + head) * D + n * 8 + pair * 2, y);
    }
  }
}

}  // namespace

cudaError_t attention(const void* qkv, void* output, int batch, int queries, int heads, int head_dim, DType dtype,
                      cudaStream_t stream) {
  if (head_dim > 64 || static_cast<int64_t>(batch) * heads > 65535) return cudaErrorNotSupported;
  if (batch == 0 || queries == 0) return cudaSuccess;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(qkv) | reinterpret_cast<uintptr_t>(output);
  const bool mma = has_mma(dtype) && (head_dim == 32 || head_dim == 64) && bits % 16 == 0;
  const auto run = [&](auto kernel, auto* p, auto... arguments) {
    using T = element_t<decltype(p)>;
    return launch(kernel, dim3(ceil_div(queries, 64), batch * heads), 256, 0, stream, true, static_cast<const T*>(qkv),
                  static_cast<T*>(output), arguments...);
  };
  if (mma) {
    return dispatch_float(dtype, [&](auto* p) {
      using T = element_t<decltype(p)>;
      return run(head_dim == 32 ? attention_mma_kernel<T, 32> : attention_mma_kernel<T, 64>, p, queries, heads);
    });
  }
  return dispatch_narrow(dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return run(head_dim <= 32 ? attention_kernel<T, 32> : attention_kernel<T, 64>, p, Format<T>(dtype), queries, heads,
               head_dim);
  });
}

}  // namespace svexport
