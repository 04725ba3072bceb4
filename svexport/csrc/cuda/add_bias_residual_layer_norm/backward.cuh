// What the kernels of rows have in common, backward, and of the sums over rows.
//
// A warp or a block reads a row and its gradients once, keeps them in registers, finds the mean and the deviation again,
// writes the gradients of x, residual and extra and adds up those of the vectors, a part per block; backward_columns adds
// up the parts. Rows that are too long for that go through backward_long_rows, and
// backward_long_columns reads everything again for the sums. What bounds it is memory.
#pragma once

#include "add_bias_residual_layer_norm/rows.cuh"

namespace svexport::norm {

// Of a row: what is left to find a column's gradients.
struct alignas(16) Statistics {
  float mean, shift, scale;  // normal: (s - mean - shift) * scale
  float mean_g, mean_gn;     // of the gradient of y times the weight; of that times normal, times scale
  float unused[3];
};
static_assert(sizeof(Statistics) == kStatistics);

struct Backward {
  Rows rows;
  AnyFloat bias, weight;
  const void *dy, *ds;
  void* dx[3];      // of x, residual, extra; null: not wanted
  AnyFloat vectors[3];  // gradients of weight, norm_bias, bias
  float* partials;      // of them: (blocks, 3, width); null: none wanted
  int width, period;    // in those of block i column c is the (c + i * d % period)th
  Statistics* statistics;  // of long rows: (rows); null: not wanted
  int d;
  float eps;
};

constexpr int kColumns = kBackwardColumns, kWarps = kBackwardWarps;

// The sums of the vectors' gradients over the warps of a block, one after another, of columns from `first` on that lie
// kWarp * N apart in a thread: to the part of a block, or if it is alone to where they go.
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

// Rows that registers do not hold, and their sums where there are a.statistics, in so many parts: compiled apart.
cudaError_t launch_long(const Backward& a, const Problem& problem, const Tactic& tactic, const Gpu& gpu, DType dtype,
                        int64_t parts, cudaStream_t stream);

}  // namespace svexport::norm
