// The plugins behind IPluginV3, for TensorRT 10 and later, and what its registry asks a library of plugins for.
#include <NvInferVersion.h>

#if NV_TENSORRT_MAJOR >= 10

#include "interface.h"

namespace svexport::plugin {
namespace {

using nvinfer1::DynamicPluginTensorDesc;

class LayerV3 final : public nvinfer1::IPluginV3,
                      public nvinfer1::IPluginV3OneCore,
                      public nvinfer1::IPluginV3OneBuild,
                      public nvinfer1::IPluginV3OneRuntime,
                      private Interface {
 public:
  explicit LayerV3(std::unique_ptr<PluginBase> plugin) : Interface(std::move(plugin)) {}
  LayerV3(const LayerV3& other) : Interface(other), tactics_(other.tactics_) {}

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }

  nvinfer1::IPluginV3* clone() noexcept override {
    return guarded<>(plugin_->type(), static_cast<nvinfer1::IPluginV3*>(nullptr),
                     [&]() -> nvinfer1::IPluginV3* { return new LayerV3(*this); });
  }

  const char* getPluginName() const noexcept override { return plugin_->type(); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return plugin_->outputs(); }

  int32_t getOutputDataTypes(DataType* outputs, int32_t count, const DataType* inputs,
                             int32_t num_inputs) const noexcept override {
    if (!declare(inputs, num_inputs) || count != plugin_->outputs()) return 1;
    for (int i = 0; i < count; ++i) outputs[i] = plugin_->output_type(i, inputs);
    return 0;
  }

  int32_t getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t, DimsExprs* outputs,
                          int32_t, IExprBuilder& builder) noexcept override {
    if (const char* why = shapes(inputs, num_inputs, outputs, builder)) return fail(why), 1;
    return 0;
  }

  bool supportsFormatCombination(int32_t i, const DynamicPluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t) noexcept override {
    return supports(i, tensors, num_inputs);
  }

  // TensorRT calls this for each profile and format, then asks for tactics: those for the profile's optimal sizes.
  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_inputs, const DynamicPluginTensorDesc* out,
                          int32_t num_outputs) noexcept override {
    if (!set_counts(num_inputs, num_outputs)) return 1;
    return guarded(plugin_->type(), 1, [&] {
      tactics_ = Interface::tactics(sized(in, num_inputs, &DynamicPluginTensorDesc::opt),
                                    sized(out, num_outputs, &DynamicPluginTensorDesc::opt));
      return 0;
    });
  }

  int32_t getNbTactics() noexcept override { return tactics_.size(); }

  int32_t getValidTactics(int32_t* tactics, int32_t count) noexcept override {
    if (count != getNbTactics()) return fail("it is asked for another number of tactics than it has"), 1;
    for (int i = 0; i < count; ++i) tactics[i] = tactics_[i];
    return 0;
  }

  int32_t setTactic(int32_t tactic) noexcept override {
    plugin_->set_tactic(tactic);
    return 0;
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const DynamicPluginTensorDesc* outputs, int32_t num_outputs) const noexcept override {
    return guarded(plugin_->type(), size_t{0}, [&] {
      return workspace(sized(inputs, num_inputs, &DynamicPluginTensorDesc::max),
                       sized(outputs, num_outputs, &DynamicPluginTensorDesc::max));
    });
  }

  int32_t onShapeChange(const PluginTensorDesc* in, int32_t num_inputs, const PluginTensorDesc*,
                        int32_t num_outputs) noexcept override {
    return set_counts(num_inputs, num_outputs) && load(in[0].type) ? 0 : 1;
  }

  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return run(in, out, inputs, outputs, workspace, stream);
  }

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }

  const PluginFieldCollection* getFieldsToSerialize() noexcept override {
    return guarded(plugin_->type(), static_cast<const PluginFieldCollection*>(nullptr), [&] {
      fields_ = plugin_->fields();
      collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
      return &collection_;
    });
  }

 private:
  static std::vector<PluginTensorDesc> sized(const DynamicPluginTensorDesc* tensors, int count,
                                             nvinfer1::Dims DynamicPluginTensorDesc::*dims) {
    std::vector<PluginTensorDesc> result;
    for (int i = 0; i < count; ++i) {
      result.push_back(tensors[i].desc);
      result.back().dims = tensors[i].*dims;
    }
    return result;
  }

  Few<int32_t> tactics_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

class CreatorV3 final : public Creator<nvinfer1::IPluginCreatorV3One> {
 public:
  using Creator::Creator;

  nvinfer1::IPluginV3* createPlugin(const char*, const PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    auto plugin = make(maker_, fields);
    if (!plugin) return nullptr;
    return guarded(type_, static_cast<nvinfer1::IPluginV3*>(nullptr),
                   [&]() -> nvinfer1::IPluginV3* { return new LayerV3(std::move(plugin)); });
  }

  const char* getPluginNamespace() const noexcept override { return kNamespace; }
};

}  // namespace
}  // namespace svexport::plugin

SVEXPORT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using namespace svexport::plugin;
  const auto& creators = all_creators<CreatorV3, nvinfer1::IPluginCreatorInterface>();
  count = static_cast<int32_t>(creators.size());
  return creators.data();
}

SVEXPORT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  svexport::plugin::set_logger(finder ? finder->findLogger() : nullptr);
}

#endif
