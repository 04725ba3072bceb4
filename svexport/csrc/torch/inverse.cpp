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
  std::vector<at::Tensor> results{fresh(A)};
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

using Backward = std::vector<at::Tensor>(at::TensorList, const at::Tensor&, int64_t, c10::List<bool>);

std::vector<at::Tensor> backward(const char* name, at::TensorList grads, const at::Tensor& A, int64_t n,
                                 c10::List<bool> needs_grad) {
  const c10::cuda::CUDAGuard guard(A.device());
  const at::Tensor& grad = grads[0];
  if (needs_grad.get(0) && fits(A, n) && grad.sizes() == A.sizes() && grad.scalar_type() == A.scalar_type()) {
    const auto result = fresh(A);
    if (done(inverse_backward(view(grad), view(A), view(result), stream()))) return {result};
  }
  return reference(name, static_cast<Backward*>(nullptr), grads, A, n, needs_grad);
}

std::vector<at::Tensor> inverse_backward_torch(at::TensorList grads, const at::Tensor& A, int64_t n,
                                               c10::List<bool> needs_grad) {
  return backward("inverse_backward", grads, A, n, needs_grad);
}

std::vector<at::Tensor> inverse_ex_backward_torch(at::TensorList grads, const at::Tensor& A, int64_t n,
                                                  c10::List<bool> needs_grad) {
  return backward("inverse_ex_backward", grads, A, n, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("inverse", &inverse_torch);
  m.impl("inverse_backward", &inverse_backward_torch);
  m.impl("inverse_ex", &inverse_ex_torch);
  m.impl("inverse_ex_backward", &inverse_ex_backward_torch);
}

}  // namespace svexport
