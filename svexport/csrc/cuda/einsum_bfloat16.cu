#include "einsum_small.cuh"

namespace svexport::einsum {

template cudaError_t run_small<__nv_bfloat16>(const Tensor&, const Tensor&, const Tensor&, void*, bool, const Sums&, cudaStream_t);

}  // namespace svexport::einsum
