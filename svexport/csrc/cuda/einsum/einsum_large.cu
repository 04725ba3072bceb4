#include "einsum/large.cuh"

namespace svexport::einsum {

cudaError_t run_large(const Call& call) {
  return dispatch_float(call.x.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    switch (call.tactic.columns) {
      case 2: return launch_large<T, 2>(call);
      case 3: return launch_large<T, 3>(call);
      case 4: return launch_large<T, 4>(call);
      case 5: return launch_large<T, 5>(call);
      default: break;
    }
    if constexpr (sizeof(T) == 2) return launch_large<T, 7>(call);
    return cudaErrorNotSupported;
  });
}

}  // namespace svexport::einsum
