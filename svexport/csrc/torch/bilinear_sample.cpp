#include "bilinear_sample.h"

#include "binding.h"

namespace svexport {
namespace {

std::tuple<at::Tensor, at::Tensor> bilinear_sample_torch(const at::Tensor& image, const at::Tensor& grid) {
  const c10::cuda::CUDAGuard guard(image.device());
  if (has_dtype(image) && has_dtype(grid)) {
    const auto options = image.options().memory_format(at::MemoryFormat::Contiguous);
    const auto output = at::empty({image.size(0), image.size(1), grid.size(1), grid.size(2)}, options);
    const auto mask = at::empty({image.size(0), grid.size(1), grid.size(2), 1}, options);
    if (done(bilinear_sample(view(image), view(grid), view(output), view(mask), stream()))) return {output, mask};
  }
  return reference("bilinear_sample", bilinear_sample_torch, image, grid);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) { m.impl("bilinear_sample", &bilinear_sample_torch); }

}  // namespace svexport
