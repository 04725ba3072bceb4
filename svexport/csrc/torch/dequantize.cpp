#include "dequantize.h"

#include "scales.h"

namespace svexport {
namespace {

// By its number in ONNX.
std::optional<at::ScalarType> result_type(int64_t number) {
  switch (number) {
    case 1: return at::kFloat;
    case 10: return at::kHalf;
    case 16: return at::kBFloat16;
    default: return std::nullopt;
  }
}

std::optional<at::Tensor> forward(const at::Tensor& q, double scale, const std::optional<at::Tensor>& scales,
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

TORCH_LIBRARY_IMPL(svexport, CUDA, m) { implement(m, "dequantize", forward); }

}  // namespace svexport
