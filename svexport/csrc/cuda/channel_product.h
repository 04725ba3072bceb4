// Products of the channels of large tensors with a small matrix, as of a convolution with a kernel of 1 x 1:
// svexport/ops/einsum.py.
//
// x (N, C, S) and z (N, D, S) are large, with neighbours along S; y (C, D) is small and has any strides. z is the sum of
// x y over C. All are of one float type. Summed in float32, products of float32 as precise as float32 is; what is not
// finite is as it should be.
#pragma once

#include "tensor.h"

namespace svexport {

cudaError_t channel_product(const Tensor& x, const Tensor& y, const Tensor& z, cudaStream_t stream);

// y, the sum of x z over N and S. workspace: of so many bytes as there are for these tensors.
size_t channel_correlation_workspace(const Tensor& x, const Tensor& z);
cudaError_t channel_correlation(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, cudaStream_t stream);

}  // namespace svexport
