// An approximate sigmoid: svexport/ops/fast_sigmoid.py.
#pragma once

#include "tensor.h"

namespace svexport {

// x, output: fp32, fp16 or bf16, computed in fp32; any strides, fastest if those of both are the same and dense.
cudaError_t fast_sigmoid(const Tensor& x, const Tensor& output, cudaStream_t stream);

// The gradient of x for that of the output, both of the type of x.
cudaError_t fast_sigmoid_backward(const Tensor& grad, const Tensor& x, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
