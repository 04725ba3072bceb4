#include "einsum/large.cuh"

namespace svexport::einsum {

cudaError_t run_large(const Call& call) {
  return dispatch_float(call.x.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const auto with = [&](auto columns) { return launch_large<T, columns.value>(call); };
    if constexpr (sizeof(T) == 4) {
      return with_constant<2, 3, 4, 5>(call.tactic.columns, with);
    } else {
      return with_constant<2, 3, 4, 5, 7>(call.tactic.columns, with);
    }
  });
}

}  // namespace svexport::einsum
