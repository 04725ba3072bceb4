#include "to_chw32.h"

#include "binding.h"

namespace svexport {
namespace {

std::optional<at::Tensor> to_chw32_torch(const at::Tensor& x, bool pool) {
  if (x.dim() != 4 || (pool && (x.size(2) < 2 || x.size(3) < 2))) return {};
  const int64_t by = pool ? 2 : 1;
  const auto output = fresh({x.size(0), (x.size(1) + 31) / 32, x.size(2) / by, x.size(3) / by, 32}, x);
  return if_done(to_chw32(view(x), pool, view(output), stream()), output);
}

Wanted to_chw32_backward(at::TensorList grads, const at::Tensor& x, bool pool, c10::List<bool> needs_grad) {
  if (pool || x.dim() != 4 || !needs_grad.get(0)) return {};  // the gradient of pooling is torch's own
  const auto gradient = fresh(x);
  return if_done(from_chw32(view(grads[0]), view(gradient), stream()), std::vector{gradient});
}

bool is_chw32(const at::Tensor& x, int64_t channels) {
  return x.dim() == 5 && x.size(4) == 32 && channels > 0 && x.size(1) == (channels + 31) / 32;
}

std::optional<at::Tensor> from_chw32_torch(const at::Tensor& x, int64_t channels) {
  if (!is_chw32(x, channels)) return {};
  const auto output = fresh({x.size(0), channels, x.size(2), x.size(3)}, x);
  return if_done(from_chw32(view(x), view(output), stream()), output);
}

Wanted from_chw32_backward(at::TensorList grads, const at::Tensor& x, int64_t channels, c10::List<bool> needs_grad) {
  if (!is_chw32(x, channels) || !needs_grad.get(0)) return {};
  const auto gradient = fresh(x);
  return if_done(to_chw32(view(grads[0]), false, view(gradient), stream()), std::vector{gradient});
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "to_chw32", to_chw32_torch);
  implement(m, "to_chw32_backward", to_chw32_backward);
  implement(m, "from_chw32", from_chw32_torch);
  implement(m, "from_chw32_backward", from_chw32_backward);
}

}  // namespace svexport
