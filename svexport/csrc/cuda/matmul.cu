#include "matmul.h"

#include "mma.cuh"

namespace svexport {
namespace {

constexpr int kTile = 128;  // rows and columns of c per block
constexpr int kInner = 16;  // of the inner dimension at a time
constexpr int kStages = 4;  // of which so many are under way
constexpr int kThreads = 256;

// One factor, a or the transpose of b: rows x inner.
struct Factor {
  const float* data;
  int64_t batch, step;  // strides; step is that of the axis whose elements are not neighbours
  int rows;
};

struct Matmul {
  Factor left, right;
  AnyFloat bias;
  int64_t bias_stride;
  float* c;
  int inner, part;  // a block of the grid does `part` of the inner dimension
};

// A tile of a factor in shared memory, with neighbours as in the factor: pitches that leave no two of the words that a
// warp reads for a fragment, 8 rows x 4 of the inner dimension, in one bank.
template <bool kAlongInner>
struct Tile {
  static constexpr int kPitch = kAlongInner ? kInner + 4 : kTile + 8;
  static constexpr int kSize = (kAlongInner ? kTile : kInner) * kPitch;

  static __device__ __forceinline__ void fetch(float* tile, const Factor& f, const float* data, int row0, int k0, int end) {
#pragma unroll
    for (int i = 0; i < kTile * kInner / 4 / kThreads; ++i) {
      const int piece = i * kThreads + threadIdx.x;
      constexpr int kPieces = (kAlongInner ? kInner : kTile) / 4;  // of 16 bytes, along neighbours
      const int far = piece / kPieces, near = piece % kPieces * 4;
      const int row = row0 + (kAlongInner ? far : near), k = k0 + (kAlongInner ? near : far);
      const bool there = row < f.rows && k < end;
      const int64_t at = kAlongInner ? row * f.step + k : k * f.step + row;
      copy_async(tile + far * kPitch + near, data + (there ? at : 0), there);
    }
  }
  static __device__ __forceinline__ uint32_t word(const float* tile, int row, int k) {
    return __float_as_uint(tile[kAlongInner ? row * kPitch + k : k * kPitch + row]);
  }
};

// 8 warps, 2 x 4 of 64 x 32.
template <bool kLeftAlongInner, bool kRightAlongInner>
__global__ void __launch_bounds__(kThreads) matmul_kernel(const __grid_constant__ Matmul a) {
#if __CUDA_ARCH__ >= 800
  using Left = Tile<kLeftAlongInner>;
  using Right = Tile<kRightAlongInner>;
  extern __shared__ __align__(16) float shared[];
  const int row0 = blockIdx.x * kTile, column0 = blockIdx.y * kTile;
  const int begin = a.part ? blockIdx.z * a.part : 0, end = a.part ? min(a.inner, begin + a.part) : a.inner;
  const float* left = a.left.data + (a.part ? 0 : blockIdx.z * a.left.batch);
  const float* right = a.right.data + (a.part ? 0 : blockIdx.z * a.right.batch);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
  const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;

  const auto stage = [&](int step) { return shared + step % kStages * (Left::kSize + Right::kSize); };
  const auto fetch = [&](int step) {
    const int k = begin + step * kInner;
    if (k < end) {
      Left::fetch(stage(step), a.left, left, row0, k, end);
      Right::fetch(stage(step) + Left::kSize, a.right, right, column0, k, end);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) fetch(step);
  float sums[4][4][4] = {};
  for (int step = 0; begin + step * kInner < end; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);
    const float *l = stage(step), *r = l + Left::kSize;
    float part[4][4][4] = {};  // tensor cores cut off what does not fit into a long sum, the additions below round
#pragma unroll
    for (int k = 0; k < kInner; k += 8) {
      uint32_t high[4][2], low[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) split_tf32(Right::word(r, warp_column + j * 8 + group, k + h * 4 + pair), high[j][h], low[j][h]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t left_high[4], left_low[4];
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          split_tf32(Left::word(l, warp_row + i * 16 + h % 2 * 8 + group, k + h / 2 * 4 + pair), left_high[h], left_low[h]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_tf32(part[i][j], left_low, high[j]);
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_tf32(part[i][j], left_high, low[j]);
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_tf32(part[i][j], left_high, high[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] += part[i][j][e];
      }
    }
  }

  const int rows = a.left.rows, columns = a.right.rows;
  float* const c = a.c + static_cast<int64_t>(blockIdx.z) * rows * columns;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = row0 + warp_row + i * 8 + group;
    if (row >= rows) continue;
    const float bias = a.bias.data ? a.bias.get(row * a.bias_stride) : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = column0 + warp_column + j * 8 + pair * 2;
      float* const to = c + static_cast<int64_t>(row) * columns + column;
      const float x = sums[i / 2][j][i % 2 * 2] + bias, y = sums[i / 2][j][i % 2 * 2 + 1] + bias;
      if (columns % 2 == 0) {
        if (column < columns) store(to, Vec<float, 2>{{x, y}});
      } else {
        if (column < columns) to[0] = x;
        if (column + 1 < columns) to[1] = y;
      }
    }
  }
#endif
}

template <bool kLeftAlongInner, bool kRightAlongInner>
cudaError_t launch(const Matmul& a, int batch, cudaStream_t stream) {
  constexpr int kBytes = kStages * (Tile<kLeftAlongInner>::kSize + Tile<kRightAlongInner>::kSize) * sizeof(float);
  const auto kernel = matmul_kernel<kLeftAlongInner, kRightAlongInner>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  const dim3 blocks(ceil_div(a.left.rows, kTile), ceil_div(a.right.rows, kTile), batch);
  if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
  kernel<<<blocks, kThreads, kBytes, stream>>>(a);
  return cudaGetLastError();
}

// t: (B, M, K) or (M, K), its rows along `rows`, the other of the two last axes is the inner one. Sets whether neighbours
// are along the latter.
bool factor(const Tensor& t, int rows, Factor* f, bool* along_inner) {
  const int axis[2] = {rows, 2 * t.rank - 3 - rows};
  *along_inner = t.strides[axis[1]] == 1;
  const int near = axis[*along_inner], far = axis[!*along_inner];
  const int64_t batch = t.rank == 3 ? t.strides[0] : 0;
  *f = {static_cast<const float*>(t.data), batch, t.strides[far], static_cast<int>(t.sizes[rows])};
  return t.dtype == DType::kFloat32 && t.strides[near] == 1 && t.sizes[near] % 4 == 0 && t.strides[far] % 4 == 0 &&
         batch % 4 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.sizes[near] <= INT32_MAX &&
         t.sizes[far] <= INT32_MAX;
}

}  // namespace

cudaError_t matmul(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& c, int parts, cudaStream_t stream) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  Matmul m{{}, {}, AnyFloat(bias), bias.strides[0], static_cast<float*>(c.data), static_cast<int>(a.sizes[a.rank - 1]), 0};
  bool left_along_inner = false, right_along_inner = false;
  if (major < 8 || !factor(a, a.rank - 2, &m.left, &left_along_inner) ||
      !factor(b, b.rank - 1, &m.right, &right_along_inner)) {
    return cudaErrorNotSupported;
  }
  if (c.numel() == 0) return cudaSuccess;
  if (parts > 1) m.part = ceil_div(ceil_div(m.inner, parts), kInner) * kInner;
  const int batch = static_cast<int>(c.sizes[0]);
  return left_along_inner
             ? right_along_inner ? launch<true, true>(m, batch, stream) : launch<true, false>(m, batch, stream)
             : right_along_inner ? launch<false, true>(m, batch, stream) : launch<false, false>(m, batch, stream);
}

}  // namespace svexport
