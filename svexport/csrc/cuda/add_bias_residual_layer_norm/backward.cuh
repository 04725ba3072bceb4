// What the backward kernels share: those of rows and those of sums over rows.
//
// A warp or a block reads a row and its gradients once, keeps them in registers, computes mean and deviation again,
// writes the gradients of x, residual and extra, and adds up those of the vectors, one part per block. backward_columns
// adds up the parts. Rows too long for registers go through backward_long_rows, and backward_long_columns reads
// everything again for the sums. Memory bounds all of these.
#pragma once

#include "add_bias_residual_layer_norm/rows.cuh"

namespace svexport::norm {

// Statistics of a row from which the gradients of its columns follow.
struct alignas(16) Statistics {
  float mean, shift, scale;  // normal: (s - mean - shift) * scale
  float mean_g, mean_gn;     // means of g = weight * (gradient of y), and of g * normal
  float unused[3];
};
static_assert(sizeof(Statistics) == kStatistics);

struct Backward {
  Rows rows;
  AnyFloat bias, weight;
  const void *dy, *ds;
  void* dx[3];      // gradients of x, residual, extra; null: not wanted
  AnyFloat vectors[3];  // gradients of weight, norm_bias, bias
  float* partials;      // parts of their sums: (blocks, 3, width); null: none wanted
  int width, period;    // in the part of block i, column c is at c + i * d % period
  Statistics* statistics;  // of long rows: (rows); null: not wanted
  int d;
  float eps;
};

constexpr int kColumns = kBackwardColumns, kWarps = kBackwardWarps;

// Sums the vectors' gradients over the warps of a block, one vector after another, for columns from `first` on, which
// lie kWarp * N apart in a thread. Writes them to the part of the block or, if it is alone, to the gradients.
template <int K, int N>
__device__ __forceinline__ void write_sums(const Backward& a, const float (&sums)[3][K][N], int first, int shift,
                                           int64_t part, bool alone) {
  __shared__ float shared[kWarps][kWarp * kColumns];
  UNROLL for (int i = 0; i < 3; ++i) {
    __syncthreads();
    UNROLL for (int k = 0; k < K; ++k) {
      UNROLL for (int j = 0; j < N; ++j) {
        const int c = (k * kWarp + threadIdx.x) * N + j - shift;
        if (c >= 0) shared[threadIdx.y][c] = sums[i][k][j];
      }
    }
    __syncthreads();
    const int count = min(a.d - first, kWarp * kColumns);
    for (int c = threadIdx.y * kWarp + threadIdx.x; c < count; c += kWarp * kWarps) {
      float sum = 0;
      UNROLL for (int w = 0; w < kWarps; ++w) sum += shared[w][c];
      if (!alone) {
        a.partials[(part * 3 + i) * a.width + first + c] = sum;
      } else if (a.vectors[i].data) {
        a.vectors[i].set(first + c, sum);
      }
    }
  }
}

// Launches the kernels of long rows and, given a.statistics, of their sums in `parts` parts; compiled on its own.
cudaError_t launch_long(const Backward& a, const Problem& problem, const Tactic& tactic, const Gpu& gpu, DType dtype,
                        int64_t parts, cudaStream_t stream);

}  // namespace svexport::norm
