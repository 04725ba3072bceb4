// What grid_sample and bilinear_sample share.
#include "aot.cuh"
#include "grid_sample/points.cuh"
#include "grid_sample/vector.cuh"

namespace svexport::aot {

using namespace forward;

template <int MODE, int R>
constexpr int kTaps = MODE == kNearest ? 1 : MODE == kBicubic ? 16 : R == 4 ? 4 : 8;

// stride: between pixels of a row.
template <class T, class G, int R>
__device__ Space space(const View<const T, R>& input, const View<const G, R>& grid, Sampling sampling, int stride) {
  constexpr int AXES = R - 2;
  Space s(untyped(grid));
  s.axes = AXES;
  s.describe(sampling);
  s.points = static_cast<int>(grid.product(1, R - 1));
  UNROLL for (int a = 0; a < AXES; ++a) {
    s.describe(a, input.sizes[R - 1 - a], stride);
    stride *= s.size[a];
  }
  s.grid_image = static_cast<int64_t>(s.points) * AXES;
  s.grid_coordinate = 1;
  s.grid_stride[AXES - 1] = AXES;  // all points are one row
  s.grid_pairs = AXES == 2 && grid.aligned(2 * sizeof(G));
  return s;
}

// Runs the planner's choice. WIDTH 0: the vector kernel, for channels-last input and output with C a multiple of 16
// bytes; else the point kernel, with WIDTH channels at once. The compiler knows what a step of int8 is worth.
template <class F, class T, class G, int R, int MODE, int WIDTH, int CHUNK, int SHIFT, int STEPS>
__device__ void sample(const View<const F, R>& input, const View<const G, R>& grid, Sampling sampling, float scale,
                       const View<T, R>& output, T* mask, Int<WIDTH>, Int<CHUNK>, Int<SHIFT>, Int<STEPS>) {
  constexpr int TAPS = kTaps<MODE, R>;
  const int batch = input.sizes[0], channels = input.sizes[1], pixels = static_cast<int>(input.product(2, R));
  const Space s = space(input, grid, sampling, WIDTH == 0 ? channels : 1);
  if (s.points == 0) return;
  const int64_t image = static_cast<int64_t>(pixels) * channels, results = static_cast<int64_t>(s.points) * channels;
  if constexpr (WIDTH == 0) {
    const Output<T> to{output.data, results, 1, channels, mask};
    vector_kernel<T, TAPS>(s, input.data, image, to, batch, channels, SHIFT, STEPS, 0, nullptr);
  } else {
    const Output<T> to{output.data, results, s.points, 1, mask};
    points_kernel<F, T, TAPS, kAnyPadding, WIDTH>(s, Image<F>{input.data, image, pixels, 0, scale}, to, batch, channels,
                                                  CHUNK, SHIFT, Divider(s.points), true);
  }
}

}  // namespace svexport::aot
