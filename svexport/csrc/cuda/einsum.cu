#include "einsum.h"

#include "einsum_large.cuh"
#include "einsum_many.cuh"
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

namespace {

// Whether the small tensor has so many sums that warps do better on their own.
bool by_many(const Sums& sums, const Many& many) { return many.time < 0.98 * sums.time; }

}  // namespace

size_t einsum_small_workspace(const Tensor& x, const Tensor& z) {
  if (!small_enough(x) || !small_enough(z)) return 0;
  const Sums sums = sums_of(x, z);
  const Many many = many_of(x, z);
  const int parts = by_many(sums, many) ? many.parts : sums.parts;
  return parts == 1 ? 0 : sizeof(float) * parts * x.sizes[0] * x.sizes[2] * x.sizes[4] * z.sizes[4];
}

cudaError_t einsum_small(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early,
                         cudaStream_t stream) {
  if (!small_enough(x) || !small_enough(z)) return cudaErrorNotSupported;
  const Sums sums = sums_of(x, z);
  const Many many = many_of(x, z);
  const bool is_many = by_many(sums, many);
  if (!is_many && sums.warps == 0) return cudaErrorNotSupported;
  return dispatch_columns(sums.columns, [&](auto columns) {
    return dispatch_float(x.dtype, [&](auto* p) {
      using T = element_t<decltype(p)>;
      return dispatch_sums<columns.value>(is_many ? many.tiles : sums.tiles, [&](auto tiles) {
        if (!is_many) return launch_small<T, tiles.value, columns.value>(x, z, y, workspace, early, sums, stream);
        if constexpr (tiles.value <= most_of_many(columns.value, sizeof(T))) {
          return launch_many<T, tiles.value, columns.value>(x, z, y, workspace, early, many, stream);
        }
        return cudaErrorNotSupported;
      });
    });
  });
}

}  // namespace svexport
