#include "grid_sample/backward_run.cuh"

namespace svexport::backward {

SVEXPORT_RUN_BACKWARD(float)

}  // namespace svexport::backward
