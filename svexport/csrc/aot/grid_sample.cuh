#include "sample.cuh"

namespace svexport::aot {

template <class T, class G, int R, int MODE, int PADDING, int ALIGN, class... Choice>
__device__ void grid_sample(const View<const T, R>& input, const View<const G, R>& grid, Int<MODE>, Int<PADDING>,
                            Int<ALIGN>, const View<T, R>& output, Choice... choice) {
  sample<T, G, R, MODE>(input, grid, Sampling{MODE, PADDING, ALIGN != 0}, output, nullptr, choice...);
}

}  // namespace svexport::aot
