// The scales of quantize and dequantize as the launchers take them.
#pragma once

#include "binding.h"

namespace svexport {

// Whether there is one scale, or one per index of the axis.
inline bool fits_scales(const at::Tensor& x, const std::optional<at::Tensor>& scales, int64_t axis) {
  if (!scales) return true;
  const bool one = scales->numel() == 1 && scales->dim() <= 1;
  return scales->is_floating_point() &&
         (one || (axis >= 0 && axis < x.dim() && scales->dim() == 1 && scales->size(0) == x.size(axis)));
}

inline std::optional<at::Tensor> float_scales(const std::optional<at::Tensor>& scales) {
  return scales ? std::optional(scales->to(at::kFloat).contiguous()) : std::nullopt;
}

}  // namespace svexport
