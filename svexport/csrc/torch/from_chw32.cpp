#include "from_chw32.h"

#include "binding.h"
#include "to_chw32.h"

namespace svexport {
namespace {

bool fits(const at::Tensor& x, int64_t channels) {
  return has_dtype(x) && x.dim() == 5 && x.size(4) == 32 && channels > 0 && x.size(1) == (channels + 31) / 32;
}

at::Tensor forward(const at::Tensor& x, int64_t channels) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (fits(x, channels)) {
    const auto output = fresh({x.size(0), channels, x.size(2), x.size(3)}, x);
    if (done(from_chw32(view(x), view(output), stream()))) return output;
  }
  return reference("from_chw32", forward, x, channels);
}

std::vector<at::Tensor> backward(at::TensorList grads, const at::Tensor& x, int64_t channels,
                                 c10::List<bool> needs_grad) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (fits(x, channels) && needs_grad.get(0)) {
    const auto gradient = fresh(x);
    if (done(to_chw32(view(grads[0]), false, view(gradient), stream()))) return {gradient};
  }
  return reference("from_chw32_backward", backward, grads, x, channels, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("from_chw32", &forward);
  m.impl("from_chw32_backward", &backward);
}

}  // namespace svexport
