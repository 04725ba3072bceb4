#include "camera_sample/launch.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>

#include "binding.h"

namespace svexport {
namespace {

std::vector<CameraLevel> levels_of(at::TensorList maps, at::ArrayRef<double> scales) {
  std::vector<CameraLevel> levels;
  for (size_t i = 0; i < maps.size(); ++i) levels.push_back({view(maps[i]), static_cast<float>(scales[i])});
  return levels;
}

std::optional<at::Tensor> camera_sample_torch(at::TensorList features, const at::Tensor& reference_points,
                                              const at::Tensor& lidar2img, const at::Tensor& weights,
                                              const at::Tensor& offsets, at::IntArrayRef image_size,
                                              at::ArrayRef<double> pc_range, double depth_eps, bool in_image,
                                              at::ArrayRef<double> uv_clamp, int64_t activation,
                                              at::ArrayRef<double> scales) {
  if (scales.size() != features.size()) return {};
  const auto levels = levels_of(features, scales);
  const auto& like = features[0].is_floating_point() ? features[0] : weights;
  const auto output = fresh({weights.size(0), weights.size(1), features[0].size(2)}, like);
  return if_done(camera_sample(levels.data(), static_cast<int>(levels.size()), view(reference_points), view(lidar2img),
                               view(weights.contiguous()), view(offsets),
                               CameraSampleOptions(image_size, pc_range, depth_eps, in_image, uv_clamp, activation),
                               view(output), forced_tactic("camera_sample"), stream()),
                 output);
}

Wanted camera_sample_backward_torch(at::TensorList grads, at::TensorList features, const at::Tensor& reference_points,
                                    const at::Tensor& lidar2img, const at::Tensor& weights, const at::Tensor& offsets,
                                    at::IntArrayRef image_size, at::ArrayRef<double> pc_range, double depth_eps,
                                    bool in_image, at::ArrayRef<double> uv_clamp, int64_t activation,
                                    at::ArrayRef<double> scales, const c10::List<bool>& needs_grad) {
  if (scales.size() != features.size() || features.size() > kMaxCameraLevels) return {};
  const auto levels = levels_of(features, scales);
  size_t next = 0;
  std::vector<at::Tensor> results;
  const auto gradient = [&](const at::Tensor& of, at::IntArrayRef sizes) {
    if (!needs_grad[next++]) return Tensor{};
    results.push_back(fresh(sizes, of));
    return view(results.back());
  };
  CameraSampleGradients gradients;
  for (size_t i = 0; i < levels.size(); ++i) gradients.maps[i] = gradient(features[i], features[i].sizes());
  gradients.reference_points = gradient(reference_points, reference_points.sizes());
  gradients.lidar2img = gradient(lidar2img, lidar2img.sizes());
  gradients.weights = gradient(weights, weights.sizes());
  gradients.offsets = gradient(offsets, {weights.size(0), weights.size(1), weights.size(3), 3});
  const auto logits = weights.contiguous();
  const int count = static_cast<int>(levels.size());
  const auto scratch = workspace(camera_sample_backward_workspace(levels.data(), count, view(logits)), grads[0]);
  if (!done(camera_sample_backward(levels.data(), count, view(reference_points), view(lidar2img), view(logits),
                                   view(offsets),
                                   CameraSampleOptions(image_size, pc_range, depth_eps, in_image, uv_clamp, activation),
                                   view(grads[0].contiguous()), gradients,
                                   at::globalContext().deterministicAlgorithms(), scratch.data_ptr(), stream()))) {
    return {};
  }
  if (gradients.offsets.data && results.back().sizes() != offsets.sizes()) {  // the offsets were broadcast
    results.back() = at::sum_to(results.back(), offsets.sizes()).contiguous();
  }
  return results;
}

// For tests: what the launcher can do but the op has no schema for, pooled levels and int8 in TensorRT's formats.
void camera_sample_levels(at::TensorList maps, at::ArrayRef<double> scales, const c10::List<bool>& pool,
                          const at::Tensor& reference_points, const at::Tensor& lidar2img, const at::Tensor& weights,
                          const at::Tensor& offsets, at::IntArrayRef image_size, at::ArrayRef<double> pc_range,
                          double depth_eps, bool in_image, at::ArrayRef<double> uv_clamp, int64_t activation,
                          const at::Tensor& output) {
  const c10::cuda::CUDAGuard guard(output.device());
  auto levels = levels_of(maps, scales);
  for (size_t i = 0; i < levels.size(); ++i) levels[i].pool = pool[i];
  TORCH_CHECK(done(camera_sample(levels.data(), static_cast<int>(levels.size()), view(reference_points),
                                 view(lidar2img), view(weights), view(offsets),
                                 CameraSampleOptions(image_size, pc_range, depth_eps, in_image, uv_clamp, activation),
                                 view(output), forced_tactic("camera_sample"), stream())));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(svexport_internal, m) {
  m.def("camera_sample_levels(Tensor[] maps, float[] scales, bool[] pool, Tensor reference_points, Tensor lidar2img, "
        "Tensor weights, Tensor offsets, int[] image_size, float[] pc_range, float depth_eps, bool in_image, "
        "float[] uv_clamp, int activation, Tensor(a!) output) -> ()");
}

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "camera_sample", camera_sample_torch);
  implement(m, "camera_sample_backward", camera_sample_backward_torch);
}

TORCH_LIBRARY_IMPL(svexport_internal, CUDA, m) { m.impl("camera_sample_levels", &camera_sample_levels); }

}  // namespace svexport
