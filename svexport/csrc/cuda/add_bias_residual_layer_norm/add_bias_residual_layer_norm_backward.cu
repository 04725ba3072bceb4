#include "add_bias_residual_layer_norm/backward.cuh"
#include "add_bias_residual_layer_norm/launch.h"
#include "add_bias_residual_layer_norm/tensors.h"
#include "planned.cuh"

namespace svexport {
namespace {

using BackwardKernel = void (*)(Backward);

template <class T, int N, bool kShifted>
BackwardKernel kernel_of(Kernel kernel) {
  return kernel == Kernel::kWarp8 ? backward_rows<T, N, false, kShifted> : backward_rows<T, N, true, kShifted>;
}

// The second stage of the sums over rows.
cudaError_t launch_columns(const Backward& a, int64_t parts, cudaStream_t stream) {
  if (!a.partials || parts == 1) return cudaGetLastError();
  const dim3 threads(kWarp, std::min<int64_t>(ceil_div<int64_t>(parts, 8), kWarp));
  return svexport::launch(backward_columns, ceil_div(3 * a.d, kWarp), threads, 0, stream, true, a,
                          static_cast<int>(parts));
}

template <class T, int N>
cudaError_t launch_long(Backward a, const Problem& problem, const Launch& l, const Gpu& gpu, void* workspace,
                        cudaStream_t stream) {
  a.statistics = static_cast<Statistics*>(workspace);
  a.partials = reinterpret_cast<float*>(workspace ? a.statistics + problem.rows : nullptr);
  const bool kept = a.d <= 16 * kMaxThreads;
  const auto kernel = kept ? backward_long_rows<T, N, 16 / N, true> : backward_long_rows<T, N, 8 / N, false>;
  cudaError_t status = launch_planned<Backward>(kernel, l, false, stream, a);
  if (status != cudaSuccess || !workspace) return status;
  const auto parts = static_cast<unsigned>(parts_of(problem, gpu));
  const dim3 blocks(ceil_div(a.d, kWarp * kColumns), parts);
  status = svexport::launch(backward_long_columns<T, N>, blocks, dim3(kWarp, kWarps), 0, stream, true, a);
  return status != cudaSuccess ? status : launch_columns(a, parts, stream);
}

// workspace: null if no gradient of the vectors is wanted.
template <class T>
cudaError_t launch_backward(Backward a, const Problem& problem, const Tactic& tactic, const Gpu& gpu, void* workspace,
                            cudaStream_t stream) {
  const Launch l = norm::launch(problem, tactic, gpu);
  return with_access<T>(tactic.access, [&](auto width, auto shifted) {
    constexpr int N = width.value;
    constexpr bool kShifted = shifted.value;
    if constexpr (!kShifted) {
      if (tactic.kernel == Kernel::kLong) return launch_long<T, N>(a, problem, l, gpu, workspace, stream);
    }
    a.partials = static_cast<float*>(workspace);
    if (kShifted && !tactic.is_warp()) {
      a.width = static_cast<int>(ceil_div<int64_t>(seen_columns(problem, tactic), N)) * N;
      a.period = N;
    }
    const cudaError_t status = launch_planned(kernel_of<T, N, kShifted>(tactic.kernel), l, false, stream, a);
    return status != cudaSuccess ? status : launch_columns(a, l.blocks(), stream);
  });
}

}  // namespace

size_t add_bias_residual_layer_norm_backward_workspace(const Tensor& x) {
  if (x.numel() == 0) return 0;
  Problem problem;  // aligned to 16 bytes, for which there are all tactics of other alignments too
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
  return dispatch_float(x.dtype, [&](auto* p) {
    return launch_backward<element_t<decltype(p)>>(a, problem, chosen, gpu, problem.sums ? workspace : nullptr, stream);
  });
}

}  // namespace svexport
