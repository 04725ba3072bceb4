// The nodes that ONNX Runtime runs by our kernels: those of TensorRT's plugins, and einsum.
#pragma once

#include "plugin.h"

namespace svexport::plugin {

std::unique_ptr<PluginBase> make_einsum();

}  // namespace svexport::plugin
