#include "ms_deform_attn/launch.h"

#include "accumulate.h"
#include "binding.h"

namespace svexport {
namespace {

std::optional<at::Tensor> ms_deform_attn_torch(const at::Tensor& value, const at::Tensor& spatial_shapes,
                                               const at::Tensor& level_start_index,
                                               const at::Tensor& sampling_locations,
                                               const at::Tensor& attention_weights, double scale) {
  const auto& typed = value.scalar_type() == at::kChar ? attention_weights : value;
  const auto output = fresh({value.size(0), sampling_locations.size(1), value.size(2) * value.size(3)}, typed);
  return if_done(ms_deform_attn(view(value), view(spatial_shapes), view(level_start_index), view(sampling_locations),
                                view(attention_weights), view(output), static_cast<float>(scale),
                                forced_tactic("ms_deform_attn"), stream()),
                 output);
}

Wanted ms_deform_attn_backward_torch(at::TensorList grads, const at::Tensor& value, const at::Tensor& spatial_shapes,
                                     const at::Tensor& level_start_index, const at::Tensor& sampling_locations,
                                     const at::Tensor& attention_weights, double,
                                     const c10::List<bool>& needs_grad) {
  std::optional<Accumulator> grad_value;
  if (needs_grad[0]) {
    grad_value.emplace(value.sizes(), value, at::TensorList{grads[0], attention_weights},
                       static_cast<double>(sampling_locations.numel()));
  }
  const Gradients others({sampling_locations, attention_weights}, {needs_grad[3], needs_grad[4]});
  if (!done(ms_deform_attn_backward(view(grads[0]), view(value), view(spatial_shapes), view(level_start_index),
                                    view(sampling_locations), view(attention_weights),
                                    grad_value ? view(grad_value->sums) : Tensor{},
                                    grad_value ? view(grad_value->scale) : Tensor{}, view(others.all[0]),
                                    view(others.all[1]), forced_tactic("ms_deform_attn_backward"), stream()))) {
    return {};
  }
  auto results = others.wanted();
  if (grad_value) results.insert(results.begin(), grad_value->result(value.scalar_type()));
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "ms_deform_attn", ms_deform_attn_torch);
  implement(m, "ms_deform_attn_backward", ms_deform_attn_backward_torch);
}

}  // namespace svexport
