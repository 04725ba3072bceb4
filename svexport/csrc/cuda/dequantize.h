// The inverse of symmetric int8 quantization: svexport/ops/dequantize.py.
#pragma once

#include "tensor.h"

namespace svexport {

// q * scale in fp32. q: int8; output: fp32, fp16 or bf16, the shape of q; any strides, fastest if those of both are the
// same and dense. scales (data null: `scale`): fp32, one element, or one per index of `axis` of q.
cudaError_t dequantize(const Tensor& q, float scale, const Tensor& scales, int axis, const Tensor& output,
                       cudaStream_t stream);

}  // namespace svexport
