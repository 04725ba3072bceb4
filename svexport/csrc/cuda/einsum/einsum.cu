#include "einsum/launch.h"

#include "einsum/run.h"
#include "einsum/tensors.h"
#include "mma.cuh"

namespace svexport {

size_t einsum_views_workspace(const Tensor& x, const Tensor& y, const Tensor& z, bool sums) {
  const einsum::Problem problem = einsum::problem_of(x, y, z, sums);
  const Gpu gpu = current_gpu();
  size_t bytes = 0;
  for (const auto& tactic : tactics(problem, gpu)) bytes = std::max(bytes, workspace(problem, tactic, gpu));
  return bytes;
}

cudaError_t einsum_views(const Tensor& x, const Tensor& y, const Tensor& z, bool sums, int32_t tactic, void* workspace,
                         bool early, cudaStream_t stream) {
  if (!is_float(x) || y.dtype != x.dtype || z.dtype != x.dtype) return cudaErrorNotSupported;
  const einsum::Problem problem = einsum::problem_of(x, y, z, sums);
  const Gpu gpu = current_gpu();
  const einsum::Tactic chosen = choose(problem, gpu, tactic);
  const einsum::Call call{problem, chosen, gpu, launch(problem, chosen, gpu), x, y, z, workspace, early, stream};
  switch (chosen.kernel) {
    case einsum::Kernel::kLarge: return run_large(call);
    case einsum::Kernel::kSmall:
      return dispatch_float(x.dtype, [&](auto* p) { return einsum::run_small<element_t<decltype(p)>>(call); });
    case einsum::Kernel::kChannelProduct: return run_channel_product(call);
    case einsum::Kernel::kChannelCorrelation: return run_channel_correlation(call);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace svexport
