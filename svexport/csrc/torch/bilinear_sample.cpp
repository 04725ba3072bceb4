#include "sampling_gradients.h"

namespace svexport {
namespace {

std::optional<std::tuple<at::Tensor, at::Tensor>> bilinear_sample_torch(const at::Tensor& image,
                                                                        const at::Tensor& grid) {
  const auto output = fresh({image.size(0), image.size(1), grid.size(1), grid.size(2)}, image);
  const auto mask = fresh({image.size(0), grid.size(1), grid.size(2), 1}, image);
  const auto scratch = workspace(grid_sample_workspace(view(image), view(grid), kBilinear), image);
  return if_done(bilinear_sample(view(image), view(grid), view(output), view(mask), forced_tactic("bilinear_sample"),
                                 stream(), scratch.data_ptr()),
                 std::tuple(output, mask));
}

Wanted bilinear_sample_backward_torch(at::TensorList grads, const at::Tensor& image, const at::Tensor& grid,
                                      const c10::List<bool>& needs_grad) {
  return sampling_gradients("bilinear_sample_backward", grads[0], image, grid, kBilinear, kPixels, true, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "bilinear_sample", bilinear_sample_torch);
  implement(m, "bilinear_sample_backward", bilinear_sample_backward_torch);
}

}  // namespace svexport
