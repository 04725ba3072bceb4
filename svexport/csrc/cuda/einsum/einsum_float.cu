#include "einsum/small.cuh"

namespace svexport::einsum {

template cudaError_t run_small<float>(const Call&);

}  // namespace svexport::einsum
