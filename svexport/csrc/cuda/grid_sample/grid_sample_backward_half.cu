#include "grid_sample/backward_run.cuh"

namespace svexport::backward {

template cudaError_t run_backward<__half>(const Tensor&, int64_t, const Tensor&, const Space&, const Tensor&,
                                       const Tensor&, int, bool, const Plan&, void*, cudaStream_t);

}  // namespace svexport::backward
