// The plugins behind IPluginV2DynamicExt, for TensorRT 8, and what its registry asks a library of plugins for.
#include <NvInferVersion.h>

#if NV_TENSORRT_MAJOR < 10

#include "interface.h"

// IPluginV2 is deprecated from 8.5 on, but these versions have nothing else.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace svexport::plugin {
namespace {

using nvinfer1::DynamicPluginTensorDesc;

constexpr int32_t kUnknown = -1;

// What an engine keeps of a plugin: the number of its inputs and the type of the first one, if they are known, then for
// each field its name with the terminating null, its type and length, and its numbers.
class Writer {
 public:
  void put(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }
  void put(int32_t number) { put(&number, sizeof(number)); }
  void put(const PluginField& field) {
    put(field.name, std::strlen(field.name) + 1);
    put(static_cast<int32_t>(field.type));
    put(field.length);
    if (field.length) put(field.data, field.length * size_of(field.type));
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  Reader(const void* data, size_t size)
      : next_(static_cast<const char*>(data)), end_(data ? next_ + size : next_) {}
  bool done() const { return next_ == end_; }
  bool get(int32_t& number) {
    if (end_ - next_ < static_cast<ptrdiff_t>(sizeof(number))) return false;
    std::memcpy(&number, next_, sizeof(number));
    next_ += sizeof(number);
    return true;
  }
  bool get(PluginField& field) {
    const void* null = done() ? nullptr : std::memchr(next_, 0, end_ - next_);
    if (!null) return false;
    field.name = next_;
    next_ = static_cast<const char*>(null) + 1;
    int32_t type = 0;
    if (!get(type) || !get(field.length)) return false;
    field.type = static_cast<PluginFieldType>(type);
    const int64_t size = static_cast<int64_t>(size_of(field.type)) * field.length;
    if (size < 0 || size > end_ - next_ || (size == 0 && field.length != 0)) return false;
    field.data = next_;
    next_ += size;
    return true;
  }

 private:
  const char *next_, *end_;
};

class LayerV2 final : public nvinfer1::IPluginV2DynamicExt, private Interface {
 public:
  LayerV2(std::unique_ptr<PluginBase> plugin, const std::string& space) : Interface(std::move(plugin)), space_(space) {}
  LayerV2(const LayerV2& other)
      : Interface(other), space_(other.space_), first_(other.first_), initialized_(other.initialized_) {}

  const char* getPluginType() const noexcept override { return plugin_->type(); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return space_.c_str(); }
  void setPluginNamespace(const char* space) noexcept override {
    guarded(plugin_->type(), 0, [&] { return space_ = space ? space : "", 0; });
  }

  int32_t getNbOutputs() const noexcept override { return plugin_->outputs(); }
  int32_t initialize() noexcept override {
    initialized_ = true;
    return first_ == kUnknown || load(static_cast<DataType>(first_)) ? 0 : 1;
  }
  void terminate() noexcept override {
    initialized_ = false;
    plugin_->release_weights();
  }
  void destroy() noexcept override { delete this; }

  nvinfer1::IPluginV2DynamicExt* clone() const noexcept override {
    return guarded(plugin_->type(), static_cast<nvinfer1::IPluginV2DynamicExt*>(nullptr),
                   [&]() -> nvinfer1::IPluginV2DynamicExt* { return new LayerV2(*this); });
  }

  DataType getOutputDataType(int32_t i, const DataType* inputs, int32_t num_inputs) const noexcept override {
    return declare(inputs, num_inputs) ? plugin_->output_type(i, inputs) : DataType::kFLOAT;
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

  // TensorRT calls this before initialize, and again whenever shapes change.
  void configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_inputs, const DynamicPluginTensorDesc*,
                       int32_t num_outputs) noexcept override {
    if (!set_counts(num_inputs, num_outputs)) return;
    first_ = static_cast<int32_t>(in[0].desc.type);
    if (initialized_) load(in[0].desc.type);
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
    return guarded(plugin_->type(), size_t{0}, [&] { return serialized().size(); });
  }

  void serialize(void* buffer) const noexcept override {
    guarded(plugin_->type(), 0, [&] {
      const std::string bytes = serialized();
      std::memcpy(buffer, bytes.data(), bytes.size());
      return 0;
    });
  }

  // Restores what was serialized, because a context whose shapes never change may enqueue without configurePlugin.
  bool configured(int32_t inputs, int32_t first) noexcept {
    first_ = first;
    return inputs == 0 || set_counts(inputs, plugin_->outputs());
  }

 private:
  std::string serialized() const {
    Writer writer;
    writer.put(tensors_.count());
    writer.put(first_);
    for (const auto& field : plugin_->fields()) writer.put(field);
    return writer.bytes();
  }

  std::string space_;
  int32_t first_ = kUnknown;  // the type of input 0
  bool initialized_ = false;
};

class CreatorV2 final : public Creator<nvinfer1::IPluginCreator> {
 public:
  using Creator::Creator;

  nvinfer1::IPluginV2* createPlugin(const char*, const PluginFieldCollection* fields) noexcept override {
    return layer(fields, 0, kUnknown);
  }

  nvinfer1::IPluginV2* deserializePlugin(const char*, const void* data, size_t size) noexcept override {
    return guarded(type_, static_cast<nvinfer1::IPluginV2*>(nullptr), [&]() -> nvinfer1::IPluginV2* {
      Reader reader(data, size);
      int32_t inputs = 0, first = kUnknown;
      bool ok = reader.get(inputs) && reader.get(first);
      std::vector<PluginField> fields;
      while (ok && !reader.done()) ok = reader.get(fields.emplace_back());
      if (!ok) {
        log_error(type_, "the engine holds no plugin of this library: build the engine again");
        return nullptr;
      }
      const PluginFieldCollection all{static_cast<int32_t>(fields.size()), fields.data()};
      return layer(&all, inputs, first);
    });
  }

  const char* getPluginNamespace() const noexcept override { return space_.c_str(); }
  void setPluginNamespace(const char* space) noexcept override {
    guarded(type_, 0, [&] { return space_ = space ? space : "", 0; });
  }

 private:
  nvinfer1::IPluginV2* layer(const PluginFieldCollection* fields, int32_t inputs, int32_t first) noexcept {
    auto plugin = make(maker_, fields);
    if (!plugin) return nullptr;
    return guarded(type_, static_cast<nvinfer1::IPluginV2*>(nullptr), [&]() -> nvinfer1::IPluginV2* {
      auto layer = std::make_unique<LayerV2>(std::move(plugin), space_);
      return layer->configured(inputs, first) ? layer.release() : nullptr;
    });
  }

  std::string space_ = kNamespace;
};

const std::vector<nvinfer1::IPluginCreator*>& creators() { return all_creators<CreatorV2, nvinfer1::IPluginCreator>(); }

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
