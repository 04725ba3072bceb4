// Symmetric int8 quantization and its inverse: svexport/ops/quantize.py, dequantize.py. Any strides, fastest if both
// tensors have the same dense layout. scales (null data: use `scale`): fp32, one element, or one per index of `axis`.
#pragma once

#include "tensor.h"

namespace svexport {

// output = x / scale, correctly rounded in fp32, rounded to the nearest integer (half to even), clamped to [-127, 127]
// if `restricted`, else to [-128, 127]. x: fp32, fp16 or bf16; output: int8, the shape of x.
cudaError_t quantize(const Tensor& x, float scale, const Tensor& scales, int axis, bool restricted,
                     const Tensor& output, cudaStream_t stream);

// output = q * scale, in fp32. q: int8; output: fp32, fp16 or bf16, the shape of q.
cudaError_t dequantize(const Tensor& q, float scale, const Tensor& scales, int axis, const Tensor& output,
                       cudaStream_t stream);

}  // namespace svexport
