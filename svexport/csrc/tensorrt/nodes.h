// The nodes as the definitions of the ops describe them. Written by `python -m svexport.tensorrt.nodes`.
#pragma once

#include <cstdint>
#include <vector>

#include "fields.h"

// SVEXPORT_NODES(X) is X(op, Node) for every node that has a plugin.
#define SVEXPORT_NODES(X) \
  X(add_bias_residual_layer_norm, AddBiasResidualLayerNormNode) \
  X(bilinear_sample, BilinearSampleNode) \
  X(camera_sample, CameraSampleNode) \
  X(deform_conv2d, DeformConv2dNode) \
  X(grid_sample, GridSampleNode) \
  X(inverse, InverseNode) \
  X(ms_deform_attn, MsDeformAttnNode) \
  X(transformer_decoder, TransformerDecoderNode) \

namespace svexport::plugin {

struct NodeType {
  const char* type;
  int tensors, optional, outputs;  // tensors: inputs that are neither optional nor in a list
};

// x, bias, residual, weight, norm_bias, extra?
struct AddBiasResidualLayerNormNode {
  static constexpr NodeType kNode{"SvAddBiasResidualLayerNorm", 5, 1, 2};
  float eps{};

  SVEXPORT_EACH(eps)
};

// image, grid
struct BilinearSampleNode {
  static constexpr NodeType kNode{"SvBilinearSample", 2, 0, 2};

  template <class Visitor>
  void each(Visitor&&) {}
};

// features..., reference_points, lidar2img, weights, offsets
struct CameraSampleNode {
  static constexpr NodeType kNode{"SvCameraSample", 4, 0, 1};
  std::vector<int32_t> image_size{};
  std::vector<float> pc_range{};
  float depth_eps{};
  int32_t in_image{};
  std::vector<float> uv_clamp{};
  int32_t activation{};
  std::vector<float> scales{};

  SVEXPORT_EACH(image_size, pc_range, depth_eps, in_image, uv_clamp, activation, scales)
};

// input, offset, weight, bias?, mask?
struct DeformConv2dNode {
  static constexpr NodeType kNode{"SvDeformConv2d", 3, 2, 1};
  std::vector<int32_t> stride{};
  std::vector<int32_t> padding{};
  std::vector<int32_t> dilation{};
  int32_t groups{};
  int32_t offset_groups{};
  float scale{};

  SVEXPORT_EACH(stride, padding, dilation, groups, offset_groups, scale)
};

// input, grid
struct GridSampleNode {
  static constexpr NodeType kNode{"SvGridSample", 2, 0, 1};
  int32_t interpolation_mode{};
  int32_t padding_mode{};
  int32_t align_corners{};
  float scale{};

  SVEXPORT_EACH(interpolation_mode, padding_mode, align_corners, scale)
};

// A
struct InverseNode {
  static constexpr NodeType kNode{"SvInverse", 1, 0, 1};
  int32_t n{};

  SVEXPORT_EACH(n)
};

// value, spatial_shapes, level_start_index, sampling_locations, attention_weights
struct MsDeformAttnNode {
  static constexpr NodeType kNode{"SvMsDeformAttn", 5, 0, 1};
  float scale{};

  SVEXPORT_EACH(scale)
};

// query, query_pos, reference_points, features..., lidar2img, weights...
struct TransformerDecoderNode {
  static constexpr NodeType kNode{"SvTransformerDecoder", 4, 0, 3};
  int32_t num_layers{};
  int32_t num_heads{};
  int32_t num_points{};
  int32_t num_groups{};
  std::vector<int32_t> image_size{};
  std::vector<float> pc_range{};
  float depth_eps{};
  int32_t in_image{};
  std::vector<float> uv_clamp{};
  int32_t activation{};
  int32_t learned_offsets{};
  int32_t residual_query_pos{};
  int32_t pool{};
  std::vector<float> scales{};
  static constexpr const char* kLayerWeights[] = {
      "mha_in_proj_weight", "mha_in_proj_bias", "mha_out_proj_weight", "mha_out_proj_bias", "mha_norm_weight",
      "mha_norm_bias", "svca_attention_weights_weight", "svca_attention_weights_bias", "svca_output_proj_weight",
      "svca_output_proj_bias", "svca_position_encoder_0_weight", "svca_position_encoder_0_bias",
      "svca_position_encoder_1_weight", "svca_position_encoder_1_bias", "svca_position_encoder_3_weight",
      "svca_position_encoder_3_bias", "svca_position_encoder_4_weight", "svca_position_encoder_4_bias",
      "svca_norm_weight", "svca_norm_bias", "ffn_0_weight", "ffn_0_bias", "ffn_2_weight", "ffn_2_bias",
      "ffn_norm_weight", "ffn_norm_bias", "reg_0_weight", "reg_0_bias", "reg_2_weight", "reg_2_bias", "reg_4_weight",
      "reg_4_bias", "svca_sampling_offsets_weight", "svca_sampling_offsets_bias"
  };
  static constexpr const char* kLastWeights[] = {
      "cls_0_weight", "cls_0_bias", "cls_1_weight", "cls_1_bias", "cls_3_weight", "cls_3_bias", "cls_4_weight",
      "cls_4_bias", "cls_6_weight", "cls_6_bias"
  };

  SVEXPORT_EACH(num_layers, num_heads, num_points, num_groups, image_size, pc_range, depth_eps, in_image, uv_clamp,
                activation, learned_offsets, residual_query_pos, pool, scales)
};

}  // namespace svexport::plugin
