#include "add_bias_residual_layer_norm/forward.cuh"
#include "add_bias_residual_layer_norm/launch.h"
#include "add_bias_residual_layer_norm/tensors.h"
#include "planned.cuh"

namespace svexport {
namespace {

template <class T, int N, bool kShifted>
void (*kernel_of(Kernel kernel))(Forward) {
  switch (kernel) {
    case Kernel::kWarp8: return forward_rows<T, N, 8 / N, false, kShifted>;
    case Kernel::kBlock8: return forward_rows<T, N, 8 / N, true, kShifted>;
    case Kernel::kLong: return forward_long_rows<T, N, kShifted>;
    default: break;
  }
  if constexpr (N * sizeof(T) == 16) {
    if (kernel == Kernel::kBlock32) return forward_rows<T, N, 32 / N, true, kShifted>;
  }
  return nullptr;
}

}  // namespace

cudaError_t add_bias_residual_layer_norm(const Tensor& x, const Tensor& bias, const Tensor& residual,
                                         const Tensor& weight, const Tensor& norm_bias, float eps, const Tensor& extra,
                                         const Tensor& y, const Tensor& s, int32_t tactic, cudaStream_t stream) {
  if (!walks(x, x) || !walks(residual, x) || !walks(extra, x) || !is_float(bias) || !is_float(weight) ||
      !is_float(norm_bias)) {
    return cudaErrorNotSupported;
  }
  if (x.numel() == 0) return cudaSuccess;
  const Axes<3> axes = axes_of(x, residual, extra);
  const Problem problem =
      problem_of(x, residual, extra, axes, {y.data, s.data}, {bias.data, weight.data, norm_bias.data});
  const Gpu gpu = current_gpu();
  const Tactic chosen = choose(problem, gpu, tactic);
  const Rows rows(axes, x.data, residual.data, extra.data);
  const Forward forward{rows, AnyFloat(bias), AnyFloat(weight), AnyFloat(norm_bias), y.data, s.data,
                        static_cast<int>(problem.columns), eps};
  return dispatch_float(x.dtype, [&](auto* p) {
    return with_access<element_t<decltype(p)>>(chosen.access, [&](auto width, auto shifted) {
      const auto kernel = kernel_of<element_t<decltype(p)>, width.value, shifted.value>(chosen.kernel);
      return launch_planned(kernel, norm::launch(problem, chosen, gpu), false, stream, forward);
    });
  });
}

}  // namespace svexport
