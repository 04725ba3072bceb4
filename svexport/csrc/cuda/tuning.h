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
    {0, "add_bias_residual_layer_norm", "setup", {2.3f}},
    {0, "add_bias_residual_layer_norm", "again", {4.0f}},
    {0, "add_bias_residual_layer_norm", "one_row", {1.06f, 0.95f}},
    {0, "add_bias_residual_layer_norm", "forward_warp8", {1.05f, 1.9f, 1.2f, 2.1f, 1.05f, 1.25f, 1.5f, 2.1f}},
    {0, "add_bias_residual_layer_norm", "forward_warp16", {1.1f, 2.2f, 0.0f, 0.0f, 1.1f, 1.35f, 0.0f, 0.0f}},
    {0, "add_bias_residual_layer_norm", "forward_block8", {1.3f, 2.3f, 2.4f, 3.0f, 1.2f, 1.4f, 1.6f, 2.4f}},
    {0, "add_bias_residual_layer_norm", "forward_block16", {1.4f, 2.4f, 0.0f, 0.0f, 1.3f, 1.5f, 0.0f, 0.0f}},
    {0, "add_bias_residual_layer_norm", "forward_block32", {1.6f, 2.5f, 0.0f, 0.0f, 1.5f, 1.6f, 0.0f, 0.0f}},
    {0, "add_bias_residual_layer_norm", "forward_long", {2.6f, 2.6f, 3.0f, 4.0f, 2.6f, 2.6f, 3.0f, 4.0f}},
    {0, "add_bias_residual_layer_norm", "backward_warp8", {1.3f, 1.9f, 2.1f, 2.3f, 1.2f, 1.4f, 1.8f, 2.4f}},
    {0, "add_bias_residual_layer_norm", "backward_block8", {1.4f, 2.0f, 2.4f, 3.0f, 1.3f, 1.5f, 1.9f, 2.5f}},
    {0, "add_bias_residual_layer_norm", "backward_block16", {1.6f, 2.1f, 0.0f, 0.0f, 1.5f, 1.7f, 0.0f, 0.0f}},
    {0, "add_bias_residual_layer_norm", "backward_block32", {1.8f, 2.2f, 0.0f, 0.0f, 1.7f, 1.9f, 0.0f, 0.0f}},
    {0, "add_bias_residual_layer_norm", "backward_long", {1.65f, 0.0f, 1.9f, 2.6f, 1.55f, 0.0f, 1.8f, 2.3f}},
};

}  // namespace svexport
