#include "add_bias_residual_layer_norm/launch.h"

#include "binding.h"
#include "tactics.h"

namespace svexport {
namespace {

using Optional = std::optional<at::Tensor>;

bool fits(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, const at::Tensor& weight,
          const at::Tensor& norm_bias, const Optional& extra) {
  auto like_x = [&](const at::Tensor& t) { return t.sizes() == x.sizes() && t.device() == x.device() && has_dtype(t); };
  auto vector = [&](const at::Tensor& t) {
    return t.sizes() == x.sizes().slice(x.dim() - 1) && t.device() == x.device() && has_dtype(t);
  };
  return x.dim() > 0 && like_x(x) && like_x(residual) && (!extra || like_x(*extra)) && vector(bias) && vector(weight) &&
         vector(norm_bias);
}

// Only columns that are not contiguous, which are rare, are worth a copy.
at::Tensor with_contiguous_columns(const at::Tensor& t) {
  return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous();
}

Optional with_contiguous_columns(const Optional& t) { return t ? Optional(with_contiguous_columns(*t)) : t; }

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual,
                                           const at::Tensor& weight, const at::Tensor& norm_bias, double eps,
                                           const Optional& extra) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (fits(x, bias, residual, weight, norm_bias, extra)) {
    const auto x_ = with_contiguous_columns(x), residual_ = with_contiguous_columns(residual);
    const auto extra_ = with_contiguous_columns(extra);
    const auto y = at::empty_like(x, at::MemoryFormat::Contiguous), s = at::empty_like(y);
    const auto bias_ = bias.contiguous(), weight_ = weight.contiguous(), norm_bias_ = norm_bias.contiguous();
    if (done(add_bias_residual_layer_norm(view(x_), view(bias_), view(residual_), view(weight_), view(norm_bias_),
                                          static_cast<float>(eps), view(extra_), view(y), view(s), forced_tactic("add_bias_residual_layer_norm"),
                                          stream()))) {
      return {y, s};
    }
  }
  return reference("add_bias_residual_layer_norm", forward, x, bias, residual, weight, norm_bias, eps, extra);
}

std::vector<at::Tensor> backward(at::TensorList grads, const at::Tensor& x, const at::Tensor& bias,
                                 const at::Tensor& residual, const at::Tensor& weight, const at::Tensor& norm_bias,
                                 double eps, const Optional& extra, c10::List<bool> needs_grad) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (fits(x, bias, residual, weight, norm_bias, extra)) {
    const auto x_ = with_contiguous_columns(x), residual_ = with_contiguous_columns(residual);
    const auto extra_ = with_contiguous_columns(extra);
    std::vector<at::Tensor> results;
    std::vector<Tensor> views;
    const at::Tensor inputs[] = {x, bias, residual, weight, norm_bias, extra.value_or(at::Tensor())};
    for (size_t i = 0; i < 6; ++i) {
      if (i < needs_grad.size() && needs_grad.get(i)) {
        results.push_back(at::empty_like(inputs[i], at::MemoryFormat::Contiguous));
        views.push_back(view(results.back()));
      } else {
        views.emplace_back();
      }
    }
    const auto dy = grads[0].contiguous(), ds = grads[1].contiguous();
    const auto bias_ = bias.contiguous(), weight_ = weight.contiguous();
    const bool columns = views[1].data || views[3].data || views[4].data;
    const auto scratch = workspace(columns ? add_bias_residual_layer_norm_backward_workspace(view(x)) : 0, x);
    if (done(add_bias_residual_layer_norm_backward(
            view(dy), view(ds), view(x_), view(bias_), view(residual_), view(weight_), static_cast<float>(eps),
            view(extra_), views[0], views[1], views[2], views[3], views[4], views[5], scratch.data_ptr(),
            forced_tactic("add_bias_residual_layer_norm_backward"), stream()))) {
      return results;
    }
  }
  return reference("add_bias_residual_layer_norm_backward", backward, grads, x, bias, residual, weight, norm_bias, eps,
                   extra, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("add_bias_residual_layer_norm", &forward);
  m.impl("add_bias_residual_layer_norm_backward", &backward);
}

}  // namespace svexport
