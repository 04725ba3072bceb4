#include "einsum/small.cuh"

template cudaError_t svexport::einsum::run_small<__nv_bfloat16>(const Call&);
