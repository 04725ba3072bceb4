// Copies between tensors of any strides, for other launchers. A permutation is a view with its strides reordered.
#pragma once

#include "tensor.h"

namespace svexport {

// output[i] = input[i] for every index i. Both have the same sizes and type (any), and any strides, in `input` also 0.
cudaError_t permute(const Tensor& input, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
