#include "to_chw32.h"

#include "binding.h"
#include "from_chw32.h"

namespace svexport {
namespace {

bool fits(const at::Tensor& x, bool pool) {
  return has_dtype(x) && x.dim() == 4 && (!pool || (x.size(2) > 1 && x.size(3) > 1));
}

at::Tensor forward(const at::Tensor& x, bool pool) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (fits(x, pool)) {
    const int64_t by = pool ? 2 : 1;
    const auto output = fresh({x.size(0), (x.size(1) + 31) / 32, x.size(2) / by, x.size(3) / by, 32}, x);
    if (done(to_chw32(view(x), pool, view(output), stream()))) return output;
  }
  return reference("to_chw32", forward, x, pool);
}

std::vector<at::Tensor> backward(at::TensorList grads, const at::Tensor& x, bool pool, c10::List<bool> needs_grad) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (fits(x, pool) && needs_grad.get(0)) {
    const auto gradient = fresh(x);
    const auto grad = pool ? grads[0].contiguous() : grads[0];
    if (done(pool ? to_chw32_pool_backward(view(grad), view(x), view(gradient), stream())
                  : from_chw32(view(grad), view(gradient), stream()))) {
      return {gradient};
    }
  }
  return reference("to_chw32_backward", backward, grads, x, pool, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("to_chw32", &forward);
  m.impl("to_chw32_backward", &backward);
}

}  // namespace svexport
