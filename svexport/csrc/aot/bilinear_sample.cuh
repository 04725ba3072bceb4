#include "sample.cuh"

namespace svexport::aot {

template <class T, class G, class... Choice>
__device__ void bilinear_sample(const View<const T, 4>& image, const View<const G, 4>& grid, const View<T, 4>& output,
                                const View<T, 4>& mask, Choice... choice) {
  sample<T, T, G, 4, kBilinear>(image, grid, Sampling{kBilinear, kPixels, true}, 1, output, mask.data, choice...);
}

}  // namespace svexport::aot
