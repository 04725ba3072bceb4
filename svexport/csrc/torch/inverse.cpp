#include "inverse.h"

#include "binding.h"

namespace svexport {
namespace {

bool fits(const at::Tensor& A, int64_t n) {
  return has_dtype(A) && A.dim() >= 2 && A.size(-1) == n && A.size(-2) == n && n > 0;
}

std::vector<at::Tensor> inverse_and_info(const at::Tensor& A, int64_t n, bool wants_info) {
  const c10::cuda::CUDAGuard guard(A.device());
  if (!fits(A, n)) return {};
  std::vector<at::Tensor> results{at::empty_like(A, at::MemoryFormat::Contiguous)};
  if (wants_info) results.push_back(at::empty(A.sizes().slice(0, A.dim() - 2), A.options().dtype(at::kInt)));
  if (!done(inverse(view(A), view(results[0]), wants_info ? view(results[1]) : Tensor{}, stream()))) return {};
  return results;
}

at::Tensor inverse_torch(const at::Tensor& A, int64_t n) {
  const auto results = inverse_and_info(A, n, false);
  return results.empty() ? reference("inverse", inverse_torch, A, n) : results[0];
}

std::tuple<at::Tensor, at::Tensor> inverse_ex_torch(const at::Tensor& A, int64_t n) {
  const auto results = inverse_and_info(A, n, true);
  if (results.empty()) return reference("inverse_ex", inverse_ex_torch, A, n);
  return {results[0], results[1]};
}

std::vector<at::Tensor> gradient(const at::Tensor& grad, const at::Tensor& A, int64_t n) {
  const c10::cuda::CUDAGuard guard(A.device());
  if (!fits(A, n) || grad.sizes() != A.sizes() || grad.scalar_type() != A.scalar_type()) return {};
  const auto result = at::empty_like(A, at::MemoryFormat::Contiguous);
  if (!done(inverse_backward(view(grad), view(A), view(result), stream()))) return {};
  return {result};
}

std::vector<at::Tensor> inverse_backward_torch(at::TensorList grads, const at::Tensor& A, int64_t n,
                                               c10::List<bool> needs_grad) {
  auto results = needs_grad.get(0) ? gradient(grads[0], A, n) : std::vector<at::Tensor>();
  return !results.empty() ? results : reference("inverse_backward", inverse_backward_torch, grads, A, n, needs_grad);
}

std::vector<at::Tensor> inverse_ex_backward_torch(at::TensorList grads, const at::Tensor& A, int64_t n,
                                                  c10::List<bool> needs_grad) {
  auto results = needs_grad.get(0) ? gradient(grads[0], A, n) : std::vector<at::Tensor>();
  return !results.empty() ? results
                          : reference("inverse_ex_backward", inverse_ex_backward_torch, grads, A, n, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("inverse", &inverse_torch);
  m.impl("inverse_backward", &inverse_backward_torch);
  m.impl("inverse_ex", &inverse_ex_torch);
  m.impl("inverse_ex_backward", &inverse_ex_backward_torch);
}

}  // namespace svexport
