#include "gemm.h"

#include "mma.cuh"
#include "overlap.cuh"

namespace svexport {
namespace {

constexpr int kTile = 64;  // rows and columns of y per block

// Which input the columns of this block have, and how many of them: those before the tail are padded to whole tiles.
struct Columns {
  const void* x;
  int begin, end;
};

__device__ __forceinline__ Columns columns(const Linear& a, int block) {
  if (a.x_tail == nullptr) return {a.x, block * kTile, min(a.out, (block + 1) * kTile)};
  const int before = ceil_div(a.tail, kTile);
  if (block < before) return {a.x, block * kTile, min(a.tail, (block + 1) * kTile)};
  const int begin = a.tail + (block - before) * kTile;
  return {a.x_tail, begin, min(a.out, begin + kTile)};
}

int blocks_of_columns(const Linear& a) {
  return a.x_tail == nullptr ? ceil_div(a.out, kTile) : ceil_div(a.tail, kTile) + ceil_div(a.out - a.tail, kTile);
}

// 16-bit types. 4 warps of 32 x 32; 64 of the inner dimension at a time, three stages. Rows of 128 bytes in shared
// memory, their 16-byte pieces permuted by the row against bank conflicts.
template <class T, bool kVector>
__global__ void __launch_bounds__(128) linear_mma_kernel(const __grid_constant__ Linear a) {
  constexpr int kStages = 3, kInner = 64;
  __shared__ __align__(128) T shared[kStages][2][kTile * kInner];
  const Columns column = columns(a, blockIdx.y);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kTile;
  const T* x = static_cast<const T*>(column.x);
  const T* weight = static_cast<const T*>(a.weight);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = ceil_div(a.in, kInner);

  auto fetch = [&](int step, bool of_x, bool of_weight) {
    if (step < steps) {
#pragma unroll
      for (int i = 0; i < kTile * kInner / 8 / 128; ++i) {
        const int piece = i * 128 + threadIdx.x, r = piece / 8, k = step * kInner + piece % 8 * 8;
        const int at = r * kInner + ((piece % 8) ^ (r % 8)) * 8;
        const bool row_in = row0 + r < a.rows, column_in = column.begin + r < column.end;
        T* to[2] = {&shared[step % kStages][0][at], &shared[step % kStages][1][at]};
        const T* from[2] = {x + (row_in ? row0 + r : 0) * a.in + k,
                            weight + static_cast<int64_t>(column_in ? column.begin + r : 0) * a.in + k};
        const bool in[2] = {row_in, column_in};
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (!(m ? of_weight : of_x)) continue;
          if (kVector) {
            copy_async(to[m], k < a.in ? from[m] : (m ? weight : x), in[m] && k < a.in);
          } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) to[m][j] = in[m] && k + j < a.in ? from[m][j] : from_float<T>(0.f);
          }
        }
      }
    }
  };
  auto fetch_both = [&](int step) {
    fetch(step, true, true);
    copy_async_commit();
  };

  fetch(0, false, true);  // weights, which no kernel before writes
  fetch(1, false, true);
  wait_for_previous();
  start_next();
  fetch(0, true, false);
  copy_async_commit();
  fetch(1, true, false);
  copy_async_commit();
  float sum[2][4][4] = {};
  const int warp_row = warp % 2 * 32, warp_column = warp / 2 * 32;
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<1>();
    __syncthreads();
    fetch_both(step + 2);
    const uint32_t base_x = shared_address(shared[step % kStages][0]);
    const uint32_t base_w = shared_address(shared[step % kStages][1]);
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      uint32_t rows[2][4], cols[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int r = warp_row + m * 16 + lane % 16, piece = (k * 2 + lane / 16) ^ (r % 8);
        load_matrix(rows[m], base_x + (r * kInner + piece * 8) * 2);
        const int c = warp_column + m * 16 + lane / 16 * 8 + lane % 8, piece_w = (k * 2 + lane / 8 % 2) ^ (c % 8);
        load_matrix(cols[m], base_w + (c * kInner + piece_w * 8) * 2);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) mma<T>(sum[m][n], rows[m], cols[n / 2][n % 2 * 2], cols[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
  copy_async_wait<0>();

  const T* bias = static_cast<const T*>(a.bias);
  T* y = static_cast<T*>(a.y);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int c = column.begin + warp_column + n * 8 + lane % 4 * 2;
    if (c >= column.end) continue;
    const bool second = c + 1 < column.end;
    const float b0 = bias ? to_float(bias[c]) : 0.f, b1 = bias && second ? to_float(bias[c + 1]) : 0.f;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int64_t r = row0 + warp_row + m / 2 * 16 + m % 2 * 8 + lane / 4;
      if (r >= a.rows) continue;
      float v0 = sum[m / 2][n][m % 2 * 2] + b0, v1 = sum[m / 2][n][m % 2 * 2 + 1] + b1;
      if (a.relu) {
        v0 = v0 < 0.f ? 0.f : v0;  // keeps NaN
        v1 = v1 < 0.f ? 0.f : v1;
      }
      T* to = y + r * a.out + c;
      if (kVector && second && a.out % 2 == 0 && c % 2 == 0) {
        *reinterpret_cast<uint32_t*>(to) = pack<T>(v0, v1);
      } else {
        to[0] = from_float<T>(v0);
        if (second) to[1] = from_float<T>(v1);
      }
    }
  }
}

// fp32, in tf32 parts where tensor cores have them. 4 warps of 16 rows x 32 columns; 32 of the inner dimension at a time, three stages, in two tiles whose
// rows of 64 bytes lie without bank conflicts for a lane's 16 bytes.
template <bool kVector>
__global__ void __launch_bounds__(128) linear_parts_kernel(const __grid_constant__ Linear a) {
  constexpr int kStages = 3, kRows = 32, kInner = 16;
  __shared__ __align__(128) float shared[kStages][2][(kRows + kTile) * kInner];
  const Columns column = columns(a, blockIdx.y);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kRows;
  const float* x = static_cast<const float*>(column.x);
  const float* weight = static_cast<const float*>(a.weight);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = ceil_div(a.in, 2 * kInner);

  constexpr int kPieces = kRows * 2 * kInner / 4 / 128;  // of x that a thread fetches a step, before twice as many of the weight
  auto fetch = [&](int step, int first, int last) {
    if (step < steps) {
#pragma unroll
      for (int i = first; i < last; ++i) {
        const int piece = i * 128 + threadIdx.x, r = piece / 8, k = step * 2 * kInner + piece % 8 * 4;
        float* to = &shared[step % kStages][piece % 8 / 4][r * kInner + piece % 4 * 4];
        const bool in = r < kRows ? row0 + r < a.rows : column.begin + r - kRows < column.end;
        const float* from = (r < kRows ? x + (in ? row0 + r : 0) * a.in
                                       : weight + static_cast<int64_t>(in ? column.begin + r - kRows : 0) * a.in) + k;
        if (kVector) {
          copy_async(to, k < a.in ? from : x, in && k < a.in);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) to[j] = in && k + j < a.in ? from[j] : 0.f;
        }
      }
    }
  };

  fetch(0, kPieces, 3 * kPieces);  // weights, which no kernel before writes
  fetch(1, kPieces, 3 * kPieces);
  wait_for_previous();
  start_next();
  fetch(0, 0, kPieces);
  copy_async_commit();
  fetch(1, 0, kPieces);
  copy_async_commit();
  float sum[4][4] = {};
  const int warp_row = warp % 2 * 16, warp_column = warp / 2 * 32;
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<1>();
    __syncthreads();
    fetch(step + 2, 0, 3 * kPieces);
    copy_async_commit();
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#if __CUDA_ARCH__ < 800  // no tensor cores for it: products of floats, in which lanes begin at pieces of other banks
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* piece = &shared[step % kStages][tile][(j + lane) % 4 * 4];
        Vec<float, 4> x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) x[i] = load<float, 4>(piece + (warp_row + i * 8 + lane / 4) * kInner);
#pragma unroll
        for (int e = 0; e < 8; ++e) {  // the columns of a fragment
          const auto w = load<float, 4>(piece + (kRows + warp_column + e / 2 * 8 + lane % 4 * 2 + e % 2) * kInner);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            float& to = sum[e / 2][i / 4 * 2 + e % 2];
            to = fmaf(x[i / 4].at[i % 4], w.at[i % 4], to);
          }
        }
      }
#else
      const float* from = &shared[step % kStages][tile][lane / 4 * kInner + lane % 4 * 4];
      // 16 of the inner dimension, a lane's four adjacent ones in two products: in the same order on both sides.
      Parts rows[2][4], cols[4][4];
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        const int r = i < 2 ? warp_row + i * 8 : kRows + warp_column + (i - 2) * 8;
        const Vec<float, 4> v = load<float, 4>(from + r * kInner);
#pragma unroll
        for (int j = 0; j < 4; ++j) (i < 2 ? rows[i % 2] : cols[(i + 2) % 4])[j] = parts(v.at[j]);
      }
      float step_sum[4][4] = {};  // tensor cores cut off what they add: long sums are ours
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const Parts both[4] = {rows[0][k], rows[1][k], rows[0][k + 1], rows[1][k + 1]};
#pragma unroll
        for (int n = 0; n < 4; ++n) mma_parts(step_sum[n], both, cols[n][k], cols[n][k + 1]);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i / 4][i % 4] += step_sum[i / 4][i % 4];
#endif
    }
  }
  copy_async_wait<0>();

  const float* bias = static_cast<const float*>(a.bias);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = column.begin + warp_column + n * 8 + lane % 4 * 2 + i % 2;
      const int64_t r = row0 + warp_row + i / 2 * 8 + lane / 4;
      if (c >= column.end || r >= a.rows) continue;
      const float v = sum[n][i] + (bias ? bias[c] : 0.f);
      static_cast<float*>(a.y)[r * a.out + c] = a.relu && v < 0.f ? 0.f : v;  // keeps NaN
    }
  }
}

template <class T>
cudaError_t linear_mma(const Linear& a, dim3 grid, cudaStream_t stream) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.x_tail) |
                         reinterpret_cast<uintptr_t>(a.weight) | reinterpret_cast<uintptr_t>(a.y);
  const bool vector = bits % 16 == 0 && a.in % 8 == 0;
  const auto kernel = vector ? linear_mma_kernel<T, true> : linear_mma_kernel<T, false>;
  return launch(kernel, grid, 128, 0, stream, true, a);
}

cudaError_t linear_float(const Linear& a, dim3 grid, cudaStream_t stream) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.x_tail) |
                         reinterpret_cast<uintptr_t>(a.weight);
  const bool vector = bits % 16 == 0 && a.in % 4 == 0;
  const auto kernel = vector ? linear_parts_kernel<true> : linear_parts_kernel<false>;
  grid.x = static_cast<unsigned>(ceil_div<int64_t>(a.rows, 32));
  return launch(kernel, grid, 128, 0, stream, true, a);
}

}  // namespace

cudaError_t linear(const Linear& a, DType dtype, cudaStream_t stream) {
  if (a.rows == 0 || a.out == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(a.rows, kTile)), blocks_of_columns(a));
  switch (dtype) {
    case DType::kFloat32: return linear_float(a, grid, stream);
    case DType::kFloat16: return linear_mma<__half>(a, grid, stream);
    case DType::kBFloat16: return linear_mma<__nv_bfloat16>(a, grid, stream);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace svexport
