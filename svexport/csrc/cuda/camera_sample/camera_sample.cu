#include <algorithm>

#include "camera_sample/planes.cuh"
#include "camera_sample/queries.cuh"
#include "planned.cuh"

namespace svexport {
namespace {

// The arguments of the kernel of planes.
Planes planes_of(const Problem& problem, const Tactic& tactic, const Gpu& gpu, const Tensor& weights,
                 const Tensor& output, const Params& p) {
  Planes r{};
  const int64_t size = problem.item_size;
  r.queries = static_cast<int>(problem.queries);
  r.at_once = static_cast<int>(Parts(problem, gpu).at_once);
  r.lane_shift = tactic.row_shift;
  r.bands = kPlaneBands / p.image_height;
  r.bounds[0] = p.image_width * 1.000001f;
  r.bounds[1] = p.image_height * 1.000001f;
  const bool vectors = p.groups == 1 && (p.weights_stride[2] == 1 || p.samples == 1) && p.samples * size % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(weights.data) % 16 == 0 && p.weights_stride[0] * size % 16 == 0 &&
                       (p.weights_stride[1] == p.samples || r.queries == 1);
  r.vectors = vectors ? static_cast<int>(p.samples * size / 16) : 0;
  r.floats = p.points.dtype == DType::kFloat32 && (!p.has_offsets || p.offsets.dtype == DType::kFloat32);
  const auto aligned = [&](int64_t stride) { return stride % kPlaneLevels == 0; };
  r.fours = p.num_levels == kPlaneLevels && p.weights_stride[2] == 1 && aligned(p.weights_stride[0]) &&
            aligned(p.weights_stride[1]) && (p.groups == 1 || aligned(p.weights_stride[3])) &&
            reinterpret_cast<uintptr_t>(weights.data) % (kPlaneLevels * size) == 0;
  r.pairs = p.channels % 2 == 0 && output.aligned(2, 2 * size);
  return r;
}

}  // namespace

cudaError_t camera_sample(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
                          const Tensor& lidar2img, const Tensor& weights, const Tensor& offsets,
                          const CameraSampleOptions& options, const Tensor& output, int32_t tactic, cudaStream_t stream) {
  Params p{AnyFloat(reference_points), AnyFloat(lidar2img), AnyFloat(weights), AnyFloat(offsets)};
  const cudaError_t status =
      prepare(levels, num_levels, reference_points, lidar2img, weights, offsets, options, output, p);
  if (status != cudaSuccess || output.numel() == 0) return status;
  const Problem problem = problem_of(levels, num_levels, reference_points, weights, offsets, options, output);
  const Gpu gpu = current_gpu();
  const Tactic t = choose(problem, gpu, tactic);
  const Launch l = launch(problem, t, gpu);
  p.row_shift = t.row_shift;
  bool others = false, codes = true;
  for (int i = 0; i < num_levels; ++i) {
    const Level& level = p.levels[i];
    others |= level.int8 || level.pool;
    codes &= level.int8 && !level.pool && level.block_shift == p.levels[0].block_shift;
  }
  return dispatch_float(output.dtype, [&](auto* e) {
    using T = element_t<decltype(e)>;
    if (t.kernel == Kernel::kPlanes) {
      const Planes planes = planes_of(problem, t, gpu, weights, output, p);
      return launch_planned(camera_sample_planes_kernel<T>, l, false, stream, p, planes);
    }
    const bool vectors = t.kernel == Kernel::kVectors;
    const auto of_maps = vectors ? camera_sample_kernel<T, kVector<T>, false, false> : camera_sample_kernel<T, 1, true, false>;
    const auto of_any = vectors ? camera_sample_kernel<T, kVector<T>, false, true> : camera_sample_kernel<T, 1, true, true>;
    const auto of_codes = camera_sample_kernel<T, kVector<T>, false, false, int8_t>;
    return launch_planned(vectors && codes ? of_codes : others ? of_any : of_maps, l, false, stream, p);
  });
}

}  // namespace svexport
