#include "einsum_large.cuh"

#include "einsum.h"

namespace svexport {

using namespace einsum;

cudaError_t einsum_large(const Tensor& x, const Tensor& y, const Tensor& z, cudaStream_t stream) {
  if (!small_enough(x) || !small_enough(z)) return cudaErrorNotSupported;
  const Division division = division_of(x, z);
  if (!division.fits) return cudaErrorNotSupported;
  return dispatch_float(x.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    if constexpr (sizeof(T) == 2) {
      if (division.columns == 7) return launch_large<T, 7>(x, y, z, division, stream);
    }
    return dispatch_columns(division.columns, [&](auto columns) {
      return launch_large<T, std::min(columns.value, 5)>(x, y, z, division, stream);
    });
  });
}

}  // namespace svexport
