#include "einsum.h"

#include "einsum_large.cuh"
#include "einsum_small.cuh"

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

size_t einsum_small_workspace(const Tensor& x, const Tensor& z) {
  if (!small_enough(x) || !small_enough(z)) return 0;
  const Sums sums = sums_of(x, z);
  return sums.parts == 1 ? 0 : sizeof(float) * sums.parts * x.sizes[0] * x.sizes[2] * x.sizes[4] * z.sizes[4];
}

cudaError_t einsum_small(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early,
                         cudaStream_t stream) {
  if (!small_enough(x) || !small_enough(z)) return cudaErrorNotSupported;
  const Sums sums = sums_of(x, z);
  if (sums.warps == 0) return cudaErrorNotSupported;
  return dispatch_columns(sums.columns, [&](auto columns) {
    return dispatch_float(x.dtype, [&](auto* p) {
      return dispatch_sums<columns.value>(sums.tiles, [&](auto tiles) {
        return launch_small<element_t<decltype(p)>, tiles.value, columns.value>(x, z, y, workspace, early, sums, stream);
      });
    });
  });
}

}  // namespace svexport
