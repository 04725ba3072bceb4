#include "gemm.h"

#include "mma.cuh"
#include "overlap.cuh"

namespace svexport {
namespace {

constexpr int kColumns = 64;   // columns of y in a block
constexpr int kPieces = 8;     // pieces of 16 bytes that a block reads of the inner dimension at a time
constexpr int kThreads = 128;  // 4 warps, 2 x 2

// The input of this block's columns, and their range. Columns before the tail are padded to whole blocks.
struct Columns {
  const void* x;
  int begin, end;
};

__device__ __forceinline__ Columns columns(const Linear& a, int block) {
  if (a.x_tail == nullptr) return {a.x, block * kColumns, min(a.out, (block + 1) * kColumns)};
  const int before = ceil_div(a.tail, kColumns);
  if (block < before) return {a.x, block * kColumns, min(a.tail, (block + 1) * kColumns)};
  const int begin = a.tail + (block - before) * kColumns;
  return {a.x_tail, begin, min(a.out, begin + kColumns)};
}

int blocks_of_columns(const Linear& a) {
  if (a.x_tail == nullptr) return ceil_div(a.out, kColumns);
  return ceil_div(a.tail, kColumns) + ceil_div(a.out - a.tail, kColumns);
}

// What differs by type: kRows of x, then kColumns of the weight in shared memory; where a piece lies, without bank
// conflicts; the products of a warp's kMatrices * 16 rows by 32 columns. 16-bit types: rows of 128 bytes, whose pieces
// are permuted by the row.
template <class T>
struct Tile {
  static constexpr int kRows = 64, kMatrices = 2;

  static __device__ __forceinline__ int at(int row, int piece) { return (row * kPieces + (piece ^ row % 8)) * 8; }

  static __device__ __forceinline__ void multiply(float (&sum)[kMatrices][4][4], const T* tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    const uint32_t base = shared_address(tile);
    UNROLL for (int k = 0; k < kPieces; k += 2) {
      uint32_t rows[2][4], cols[2][4];
      UNROLL for (int m = 0; m < 2; ++m) {
        load_matrix(rows[m], base + at(row + m * 16 + lane % 16, k + lane / 16) * 2);
        load_matrix(cols[m], base + at(kRows + column + m * 16 + lane / 16 * 8 + lane % 8, k + lane / 8 % 2) * 2);
      }
      UNROLL for (int m = 0; m < 2; ++m) {
        UNROLL for (int n = 0; n < 4; ++n) {
          mma<T>(sum[m][n], rows[m], cols[n / 2][n % 2 * 2], cols[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
};

// fp32, as tf32 parts on tensor cores that have tf32: two tiles, with rows of 64 bytes for lanes that read 16 bytes.
template <>
struct Tile<float> {
  static constexpr int kRows = 32, kMatrices = 1;

  static __device__ __forceinline__ int at(int row, int piece) {
    return (piece / 4 * (kRows + kColumns) + row) * 16 + piece % 4 * 4;
  }

  static __device__ __forceinline__ void multiply(float (&sums)[kMatrices][4][4], const float* tile, int row,
                                                  int column) {
    const int lane = threadIdx.x % 32;
    auto& sum = sums[0];
    UNROLL for (int first = 0; first < kPieces; first += 4) {
#if __CUDA_ARCH__ < 800  // no tf32 tensor cores: products of floats, where lanes begin at pieces in different banks
      UNROLL for (int j = 0; j < 4; ++j) {
        const float* piece = tile + at(0, first) + (j + lane) % 4 * 4;
        Vec<float, 4> x[2];
        UNROLL for (int i = 0; i < 2; ++i) x[i] = load<float, 4>(piece + at(row + i * 8 + lane / 4, 0));
        UNROLL for (int e = 0; e < 8; ++e) {  // the columns of a fragment
          const auto w = load<float, 4>(piece + at(kRows + column + e / 2 * 8 + lane % 4 * 2 + e % 2, 0));
          UNROLL for (int i = 0; i < 8; ++i) {
            float& to = sum[e / 2][i / 4 * 2 + e % 2];
            to = fmaf(x[i / 4].at[i % 4], w.at[i % 4], to);
          }
        }
      }
#else
      // 16 of the inner dimension: a lane's four adjacent ones make two products, in the same order on both sides.
      const float* from = tile + at(lane / 4, first) + lane % 4 * 4;
      Parts rows[2][4], cols[4][4];
      UNROLL for (int i = 0; i < 6; ++i) {
        const Vec<float, 4> v = load<float, 4>(from + at(i < 2 ? row + i * 8 : kRows + column + (i - 2) * 8, 0));
        UNROLL for (int j = 0; j < 4; ++j) (i < 2 ? rows[i % 2] : cols[(i + 2) % 4])[j] = parts(v.at[j]);
      }
      float step_sum[4][4] = {};  // tensor cores truncate what they add, so only short sums are theirs
      UNROLL for (int k = 0; k < 4; k += 2) {
        const Parts both[4] = {rows[0][k], rows[1][k], rows[0][k + 1], rows[1][k + 1]};
        UNROLL for (int n = 0; n < 4; ++n) mma_parts(step_sum[n], both, cols[n][k], cols[n][k + 1]);
      }
      UNROLL for (int i = 0; i < 16; ++i) sum[i / 4][i % 4] += step_sum[i / 4][i % 4];
#endif
    }
  }
};

// Three stages of kPieces of rows and columns are in flight. kVector: pieces and pairs of results are aligned.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) linear_kernel(const __grid_constant__ Linear a) {
  using Of = Tile<T>;
  constexpr int kStages = 3, V = 16 / sizeof(T), kInner = kPieces * V, kAll = Of::kRows + kColumns;
  __shared__ __align__(128) T shared[kStages][kAll * kInner];
  const Columns column = columns(a, blockIdx.y);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * Of::kRows;
  const T* x = static_cast<const T*>(column.x);
  const T* weight = static_cast<const T*>(a.weight);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = ceil_div(a.in, kInner);

  auto fetch = [&](int step, int begin, int end) {
    if (step < steps) {
      const int piece = threadIdx.x % kPieces, k = step * kInner + piece * V;
      UNROLL for (int first = begin; first < end; first += kThreads / kPieces) {
        const int r = first + threadIdx.x / kPieces;
        const int64_t place = first < Of::kRows ? row0 + r : column.begin + r - Of::kRows;
        const bool in = place < (first < Of::kRows ? a.rows : column.end);
        const T* from = (first < Of::kRows ? x : weight) + (in ? place : 0) * a.in + k;
        T* to = &shared[step % kStages][Of::at(r, piece)];
        if (kVector) {
          copy_async(to, k < a.in ? from : x, in && k < a.in);
        } else {
          UNROLL for (int j = 0; j < V; ++j) to[j] = in && k + j < a.in ? from[j] : from_float<T>(0.f);
        }
      }
    }
  };

  fetch(0, Of::kRows, kAll);  // weights, which no previous kernel writes
  fetch(1, Of::kRows, kAll);
  wait_for_previous();
  start_next();
  fetch(0, 0, Of::kRows);
  copy_async_commit();
  fetch(1, 0, Of::kRows);
  copy_async_commit();
  float sum[Of::kMatrices][4][4] = {};
  const int warp_row = warp % 2 * Of::kMatrices * 16, warp_column = warp / 2 * 32;
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<1>();
    __syncthreads();
    fetch(step + 2, 0, kAll);
    copy_async_commit();
    Of::multiply(sum, shared[step % kStages], warp_row, warp_column);
  }
  copy_async_wait<0>();

  const T* bias = static_cast<const T*>(a.bias);
  T* y = static_cast<T*>(a.y);
  UNROLL for (int n = 0; n < 4; ++n) {
    const int c = column.begin + warp_column + n * 8 + lane % 4 * 2;
    if (c >= column.end) continue;
    const bool second = c + 1 < column.end;
    const float b0 = bias ? to_float(bias[c]) : 0.f, b1 = bias && second ? to_float(bias[c + 1]) : 0.f;
    UNROLL for (int m = 0; m < 2 * Of::kMatrices; ++m) {
      const int64_t r = row0 + warp_row + m * 8 + lane / 4;
      if (r >= a.rows) continue;
      float v0 = sum[m / 2][n][m % 2 * 2] + b0, v1 = sum[m / 2][n][m % 2 * 2 + 1] + b1;
      if (a.relu) {
        v0 = v0 < 0.f ? 0.f : v0;  // keeps NaN
        v1 = v1 < 0.f ? 0.f : v1;
      }
      T* to = y + r * a.out + c;
      if (kVector && second && a.out % 2 == 0 && c % 2 == 0) {
        store(to, Vec<T, 2>{from_float<T>(v0), from_float<T>(v1)});
      } else {
        to[0] = from_float<T>(v0);
        if (second) to[1] = from_float<T>(v1);
      }
    }
  }
}

}  // namespace

cudaError_t linear(const Linear& a, DType dtype, cudaStream_t stream) {
  if (a.rows == 0 || a.out == 0) return cudaSuccess;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.x_tail) |
                         reinterpret_cast<uintptr_t>(a.weight) | reinterpret_cast<uintptr_t>(a.y);
  return dispatch_float(dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(a.rows, Tile<T>::kRows)), blocks_of_columns(a));
    const bool vector = bits % 16 == 0 && a.in * sizeof(T) % 16 == 0;
    return launch(vector ? linear_kernel<T, true> : linear_kernel<T, false>, grid, kThreads, 0, stream, true, a);
  });
}

}  // namespace svexport
