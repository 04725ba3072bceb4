#include "inverse.h"

#include "binding.h"

namespace svexport {
namespace {

bool is_square(const at::Tensor& A, int64_t n) { return A.dim() >= 2 && A.size(-1) == n && A.size(-2) == n && n > 0; }

std::optional<at::Tensor> inverse_torch(const at::Tensor& A, int64_t n) {
  if (!is_square(A, n)) return {};
  const auto result = fresh(A);
  return if_done(inverse(view(A), view(result), Tensor{}, stream()), result);
}

std::optional<std::tuple<at::Tensor, at::Tensor>> inverse_ex_torch(const at::Tensor& A, int64_t n) {
  if (!is_square(A, n)) return {};
  const auto result = fresh(A), info = at::empty(A.sizes().slice(0, A.dim() - 2), A.options().dtype(at::kInt));
  return if_done(inverse(view(A), view(result), view(info), stream()), std::tuple(result, info));
}

Wanted inverse_backward_torch(at::TensorList grads, const at::Tensor& A, int64_t n, c10::List<bool> needs_grad) {
  const at::Tensor& grad = grads[0];
  const bool alike = grad.sizes() == A.sizes() && grad.scalar_type() == A.scalar_type();
  if (!needs_grad.get(0) || !is_square(A, n) || !alike) return {};
  const auto result = fresh(A);
  return if_done(inverse_backward(view(grad), view(A), view(result), stream()), std::vector{result});
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "inverse", inverse_torch);
  implement(m, "inverse_ex", inverse_ex_torch);
  for (const char* op : {"inverse_backward", "inverse_ex_backward"}) implement(m, op, inverse_backward_torch);
}

}  // namespace svexport
