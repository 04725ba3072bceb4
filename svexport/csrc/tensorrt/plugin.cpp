#include "plugin.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>

namespace svexport::plugin {
namespace {

std::atomic<nvinfer1::ILogger*> found_logger{nullptr};

// No attribute of a node is a longer list: what claims to be is refused before it is read.
constexpr int kMaxLength = 64;

template <class T>
constexpr PluginFieldType kFieldType = std::is_same_v<T, int32_t> ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;

template <class T>
std::string wrong_type(const nvinfer1::PluginField& field) {
  if (field.type == kFieldType<T>) return {};
  return std::string("attribute ") + field.name + " should be of type " +
         (kFieldType<T> == PluginFieldType::kINT32 ? "INT32" : "FLOAT32") + ", got PluginFieldType " +
         std::to_string(static_cast<int>(field.type));
}

template <class T>
std::string set_scalar(const nvinfer1::PluginField& field, T& value) {
  if (std::string why = wrong_type<T>(field); !why.empty()) return why;
  if (field.length != 1 || !field.data) {
    return std::string("attribute ") + field.name + " should be one number, got " + std::to_string(field.length);
  }
  std::memcpy(&value, field.data, sizeof(T));
  return {};
}

template <class T>
std::string set_list(const nvinfer1::PluginField& field, std::vector<T>& value) {
  if (std::string why = wrong_type<T>(field); !why.empty()) return why;
  if (field.length < 0 || field.length > kMaxLength || (field.length > 0 && !field.data)) {
    return std::string("attribute ") + field.name + " should be a list of at most " + std::to_string(kMaxLength) +
           " numbers, got " + (field.data ? std::to_string(field.length) : "none");
  }
  value.resize(field.length);
  if (field.length > 0) std::memcpy(value.data(), field.data, field.length * sizeof(T));
  return {};
}

bool has_name(const nvinfer1::PluginField& field, const char* name) {
  return field.name && std::strcmp(field.name, name) == 0;
}

}  // namespace

std::string set_field(const nvinfer1::PluginField& field, int32_t& value) { return set_scalar(field, value); }
std::string set_field(const nvinfer1::PluginField& field, float& value) { return set_scalar(field, value); }
std::string set_field(const nvinfer1::PluginField& field, std::vector<int32_t>& value) { return set_list(field, value); }
std::string set_field(const nvinfer1::PluginField& field, std::vector<float>& value) { return set_list(field, value); }

nvinfer1::PluginField field_of(const char* name, const int32_t& value) {
  return {name, &value, PluginFieldType::kINT32, 1};
}
nvinfer1::PluginField field_of(const char* name, const float& value) {
  return {name, &value, PluginFieldType::kFLOAT32, 1};
}
nvinfer1::PluginField field_of(const char* name, const std::vector<int32_t>& value) {
  return {name, value.data(), PluginFieldType::kINT32, static_cast<int32_t>(value.size())};
}
nvinfer1::PluginField field_of(const char* name, const std::vector<float>& value) {
  return {name, value.data(), PluginFieldType::kFLOAT32, static_cast<int32_t>(value.size())};
}

const nvinfer1::PluginField* find_field(const PluginFieldCollection& fields, const char* name, std::string& why) {
  const nvinfer1::PluginField* found = nullptr;
  for (int i = 0; i < fields.nbFields; ++i) {
    if (!has_name(fields.fields[i], name)) continue;
    if (found) why = std::string("attribute ") + name + " is given twice";
    found = &fields.fields[i];
  }
  if (!found) why = std::string("attribute ") + name + " is missing";
  return why.empty() ? found : nullptr;
}

const nvinfer1::PluginField* unknown_field(const PluginFieldCollection& fields,
                                           const std::vector<nvinfer1::PluginField>& known) {
  static const nvinfer1::PluginField nameless("without a name");
  for (int i = 0; i < fields.nbFields; ++i) {
    const nvinfer1::PluginField& field = fields.fields[i];
    if (!field.name) return &nameless;
    bool found = false;
    for (const auto& other : known) found = found || has_name(field, other.name);
    if (!found) return &field;
  }
  return nullptr;
}

std::unique_ptr<PluginBase> make(Maker maker, const PluginFieldCollection* fields) noexcept {
  return guarded("svexport", std::unique_ptr<PluginBase>(), [&]() -> std::unique_ptr<PluginBase> {
    auto plugin = maker();
    std::string why;
    if (!fields || fields->nbFields < 0 || (fields->nbFields > 0 && !fields->fields)) {
      why = "no attributes are given";
    } else {
      why = plugin->set(*fields);
    }
    if (why.empty()) {
      if (const char* wrong = plugin->wrong_attributes()) why = wrong;
    }
    if (why.empty()) return plugin;
    log_error(plugin->type(), why);
    return nullptr;
  });
}

Tensor view(const nvinfer1::Dims& dims, DataType type, TensorFormat format, void* data) {
  Tensor tensor;
  tensor.data = data;
  switch (type) {
    case DataType::kHALF: tensor.dtype = DType::kFloat16; break;
    case DataType::kINT8: tensor.dtype = DType::kInt8; break;
    case DataType::kINT32: tensor.dtype = DType::kInt32; break;
    case DataType::kBOOL: tensor.dtype = DType::kBool; break;
#if NV_TENSORRT_MAJOR >= 9
    case DataType::kBF16: tensor.dtype = DType::kBFloat16; break;
    case DataType::kINT64: tensor.dtype = DType::kInt64; break;
#endif
    default: tensor.dtype = DType::kFloat32;
  }
  tensor.rank = dims.nbDims;
  for (int i = 0; i < dims.nbDims; ++i) tensor.sizes[i] = dims.d[i];
  const int channel = dims.nbDims - 3;
  int64_t vector = 0, padding = 1;
  switch (format) {
    case TensorFormat::kCHW2: vector = 2; break;
    case TensorFormat::kCHW4: vector = 4; break;
    case TensorFormat::kCHW32: vector = 32; break;
    case TensorFormat::kHWC8: padding = 8; break;
    case TensorFormat::kHWC16: padding = 16; break;
    default: break;
  }
  if (vector && tensor.rank < kMaxRank) {
    tensor.sizes[channel] = (tensor.sizes[channel] + vector - 1) / vector;
    tensor.sizes[tensor.rank++] = vector;
  }
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.strides[i] = stride;
    stride *= tensor.sizes[i];
  }
  if (padding > 1 || format == TensorFormat::kHWC) {
    const int64_t pixel = (tensor.sizes[channel] + padding - 1) / padding * padding;
    tensor.strides[channel] = 1;
    tensor.strides[channel + 2] = pixel;
    tensor.strides[channel + 1] = pixel * tensor.sizes[channel + 2];
    stride = tensor.strides[channel + 1] * tensor.sizes[channel + 1];
    for (int i = channel - 1; i >= 0; --i) {
      tensor.strides[i] = stride;
      stride *= tensor.sizes[i];
    }
  }
  return tensor;
}

void set_logger(nvinfer1::ILogger* logger) noexcept { found_logger = logger; }

void* tensorrt_function(const char* name) noexcept {
#define SVEXPORT_TEXT(x) #x
#define SVEXPORT_EXPANDED(x) SVEXPORT_TEXT(x)
  static const char library[] = "libnvinfer.so." SVEXPORT_EXPANDED(NV_TENSORRT_MAJOR);
#undef SVEXPORT_EXPANDED
#undef SVEXPORT_TEXT
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return nullptr;
  void* function = dlsym(handle, name);
  dlclose(handle);  // this reference of several
  return function;
}

void log_error(const char* type, const std::string& message) noexcept {
  nvinfer1::ILogger* logger = found_logger;
  if (!logger) {
    using Getter = nvinfer1::ILogger* (*)();
    if (const auto get = reinterpret_cast<Getter>(tensorrt_function("getLogger"))) logger = get();
  }
  try {
    const std::string text = std::string("svexport: ") + type + ": " + message;
    if (logger) {
      logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
    } else {
      std::fprintf(stderr, "%s\n", text.c_str());
    }
  } catch (...) {
  }
}

}  // namespace svexport::plugin
