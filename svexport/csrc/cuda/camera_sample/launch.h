// Samples features of several cameras at points in space, weights and sums them: svexport/ops/camera_sample.py.
#pragma once

#include <algorithm>
#include <iterator>

#include "tensor.h"

namespace svexport {

constexpr int kMaxCameraLevels = 8;

// One level of the feature pyramid. The levels of a call may differ in type and layout.
struct CameraLevel {
  // (B, cams, C, H, W), of the output's type, any strides. NCHW and channels-last are read without a copy; fastest if
  // all levels are channels-last, 16-byte aligned, and have a multiple of 16 bytes of channels per group. Or int8: (B,
  // cams, C, H, W) likewise, or CHW32 or CHW4, (B, cams, ceil(C/V), H, W, V) for V = 32 or 4.
  Tensor map;
  float scale = 1;    // value of one step of an int8 map, > 0
  bool pool = false;  // the level is the 2x2 maximum of the map, (H/2, W/2), taken while it is read
};

struct CameraSampleOptions {
  double image_size[2];  // height, width
  double pc_range[6];    // x, y, z from; x, y, z to
  double depth_eps;
  bool in_image;         // true: only points within the image count; false: u and v are clamped
  double uv_clamp[2];    // low, high
  int32_t activation;    // of weights; 0: sigmoid, 1: softmax over cams, points and levels in each group

  CameraSampleOptions() = default;
  // From the attributes of a node: lists of as many numbers, of any type.
  template <class Sizes, class Numbers>
  CameraSampleOptions(const Sizes& image, const Numbers& range, double eps, bool inside, const Numbers& clamp, int64_t how)
      : depth_eps(eps), in_image(inside), activation(static_cast<int32_t>(how)) {
    std::copy(std::begin(image), std::end(image), image_size);
    std::copy(std::begin(range), std::end(range), pc_range);
    std::copy(std::begin(clamp), std::end(clamp), uv_clamp);
  }
};

// reference_points: (B, Q, 3); lidar2img: (B, cams, 4, 4); any float type and strides
// weights: (B, Q, cams, points, L, G), any float type; cams, points and levels must collapse into one dimension
// offsets: (B, Q, points, 3), any float type and strides, or dimensions of 1 that broadcast; null data: none
// output: (B, Q, C), float32, float16 or bfloat16, any strides
// Not supported: B above 65535, a stride of C, H or W above 2^30 bytes, no camera or no point.
cudaError_t camera_sample(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
                          const Tensor& lidar2img, const Tensor& weights, const Tensor& offsets,
                          const CameraSampleOptions& options, const Tensor& output, int32_t tactic,
                          cudaStream_t stream);

// Each is contiguous and has the type of the tensor that it belongs to; null data: not wanted.
struct CameraSampleGradients {
  Tensor maps[kMaxCameraLevels];  // (B, cams, C, H, W)
  Tensor reference_points;        // (B, Q, 3)
  Tensor lidar2img;               // (B, cams, 4, 4)
  Tensor weights;                 // (B, Q, cams, points, L, G)
  Tensor offsets;                 // (B, Q, points, 3), also where the offsets themselves broadcast
};

// Bytes of scratch memory, whichever gradients are wanted.
size_t camera_sample_backward_workspace(const CameraLevel* levels, int num_levels, const Tensor& weights);

// Supports float maps that are not pooled. grad_output: (B, Q, C), of the maps' type, contiguous. Gradients need not be
// cleared before. deterministic: adds to each pixel of a map in a fixed order; all other sums always have one.
cudaError_t camera_sample_backward(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
                                   const Tensor& lidar2img, const Tensor& weights, const Tensor& offsets,
                                   const CameraSampleOptions& options, const Tensor& grad_output,
                                   const CameraSampleGradients& gradients, bool deterministic, void* workspace,
                                   cudaStream_t stream);

}  // namespace svexport
