#include "fast_sigmoid.h"

#include "binding.h"

namespace svexport {
namespace {

at::Tensor forward(const at::Tensor& x) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (has_dtype(x)) {
    const auto output = at::empty_like(x);
    if (done(fast_sigmoid(view(x), view(output), stream()))) return output;
  }
  return reference("fast_sigmoid", forward, x);
}

std::vector<at::Tensor> backward(at::TensorList grads, const at::Tensor& x, c10::List<bool> needs_grad) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (has_dtype(x) && needs_grad.get(0) && grads[0].scalar_type() == x.scalar_type()) {
    const auto gradient = fresh(x);
    if (done(fast_sigmoid_backward(view(grads[0]), view(x), view(gradient), stream()))) return {gradient};
  }
  return reference("fast_sigmoid_backward", backward, grads, x, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("fast_sigmoid", &forward);
  m.impl("fast_sigmoid_backward", &backward);
}

}  // namespace svexport
