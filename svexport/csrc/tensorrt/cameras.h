// What the nodes that sample cameras have in common.
#pragma once

#include "camera_sample/launch.h"

namespace svexport::plugin {

// What is wrong with these attributes; null if nothing is.
template <class Node>
const char* wrong_cameras(const Node& node) {
  if (node.image_size.size() != 2 || node.image_size[0] < 1 || node.image_size[1] < 1) {
    return "image_size should be (height, width)";
  }
  if (node.pc_range.size() != 6) return "pc_range should be 6 numbers";
  if (node.uv_clamp.size() != 2) return "uv_clamp should be (low, high)";
  return node.activation < 0 || node.activation > 1 ? "activation should be 0 (sigmoid) or 1 (softmax)" : nullptr;
}

template <class Node>
CameraSampleOptions options_of(const Node& node) {
  return {node.image_size, node.pc_range, node.depth_eps, node.in_image != 0, node.uv_clamp, node.activation};
}

}  // namespace svexport::plugin
