// Levels are indexed at run time, so parameters cannot be in registers: a block has them all in shared memory. Known
// sizes are constants here, and so is nearly all of what one thread writes there.
#define SVEXPORT_BY &

#include "aot.cuh"
#include "camera_sample/queries.cuh"

namespace svexport::aot {

// F: type of the maps, T or int8. VECTOR: maps are channels-last, each group a multiple of 16 bytes. SHIFT: log2 of the
// number of threads of a row.
template <class F, class P, class M, class W, class O, class T, int L, int IN_IMAGE, int ACTIVATION, int S, bool LAST,
          bool VECTOR, int SHIFT>
__device__ void camera_sample(const List<View<const F, 5>, L>& features, const View<const P, 3>& reference_points,
                              const View<const M, 4>& lidar2img, const View<const W, 6>& weights,
                              const View<const O, 4>& offsets, const List<double, 2>& image_size,
                              const List<double, 6>& pc_range, float depth_eps, Int<IN_IMAGE>,
                              const List<double, 2>& uv_clamp, Int<ACTIVATION>, const List<double, S>& scales,
                              const View<T, 3>& output, std::bool_constant<LAST>, std::bool_constant<VECTOR>,
                              Int<SHIFT>) {
  if (output.product(0, 3) == 0) return;
  __shared__ alignas(16) char memory[sizeof(Params)];
  Params& p = *reinterpret_cast<Params*>(memory);
  if (threadIdx.x == 0) {
    CameraLevel levels[L];
    for (int l = 0; l < L; ++l) {
      levels[l].map = tensor(features.at[l], LAST);
      if (l < S) levels[l].scale = static_cast<float>(scales.at[l]);
    }
    CameraSampleOptions options{};
    for (int i = 0; i < 2; ++i) {
      options.image_size[i] = image_size.at[i];
      options.uv_clamp[i] = uv_clamp.at[i];
    }
    for (int i = 0; i < 6; ++i) options.pc_range[i] = pc_range.at[i];
    options.depth_eps = depth_eps;
    options.in_image = IN_IMAGE != 0;
    options.activation = ACTIVATION;
    const Tensor points = tensor(reference_points), matrices = tensor(lidar2img), logits = tensor(weights),
                 shifts = tensor(offsets);
    p.points = AnyFloat(points);
    p.lidar2img = AnyFloat(matrices);
    p.weights = AnyFloat(logits);
    p.offsets = AnyFloat(shifts);
    prepare(levels, L, points, matrices, logits, shifts, options, tensor(output), p);
    p.row_shift = SHIFT;
  }
  __syncthreads();
  camera_sample_kernel<T, VECTOR ? kVector<T> : 1, !VECTOR, std::is_same_v<F, int8_t>>(p);
}

}  // namespace svexport::aot
