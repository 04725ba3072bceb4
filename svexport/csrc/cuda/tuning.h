// The tables of tuning/*.json. Written by `python -m svexport.kernels.tuning`.
#pragma once

namespace svexport {

constexpr int kTables = 1;
constexpr const char* kTunedGpus[kTables] = {"default"};

struct Tuned {
  int table;
  const char *op, *name;
  float values[8];
};

constexpr Tuned kTuned[] = {
    {0, "add_bias_residual_layer_norm", "launch", {2.2f}},
    {0, "add_bias_residual_layer_norm", "turn", {0.2f}},
    {0, "add_bias_residual_layer_norm", "part", {0.004f}},
    {0, "add_bias_residual_layer_norm", "share", {2.3f}},
    {0, "add_bias_residual_layer_norm", "again", {4.8f, 8.0f}},
    {0, "add_bias_residual_layer_norm", "one_row", {1.14f, 0.94f}},
    {0, "add_bias_residual_layer_norm", "forward_warp8", {1.33f, 2.17f, 1.39f, 2.74f, 1.24f, 1.37f, 1.26f, 1.81f}},
    {0, "add_bias_residual_layer_norm", "forward_block8", {1.51f, 1.67f, 1.96f, 4.77f, 1.19f, 1.27f, 1.21f, 2.42f}},
    {0, "add_bias_residual_layer_norm", "forward_block32", {1.42f, 1.79f, 0.0f, 0.0f, 1.43f, 1.46f, 0.0f, 0.0f}},
    {0, "add_bias_residual_layer_norm", "forward_long", {3.87f, 5.38f, 3.5f, 5.54f, 1.89f, 2.43f, 2.07f, 2.99f}},
    {0, "add_bias_residual_layer_norm", "backward_warp8", {1.24f, 1.41f, 1.51f, 1.87f, 1.14f, 1.2f, 1.16f, 1.26f}},
    {0, "add_bias_residual_layer_norm", "backward_block8", {1.21f, 1.55f, 1.73f, 2.33f, 1.31f, 1.19f, 1.32f, 1.27f}},
    {0, "add_bias_residual_layer_norm", "backward_long", {1.63f, 0.0f, 1.48f, 2.84f, 1.24f, 0.0f, 1.46f, 2.1f}},
    {0, "camera_sample", "launch", {3.9f}},
    {0, "camera_sample", "vectors", {0.00045f}},
    {0, "camera_sample", "channels", {0.0027f}},
    {0, "camera_sample", "planes", {1.5f, 6.25f, 0.0061f}},
    {0, "deform_conv2d", "launch", {2.2f}},
    {0, "deform_conv2d", "pack", {9.2f}},
    {0, "deform_conv2d", "packed", {0.000207f}},
    {0, "deform_conv2d", "planes", {0.000364f}},
    {0, "einsum", "launch", {2.2f}},
    {0, "einsum", "large", {0.29f, 0.16f}},
    {0, "einsum", "apart", {1.1f}},
    {0, "einsum", "small", {4.4f, 2.4f, 0.73f, 0.0078f}},
    {0, "einsum", "small_product", {0.0264f, 0.0088f}},
    {0, "einsum", "small_read", {0.0181f, 0.0113f}},
    {0, "einsum", "small_byte", {7e-05f}},
    {0, "einsum", "small_parts", {1.5f, 3e-06f}},
    {0, "einsum", "small_time", {1.12f, 0.93f}},
    {0, "einsum", "usual", {1.087f, 4.0f}},
    {0, "einsum", "channel", {0.105f, 0.065f}},
    {0, "einsum", "columns32", {-0.5f, 1.3f}},
    {0, "einsum", "correlation", {1.3f, 1.5f}},
    {0, "einsum", "matrices", {6.0f, 3.0f}},
    {0, "grid_sample", "launch", {2.2f}},
    {0, "grid_sample", "points", {1.0f, 2.0f}},
    {0, "grid_sample", "singles", {3.0f, 3.0f}},
    {0, "grid_sample", "vectors", {1.4f, 1.4f}},
    {0, "grid_sample", "narrow", {1.2f, 4.0f}},
    {0, "grid_sample", "planes", {1.5f, 4.0f}},
    {0, "grid_sample", "sampled", {1.0f, 4.0f}},
    {0, "grid_sample", "boxes", {2.0f, 2.0f}},
    {0, "grid_sample_backward", "launch", {2.2f}},
    {0, "grid_sample_backward", "other", {0.5f}},
    {0, "ms_deform_attn", "launch", {2.2f}},
    {0, "ms_deform_attn", "lines", {4.0f, 0.0f}},
    {0, "ms_deform_attn", "issue", {16.6f, 50.0f}},
    {0, "ms_deform_attn", "pass", {0.8f, 6.0f}},
    {0, "ms_deform_attn", "corners", {0.5f, 1.1f}},
};

}  // namespace svexport
