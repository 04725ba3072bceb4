#include "einsum_many.cuh"

namespace svexport::einsum {

cudaError_t run_many(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early, const Many& many,
                     cudaStream_t stream) {
  return dispatch_columns(many.columns, [&](auto columns) {
    return dispatch_float(x.dtype, [&](auto* p) {
      using T = element_t<decltype(p)>;
      return dispatch_sums<columns.value>(many.tiles, [&](auto tiles) {
        if constexpr (tiles.value <= most_of_many(columns.value, sizeof(T))) {
          return launch_many<T, tiles.value, columns.value>(x, z, y, workspace, early, many, stream);
        }
        return cudaErrorNotSupported;
      });
    });
  });
}

}  // namespace svexport::einsum
