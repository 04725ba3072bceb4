// Sums of products of three tensors that share dimensions in pairs, one of them small: svexport/ops/einsum.py.
#pragma once

#include "tensor.h"

namespace svexport {

// Bytes of scratch for einsum_views by any tactic.
size_t einsum_views_workspace(const Tensor& x, const Tensor& y, const Tensor& z, bool sums);

// x (S, O, K, T, V) and z (S, O, M, T, W) are large, y (S, K, V, M, W) is small. If `sums`, y = the sum of x z over O and T;
// else z = that of x y over K and V. All are of one float type; y has any strides, x and z have neighbours along V and W
// and along T rows without gaps. Summed in float32, products of float32 as precise as float32 is; what is not finite is
// as it should be. early: the kernel before is one of these and not `sums`, and this one needs nothing of it; they may run
// at once.
cudaError_t einsum_views(const Tensor& x, const Tensor& y, const Tensor& z, bool sums, int32_t tactic, void* workspace,
                         bool early, cudaStream_t stream);

}  // namespace svexport
