#include "add_bias_residual_layer_norm/backward.cuh"
#include "planned.cuh"

namespace svexport::norm {
namespace {

// One block per row: writes the gradients of the row and its statistics. If kKept, the row has at most N * K columns
// per thread and stays in registers; else it is read and summed up three times, N * K columns per thread at a time.
template <class T, int N, int K, bool kKept>
__global__ void __launch_bounds__(kMaxThreads) backward_long_rows(const __grid_constant__ Backward a) {
  const float part = 1.f / a.d;
  __shared__ Sums<2> scratch[kWarp];
  __shared__ Sums<3> scratch_rest[kWarp];
  start_next();
  const int step = kKept ? INT32_MAX / 2 : static_cast<int>(blockDim.x) * N * K;
  for (int64_t row = blockIdx.x; row < a.rows.walk.count; row += gridDim.x) {
    const Row<T> from(a.rows, row);
    const T *dy = static_cast<const T*>(a.dy) + row * a.d, *ds = static_cast<const T*>(a.ds) + row * a.d;
    auto column = [&](int first, int k) {
      return first + (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
    };
    float v[K][N], g[K][N];  // s, and the gradient of y times the weight; 0 outside the row
    const auto read = [&](int first) {
      Loaded<T, N> loaded[K];
      Vec<T, N> loaded_dy[K];
      UNROLL for (int k = 0; k < K; ++k) {
        const bool there = column(first, k) < a.d;
        loaded[k] = {from, column(first, k), there};
        loaded_dy[k] = load_if<T, N>(dy + column(first, k), there);
      }
      UNROLL for (int k = 0; k < K; ++k) {
        const bool there = column(first, k) < a.d;
        float bias[N], weight[N];
        load_floats(a.bias, column(first, k), there, bias);
        load_floats(a.weight, column(first, k), there, weight);
        loaded[k].sum(bias, a.rows.data[2], v[k]);
        UNROLL for (int j = 0; j < N; ++j) g[k][j] = __fmul_rn(to_float(loaded_dy[k].at[j]), weight[j]);
      }
    };
    if (kKept) read(0);
    Sums<2> sum{};
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
      UNROLL for (int k = 0; k < K; ++k) {
        UNROLL for (int j = 0; j < N; ++j) sum += {v[k][j], g[k][j]};
      }
    }
    sum = block_sum(sum, scratch);
    const float mean = sum.at[0] * part, mean_g = sum.at[1] * part;
    Sums<3> rest{};
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(first, k) >= a.d) continue;
        UNROLL for (int j = 0; j < N; ++j) {
          const float difference = v[k][j] - mean;
          rest += {difference, difference * difference, difference * g[k][j]};
        }
      }
    }
    rest = block_sum(rest, scratch_rest);
    const Moments moments({rest.at[0], rest.at[1]}, part, a.eps);
    const float mean_gn = (rest.at[2] * part - moments.shift * mean_g) * moments.scale;
    if (a.statistics && threadIdx.x == 0) {
      a.statistics[row] = {mean, moments.shift, moments.scale, mean_g, mean_gn};
    }
    for (int first = 0; first < a.d; first += step) {
      if (!kKept) read(first);
      Vec<T, N> loaded_ds[K];
      UNROLL for (int k = 0; k < K; ++k) loaded_ds[k] = load_if<T, N>(ds + column(first, k), column(first, k) < a.d);
      UNROLL for (int k = 0; k < K; ++k) {
        if (column(first, k) >= a.d) continue;
        float dx[N];
        UNROLL for (int j = 0; j < N; ++j) {
          dx[j] = (g[k][j] - mean_g - moments.normal(v[k][j] - mean) * mean_gn) * moments.scale +
                  to_float(loaded_ds[k].at[j]);
        }
        UNROLL for (int i = 0; i < 3; ++i) {
          if (a.dx[i]) store_floats<T, N>(static_cast<T*>(a.dx[i]) + row * a.d + column(first, k), dx);
        }
      }
    }
  }
}

// The gradients of the vectors, from long rows and their statistics. Blocks: kWarp * kColumns columns x rows.
template <class T, int N>
__global__ void __launch_bounds__(kWarp * kWarps, 2) backward_long_columns(const __grid_constant__ Backward a) {
  constexpr int K = kColumns / N;
  const int first = blockIdx.x * kWarp * kColumns;
  start_next();
  auto column = [&](int k) { return first + (k * kWarp + static_cast<int>(threadIdx.x)) * N; };
  float bias[K][N], weight[K][N], sums[3][K][N] = {};
  UNROLL for (int k = 0; k < K; ++k) {
    load_floats(a.bias, column(k), column(k) < a.d, bias[k]);
    load_floats(a.weight, column(k), column(k) < a.d, weight[k]);
  }
  wait_for_previous();
  const int64_t step = static_cast<int64_t>(gridDim.y) * kWarps;
  for (int64_t row = blockIdx.y * static_cast<int64_t>(kWarps) + threadIdx.y; row < a.rows.walk.count; row += step) {
    const Statistics of = a.statistics[row];
    const Row<T> from(a.rows, row);
    const T *dy = static_cast<const T*>(a.dy) + row * a.d, *ds = static_cast<const T*>(a.ds) + row * a.d;
    Loaded<T, N> loaded[K];
    Vec<T, N> loaded_dy[K], loaded_ds[K];
    UNROLL for (int k = 0; k < K; ++k) {
      loaded[k] = {from, column(k), column(k) < a.d};
      loaded_dy[k] = load_if<T, N>(dy + column(k), column(k) < a.d);
      loaded_ds[k] = load_if<T, N>(ds + column(k), column(k) < a.d);
    }
    UNROLL for (int k = 0; k < K; ++k) {
      float v[N];
      loaded[k].sum(bias[k], a.rows.data[2], v);
      UNROLL for (int j = 0; j < N; ++j) {
        const float g = to_float(loaded_dy[k].at[j]), normal = (v[j] - of.mean - of.shift) * of.scale;
        sums[0][k][j] += g * normal;
        sums[1][k][j] += g;
        sums[2][k][j] += (__fmul_rn(g, weight[k][j]) - of.mean_g - normal * of.mean_gn) * of.scale +
                         to_float(loaded_ds[k].at[j]);
      }
    }
  }
  write_sums(a, sums, first, 0, blockIdx.y, gridDim.y == 1);
}

}  // namespace

cudaError_t launch_long(const Backward& a, const Problem& problem, const Tactic& tactic, const Gpu& gpu, DType dtype,
                        int64_t parts, cudaStream_t stream) {
  const bool kept = a.d <= 16 * kMaxThreads;
  const dim3 blocks(ceil_div(a.d, kWarp * kColumns), static_cast<unsigned>(parts));
  return dispatch_float(dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return with_constant<16 / sizeof(T), 2, 1>(tactic.width(sizeof(T)), [&](auto width) {
      constexpr int N = width.value;
      const auto rows = kept ? backward_long_rows<T, N, 16 / N, true> : backward_long_rows<T, N, 8 / N, false>;
      const cudaError_t status = launch_planned(rows, launch(problem, tactic, gpu), false, stream, a);
      if (status != cudaSuccess || !a.statistics) return status;
      return svexport::launch(backward_long_columns<T, N>, blocks, dim3(kWarp, kWarps), 0, stream, true, a);
    });
  });
}

}  // namespace svexport::norm
