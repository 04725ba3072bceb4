// Sums of products of three tensors that share dimensions in pairs, one of them small: svexport/ops/einsum.py.
//
// x (S, O, K, T, V) and z (S, O, M, T, W) are large, y (S, K, V, M, W) is small; y = the sum of x z over O and T, z that of
// x y over K and V. All are of one float type; y has any strides, x and z have neighbours along V and W and along T rows
// without gaps. Summed in float32, products of float32 as precise as float32 is; what is not finite is as it should be.
#pragma once

#include "tensor.h"

namespace svexport {

cudaError_t einsum_large(const Tensor& x, const Tensor& y, const Tensor& z, cudaStream_t stream);

// Of y, from x and z, of which M must be 1. workspace: of so many bytes as there are for these tensors. early: the
// kernel before is an einsum_large of which this one needs nothing; they may run at once.
size_t einsum_small_workspace(const Tensor& x, const Tensor& z);
cudaError_t einsum_small(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early,
                         cudaStream_t stream);

}  // namespace svexport
