// What IPluginV3 and IPluginV2DynamicExt share: the classes behind both derive from this one and forward calls to it.
#pragma once

#include <cstring>

#include "plugin.h"

namespace svexport::plugin {

class Interface {
 protected:
  explicit Interface(std::unique_ptr<PluginBase> plugin) : plugin_(std::move(plugin)) {}
  Interface(const Interface& other)
      : plugin_(other.plugin_->clone()),
        tensors_(other.tensors_),
        declared_(other.declared_),
        described_(other.described_),
        descriptions_(other.descriptions_) {}

  bool takes(int inputs) const { return inputs >= plugin_->min_inputs() && inputs <= plugin_->max_inputs(); }

  // Remembers how many tensors there are, because enqueue is not told and may not allocate.
  bool set_counts(int inputs, int outputs) noexcept {
    return guarded(plugin_->type(), false, [&] {
      if (!takes(inputs) || outputs != plugin_->outputs()) {
        return fail("takes " + std::to_string(plugin_->min_inputs()) + " to " + std::to_string(plugin_->max_inputs()) +
                    " inputs and gives " + std::to_string(plugin_->outputs()) + " outputs, not " +
                    std::to_string(inputs) + " and " + std::to_string(outputs));
      }
      tensors_.inputs.resize(inputs);
      tensors_.outputs.resize(outputs);
      tensors_.scales.resize(inputs);
      descriptions_.resize(inputs + outputs);
      described_ = false;
      return true;
    });
  }

  // Loads the weights onto the device, in the type of the first input.
  bool load(DataType first) noexcept {
    return guarded(plugin_->type(), false, [&] {
      const cudaError_t status = plugin_->load_weights(dtype_of(first));
      return status == cudaSuccess || fail(std::string("its weights: ") + cudaGetErrorString(status));
    });
  }

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

  // Bytes of scratch that are enough for tensors of these descriptions and for smaller ones.
  size_t workspace(const std::vector<PluginTensorDesc>& inputs,
                   const std::vector<PluginTensorDesc>& outputs) const noexcept {
    return guarded(plugin_->type(), size_t{0}, [&] {
      const Tensors tensors = described(inputs, outputs);
      return takes(tensors.count()) ? plugin_->workspace(tensors) : size_t{0};
    });
  }

  // The tactics for tensors of these descriptions.
  Few<int32_t> tactics(const std::vector<PluginTensorDesc>& inputs,
                       const std::vector<PluginTensorDesc>& outputs) const noexcept {
    return guarded(plugin_->type(), Few<int32_t>(), [&] {
      const Tensors tensors = described(inputs, outputs);
      if (!takes(tensors.count()) || plugin_->wrong_sizes(tensors)) return Few<int32_t>();
      return plugin_->tactics(tensors);
    });
  }

  int run(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs, void* const* outputs,
          void* workspace, cudaStream_t stream) noexcept {
    const size_t count = tensors_.inputs.size();
    if (descriptions_.empty()) return fail("enqueue before it is told how many inputs there are"), 1;
    if (!described_ || !same(in, out)) {
      described_ = false;
      describe(in, out, tensors_);
      if (const char* why = plugin_->wrong_sizes(tensors_)) return fail(why), 1;
      described_ = true;  // copies the padding between members too, because it is compared
      std::memcpy(static_cast<void*>(descriptions_.data()), in, count * sizeof(*in));
      std::memcpy(static_cast<void*>(descriptions_.data() + count), out, tensors_.outputs.size() * sizeof(*out));
    }
    for (size_t i = 0; i < count; ++i) tensors_.inputs[i].data = const_cast<void*>(inputs[i]);
    for (size_t i = 0; i < tensors_.outputs.size(); ++i) tensors_.outputs[i].data = outputs[i];
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
  mutable std::vector<DataType> declared_;  // input types in the network, given when output types are asked for

 private:
  static Tensors described(const std::vector<PluginTensorDesc>& inputs, const std::vector<PluginTensorDesc>& outputs) {
    Tensors tensors;
    tensors.inputs.resize(inputs.size());
    tensors.outputs.resize(outputs.size());
    tensors.scales.resize(inputs.size());
    describe(inputs.data(), outputs.data(), tensors);
    return tensors;
  }

  static void describe(const PluginTensorDesc* in, const PluginTensorDesc* out, Tensors& tensors) {
    // Not null, which would mean absent, and aligned like memory that TensorRT allocates.
    void* const somewhere = reinterpret_cast<void*>(256);
    for (size_t i = 0; i < tensors.inputs.size(); ++i) {
      tensors.inputs[i] = view(in[i], somewhere);
      tensors.scales[i] = in[i].scale;
    }
    for (size_t i = 0; i < tensors.outputs.size(); ++i) tensors.outputs[i] = view(out[i], somewhere);
  }

  // Whether tensors_ was made from these descriptions.
  bool same(const PluginTensorDesc* in, const PluginTensorDesc* out) const {
    const size_t count = tensors_.inputs.size();
    return std::memcmp(descriptions_.data(), in, count * sizeof(*in)) == 0 &&
           std::memcmp(descriptions_.data() + count, out, tensors_.outputs.size() * sizeof(*out)) == 0;
  }

  bool described_ = false;
  std::vector<PluginTensorDesc> descriptions_;  // of the inputs, then the outputs
};

// What creators of plugins share: the fields of a node, without values, that the parser should read from it.
template <class Base>
class Creator : public Base {
 public:
  explicit Creator(Maker maker) : maker_(maker) {
    const auto plugin = maker();
    type_ = plugin->type();
    for (const auto& field : plugin->attributes()) fields_.emplace_back(field.name, nullptr, field.type, field.length);
    weights_ = plugin->possible_weight_names();
    for (const auto& name : weights_) fields_.emplace_back(name.c_str(), nullptr, PluginFieldType::kFLOAT32, 0);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return type_; }
  const char* getPluginVersion() const noexcept override { return kVersion; }

 protected:
  Maker maker_;
  const char* type_;

 private:
  std::vector<std::string> weights_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

// The creators of all nodes. They are never destroyed: a registry may outlive the statics of this library.
template <class Creator, class Base>
const std::vector<Base*>& all_creators() {
  static const auto* creators = [] {
    auto* all = new std::vector<Base*>;
    for (Maker maker : kMakers) all->push_back(new Creator(maker));
    return all;
  }();
  return *creators;
}

}  // namespace svexport::plugin

#define SVEXPORT_EXPORT extern "C" __attribute__((visibility("default")))
