#include "space_to_depth.h"

#include "binding.h"

namespace svexport {
namespace {

bool has_even_sides(const at::Tensor& x) { return x.dim() == 4 && x.size(2) % 2 == 0 && x.size(3) % 2 == 0; }

std::optional<at::Tensor> space_to_depth_torch(const at::Tensor& x) {
  if (!has_even_sides(x)) return {};
  const auto output = fresh({x.size(0), 4 * x.size(1), x.size(2) / 2, x.size(3) / 2}, x);
  return if_done(space_to_depth(view(x), view(output), stream()), output);
}

Wanted space_to_depth_backward_torch(at::TensorList grads, const at::Tensor& x, c10::List<bool> needs_grad) {
  if (!has_even_sides(x) || !needs_grad.get(0)) return {};
  const auto gradient = fresh(x);
  return if_done(depth_to_space(view(grads[0]), view(gradient), stream()), std::vector{gradient});
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "space_to_depth", space_to_depth_torch);
  implement(m, "space_to_depth_backward", space_to_depth_backward_torch);
}

}  // namespace svexport
