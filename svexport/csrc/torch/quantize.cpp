#include "quantize.h"

#include "binding.h"

namespace svexport {
namespace {

// Whether scales are absent, one number, or one number per index of the axis.
bool fits_scales(const at::Tensor& x, const std::optional<at::Tensor>& scales, int64_t axis) {
  if (!scales) return true;
  const bool one = scales->numel() == 1 && scales->dim() <= 1;
  return scales->is_floating_point() &&
         (one || (axis >= 0 && axis < x.dim() && scales->dim() == 1 && scales->size(0) == x.size(axis)));
}

std::optional<at::Tensor> float_scales(const std::optional<at::Tensor>& scales) {
  return scales ? std::optional(scales->to(at::kFloat).contiguous()) : std::nullopt;
}

std::optional<at::Tensor> quantize_torch(const at::Tensor& x, double scale, const std::optional<at::Tensor>& scales,
                                         int64_t axis, bool restricted) {
  if (!fits_scales(x, scales, axis)) return {};
  const auto output = at::empty_like(x, x.options().dtype(at::kChar));
  const auto steps = float_scales(scales);
  return if_done(quantize(view(x), static_cast<float>(scale), view(steps), static_cast<int>(axis), restricted,
                          view(output), stream()),
                 output);
}

// The torch type of a type's number in ONNX.
std::optional<at::ScalarType> result_type(int64_t number) {
  switch (number) {
    case 1: return at::kFloat;
    case 10: return at::kHalf;
    case 16: return at::kBFloat16;
    default: return std::nullopt;
  }
}

std::optional<at::Tensor> dequantize_torch(const at::Tensor& q, double scale, const std::optional<at::Tensor>& scales,
                                           int64_t axis, int64_t dtype) {
  const auto type = result_type(dtype);
  if (!type || !fits_scales(q, scales, axis)) return {};
  const auto output = at::empty_like(q, q.options().dtype(*type));
  const auto steps = float_scales(scales);
  return if_done(dequantize(view(q), static_cast<float>(scale), view(steps), static_cast<int>(axis), view(output),
                            stream()),
                 output);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "quantize", quantize_torch);
  implement(m, "dequantize", dequantize_torch);
}

}  // namespace svexport
