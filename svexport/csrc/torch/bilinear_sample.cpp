#include "grid_sample/launch.h"

#include "sampling_gradients.h"
#include "tactics.h"

namespace svexport {
namespace {

std::tuple<at::Tensor, at::Tensor> bilinear_sample_torch(const at::Tensor& image, const at::Tensor& grid) {
  const c10::cuda::CUDAGuard guard(image.device());
  if (has_dtype(image) && has_dtype(grid) && grid.device() == image.device()) {
    const auto output = fresh({image.size(0), image.size(1), grid.size(1), grid.size(2)}, image);
    const auto mask = fresh({image.size(0), grid.size(1), grid.size(2), 1}, image);
    const auto scratch = workspace(grid_sample_workspace(view(image), view(grid), kBilinear), image);
    if (done(bilinear_sample(view(image), view(grid), view(output), view(mask), forced_tactic("bilinear_sample"),
                             stream(), scratch.data_ptr()))) {
      return {output, mask};
    }
  }
  return reference("bilinear_sample", bilinear_sample_torch, image, grid);
}

std::vector<at::Tensor> bilinear_sample_backward_torch(at::TensorList grads, const at::Tensor& image,
                                                       const at::Tensor& grid, const c10::List<bool>& needs_grad) {
  const c10::cuda::CUDAGuard guard(image.device());
  if (has_dtype(image) && has_dtype(grid) && grid.device() == image.device()) {
    const Gradients results({image, grid}, needs_grad);
    const auto grad = evenly_spaced(grads[0]);
    const bool deterministic = at::globalContext().deterministicAlgorithms();
    const int32_t tactic = forced_tactic("bilinear_sample_backward");
    const auto scratch = workspace(grid_sample_backward_workspace(view(grad), view(image), view(grid), kBilinear,
                                                                  deterministic, needs_grad[0], needs_grad[1], tactic),
                                   image);
    if (done(bilinear_sample_backward(view(grad), view(image), view(grid), view(results.all[0]), view(results.all[1]),
                                      deterministic, tactic, scratch.data_ptr(), stream()))) {
      return results.wanted();
    }
  }
  return reference("bilinear_sample_backward", bilinear_sample_backward_torch, grads, image, grid, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("bilinear_sample", &bilinear_sample_torch);
  m.impl("bilinear_sample_backward", &bilinear_sample_backward_torch);
}

}  // namespace svexport
