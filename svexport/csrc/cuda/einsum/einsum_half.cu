#include "einsum/small.cuh"

namespace svexport::einsum {

template cudaError_t run_small<__half>(const Call&);

}  // namespace svexport::einsum
