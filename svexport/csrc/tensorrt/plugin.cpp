#include "plugin.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>

namespace svexport::plugin {
namespace {

std::atomic<nvinfer1::ILogger*> found_logger{nullptr};

// The name of the tactic among the fields that plans hold of a plugin. No node has an attribute of that name.
constexpr char kTactic[] = "tactic";

}  // namespace

Fields::Fields(const PluginFieldCollection* given) {
  if (!given || given->nbFields < 0 || (given->nbFields > 0 && !given->fields)) {
    fail("no attributes are given");
    return;
  }
  for (int i = 0; i < given->nbFields; ++i) {
    const PluginField& field = given->fields[i];
    if (!field.name) {
      fail("unknown attribute without a name");
    } else if (!fields_.emplace(field.name, &field).second) {
      fail(std::string("attribute ") + field.name + " is given twice");
    }
  }
}

const PluginField* Fields::take(const std::string& name) {
  const auto found = fields_.find(name);
  if (found == fields_.end()) return fail("attribute " + name + " is missing"), nullptr;
  const PluginField* field = found->second;
  fields_.erase(found);
  return field;
}

const PluginField* Fields::take(const std::string& name, PluginFieldType type) {
  const PluginField* field = take(name);
  if (!field || field->type == type) return field;
  fail("attribute " + name + " should be of type " + (type == PluginFieldType::kINT32 ? "INT32" : "FLOAT32") +
       ", got PluginFieldType " + std::to_string(static_cast<int>(field->type)));
  return nullptr;
}

std::string Fields::wrong() const {
  return !why_.empty() || fields_.empty() ? why_ : "unknown attribute " + fields_.begin()->first;
}

void PluginBase::set_weights(Fields& fields) {
  const std::vector<std::string> names = weight_names();
  if (names.empty() || !fields.has(names[0])) return;
  std::vector<PluginField> taken;
  std::vector<int64_t> lengths;
  for (const std::string& name : names) {
    const PluginField* field = fields.take(name);
    if (!field) return;
    if (!Weights::is_weight(field->type) || field->length < 1 || !field->data) {
      fields.fail("attribute " + name + " should be a tensor of floating point numbers");
      return;
    }
    taken.push_back(*field);
    lengths.push_back(field->length);
  }
  // Check lengths before anything is read: wrong ones may be longer than the data.
  if (const char* why = wrong_lengths(lengths)) {
    fields.fail(why);
  } else {
    weights_ = std::make_shared<Weights>(taken);
    view_weights(DType::kFloat32);
  }
}

cudaError_t PluginBase::load_weights(DType dtype) {
  if (!weights_) return cudaSuccess;
  const cudaError_t status = weights_->on_device(dtype, on_device_);
  if (status == cudaSuccess) view_weights(dtype);
  return status;
}

void PluginBase::view_weights(DType dtype) {
  weight_views_.clear();
  for (int i = 0; i < weights_->count(); ++i) {
    const int64_t out = weights_->length(i | 1), in = weights_->length(i) / out;  // a bias follows its weight
    const void* const data = on_device_ ? on_device_->at(i) : nullptr;
    weight_views_.push_back(i % 2 ? row_major(data, dtype, {out}) : row_major(data, dtype, {out, in}));
  }
}

std::vector<PluginField> PluginBase::fields() {
  std::vector<PluginField> result = attributes();
  if (weights_) weights_->append_fields(result);
  if (tactic_) result.push_back(field_of(kTactic, tactic_));
  return result;
}

std::string PluginBase::set_fields(const PluginFieldCollection* given) {
  Fields fields(given);
  if (fields.ok()) set_attributes(fields);
  if (const char* why = fields.ok() ? wrong_attributes() : nullptr) fields.fail(why);
  if (fields.ok()) set_weights(fields);
  if (fields.ok() && fields.has(kTactic)) set(fields, kTactic, tactic_);
  return fields.wrong();
}

std::unique_ptr<PluginBase> make(Maker maker, const PluginFieldCollection* given) noexcept {
  return guarded("svexport", std::unique_ptr<PluginBase>(), [&]() -> std::unique_ptr<PluginBase> {
    auto plugin = maker();
    const std::string why = plugin->set_fields(given);
    if (why.empty()) return plugin;
    log_error(plugin->type(), why);
    return nullptr;
  });
}

DType dtype_of(DataType type) {
  switch (type) {
    case DataType::kHALF: return DType::kFloat16;
    case DataType::kINT8: return DType::kInt8;
    case DataType::kINT32: return DType::kInt32;
    case DataType::kBOOL: return DType::kBool;
#if NV_TENSORRT_MAJOR >= 9
    case DataType::kBF16: return DType::kBFloat16;
    case DataType::kINT64: return DType::kInt64;
#endif
    default: return DType::kFloat32;
  }
}

Tensor view(const PluginTensorDesc& description, void* data) {
  const auto& dims = description.dims;
  const TensorFormat format = description.format;
  Tensor tensor;
  tensor.data = data;
  tensor.dtype = dtype_of(description.type);
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
  tensor = row_major(tensor);
  if (padding > 1 || format == TensorFormat::kHWC) {
    const int64_t pixel = (tensor.sizes[channel] + padding - 1) / padding * padding;
    tensor.strides[channel] = 1;
    tensor.strides[channel + 2] = pixel;
    tensor.strides[channel + 1] = pixel * tensor.sizes[channel + 2];
    int64_t stride = tensor.strides[channel + 1] * tensor.sizes[channel + 1];
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
  dlclose(handle);  // drops the reference that dlopen added
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
