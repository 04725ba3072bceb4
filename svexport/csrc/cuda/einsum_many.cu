#include "einsum_many.cuh"

namespace svexport::einsum {

template cudaError_t run_many<float>(const Tensor&, const Tensor&, const Tensor&, void*, bool, const Many&, cudaStream_t);

}  // namespace svexport::einsum
