#include "add_bias_residual_layer_norm/backward.cuh"
#include "add_bias_residual_layer_norm/launch.h"
#include "add_bias_residual_layer_norm/tensors.h"
#include "planned.cuh"

namespace svexport {
namespace {

using namespace norm;

// A warp (blockDim.y of them) or the whole block does one row after another, kColumns a thread. A thread keeps the same
// columns throughout, so that it can sum up the gradients of the vectors.
template <class T, int N, bool kBlock, bool kShifted>
__global__ void __launch_bounds__(kBlock ? kRowThreads : kWarp * kWarps)
    backward_rows(const __grid_constant__ Backward a) {
  constexpr int K = kColumns / N;
  const float part = 1.f / a.d;
  start_next();
  __shared__ Sums<2> scratch[kBlock ? kWarp : 1];
  __shared__ Sums<3> scratch_rest[kBlock ? kWarp : 1];
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.y) + threadIdx.y;
  __shared__ Vec<T, N> ends[5];
  const int shift = kShifted ? shift_of<N>(row, a.d) : 0;
  auto column = [&](int k) { return (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N - shift; };
  uint32_t inside[K];
  float sums[3][K][N] = {}, bias[K][N], weight[K][N];  // sums: for weight, norm_bias and bias
  UNROLL for (int k = 0; k < K; ++k) inside[k] = kShifted ? columns_inside<N>(column(k), a.d) : ~0u;
  // Where registers suffice, the next row is loaded while the current one is summed up.
  constexpr bool kAhead = sizeof(T) == 2 && N * sizeof(T) == 16;
  Loaded<T, N> loaded[K];
  Vec<T, N> loaded_dy[K], loaded_ds[K];
  const auto fetch = [&](int64_t row) {
    const bool real = row < a.rows.walk.count;
    const Row<T> from(a.rows, real ? row : 0);
    const T *dy = static_cast<const T*>(a.dy) + row * a.d, *ds = static_cast<const T*>(a.ds) + row * a.d;
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
    UNROLL for (int k = 0; k < K; ++k) {
      const bool there = real && column(k) < a.d && column(k) + N <= end;
      loaded[k] = {from, column(k), there};
      loaded_dy[k] = load_if<T, N>(dy + column(k), there);
      loaded_ds[k] = load_if<T, N>(ds + column(k), there);
    }
  };
  if (kAhead) fetch(row);
  const Ends<T, N, 5> last({a.rows.data[0], a.rows.data[1], a.rows.data[2], a.dy, a.ds}, a.rows.walk.count * a.d);
  UNROLL for (int k = 0; k < K; ++k) {
    load_columns<N, kShifted>(a.bias, column(k), a.d, bias[k]);
    load_columns<N, kShifted>(a.weight, column(k), a.d, weight[k]);
  }
  if (kShifted) last.share(ends);
  for (; row < a.rows.walk.count; row += step) {
    if (!kAhead) fetch(row);
    const int end = kShifted ? readable<N>(row, a.rows.walk.count, a.d) : INT32_MAX;
    if (kShifted && end != INT32_MAX) {  // in fetch() this would wait for the loads
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(k) < a.d && column(k) + N > end) loaded[k] = ends, loaded_dy[k] = ends[3], loaded_ds[k] = ends[4];
      }
    }
    float v[K][N];  // s, then s - mean
    Vec<T, N> dy[K], ds[K];
    Sums<2> sum{};  // of s; of the gradient of y times the weight
    UNROLL for (int k = 0; k < K; ++k) {
      loaded[k].sum(bias[k], a.rows.data[2], v[k]);
      dy[k] = loaded_dy[k];
      ds[k] = loaded_ds[k];
      UNROLL for (int j = 0; j < N; ++j) {
        if (kShifted && !(inside[k] >> j & 1)) v[k][j] = 0, dy[k].at[j] = from_float<T>(0);
        sum += {v[k][j], __fmul_rn(to_float(dy[k].at[j]), weight[k][j])};
      }
    }
    if (kAhead) fetch(row + step);
    sum = row_sum<kBlock>(sum, scratch);
    const float mean = sum.at[0] * part, mean_g = sum.at[1] * part;
    Sums<3> rest{};  // of v = s - mean; of its square; of v * g * weight
    UNROLL for (int k = 0; k < K; ++k) {
      const float less = column(k) < a.d ? mean : 0;  // v stays 0 outside the row
      UNROLL for (int j = 0; j < N; ++j) {
        v[k][j] = inside[k] >> j & 1 ? v[k][j] - less : 0;
        rest += {v[k][j], v[k][j] * v[k][j], v[k][j] * __fmul_rn(to_float(dy[k].at[j]), weight[k][j])};
      }
    }
    rest = row_sum<kBlock>(rest, scratch_rest);
    const Moments moments({rest.at[0], rest.at[1]}, part, a.eps);
    const float mean_gn = (rest.at[2] * part - moments.shift * mean_g) * moments.scale;  // n: v, normalized
    UNROLL for (int k = 0; k < K; ++k) {
      UNROLL for (int j = 0; j < N; ++j) {
        const float normal = moments.normal(v[k][j]), g = to_float(dy[k].at[j]);
        sums[0][k][j] += g * normal;
        sums[1][k][j] += g;
        // Round the product as in the mean: with a single column, the difference must be 0.
        v[k][j] = (__fmul_rn(g, weight[k][j]) - mean_g - normal * mean_gn) * moments.scale + to_float(ds[k].at[j]);
        sums[2][k][j] += v[k][j];
      }
      UNROLL for (int i = 0; i < 3; ++i) {
        T* const dx = static_cast<T*>(a.dx[i]) + row * a.d;
        if (a.dx[i] && column(k) < a.d) store_columns<T, N, kShifted>(dx, column(k), a.d, v[k]);
      }
    }
  }
  if (!a.partials) return;
  const bool alone = gridDim.x == 1;
  if constexpr (!kBlock) {
    write_sums(a, sums, 0, shift, blockIdx.x, alone);
  } else {
    UNROLL for (int i = 0; i < 3; ++i) {
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(k) >= a.d) continue;
        if (alone) {
          UNROLL for (int j = 0; j < N; ++j) {
            if (a.vectors[i].data && inside[k] >> j & 1) a.vectors[i].set(column(k) + j, sums[i][k][j]);
          }
        } else {
          constexpr int W = N < 4 ? N : 4;
          float* const to = a.partials + (blockIdx.x * 3ll + i) * a.width + column(k) + shift;
          UNROLL for (int j = 0; j < N; j += W) store_floats<float, W>(to + j, sums[i][k] + j);
        }
      }
    }
  }
}

// Adds up `count` partials.
__global__ void __launch_bounds__(1024) backward_columns(const __grid_constant__ Backward a, int count) {
  __shared__ float shared[kWarp][kWarp];
  const int column = blockIdx.x * kWarp + threadIdx.x;
  wait_for_previous();
  float sum = 0;
  if (column < 3 * a.d) {
#pragma unroll 8
    for (int i = threadIdx.y; i < count; i += blockDim.y) {
      const int shift = static_cast<uint32_t>(i) * a.d & (a.period - 1);
      sum += a.partials[(i * 3ll + column / a.d) * a.width + column % a.d + shift];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= 3 * a.d) return;
  for (int i = 1; i < blockDim.y; ++i) sum += shared[i][threadIdx.x];
  const AnyFloat& to = a.vectors[column / a.d];
  if (to.data) to.set(column % a.d, sum);
}

// workspace: null if no gradient of the vectors is wanted.
cudaError_t launch_backward(Backward a, const Problem& problem, const Tactic& tactic, const Gpu& gpu, DType dtype,
                            void* workspace, cudaStream_t stream) {
  int64_t parts = 0;
  cudaError_t status = cudaSuccess;
  if (tactic.kernel == Kernel::kLong) {
    parts = parts_of(problem, gpu);
    a.statistics = static_cast<Statistics*>(workspace);
    a.partials = reinterpret_cast<float*>(workspace ? a.statistics + problem.rows : nullptr);
    status = launch_long(a, problem, tactic, gpu, dtype, parts, stream);
  } else {
    const Launch l = norm::launch(problem, tactic, gpu);
    parts = l.blocks();
    a.partials = static_cast<float*>(workspace);
    if (tactic.access == Access::kShifted && !tactic.is_warp()) {
      a.period = tactic.width(problem.item_size);
      a.width = static_cast<int>(ceil_div<int64_t>(seen_columns(problem, tactic), a.period)) * a.period;
    }
    status = dispatch_float(dtype, [&](auto* p) {
      using T = element_t<decltype(p)>;
      const auto kernel = with_access<T>(tactic.access, [&](auto width, auto shifted) {
        return tactic.is_warp() ? backward_rows<T, width.value, false, shifted.value>
                                : backward_rows<T, width.value, true, shifted.value>;
      });
      return launch_planned(kernel, l, false, stream, a);
    });
  }
  if (status != cudaSuccess || !a.partials || parts == 1) return status;
  // The second stage of the sums over rows.
  const dim3 threads(kWarp, std::min<int64_t>(ceil_div<int64_t>(parts, 8), kWarp));
  return svexport::launch(backward_columns, ceil_div(3 * a.d, kWarp), threads, 0, stream, true, a,
                          static_cast<int>(parts));
}

}  // namespace

size_t add_bias_residual_layer_norm_backward_workspace(const Tensor& x) {
  if (x.numel() == 0) return 0;
  Problem problem;  // aligned to 16 bytes, which makes every tactic of a lower alignment valid too
  problem.backward = true;
  problem.columns = x.sizes[x.rank - 1];
  problem.rows = x.numel() / problem.columns;
  problem.item_size = static_cast<int32_t>(x.item_size());
  return static_cast<size_t>(norm::workspace(problem, current_gpu()));
}

cudaError_t add_bias_residual_layer_norm_backward(const Tensor& dy, const Tensor& ds, const Tensor& x,
                                                  const Tensor& bias, const Tensor& residual, const Tensor& weight,
                                                  float eps, const Tensor& extra, const Tensor& dx, const Tensor& dbias,
                                                  const Tensor& dresidual, const Tensor& dweight,
                                                  const Tensor& dnorm_bias, const Tensor& dextra, void* workspace,
                                                  int32_t tactic, cudaStream_t stream) {
  if (!walks(x, x) || !walks(residual, x) || !walks(extra, x) || !walks(dy, x) || !walks(ds, x) || !is_float(bias) ||
      !is_float(weight) || x.numel() == 0) {
    return cudaErrorNotSupported;
  }
  const Axes<3> axes = axes_of(x, residual, extra);
  Problem problem = problem_of(x, residual, extra, axes, {dy.data, ds.data, dx.data, dresidual.data, dextra.data},
                               {bias.data, weight.data});
  problem.backward = true;
  problem.gradients = (dx.data != nullptr) + (dresidual.data != nullptr) + (dextra.data != nullptr);
  problem.sums = dbias.data || dweight.data || dnorm_bias.data;
  const auto d = static_cast<int>(problem.columns);
  const Backward a{Rows(axes, x.data, residual.data, extra.data), AnyFloat(bias), AnyFloat(weight), dy.data, ds.data,
                   {dx.data, dresidual.data, dextra.data}, {AnyFloat(dweight), AnyFloat(dnorm_bias), AnyFloat(dbias)},
                   nullptr, d, 1, nullptr, d, eps};
  const Gpu gpu = current_gpu();
  const Tactic chosen = choose(problem, gpu, tactic);
  return launch_backward(a, problem, chosen, gpu, x.dtype, problem.sums ? workspace : nullptr, stream);
}

}  // namespace svexport
