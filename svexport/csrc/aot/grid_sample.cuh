#include "sample.cuh"

namespace svexport::aot {

// F: type of the image, T or int8.
template <class F, class G, class T, int R, int MODE, int PADDING, int ALIGN, class... Choice>
__device__ void grid_sample(const View<const F, R>& input, const View<const G, R>& grid, Int<MODE>, Int<PADDING>,
                            Int<ALIGN>, float scale, const View<T, R>& output, Choice... choice) {
  sample<F, T, G, R, MODE>(input, grid, Sampling{MODE, PADDING, ALIGN != 0}, scale, output, nullptr, choice...);
}

}  // namespace svexport::aot
