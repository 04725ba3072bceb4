#include "add_bias_residual_layer_norm/launch.h"

#include "binding.h"

namespace svexport {
namespace {

using Optional = std::optional<at::Tensor>;

bool fits(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, const at::Tensor& weight,
          const at::Tensor& norm_bias, const Optional& extra) {
  auto vector = [&](const at::Tensor& t) { return t.sizes() == x.sizes().slice(x.dim() - 1); };
  return x.dim() > 0 && residual.sizes() == x.sizes() && (!extra || extra->sizes() == x.sizes()) && vector(bias) &&
         vector(weight) && vector(norm_bias);
}

// Only columns that are not contiguous, which are rare, are worth a copy.
at::Tensor with_contiguous_columns(const at::Tensor& t) {
  return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous();
}

Optional with_contiguous_columns(const Optional& t) { return t ? Optional(with_contiguous_columns(*t)) : t; }

std::optional<std::tuple<at::Tensor, at::Tensor>> add_bias_residual_layer_norm_torch(
    const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, const at::Tensor& weight,
    const at::Tensor& norm_bias, double eps, const Optional& extra) {
  if (!fits(x, bias, residual, weight, norm_bias, extra)) return {};
  const auto x_ = with_contiguous_columns(x), residual_ = with_contiguous_columns(residual);
  const auto extra_ = with_contiguous_columns(extra);
  const auto y = fresh(x), s = at::empty_like(y);
  const auto bias_ = bias.contiguous(), weight_ = weight.contiguous(), norm_bias_ = norm_bias.contiguous();
  return if_done(add_bias_residual_layer_norm(view(x_), view(bias_), view(residual_), view(weight_), view(norm_bias_),
                                              static_cast<float>(eps), view(extra_), view(y), view(s),
                                              forced_tactic("add_bias_residual_layer_norm"), stream()),
                 std::tuple(y, s));
}

Wanted add_bias_residual_layer_norm_backward_torch(at::TensorList grads, const at::Tensor& x, const at::Tensor& bias,
                                                   const at::Tensor& residual, const at::Tensor& weight,
                                                   const at::Tensor& norm_bias, double eps, const Optional& extra,
                                                   c10::List<bool> needs_grad) {
  if (!fits(x, bias, residual, weight, norm_bias, extra)) return {};
  const auto x_ = with_contiguous_columns(x), residual_ = with_contiguous_columns(residual);
  const auto extra_ = with_contiguous_columns(extra);
  const Gradients results({x, bias, residual, weight, norm_bias, extra.value_or(at::Tensor())}, needs_grad);
  const auto& of = results.all;
  const auto dy = grads[0].contiguous(), ds = grads[1].contiguous();
  const auto bias_ = bias.contiguous(), weight_ = weight.contiguous();
  const bool columns = of[1].defined() || of[3].defined() || of[4].defined();
  const auto scratch = workspace(columns ? add_bias_residual_layer_norm_backward_workspace(view(x)) : 0, x);
  return if_done(add_bias_residual_layer_norm_backward(
                     view(dy), view(ds), view(x_), view(bias_), view(residual_), view(weight_), static_cast<float>(eps),
                     view(extra_), view(of[0]), view(of[1]), view(of[2]), view(of[3]), view(of[4]), view(of[5]),
                     scratch.data_ptr(), forced_tactic("add_bias_residual_layer_norm_backward"), stream()),
                 results.wanted());
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "add_bias_residual_layer_norm", add_bias_residual_layer_norm_torch);
  implement(m, "add_bias_residual_layer_norm_backward", add_bias_residual_layer_norm_backward_torch);
}

}  // namespace svexport
