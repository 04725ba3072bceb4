#include "grid_sample.h"

#include "binding.h"

namespace svexport {
namespace {

at::Tensor grid_sample_torch(const at::Tensor& input, const at::Tensor& grid, int64_t mode, int64_t padding,
                             bool align_corners) {
  const c10::cuda::CUDAGuard guard(input.device());
  if (has_dtype(input) && has_dtype(grid)) {
    auto sizes = grid.sizes().vec();  // (N, *out, axes) -> (N, C, *out)
    sizes.pop_back();
    sizes.insert(sizes.begin() + 1, input.size(1));
    const auto output = at::empty(sizes, input.options().memory_format(at::MemoryFormat::Contiguous));
    if (done(grid_sample(view(input), view(grid), view(output), static_cast<int>(mode), static_cast<int>(padding),
                         align_corners, stream()))) {
      return output;
    }
  }
  return reference("grid_sample", grid_sample_torch, input, grid, mode, padding, align_corners);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) { m.impl("grid_sample", &grid_sample_torch); }

}  // namespace svexport
