// Builds the planner's problem of camera_sample from tensors. Host C++.
#pragma once

#include "camera_sample/launch.h"
#include "camera_sample/tactics.h"
#include "gpu.h"

namespace svexport::camera {

constexpr int kPlaneLevels = 4, kPlaneCams = 16;  // the most that the kernel of planes takes
constexpr int64_t kPlaneSize = 1 << 17;           // its largest height and width of a level

// Whether one aligned access can read every 16 bytes of channels, and these lie in one group. item_size: the output's.
inline bool has_vectors(const CameraLevel* levels, int num_levels, int64_t channels, int64_t groups, int64_t item_size) {
  const int64_t n = 16 / item_size;
  if (channels % n != 0 || groups < 1 || channels / groups % n != 0) return false;
  for (int l = 0; l < num_levels; ++l) {
    const Tensor& map = levels[l].map;
    const bool blocks = map.rank == 6;
    if (!map.aligned(blocks ? 5 : 2, n * map.item_size()) || (blocks && map.sizes[5] < n)) return false;
  }
  return true;
}

// Whether the kernel of planes can run: among other things, it counts the elements of an image in 32 bits.
inline bool has_planes(const CameraLevel* levels, int num_levels, const Tensor& reference_points, const Tensor& weights,
                       const Tensor& offsets, const CameraSampleOptions& options, const Tensor& output) {
  const int64_t channels = output.sizes[2], groups = weights.sizes[5];
  const bool even = groups <= 1 || channels / groups % kPlaneChannels == 0;
  if (options.activation == 1 || !options.in_image || num_levels > kPlaneLevels || weights.sizes[2] > kPlaneCams ||
      weights.dtype != output.dtype || !even || !(static_cast<float>(options.depth_eps) >= 0) ||
      !(options.image_size[0] > 0) || !(options.image_size[1] > 0)) {
    return false;
  }
  const auto reaches = [](const Tensor& t) {
    int64_t reach = 0;
    for (int i = 1; i < t.rank; ++i) reach += (t.sizes[i] - 1) * t.strides[i];
    return reach > INT32_MAX;
  };
  if (reaches(weights) || reaches(reference_points) || (offsets.data && reaches(offsets))) return false;
  for (int l = 0; l < num_levels; ++l) {
    const Tensor& map = levels[l].map;
    if (map.dtype == DType::kInt8 || levels[l].pool || (map.strides[4] != 1 && map.sizes[4] != 1)) return false;
    const int64_t reach = map.sizes[1] * map.strides[1] + (map.sizes[3] + 1) * map.strides[3] + map.sizes[4];
    if (reach > INT32_MAX || map.sizes[3] > kPlaneSize || map.sizes[4] > kPlaneSize) return false;
  }
  return true;
}

inline Problem problem_of(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
                          const Tensor& weights, const Tensor& offsets, const CameraSampleOptions& options,
                          const Tensor& output) {
  Problem p;
  p.images = output.sizes[0], p.queries = output.sizes[1], p.channels = output.sizes[2];
  p.points = weights.sizes[3], p.levels = num_levels;
  p.item_size = static_cast<int32_t>(output.item_size());
  p.vectors = has_vectors(levels, num_levels, p.channels, weights.sizes[5], p.item_size);
  p.planes = has_planes(levels, num_levels, reference_points, weights, offsets, options, output);
  return p;
}

}  // namespace svexport::camera
