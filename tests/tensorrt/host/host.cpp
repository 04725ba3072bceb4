// A host for the plugin library: what TensorRT does with a plugin, from creating it to running it, for tests.
//
// Compiled against the TensorRT headers that the library under test was compiled against, and driven from Python by
// ctypes (tests/tensorrt/host.py). Nothing of TensorRT is linked or needed but its headers.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

using namespace nvinfer1;

namespace {

std::string messages;

class Logger final : public ILogger {
 public:
  void log(Severity, const char* message) noexcept override { (messages += message) += '\n'; }
};

#if NV_TENSORRT_MAJOR > 8 || NV_TENSORRT_MINOR >= 6
#define HAS_LOGGER_FINDER
class Finder final : public ILoggerFinder {
 public:
  ILogger* findLogger() override { return &logger_; }

 private:
  Logger logger_;
};
#endif

// Expressions: a constant, or a symbol of which only this host knows the value.
class Expr final : public IDimensionExpr, private apiv::VDimensionExpr {
 public:
  using Value = decltype(std::declval<IDimensionExpr>().getConstantValue());

  Expr(int64_t value, bool constant) : value(value), constant(constant) { mImpl = this; }

  const int64_t value;
  const bool constant;

 private:
  bool isConstant() const noexcept override { return constant; }
  Value getConstantValue() const noexcept override { return constant ? static_cast<Value>(value) : -(1 << 30); }
#if NV_TENSORRT_MAJOR >= 10
  bool isSizeTensor() const noexcept override { return false; }
#endif
};

class Builder final : public IExprBuilder, private apiv::VExprBuilder {
 public:
  Builder() { mImpl = this; }

  const IDimensionExpr* make(int64_t value, bool constant) {
    all_.push_back(std::make_unique<Expr>(value, constant));
    return all_.back().get();
  }

  static const Expr& of(const IDimensionExpr& expr) { return static_cast<const Expr&>(expr); }

 private:
  const IDimensionExpr* constant(Expr::Value value) noexcept override { return make(value, true); }

  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& first,
                                  const IDimensionExpr& second) noexcept override {
    const int64_t a = of(first).value, b = of(second).value;
    const bool constant = of(first).constant && of(second).constant;
    switch (op) {
      case DimensionOperation::kSUM: return make(a + b, constant);
      case DimensionOperation::kPROD: return make(a * b, constant);
      case DimensionOperation::kMAX: return make(a > b ? a : b, constant);
      case DimensionOperation::kMIN: return make(a < b ? a : b, constant);
      case DimensionOperation::kSUB: return make(a - b, constant);
      case DimensionOperation::kEQUAL: return make(a == b, constant);
      case DimensionOperation::kLESS: return make(a < b, constant);
      case DimensionOperation::kFLOOR_DIV: return b == 0 ? nullptr : make(a / b, constant);
      case DimensionOperation::kCEIL_DIV: return b == 0 ? nullptr : make((a + b - 1) / b, constant);
    }
    return nullptr;
  }

#if NV_TENSORRT_MAJOR >= 10
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) noexcept override {
    return nullptr;
  }
#endif

  std::vector<std::unique_ptr<Expr>> all_;
};

#if NV_TENSORRT_MAJOR >= 10
using Layer = IPluginV3;
using Creator = IPluginCreatorV3One;
using CreatorInterface = IPluginCreatorInterface;
using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
constexpr char kGetCreators[] = "getCreators";

template <class T>
T* capability(Layer* layer, PluginCapabilityType type) {
  return static_cast<T*>(layer->getCapabilityInterface(type));
}
IPluginV3OneBuild* build(Layer* layer) { return capability<IPluginV3OneBuild>(layer, PluginCapabilityType::kBUILD); }
IPluginV3OneRuntime* runtime(Layer* layer) {
  return capability<IPluginV3OneRuntime>(layer, PluginCapabilityType::kRUNTIME);
}
#else
using Layer = IPluginV2DynamicExt;
using Creator = IPluginCreator;
using CreatorInterface = IPluginCreator;
using GetCreators = IPluginCreator* const* (*)(int32_t&);
constexpr char kGetCreators[] = "getPluginCreators";
#endif

CreatorInterface* const* creators = nullptr;
int32_t num_creators = 0;

Creator* creator_of(const char* type) {
  for (int i = 0; i < num_creators; ++i) {
    auto* creator = static_cast<Creator*>(creators[i]);
    if (!std::strcmp(creator->getPluginName(), type) && !std::strcmp(creator->getPluginVersion(), "1") &&
        !std::strcmp(creator->getPluginNamespace(), "svexport")) {
      return creator;
    }
  }
  return nullptr;
}

}  // namespace

// One tensor, as the tests describe it. dims has -1 where a dimension is not known before run time.
struct HostTensor {
  int32_t rank, type, format;
  float scale;
  int64_t dims[8], max[8];
};

namespace {

Dims dims_of(int rank, const int64_t* sizes) {
  Dims dims{};
  dims.nbDims = rank;
  for (int i = 0; i < rank; ++i) dims.d[i] = static_cast<decltype(dims.d[0] + 0)>(sizes[i]);
  return dims;
}

PluginTensorDesc desc_of(const HostTensor& tensor) {
  return {dims_of(tensor.rank, tensor.dims), static_cast<DataType>(tensor.type),
          static_cast<TensorFormat>(tensor.format), tensor.scale};
}

#if NV_TENSORRT_MAJOR >= 10
size_t bytes_of(const PluginField& field) {
  const bool half = field.type == PluginFieldType::kFLOAT16 || field.type == PluginFieldType::kBF16;
  return field.length * (field.type == PluginFieldType::kUNKNOWN ? 1 : half ? 2 : 4);
}
#endif

std::vector<PluginTensorDesc> descs_of(const HostTensor* tensors, int count) {
  std::vector<PluginTensorDesc> result;
  for (int i = 0; i < count; ++i) result.push_back(desc_of(tensors[i]));
  return result;
}

std::vector<DynamicPluginTensorDesc> dynamic_descs_of(const HostTensor* tensors, int count) {
  std::vector<DynamicPluginTensorDesc> result(count);
  for (int i = 0; i < count; ++i) {
    result[i].desc = desc_of(tensors[i]);
    result[i].min = result[i].max = dims_of(tensors[i].rank, tensors[i].max);
#if NV_TENSORRT_MAJOR >= 10
    result[i].opt = result[i].max;
#endif
  }
  return result;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int host_version() { return NV_TENSORRT_MAJOR * 100 + NV_TENSORRT_MINOR; }

// What was logged since the last call.
EXPORT const char* host_log() {
  static std::string last;
  last.swap(messages);
  messages.clear();
  return last.c_str();
}

// Instead of loading a library: the creators of one that is linked.
EXPORT void host_use(CreatorInterface* const* all, int count) {
  creators = all;
  num_creators = count;
}

// The number of creators in the library; -1 if it cannot be loaded, and the log says why.
EXPORT int host_load(const char* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  if (!library) return messages = dlerror(), -1;
  const auto get = reinterpret_cast<GetCreators>(dlsym(library, kGetCreators));
  if (!get) return messages = dlerror(), -1;
#ifdef HAS_LOGGER_FINDER
  static Finder finder;
  const auto set = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
  if (!set) return messages = dlerror(), -1;
  set(&finder);
#endif
  creators = get(num_creators);
  return num_creators;
}

EXPORT const char* host_type(int i) { return static_cast<Creator*>(creators[i])->getPluginName(); }

EXPORT int host_fields(const char* type, const char** names, int32_t* types, int max) {
  const auto* fields = creator_of(type)->getFieldNames();
  for (int i = 0; i < fields->nbFields && i < max; ++i) {
    names[i] = fields->fields[i].name;
    types[i] = static_cast<int32_t>(fields->fields[i].type);
  }
  return fields->nbFields;
}

EXPORT Layer* host_create(const char* type, int count, const char* const* names, const int32_t* types,
                          const int32_t* lengths, const void* const* data) {
  std::vector<PluginField> fields;
  for (int i = 0; i < count; ++i) {
    fields.emplace_back(names[i], data[i], static_cast<PluginFieldType>(types[i]), lengths[i]);
  }
  const PluginFieldCollection all{count, fields.data()};
#if NV_TENSORRT_MAJOR >= 10
  return creator_of(type)->createPlugin("node", &all, TensorRTPhase::kBUILD);
#else
  return static_cast<Layer*>(creator_of(type)->createPlugin("node", &all));
#endif
}

EXPORT void host_destroy(Layer* layer) {
#if NV_TENSORRT_MAJOR >= 10
  delete layer;
#else
  layer->terminate();
  layer->destroy();
#endif
}

EXPORT Layer* host_clone(Layer* layer) { return layer->clone(); }

// What an execution context uses.
EXPORT Layer* host_attach(Layer* layer) {
#if NV_TENSORRT_MAJOR >= 10
  return runtime(layer)->attachToContext(nullptr);
#else
  return layer->clone();
#endif
}

// Through an engine: serialized, and made again from copies of what was serialized.
EXPORT Layer* host_reload(Layer* layer) {
#if NV_TENSORRT_MAJOR >= 10
  const auto* fields = runtime(layer)->getFieldsToSerialize();
  if (!fields) return nullptr;
  std::vector<PluginField> copies(fields->fields, fields->fields + fields->nbFields);
  std::vector<std::string> names, values;
  for (const auto& field : copies) {
    names.emplace_back(field.name);
    values.emplace_back(static_cast<const char*>(field.data), bytes_of(field));
  }
  for (size_t i = 0; i < copies.size(); ++i) copies[i].name = names[i].c_str(), copies[i].data = values[i].data();
  const PluginFieldCollection all{fields->nbFields, copies.data()};
  const char* type = capability<IPluginV3OneCore>(layer, PluginCapabilityType::kCORE)->getPluginName();
  return creator_of(type)->createPlugin("node", &all, TensorRTPhase::kRUNTIME);
#else
  const size_t size = layer->getSerializationSize();
  const std::unique_ptr<char[]> buffer(new char[size]);  // of this size exactly, for sanitizers
  layer->serialize(buffer.get());
  auto* creator = creator_of(layer->getPluginType());
  auto* again = static_cast<Layer*>(creator->deserializePlugin("node", buffer.get(), size));
  if (again && again->initialize()) return again->destroy(), nullptr;
  return again;
#endif
}

// What an engine would hold of it, for comparing: names and values. The number of bytes.
EXPORT int host_serialized(Layer* layer, char* buffer, int max) {
  std::string all;
#if NV_TENSORRT_MAJOR >= 10
  const auto* fields = runtime(layer)->getFieldsToSerialize();
  for (int i = 0; i < fields->nbFields; ++i) {
    const PluginField& field = fields->fields[i];
    all.append(field.name).append(reinterpret_cast<const char*>(&field.type), sizeof(field.type));
    all.append(static_cast<const char*>(field.data), bytes_of(field));
  }
#else
  all.resize(layer->getSerializationSize());
  layer->serialize(&all[0]);
#endif
  std::memcpy(buffer, all.data(), all.size() < static_cast<size_t>(max) ? all.size() : max);
  return static_cast<int>(all.size());
}

EXPORT int host_outputs(Layer* layer) {
#if NV_TENSORRT_MAJOR >= 10
  return build(layer)->getNbOutputs();
#else
  return layer->getNbOutputs();
#endif
}

EXPORT int host_output_types(Layer* layer, int inputs, const int32_t* types, int32_t* results) {
  std::vector<DataType> in, out(host_outputs(layer));
  for (int i = 0; i < inputs; ++i) in.push_back(static_cast<DataType>(types[i]));
#if NV_TENSORRT_MAJOR >= 10
  if (build(layer)->getOutputDataTypes(out.data(), static_cast<int>(out.size()), in.data(), inputs)) return 1;
#else
  for (size_t i = 0; i < out.size(); ++i) out[i] = layer->getOutputDataType(static_cast<int>(i), in.data(), inputs);
#endif
  for (size_t i = 0; i < out.size(); ++i) results[i] = static_cast<int32_t>(out[i]);
  return 0;
}

// Shapes of the outputs for inputs of sizes `max`, which the plugin does not get to know where `dims` is -1. In the
// results `dims` is -1 where the expression is not constant, `max` has its value.
EXPORT int host_shapes(Layer* layer, int inputs, const HostTensor* tensors, HostTensor* results) {
  Builder builder;
  std::vector<DimsExprs> in(inputs), out(host_outputs(layer));
  for (int i = 0; i < inputs; ++i) {
    in[i].nbDims = tensors[i].rank;
    for (int j = 0; j < tensors[i].rank; ++j) {
      in[i].d[j] = builder.make(tensors[i].max[j], tensors[i].dims[j] >= 0);
    }
  }
#if NV_TENSORRT_MAJOR >= 10
  const int count = static_cast<int>(out.size());
  if (build(layer)->getOutputShapes(in.data(), inputs, nullptr, 0, out.data(), count, builder)) return 1;
#else
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = layer->getOutputDimensions(static_cast<int>(i), in.data(), inputs, builder);
    if (out[i].nbDims < 0) return 1;
  }
#endif
  for (size_t i = 0; i < out.size(); ++i) {
    results[i].rank = out[i].nbDims;
    for (int j = 0; j < out[i].nbDims; ++j) {
      const Expr& expr = Builder::of(*out[i].d[j]);
      results[i].max[j] = expr.value;
      results[i].dims[j] = expr.constant ? expr.value : -1;
    }
  }
  return 0;
}

// Every combination of types and formats that the plugin supports, found as TensorRT's builder does: tensor by tensor,
// each question about the tensors decided so far, the rest being garbage. `masks` says which types each may have, one bit
// per DataType. Writes (type, format) per tensor and returns how many combinations there are.
EXPORT int host_formats(Layer* layer, int inputs, int outputs, const HostTensor* tensors, const int32_t* masks,
                        int32_t* combinations, int max) {
  const int total = inputs + outputs;
  auto all = dynamic_descs_of(tensors, total);
  for (auto& tensor : all) tensor.desc.type = static_cast<DataType>(-1), tensor.desc.format = TensorFormat(-1);
  int found = 0;
  const std::function<void(int)> search = [&](int i) {
    if (i == total) {
      for (int j = 0; j < total && found < max; ++j) {
        combinations[2 * (found * total + j)] = static_cast<int32_t>(all[j].desc.type);
        combinations[2 * (found * total + j) + 1] = static_cast<int32_t>(all[j].desc.format);
      }
      ++found;
      return;
    }
    for (int type = 0; type < 12; ++type) {
      if (!(masks[i] >> type & 1)) continue;
      for (int format = 0; format < 13; ++format) {
        all[i].desc.type = static_cast<DataType>(type);
        all[i].desc.format = static_cast<TensorFormat>(format);
#if NV_TENSORRT_MAJOR >= 10
        const bool supported = build(layer)->supportsFormatCombination(i, all.data(), inputs, outputs);
#else
        std::vector<PluginTensorDesc> plain;
        for (const auto& tensor : all) plain.push_back(tensor.desc);
        const bool supported = layer->supportsFormatCombination(i, plain.data(), inputs, outputs);
#endif
        if (supported) search(i + 1);
      }
    }
    all[i].desc.type = static_cast<DataType>(-1);
    all[i].desc.format = static_cast<TensorFormat>(-1);
  };
  search(0);
  return found;
}

// As the builder does for a choice of types and formats. The bytes of workspace it asks for; -1 if it refuses.
EXPORT int64_t host_configure(Layer* layer, int inputs, int outputs, const HostTensor* tensors) {
  const auto in = dynamic_descs_of(tensors, inputs), out = dynamic_descs_of(tensors + inputs, outputs);
#if NV_TENSORRT_MAJOR >= 10
  if (build(layer)->configurePlugin(in.data(), inputs, out.data(), outputs)) return -1;
  return static_cast<int64_t>(build(layer)->getWorkspaceSize(in.data(), inputs, out.data(), outputs));
#else
  layer->configurePlugin(in.data(), inputs, out.data(), outputs);
  auto largest = descs_of(tensors, inputs + outputs);
  for (int i = 0; i < inputs + outputs; ++i) largest[i].dims = dims_of(tensors[i].rank, tensors[i].max);
  return static_cast<int64_t>(layer->getWorkspaceSize(largest.data(), inputs, largest.data() + inputs, outputs));
#endif
}

// The tactics that the builder would time after host_configure; -1 if the plugin fails. Before TensorRT 10 there are none.
EXPORT int host_tactics(Layer* layer, int32_t* tactics, int max) {
#if NV_TENSORRT_MAJOR >= 10
  const int count = build(layer)->getNbTactics();
  return count > max || (count && build(layer)->getValidTactics(tactics, count)) ? -1 : count;
#else
  return static_cast<void>(layer), static_cast<void>(tactics), static_cast<void>(max), 0;
#endif
}

EXPORT int host_set_tactic(Layer* layer, int32_t tactic) {
#if NV_TENSORRT_MAJOR >= 10
  return runtime(layer)->setTactic(tactic);
#else
  return static_cast<void>(layer), tactic != 0;
#endif
}

// As an execution context does when shapes are set.
EXPORT int host_prepare(Layer* layer, int inputs, int outputs, const HostTensor* tensors) {
#if NV_TENSORRT_MAJOR >= 10
  const auto all = descs_of(tensors, inputs + outputs);
  return runtime(layer)->onShapeChange(all.data(), inputs, all.data() + inputs, outputs);
#else
  return host_configure(layer, inputs, outputs, tensors) < 0;
#endif
}

// Runs it `times` times, and writes the time that one call took, in microseconds.
EXPORT int host_enqueue(Layer* layer, int inputs, int outputs, const HostTensor* tensors, void* const* pointers,
                        void* workspace, void* stream, int times, double* microseconds) {
  const auto all = descs_of(tensors, inputs + outputs);
#if NV_TENSORRT_MAJOR >= 10
  auto* running = runtime(layer);
#else
  auto* running = layer;
#endif
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) {
    const int status = running->enqueue(all.data(), all.data() + inputs, pointers, pointers + inputs, workspace,
                                        static_cast<cudaStream_t>(stream));
    if (status) return status;
  }
  *microseconds = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / times;
  return 0;
}
