#include "grid_sample/backward_run.cuh"

template cudaError_t svexport::backward::run_backward<svexport::Narrow>(const Call&);
