#include "einsum/small.cuh"

template cudaError_t svexport::einsum::run_small<svexport::Narrow>(const Call&);
