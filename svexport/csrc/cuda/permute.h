// A copy between tensors of any strides, for other launchers: a permutation is a view with its strides in another order.
#pragma once

#include "tensor.h"

namespace svexport {

// output[i] = input[i] for every index i. Same sizes and type, any type; strides as they come, also 0 in `input`.
cudaError_t permute(const Tensor& input, const Tensor& output, cudaStream_t stream);

}  // namespace svexport
