#include "sample.cuh"

namespace svexport::aot {

// F: of the image, T or int8.
template <class F, class G, class T, int R, int MODE, int PADDING, int ALIGN, class... Choice>
__device__ void grid_sample(const View<const F, R>& input, const View<const G, R>& grid, Int<MODE>, Int<PADDING>,
                            Int<ALIGN>, float scale, const View<T, R>& output, Choice... choice) {
  const Sampling sampling{MODE, PADDING, ALIGN != 0};
  if constexpr (std::is_same_v<F, int8_t>) {
    sample<T, G, R, MODE>(input, grid, sampling, scale, output, choice...);
  } else {
    sample<T, G, R, MODE>(input, grid, sampling, output, nullptr, choice...);
  }
}

}  // namespace svexport::aot
