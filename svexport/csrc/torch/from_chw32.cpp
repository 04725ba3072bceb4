#include "from_chw32.h"

#include "binding.h"
#include "to_chw32.h"

namespace svexport {
namespace {

bool fits(const at::Tensor& x, int64_t channels) {
  return x.dim() == 5 && x.size(4) == 32 && channels > 0 && x.size(1) == (channels + 31) / 32;
}

std::optional<at::Tensor> forward(const at::Tensor& x, int64_t channels) {
  if (!fits(x, channels)) return {};
  const auto output = fresh({x.size(0), channels, x.size(2), x.size(3)}, x);
  return if_done(from_chw32(view(x), view(output), stream()), output);
}

Wanted backward(at::TensorList grads, const at::Tensor& x, int64_t channels, c10::List<bool> needs_grad) {
  if (!fits(x, channels) || !needs_grad.get(0)) return {};
  const auto gradient = fresh(x);
  return if_done(to_chw32(view(grads[0]), false, view(gradient), stream()), std::vector{gradient});
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "from_chw32", forward);
  implement(m, "from_chw32_backward", backward);
}

}  // namespace svexport
