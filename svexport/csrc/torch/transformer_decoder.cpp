#include "transformer_decoder.h"

#include "binding.h"

namespace svexport {
namespace {

std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> transformer_decoder_torch(
    const at::Tensor& query, const at::Tensor& query_pos, const at::Tensor& reference_points, at::TensorList features,
    const at::Tensor& lidar2img, at::TensorList weights, int64_t num_layers, int64_t num_heads, int64_t num_points,
    int64_t num_groups, at::IntArrayRef image_size, at::ArrayRef<double> pc_range, double depth_eps, bool in_image,
    at::ArrayRef<double> uv_clamp, int64_t activation, bool learned_offsets, bool residual_query_pos, bool pool,
    at::ArrayRef<double> scales) {
  const at::Tensor own[3] = {query.contiguous(), query_pos.contiguous(), reference_points.contiguous()};
  std::vector<at::Tensor> own_weights;
  std::vector<Tensor> maps, parameters;
  for (const auto& f : features) maps.push_back(view(f));
  for (const auto& w : weights) {
    own_weights.push_back(w.contiguous());
    parameters.push_back(view(own_weights.back()));
  }
  const std::vector<float> steps(scales.begin(), scales.end());
  const int per_layer = learned_offsets ? 34 : 32;
  const int64_t code_size = weights[(num_layers - 1) * per_layer + 30].size(0);
  const at::Tensor classes = at::empty({query.size(0), query.size(1), weights.back().size(0)}, own[0].options());
  const at::Tensor boxes = at::empty({query.size(0), query.size(1), code_size}, own[2].options());
  const at::Tensor points = at::empty({query.size(0), query.size(1), 3}, own[2].options());

  TransformerDecoder d{view(own[0]), view(own[1]), view(own[2]), maps.data(), static_cast<int>(maps.size()),
                       steps.data(), view(lidar2img), parameters.data(), static_cast<int>(parameters.size()),
                       static_cast<int>(num_layers), static_cast<int>(num_heads), static_cast<int>(num_points),
                       static_cast<int>(num_groups),
                       CameraSampleOptions(image_size, pc_range, depth_eps, in_image, uv_clamp, activation),
                       learned_offsets, residual_query_pos, pool};
  d.classes = view(classes), d.boxes = view(boxes), d.points = view(points);

  const at::Tensor scratch = workspace(transformer_decoder_workspace(d), own[0]);
  return if_done(transformer_decoder(d, scratch.data_ptr(), stream()), std::tuple(classes, boxes, points));
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) { implement(m, "transformer_decoder", transformer_decoder_torch); }

}  // namespace svexport
