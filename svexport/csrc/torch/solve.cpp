#include "solve.h"

#include <ATen/ExpandUtils.h>

#include "binding.h"

namespace svexport {
namespace {

// X and, if wanted, info; nothing if there is no kernel for the arguments.
std::vector<at::Tensor> solve_and_info(const at::Tensor& A, const at::Tensor& B, int64_t n, bool left, bool vector,
                                       bool wants_info) {
  const c10::cuda::CUDAGuard guard(A.device());
  if (!has_dtype(A) || !has_dtype(B) || A.dim() < 2 || B.dim() < (vector ? 1 : 2) || B.device() != A.device() ||
      B.scalar_type() != A.scalar_type() || A.size(-1) != n || A.size(-2) != n || n == 0 || (vector && !left) ||
      B.numel() == 0 || B.size(vector || !left ? -1 : -2) != n) {
    return {};
  }
  const auto columns = vector ? B.unsqueeze(-1) : B;  // (*, n, k), or (*, k, n)
  auto batch_of = [](const at::Tensor& t) { return t.sizes().slice(0, t.dim() - 2); };
  const auto batch = at::infer_size(batch_of(A), batch_of(columns));
  auto shape = batch;
  shape.insert(shape.end(), {columns.size(-2), columns.size(-1)});
  auto square = batch;
  square.insert(square.end(), {n, n});
  if (shape.size() > kMaxRank) return {};

  const auto X = fresh(shape, B);
  auto turned = [&](const at::Tensor& t) { return view(left ? t : t.mT()); };
  std::vector<at::Tensor> results{vector ? X.squeeze(-1) : X};
  Tensor info;
  if (wants_info) {
    results.push_back(at::empty(batch_of(A), A.options().dtype(at::kInt)));
    info = view(results[1].expand(batch));
  }
  if (!done(solve(turned(A.expand(square)), turned(columns.expand(shape)), turned(X), info, stream()))) return {};
  return results;
}

at::Tensor solve_torch(const at::Tensor& A, const at::Tensor& B, int64_t n, bool left, bool vector) {
  const auto results = solve_and_info(A, B, n, left, vector, false);
  return results.empty() ? reference("solve", solve_torch, A, B, n, left, vector) : results[0];
}

std::tuple<at::Tensor, at::Tensor> solve_ex_torch(const at::Tensor& A, const at::Tensor& B, int64_t n, bool left,
                                                  bool vector) {
  const auto results = solve_and_info(A, B, n, left, vector, true);
  if (results.empty()) return reference("solve_ex", solve_ex_torch, A, B, n, left, vector);
  return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("solve", &solve_torch);
  m.impl("solve_ex", &solve_ex_torch);
}

}  // namespace svexport
