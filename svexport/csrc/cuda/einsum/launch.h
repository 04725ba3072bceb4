// Sums of products of three tensors that share dimensions in pairs, one of them small: svexport/ops/einsum.py.
#pragma once

#include "tensor.h"

namespace svexport {

// Bytes of scratch that are enough for einsum_views by any tactic.
size_t einsum_views_workspace(const Tensor& x, const Tensor& y, const Tensor& z, bool sums);

// x (S, O, K, T, V) and z (S, O, M, T, W) are large, y (S, K, V, M, W) is small. If `sums`, y = the sum of x z over O
// and T; else z = the sum of x y over K and V. All have one float type. y has any strides; x and z are contiguous along
// V and W, and their rows along T have no gaps. Sums are float32; products of float32 are as precise as float32 is;
// infinities and NaNs propagate. early: the previous kernel is one of these without `sums` and this one reads nothing
// that it writes, so both may run at once.
cudaError_t einsum_views(const Tensor& x, const Tensor& y, const Tensor& z, bool sums, int32_t tactic, void* workspace,
                         bool early, cudaStream_t stream);

}  // namespace svexport
