#include "grid_sample/backward_run.cuh"
#include "grid_sample/launch.h"
#include "grid_sample/tensors.h"

extern template cudaError_t svexport::backward::run_backward<svexport::Narrow>(const Call&);

namespace svexport {

using namespace backward;

size_t grid_sample_backward_workspace(const Tensor& grad, const Tensor& input, const Tensor& grid, int mode,
                                      bool deterministic, bool input_gradient, bool grid_gradient, int32_t tactic) {
  int64_t point = 1;
  if (input.numel() == 0 || grid.numel() == 0 || !evenly_spaced(grad, 2, grad.rank - 1, point)) return 0;
  const Problem problem = sampler::gradient::problem_of(grad, point, input, grid, mode, deterministic, input_gradient,
                                                        grid_gradient);
  return sampler::gradient::Workspace(problem, choose(problem, current_gpu(), tactic)).all();
}

cudaError_t grid_sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                                 const Tensor& grad_grid, int mode, int padding, bool align_corners, bool deterministic,
                                 int32_t forced, void* workspace, cudaStream_t stream) {
  if (input.numel() == 0 || grid.numel() == 0) {
    for (const Tensor* t : {&grad_input, &grad_grid}) {
      if (t->data == nullptr || t->numel() == 0) continue;
      const cudaError_t status = cudaMemsetAsync(t->data, 0, t->numel() * t->item_size(), stream);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }
  Space s(grid);
  int64_t point = 1;
  if (grad.dtype != input.dtype || !is_float(input) || !is_float(grid) || input.sizes[0] > INT32_MAX ||
      input.sizes[1] > INT32_MAX || !Space::of(input, grid, Sampling{mode, padding, align_corners}, s) ||
      !evenly_spaced(grad, 2, grad.rank - 1, point)) {
    return cudaErrorNotSupported;
  }
  const Gpu gpu = current_gpu();
  const Problem problem = sampler::gradient::problem_of(grad, point, input, grid, mode, deterministic,
                                                        grad_input.data, grad_grid.data);
  if (problem.pixels() > INT32_MAX) return cudaErrorNotSupported;
  const Tactic tactic = choose(problem, gpu, forced);
  const Call call{problem, tactic, gpu, grad, input, grad_input, grad_grid, point, s, workspace, stream};
  return dispatch_narrow(input.dtype, [&](auto* p) { return run_backward<element_t<decltype(p)>>(call); });
}

}  // namespace svexport
