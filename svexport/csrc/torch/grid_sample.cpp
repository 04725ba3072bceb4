#include "grid_sample/launch.h"

#include "sampling_gradients.h"
#include "tactics.h"

namespace svexport {
namespace {

at::Tensor grid_sample_torch(const at::Tensor& input, const at::Tensor& grid, int64_t mode, int64_t padding,
                             bool align_corners, double scale) {
  const c10::cuda::CUDAGuard guard(input.device());
  if (has_dtype(input) && has_dtype(grid) && grid.device() == input.device()) {
    auto sizes = grid.sizes().vec();  // (N, *out, axes) -> (N, C, *out)
    sizes.pop_back();
    sizes.insert(sizes.begin() + 1, input.size(1));
    const auto& typed = input.scalar_type() == at::kChar ? grid : input;
    const auto output = fresh(sizes, typed);
    const auto scratch = workspace(grid_sample_workspace(view(input), view(grid), static_cast<int>(mode)), input);
    if (done(grid_sample(view(input), view(grid), view(output), static_cast<int>(mode), static_cast<int>(padding),
                         align_corners, static_cast<float>(scale), forced_tactic("grid_sample"), stream(),
                         scratch.data_ptr()))) {
      return output;
    }
  }
  return reference("grid_sample", grid_sample_torch, input, grid, mode, padding, align_corners,
                   scale);
}

std::vector<at::Tensor> grid_sample_backward_torch(at::TensorList grads, const at::Tensor& input,
                                                   const at::Tensor& grid, int64_t mode, int64_t padding,
                                                   bool align_corners, double scale, const c10::List<bool>& needs_grad) {
  const c10::cuda::CUDAGuard guard(input.device());
  if (has_dtype(input) && has_dtype(grid) && grid.device() == input.device()) {
    const Gradients results({input, grid}, needs_grad);
    const auto grad = evenly_spaced(grads[0]);
    const bool deterministic = at::globalContext().deterministicAlgorithms();
    const int32_t tactic = forced_tactic("grid_sample_backward");
    const auto scratch =
        workspace(grid_sample_backward_workspace(view(grad), view(input), view(grid), static_cast<int>(mode),
                                                 deterministic, needs_grad[0], needs_grad[1], tactic),
                  input);
    if (done(grid_sample_backward(view(grad), view(input), view(grid), view(results.all[0]), view(results.all[1]),
                                  static_cast<int>(mode), static_cast<int>(padding), align_corners, deterministic,
                                  tactic, scratch.data_ptr(), stream()))) {
      return results.wanted();
    }
  }
  return reference("grid_sample_backward", grid_sample_backward_torch, grads, input, grid, mode, padding, align_corners,
                   scale, needs_grad);
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
  m.impl("grid_sample", &grid_sample_torch);
  m.impl("grid_sample_backward", &grid_sample_backward_torch);
}

TORCH_LIBRARY_IMPL(svexport_internal, CUDA, m) { m.impl("grid_sample_int8", &grid_sample_int8); }

}  // namespace svexport
