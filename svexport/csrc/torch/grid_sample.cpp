#include "grid_sample/launch.h"

#include <ATen/Context.h>

#include "binding.h"

namespace svexport {
namespace {

// (N, C, ...), t or a copy, whose dimensions after C can be read as if they were one, as the kernels do.
at::Tensor evenly_spaced(const at::Tensor& t) {
  int64_t stride = 0, expected = -1;
  for (int64_t i = t.dim() - 1; i >= 2; --i) {
    if (t.size(i) == 1) continue;
    stride = t.stride(i);
    if (expected >= 0 && stride != expected) return t.contiguous();
    expected = stride * t.size(i);
  }
  return t;
}

Wanted sampling_gradients(const char* op, const at::Tensor& grad_output, const at::Tensor& input,
                          const at::Tensor& grid, int64_t mode, int64_t padding, bool align_corners,
                          const c10::List<bool>& needs_grad) {
  const Gradients results({input, grid}, needs_grad);
  const auto grad = evenly_spaced(grad_output);
  const bool deterministic = at::globalContext().deterministicAlgorithms();
  const int32_t tactic = forced_tactic(op);
  const auto scratch =
      workspace(grid_sample_backward_workspace(view(grad), view(input), view(grid), static_cast<int>(mode),
                                               deterministic, needs_grad[0], needs_grad[1], tactic),
                input);
  return if_done(grid_sample_backward(view(grad), view(input), view(grid), view(results.all[0]), view(results.all[1]),
                                      static_cast<int>(mode), static_cast<int>(padding), align_corners, deterministic,
                                      tactic, scratch.data_ptr(), stream()),
                 results.wanted());
}

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

// For tests: what the launcher can do but the op has no schema for, int8 in TensorRT's formats to any float type.
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
  implement(m, "bilinear_sample", bilinear_sample_torch);
  implement(m, "bilinear_sample_backward", bilinear_sample_backward_torch);
}

TORCH_LIBRARY_IMPL(svexport_internal, CUDA, m) { m.impl("grid_sample_int8", &grid_sample_int8); }

}  // namespace svexport
