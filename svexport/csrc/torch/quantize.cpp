#include "quantize.h"

#include "scales.h"

namespace svexport {
namespace {

at::Tensor forward(const at::Tensor& x, double scale, const std::optional<at::Tensor>& scales, int64_t axis,
                   bool restricted) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (has_dtype(x) && fits_scales(x, scales, axis)) {
    const auto output = at::empty_like(x, x.options().dtype(at::kChar));
    const auto steps = float_scales(scales);
    if (done(quantize(view(x), static_cast<float>(scale), view(steps), static_cast<int>(axis), restricted, view(output),
                      stream()))) {
      return output;
    }
  }
  return reference("quantize", forward, x, scale, scales, axis, restricted);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) { m.impl("quantize", &forward); }

}  // namespace svexport
