// What IPluginV3 and IPluginV2DynamicExt have in common: both classes derive from this and name the calls their way.
#pragma once

#include <cstring>

#include "plugin.h"

namespace svexport::plugin {

class Interface {
 protected:
  explicit Interface(std::unique_ptr<PluginBase> plugin) : plugin_(std::move(plugin)) {}
  Interface(const Interface& other)
      : plugin_(other.plugin_->clone()), tensors_(other.tensors_), declared_(other.declared_) {}

  // Remembers how many tensors there are: enqueue, which may not allocate, is not told.
  bool set_counts(int inputs, int outputs) noexcept {
    return guarded(plugin_->type(), false, [&] {
      if (!takes(inputs) || outputs != plugin_->outputs()) {
        return fail("takes " + std::to_string(plugin_->min_inputs()) + " inputs or more and gives " +
                    std::to_string(plugin_->outputs()) + " outputs, not " + std::to_string(inputs) + " and " +
                    std::to_string(outputs));
      }
      tensors_.inputs.resize(inputs);
      tensors_.outputs.resize(outputs);
      tensors_.scales.resize(inputs);
      return true;
    });
  }

  bool takes(int inputs) const { return inputs >= plugin_->min_inputs() && inputs <= plugin_->max_inputs(); }

  const char* shapes(const DimsExprs* inputs, int count, DimsExprs* outputs, IExprBuilder& builder) const noexcept {
    if (!takes(count)) return "wrong number of inputs";
    return plugin_->shapes(inputs, count, outputs, builder);
  }

  bool declare(const DataType* inputs, int count) const noexcept {
    return guarded(plugin_->type(), false, [&] {
      if (!takes(count)) return fail("wrong number of inputs");
      declared_.assign(inputs, inputs + count);
      return true;
    });
  }

  template <class Description>
  bool supports(int i, const Description* tensors, int inputs) const noexcept {
    if (!takes(inputs) || i < 0 || i >= inputs + plugin_->outputs()) return false;
    static const std::vector<DataType> unknown;
    const bool known = declared_.size() == static_cast<size_t>(inputs);
    return plugin_->supports(i, {tensors, inputs, known ? declared_ : unknown});
  }

  // Scratch for tensors of these descriptions.
  size_t workspace(const std::vector<PluginTensorDesc>& inputs,
                   const std::vector<PluginTensorDesc>& outputs) const noexcept {
    return guarded(plugin_->type(), size_t{0}, [&] {
      // Not null, which would mean absent, and aligned as what TensorRT allocates.
      void* const somewhere = reinterpret_cast<void*>(256);
      Tensors tensors;
      for (const auto& desc : inputs) tensors.inputs.push_back(view(desc, somewhere));
      for (const auto& desc : outputs) tensors.outputs.push_back(view(desc, somewhere));
      for (const auto& desc : inputs) tensors.scales.push_back(desc.scale);
      return plugin_->wrong_sizes(tensors) ? size_t{0} : plugin_->workspace(tensors);
    });
  }

  int run(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs, void* const* outputs,
          void* workspace, cudaStream_t stream) noexcept {
    if (tensors_.outputs.empty()) return fail("enqueue before it is told how many inputs there are"), 1;
    for (size_t i = 0; i < tensors_.inputs.size(); ++i) {
      tensors_.inputs[i] = view(in[i], inputs[i]);
      tensors_.scales[i] = in[i].scale;
    }
    for (size_t i = 0; i < tensors_.outputs.size(); ++i) tensors_.outputs[i] = view(out[i], outputs[i]);
    if (const char* why = plugin_->wrong_sizes(tensors_)) return fail(why), 1;
    const cudaError_t status = plugin_->run(tensors_, workspace, stream);
    if (status != cudaSuccess) return fail(cudaGetErrorString(status)), 1;
    return 0;
  }

  bool fail(const std::string& why) const noexcept {
    log_error(plugin_->type(), why);
    return false;
  }

  std::unique_ptr<PluginBase> plugin_;
  Tensors tensors_;
  mutable std::vector<DataType> declared_;  // types of the inputs in the network, told when those of the outputs are asked
};

// The fields of a node's attributes without their values: what the parser reads from a node.
class FieldNames {
 public:
  explicit FieldNames(Maker maker) : fields_(maker()->fields()) {
    for (auto& field : fields_) field.data = nullptr;
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
  }
  const PluginFieldCollection* get() const { return &collection_; }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  PluginFieldCollection collection_;
};

}  // namespace svexport::plugin
