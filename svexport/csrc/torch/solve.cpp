#include "solve.h"

#include <ATen/ExpandUtils.h>

#include "binding.h"

namespace svexport {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor>;  // X, and info if it is wanted

std::optional<Result> solve_and_info(const at::Tensor& A, const at::Tensor& B, int64_t n, bool left, bool vector,
                                     bool wants_info) {
  if (A.dim() < 2 || B.dim() < (vector ? 1 : 2) || B.scalar_type() != A.scalar_type() || A.size(-1) != n ||
      A.size(-2) != n || n == 0 || (vector && !left) || B.numel() == 0 || B.size(vector || !left ? -1 : -2) != n) {
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
  at::Tensor info, infos;
  if (wants_info) {
    info = at::empty(batch_of(A), A.options().dtype(at::kInt));
    infos = info.expand(batch);
  }
  auto turned = [&](const at::Tensor& t) { return view(left ? t : t.mT()); };
  return if_done(solve(turned(A.expand(square)), turned(columns.expand(shape)), turned(X), view(infos), stream()),
                 Result(vector ? X.squeeze(-1) : X, info));
}

std::optional<at::Tensor> solve_torch(const at::Tensor& A, const at::Tensor& B, int64_t n, bool left, bool vector) {
  const auto result = solve_and_info(A, B, n, left, vector, false);
  return result ? std::optional(std::get<0>(*result)) : std::nullopt;
}

std::optional<Result> solve_ex_torch(const at::Tensor& A, const at::Tensor& B, int64_t n, bool left, bool vector) {
  return solve_and_info(A, B, n, left, vector, true);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "solve", solve_torch);
  implement(m, "solve_ex", solve_ex_torch);
}

}  // namespace svexport
