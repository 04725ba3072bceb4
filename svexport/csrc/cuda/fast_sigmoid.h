// An approximate sigmoid: svexport/ops/fast_sigmoid.py.
#pragma once

#include "tensor.h"

namespace svexport {

// x, output: fp32, fp16 or bf16, computed in fp32; any strides, fastest if both have the same dense layout.
cudaError_t fast_sigmoid(const Tensor& x, const Tensor& output, cudaStream_t stream);

// output: the gradient of x, given grad, the gradient of fast_sigmoid(x); both have the type of x.
cudaError_t fast_sigmoid_backward(const Tensor& grad, const Tensor& x, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
