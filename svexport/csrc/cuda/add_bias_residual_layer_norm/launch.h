// Bias, residual and layer norm in one: svexport/ops/add_bias_residual_layer_norm.py.
#pragma once

#include "tensor.h"

namespace svexport {

// s = x + bias + residual (+ extra) and y = layer_norm(s), where y is computed from s before it is rounded.
//
// x, residual, extra (data null: none): (*, D), all fp32, fp16 or bf16, last stride 1, other strides arbitrary.
// bias, weight, norm_bias: (D,), contiguous, each fp32, fp16 or bf16.
// y, s: (*, D), contiguous, the type of x.
cudaError_t add_bias_residual_layer_norm(const Tensor& x, const Tensor& bias, const Tensor& residual,
                                         const Tensor& weight, const Tensor& norm_bias, float eps, const Tensor& extra,
                                         const Tensor& y, const Tensor& s, int32_t tactic, cudaStream_t stream);

// Gradients. All are contiguous; those with null data are left out: dx, dresidual, dextra (*, D) of the type of x,
// dbias, dweight, dnorm_bias (D,) of any float type. dy, ds: (*, D), contiguous, the type of x.
// The order of the sums over rows depends on sizes, alignment and the device only.
cudaError_t add_bias_residual_layer_norm_backward(const Tensor& dy, const Tensor& ds, const Tensor& x,
                                                  const Tensor& bias, const Tensor& residual, const Tensor& weight,
                                                  float eps, const Tensor& extra, const Tensor& dx, const Tensor& dbias,
                                                  const Tensor& dresidual, const Tensor& dweight,
                                                  const Tensor& dnorm_bias, const Tensor& dextra, void* workspace,
                                                  int32_t tactic, cudaStream_t stream);

// Bytes of workspace; none if dbias, dweight and dnorm_bias are all left out.
size_t add_bias_residual_layer_norm_backward_workspace(const Tensor& x);

}  // namespace svexport
