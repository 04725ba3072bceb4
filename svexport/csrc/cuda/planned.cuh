// Launches a kernel as its planner says.
#pragma once

#include "overlap.cuh"
#include "planner.h"

namespace svexport {

// Launches a kernel as planned; early: that of launch().
template <class... Parameters, class... Arguments>
cudaError_t launch_planned(void (*kernel)(Parameters...), const Launch& l, bool early, cudaStream_t stream,
                           const Arguments&... arguments) {
  const dim3 blocks(static_cast<unsigned>(l.blocks()), l.grid_y, l.grid_z), threads(l.block[0], l.block[1], l.block[2]);
  return svexport::launch(kernel, blocks, threads, l.shared_memory, stream, early, arguments...);
}

}  // namespace svexport
