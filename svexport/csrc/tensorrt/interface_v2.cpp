// The plugins behind IPluginV2DynamicExt, for TensorRT 8, and what its registry asks a library of plugins for.
#include <NvInferVersion.h>

#if NV_TENSORRT_MAJOR < 10

#include "interface.h"

// IPluginV2 is deprecated from 8.5 on, but these versions have nothing else.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace svexport::plugin {
namespace {

using nvinfer1::DynamicPluginTensorDesc;

// What an engine keeps of a plugin: the number of its inputs, then for each attribute its type and length, 4 bytes each,
// and its numbers, 4 bytes each.
std::vector<int32_t> serialized(PluginBase& plugin, int inputs) {
  std::vector<int32_t> words{inputs};
  for (const auto& field : plugin.fields()) {
    words.push_back(static_cast<int32_t>(field.type));
    words.push_back(field.length);
    const auto* data = static_cast<const char*>(field.data);
    words.resize(words.size() + field.length);
    if (field.length) std::memcpy(words.data() + words.size() - field.length, data, field.length * sizeof(int32_t));
  }
  return words;
}

class LayerV2 final : public nvinfer1::IPluginV2DynamicExt, private Interface {
 public:
  LayerV2(std::unique_ptr<PluginBase> plugin, const std::string& space) : Interface(std::move(plugin)), space_(space) {}
  LayerV2(const LayerV2& other) : Interface(other), space_(other.space_) {}

  const char* getPluginType() const noexcept override { return plugin_->type(); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return space_.c_str(); }
  void setPluginNamespace(const char* space) noexcept override {
    guarded(plugin_->type(), 0, [&] { return space_ = space ? space : "", 0; });
  }

  int32_t getNbOutputs() const noexcept override { return plugin_->outputs(); }
  int32_t initialize() noexcept override { return 0; }
  void terminate() noexcept override {}
  void destroy() noexcept override { delete this; }

  nvinfer1::IPluginV2DynamicExt* clone() const noexcept override {
    return guarded(plugin_->type(), static_cast<nvinfer1::IPluginV2DynamicExt*>(nullptr),
                   [&]() -> nvinfer1::IPluginV2DynamicExt* { return new LayerV2(*this); });
  }

  DataType getOutputDataType(int32_t i, const DataType* inputs, int32_t num_inputs) const noexcept override {
    declare(inputs, num_inputs);
    return plugin_->output_type(i, inputs);
  }

  DimsExprs getOutputDimensions(int32_t i, const DimsExprs* inputs, int32_t num_inputs,
                                IExprBuilder& builder) noexcept override {
    return guarded(plugin_->type(), DimsExprs{-1, {}}, [&] {
      std::vector<DimsExprs> outputs(plugin_->outputs());
      if (const char* why = shapes(inputs, num_inputs, outputs.data(), builder)) return fail(why), DimsExprs{-1, {}};
      return outputs.at(i);
    });
  }

  bool supportsFormatCombination(int32_t i, const PluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t) noexcept override {
    return supports(i, tensors, num_inputs);
  }

  void configurePlugin(const DynamicPluginTensorDesc*, int32_t num_inputs, const DynamicPluginTensorDesc*,
                       int32_t num_outputs) noexcept override {
    set_counts(num_inputs, num_outputs);
  }

  size_t getWorkspaceSize(const PluginTensorDesc* inputs, int32_t num_inputs, const PluginTensorDesc* outputs,
                          int32_t num_outputs) const noexcept override {
    return guarded(plugin_->type(), size_t{0}, [&] {
      return workspace({inputs, inputs + num_inputs}, {outputs, outputs + num_outputs});
    });
  }

  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return run(in, out, inputs, outputs, workspace, stream);
  }

  size_t getSerializationSize() const noexcept override {
    return guarded(plugin_->type(), size_t{0}, [&] { return words().size() * sizeof(int32_t); });
  }

  void serialize(void* buffer) const noexcept override {
    guarded(plugin_->type(), 0, [&] {
      const auto all = words();
      std::memcpy(buffer, all.data(), all.size() * sizeof(int32_t));
      return 0;
    });
  }

  bool set_inputs(int count) noexcept { return count == 0 || set_counts(count, plugin_->outputs()); }

 private:
  std::vector<int32_t> words() const { return serialized(*plugin_, tensors_.count()); }

  std::string space_;
};

class CreatorV2 final : public nvinfer1::IPluginCreator {
 public:
  explicit CreatorV2(Maker maker) : maker_(maker), type_(maker()->type()), names_(maker) {}

  nvinfer1::IPluginV2* createPlugin(const char*, const PluginFieldCollection* fields) noexcept override {
    return layer(fields, 0);
  }

  nvinfer1::IPluginV2* deserializePlugin(const char*, const void* data, size_t size) noexcept override {
    return guarded(type_, static_cast<nvinfer1::IPluginV2*>(nullptr), [&]() -> nvinfer1::IPluginV2* {
      std::vector<int32_t> words(data ? size / sizeof(int32_t) : 0);
      if (!words.empty()) std::memcpy(words.data(), data, words.size() * sizeof(int32_t));
      std::vector<nvinfer1::PluginField> fields(names_.get()->fields, names_.get()->fields + names_.get()->nbFields);
      size_t next = 1;
      for (auto& field : fields) {
        if (next + 2 > words.size()) return refuse();
        field.type = static_cast<PluginFieldType>(words[next]);
        field.length = words[next + 1];
        next += 2;
        if (field.length < 0 || field.length > static_cast<int64_t>(words.size() - next)) return refuse();
        field.data = words.data() + next;
        next += field.length;
      }
      if (next * sizeof(int32_t) != size) return refuse();
      const PluginFieldCollection all{static_cast<int32_t>(fields.size()), fields.data()};
      return layer(&all, words[0]);
    });
  }

  const PluginFieldCollection* getFieldNames() noexcept override { return names_.get(); }
  const char* getPluginName() const noexcept override { return type_; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return space_.c_str(); }
  void setPluginNamespace(const char* space) noexcept override {
    guarded(type_, 0, [&] { return space_ = space ? space : "", 0; });
  }

 private:
  nvinfer1::IPluginV2* layer(const PluginFieldCollection* fields, int inputs) noexcept {
    auto plugin = make(maker_, fields);
    if (!plugin) return nullptr;
    return guarded(type_, static_cast<nvinfer1::IPluginV2*>(nullptr), [&]() -> nvinfer1::IPluginV2* {
      auto layer = std::make_unique<LayerV2>(std::move(plugin), space_);
      return layer->set_inputs(inputs) ? layer.release() : nullptr;
    });
  }

  nvinfer1::IPluginV2* refuse() const noexcept {
    log_error(type_, "the engine holds other attributes than this library knows: build the engine again");
    return nullptr;
  }

  Maker maker_;
  const char* type_;
  FieldNames names_;
  std::string space_ = kNamespace;
};

const std::vector<nvinfer1::IPluginCreator*>& creators() {
  static const auto* creators = [] {  // never destroyed: a registry may outlive the statics of this library
    auto* all = new std::vector<nvinfer1::IPluginCreator*>;
    for (Maker maker : kMakers) all->push_back(new CreatorV2(maker));
    return all;
  }();
  return *creators;
}

#if NV_TENSORRT_MAJOR == 8 && NV_TENSORRT_MINOR < 6
// These versions have no IPluginRegistry::loadLibrary: trtexec and applications load a library by dlopen, and it
// registers its plugins itself.
const bool registered = [] {
  using Getter = nvinfer1::IPluginRegistry* (*)();
  const auto get = reinterpret_cast<Getter>(tensorrt_function("getPluginRegistry"));
  if (!get) return false;
  for (auto* creator : creators()) get()->registerCreator(*creator, kNamespace);
  return true;
}();
#endif

}  // namespace
}  // namespace svexport::plugin

#define SVEXPORT_EXPORT extern "C" __attribute__((visibility("default")))

SVEXPORT_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count) {
  const auto& creators = svexport::plugin::creators();
  count = static_cast<int32_t>(creators.size());
  return creators.data();
}

#if NV_TENSORRT_MINOR >= 6
SVEXPORT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  svexport::plugin::set_logger(finder ? finder->findLogger() : nullptr);
}
#endif

#endif
