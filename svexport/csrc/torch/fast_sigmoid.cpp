#include "fast_sigmoid.h"

#include "binding.h"

namespace svexport {
namespace {

std::optional<at::Tensor> fast_sigmoid_torch(const at::Tensor& x) {
  const auto output = at::empty_like(x);
  return if_done(fast_sigmoid(view(x), view(output), stream()), output);
}

Wanted fast_sigmoid_backward_torch(at::TensorList grads, const at::Tensor& x, c10::List<bool> needs_grad) {
  if (!needs_grad.get(0) || grads[0].scalar_type() != x.scalar_type()) return {};
  const auto gradient = fresh(x);
  return if_done(fast_sigmoid_backward(view(grads[0]), view(x), view(gradient), stream()), std::vector{gradient});
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "fast_sigmoid", fast_sigmoid_torch);
  implement(m, "fast_sigmoid_backward", fast_sigmoid_backward_torch);
}

}  // namespace svexport
