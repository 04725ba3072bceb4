#include "einsum.h"

#include "einsum_many.cuh"
#include "einsum_small.cuh"

namespace svexport {

using namespace einsum;

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
  return dispatch_float(x.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    if (by_many(sums, many)) return run_many<T>(x, z, y, workspace, early, many, stream);
    if (sums.warps == 0) return cudaErrorNotSupported;
    return run_small<T>(x, z, y, workspace, early, sums, stream);
  });
}

}  // namespace svexport
