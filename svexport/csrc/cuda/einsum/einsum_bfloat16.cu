#include "einsum/small.cuh"

namespace svexport::einsum {

template cudaError_t run_small<__nv_bfloat16>(const Call&);

}  // namespace svexport::einsum
