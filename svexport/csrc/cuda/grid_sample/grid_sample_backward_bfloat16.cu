#include "grid_sample/backward_run.cuh"

namespace svexport::backward {

SVEXPORT_RUN_BACKWARD(__nv_bfloat16)

}  // namespace svexport::backward
