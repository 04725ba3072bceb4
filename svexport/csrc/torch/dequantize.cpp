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

at::Tensor forward(const at::Tensor& q, double scale, const std::optional<at::Tensor>& scales, int64_t axis,
                   int64_t dtype) {
  const c10::cuda::CUDAGuard guard(q.device());
  const auto type = result_type(dtype);
  if (type && has_dtype(q) && fits_scales(q, scales, axis)) {
    const auto output = at::empty_like(q, q.options().dtype(*type));
    const auto steps = float_scales(scales);
    if (done(dequantize(view(q), static_cast<float>(scale), view(steps), static_cast<int>(axis), view(output),
                        stream()))) {
      return output;
    }
  }
  return reference("dequantize", forward, q, scale, scales, axis, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) { m.impl("dequantize", &forward); }

}  // namespace svexport
