#include "grid_sample/points.cuh"
#include "grid_sample/tensors.h"
#include "planned.cuh"

namespace svexport {

using namespace forward;

cudaError_t sample_int8(const Tensor& input, const Tensor& grid, const Tensor& output, const Sampling& sampling,
                        float scale, int32_t forced, cudaStream_t stream) {
  if (output.numel() == 0) return cudaSuccess;
  const bool blocks = input.rank == 5 && grid.rank == 4;
  const int64_t of_block = blocks ? input.sizes[4] : 1;
  const Tensor image = sampler::image_of(input, grid, output);
  Space s(grid);
  int64_t point = 1;
  if (image.sizes[0] > INT32_MAX || image.sizes[1] > INT32_MAX || !is_float(grid) ||
      !Space::of(image, grid, sampling, s) ||
      (blocks && ((of_block != 32 && of_block != 4) || input.strides[4] != 1)) ||
      !evenly_spaced(output, 2, output.rank - 1, point)) {
    return cudaErrorNotSupported;
  }
  const Image<int8_t> codes{static_cast<const int8_t*>(input.data), input.strides[0], input.strides[1],
                            of_block == 32 ? 5 : of_block == 4 ? 2 : 0, scale};
  const Gpu gpu = current_gpu();
  const sampler::Problem problem = sampler::problem_of(input, grid, output, point, sampling.mode, false);
  const sampler::Tactic tactic = choose(problem, gpu, forced);
  const bool points_inside = output.strides[1] != 1;
  const Divider inner(points_inside ? s.points : ceil_of(problem.channels, tactic.chunk));
  return dispatch_float(output.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Output<T> to{static_cast<T*>(output.data), output.strides[0], output.strides[1], point, nullptr};
    const auto kernel = with_taps(problem.taps, [&](auto taps) {
      constexpr int TAPS = taps.value;
      if constexpr (TAPS == 4) {
        if (tactic.width == 16 && s.padding == kZeros) return points_kernel<int8_t, T, TAPS, kZeros, 16>;
      }
      return tactic.width == 16  ? points_kernel<int8_t, T, TAPS, kAnyPadding, 16>
             : tactic.width == 4 ? points_kernel<int8_t, T, TAPS, kAnyPadding, 4>
                                 : points_kernel<int8_t, T, TAPS, kAnyPadding, 1>;
    });
    return launch_planned(kernel, sampler::launch(problem, tactic, gpu), false, stream, s, codes, to,
                          static_cast<int>(problem.images), static_cast<int>(problem.channels), tactic.chunk,
                          tactic.shift, inner, points_inside);
  });
}

}  // namespace svexport
