#include "space_to_depth.h"

#include "binding.h"

namespace svexport {
namespace {

at::Tensor space_to_depth_torch(const at::Tensor& x) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (has_dtype(x)) {
    const auto output = at::empty({x.size(0), 4 * x.size(1), x.size(2) / 2, x.size(3) / 2},
                                  x.options().memory_format(at::MemoryFormat::Contiguous));
    if (done(space_to_depth(view(x), view(output), stream()))) return output;
  }
  return reference("space_to_depth", space_to_depth_torch, x);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) { m.impl("space_to_depth", &space_to_depth_torch); }

}  // namespace svexport
