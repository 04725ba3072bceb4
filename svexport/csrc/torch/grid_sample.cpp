#include "sampling_gradients.h"

namespace svexport {
namespace {

std::optional<at::Tensor> grid_sample_torch(const at::Tensor& input, const at::Tensor& grid, int64_t mode,
                                            int64_t padding, bool align_corners, double scale) {
  auto sizes = grid.sizes().vec();  // (N, *out, axes) -> (N, C, *out)
  sizes.pop_back();
  sizes.insert(sizes.begin() + 1, input.size(1));
  const auto output = fresh(sizes, input.scalar_type() == at::kChar ? grid : input);
  const auto scratch = workspace(grid_sample_workspace(view(input), view(grid), static_cast<int>(mode)), input);
  return if_done(grid_sample(view(input), view(grid), view(output), static_cast<int>(mode), static_cast<int>(padding),
                             align_corners, static_cast<float>(scale), forced_tactic("grid_sample"), stream(),
                             scratch.data_ptr()),
                 output);
}

Wanted grid_sample_backward_torch(at::TensorList grads, const at::Tensor& input, const at::Tensor& grid, int64_t mode,
                                  int64_t padding, bool align_corners, double, const c10::List<bool>& needs_grad) {
  return sampling_gradients("grid_sample_backward", grads[0], input, grid, mode, padding, align_corners, needs_grad);
}

// What the launcher does and the op has no schema for: int8 in TensorRT's formats, to any float type. For tests.
void grid_sample_int8(const at::Tensor& input, const at::Tensor& grid, int64_t mode, int64_t padding,
                      bool align_corners, double scale, const at::Tensor& output) {
  const c10::cuda::CUDAGuard guard(output.device());
  TORCH_CHECK(done(grid_sample(view(input), view(grid), view(output), static_cast<int>(mode), static_cast<int>(padding),
                               align_corners, static_cast<float>(scale), forced_tactic("grid_sample"), stream())));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(svexport_internal, m) {
  m.def("grid_sample_int8(Tensor input, Tensor grid, int mode, int padding, bool align_corners, float scale, "
        "Tensor(a!) output) -> ()");
}

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "grid_sample", grid_sample_torch);
  implement(m, "grid_sample_backward", grid_sample_backward_torch);
}

TORCH_LIBRARY_IMPL(svexport_internal, CUDA, m) { m.impl("grid_sample_int8", &grid_sample_int8); }

}  // namespace svexport
