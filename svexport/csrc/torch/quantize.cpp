#include "quantize.h"

#include "scales.h"

namespace svexport {
namespace {

std::optional<at::Tensor> forward(const at::Tensor& x, double scale, const std::optional<at::Tensor>& scales,
                                  int64_t axis, bool restricted) {
  if (!fits_scales(x, scales, axis)) return {};
  const auto output = at::empty_like(x, x.options().dtype(at::kChar));
  const auto steps = float_scales(scales);
  return if_done(quantize(view(x), static_cast<float>(scale), view(steps), static_cast<int>(axis), restricted,
                          view(output), stream()),
                 output);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) { implement(m, "quantize", forward); }

}  // namespace svexport
