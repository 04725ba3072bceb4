// What the plugins of all nodes share, whichever plugin interface their TensorRT version has.
//
// A node's plugin is a class derived from Plugin<its struct of nodes.h>. It knows about types, formats, shapes and the
// launchers of csrc/cuda; interface_v3.cpp puts it behind IPluginV3 (TensorRT 10 and later), interface_v2.cpp behind
// IPluginV2DynamicExt (8.x). Nothing here links to TensorRT: its headers are enough.
#pragma once

#include <NvInferRuntime.h>

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "nodes.h"
#include "planner.h"
#include "tensor.h"
#include "weights.h"

namespace svexport::plugin {

using nvinfer1::DataType;
using nvinfer1::DimensionOperation;
using nvinfer1::DimsExprs;
using nvinfer1::IDimensionExpr;
using nvinfer1::IExprBuilder;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

constexpr char kNamespace[] = "svexport";
constexpr char kVersion[] = "1";

// Descriptions of a plugin's tensors, inputs first and then outputs, while TensorRT looks for types and formats.
class Descriptions {
 public:
  // declared: the types of the inputs in the network; empty if they are not known.
  Descriptions(const PluginTensorDesc* first, int inputs, const std::vector<DataType>& declared)
      : Descriptions(first, inputs, sizeof(PluginTensorDesc), declared) {}
  Descriptions(const nvinfer1::DynamicPluginTensorDesc* first, int inputs, const std::vector<DataType>& declared)
      : Descriptions(&first->desc, inputs, sizeof(nvinfer1::DynamicPluginTensorDesc), declared) {}

  const PluginTensorDesc& operator[](int i) const {
    return *reinterpret_cast<const PluginTensorDesc*>(first_ + i * step_);
  }
  int inputs() const { return inputs_; }

  // Whether an input keeps the type that it has in the network. In a network that is not strongly typed this is
  // float32, and TensorRT would also try half, in which coordinates are off by pixels.
  bool keeps_type(int i) const { return declared_.empty() || (*this)[i].type == declared_[i]; }

 private:
  Descriptions(const PluginTensorDesc* first, int inputs, size_t step, const std::vector<DataType>& declared)
      : first_(reinterpret_cast<const char*>(first)), inputs_(inputs), step_(step), declared_(declared) {}

  const char* first_;
  int inputs_;
  size_t step_;
  const std::vector<DataType>& declared_;
};

// A plugin's tensors at run time. An optional input that is absent has no data.
struct Tensors {
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::vector<float> scales;  // of inputs that TensorRT quantized by a dynamic range

  int count() const { return static_cast<int>(inputs.size()); }
  const Tensor& in(int i) const { return inputs[i]; }
  const Tensor& out(int i) const { return outputs[i]; }
};

// The fields that are given for a plugin. Each can be taken once.
class Fields {
 public:
  // The collection must outlive this.
  explicit Fields(const PluginFieldCollection* given);
  bool has(const std::string& name) const { return fields_.count(name) != 0; }
  // Takes the field of that name, of that type. Returns null, and remembers why, if there is none.
  const PluginField* take(const std::string& name);
  const PluginField* take(const std::string& name, PluginFieldType type);
  void fail(const std::string& why) { why_ = why_.empty() ? why : why_; }
  bool ok() const { return why_.empty(); }
  // The first thing that was wrong, or that a field was not taken; empty if all is well.
  std::string wrong() const;

 private:
  std::unordered_map<std::string, const PluginField*> fields_;
  std::string why_;
};

// No node has a longer list as an attribute: a field that claims to be longer is refused before it is read.
constexpr int kMaxLength = 64;

template <class T>  // int32_t or float
constexpr PluginFieldType kFieldType = std::is_same_v<T, int32_t> ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;

// Sets one attribute from its field. `fields` remembers what is wrong with the field.
template <class T>
void set(Fields& fields, const char* name, T& value) {
  const PluginField* field = fields.take(name, kFieldType<T>);
  if (!field) return;
  if (field->length != 1 || !field->data) {
    fields.fail(std::string("attribute ") + name + " should be one number, got " + std::to_string(field->length));
  } else {
    std::memcpy(&value, field->data, sizeof(T));
  }
}

template <class T>
void set(Fields& fields, const char* name, std::vector<T>& value) {
  const PluginField* field = fields.take(name, kFieldType<T>);
  if (!field) return;
  if (field->length < 0 || field->length > kMaxLength || (field->length > 0 && !field->data)) {
    fields.fail(std::string("attribute ") + name + " should be a list of at most " + std::to_string(kMaxLength) +
                " numbers, got " + (field->data ? std::to_string(field->length) : "none"));
    return;
  }
  value.resize(field->length);
  if (field->length > 0) std::memcpy(value.data(), field->data, field->length * sizeof(T));
}

template <class T>
PluginField field_of(const char* name, const T& value) {
  return {name, &value, kFieldType<T>, 1};
}

template <class T>
PluginField field_of(const char* name, const std::vector<T>& value) {
  return {name, value.data(), kFieldType<T>, static_cast<int32_t>(value.size())};
}

class PluginBase {
 public:
  virtual ~PluginBase() = default;

  // What nodes.h says of the node.
  virtual const char* type() const = 0;
  virtual int min_inputs() const = 0;
  virtual int max_inputs() const = 0;
  virtual int outputs() const = 0;

  virtual std::unique_ptr<PluginBase> clone() const = 0;

  // The attributes as fields, which point into this plugin.
  virtual std::vector<PluginField> attributes() = 0;
  virtual void set_attributes(Fields& fields) = 0;
  // Takes all given fields. Returns what is wrong with them; empty if nothing is.
  std::string set_fields(const PluginFieldCollection* given);

  // The names of weights that are attributes, in the order of the inputs that they replace: those of this node, and all
  // that any node of its type may have. Empty: nodes of this type have none.
  virtual std::vector<std::string> weight_names() const { return {}; }
  virtual std::vector<std::string> possible_weight_names() const { return {}; }
  // What is wrong with weights of these lengths; null if nothing is.
  virtual const char* wrong_lengths(const std::vector<int64_t>&) const { return nullptr; }
  // Loads any weights onto the current device in the type of input 0. release_weights() lets go of them.
  cudaError_t load_weights(DType dtype);
  void release_weights() { on_device_.reset(); }

  // All that makes this plugin what it is, as fields that point into it.
  std::vector<PluginField> fields();

  // What is wrong with the attributes; null if nothing is.
  virtual const char* wrong_attributes() const { return nullptr; }
  // Sets the shapes of all outputs; returns what is wrong with the ranks of the inputs, or null.
  virtual const char* shapes(const DimsExprs* inputs, int count, DimsExprs* outputs, IExprBuilder& builder) const = 0;
  // The type of an output; the first input's unless overridden.
  virtual DataType output_type(int, const DataType* inputs) const { return inputs[0]; }
  // Whether the type and format of tensor i are possible, given those of the tensors before it.
  virtual bool supports(int i, const Descriptions& tensors) const = 0;
  // What is wrong with the sizes; null if the launcher may be called.
  virtual const char* wrong_sizes(const Tensors&) const { return nullptr; }
  // Bytes that are enough for tensors of these sizes and for all smaller ones.
  virtual size_t workspace(const Tensors&) const { return 0; }
  virtual cudaError_t run(const Tensors& tensors, void* workspace, cudaStream_t stream) const = 0;

  // The tactics for tensors of these sizes, which TensorRT 10 and later times; none if there is no choice.
  virtual Few<int32_t> tactics(const Tensors&) const { return {}; }
  // Sets one of them; 0: the planner's choice, also taken where run-time sizes do not allow the plan's tactic.
  void set_tactic(int32_t tactic) { tactic_ = tactic; }

 protected:
  int32_t tactic_ = 0;
  std::shared_ptr<const Weights> weights_;              // null: weights are inputs
  std::shared_ptr<const Weights::OnDevice> on_device_;  // null: not loaded
  std::vector<Tensor> weight_views_;                    // (out, in), then (out), of each pair

 private:
  // Takes all of weight_names(), or none if the weights are inputs.
  void set_weights(Fields& fields);
  void view_weights(DType dtype);
};

template <class Derived, class Node>
class Plugin : public PluginBase {
 public:
  const char* type() const override { return Node::kNode.type; }
  // Nodes with lists of tensors override min_inputs() and max_inputs().
  int min_inputs() const override { return Node::kNode.tensors; }
  int max_inputs() const override { return Node::kNode.tensors + Node::kNode.optional; }
  int outputs() const override { return Node::kNode.outputs; }

  std::unique_ptr<PluginBase> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }

  std::vector<PluginField> attributes() override {
    std::vector<PluginField> result;
    node.each([&](const char* name, const auto& value) { result.push_back(field_of(name, value)); });
    return result;
  }

  void set_attributes(Fields& fields) override {
    node.each([&](const char* name, auto& value) { set(fields, name, value); });
  }

 protected:
  Node node;
};

// Makes the plugin of a node: one function per op, defined in <op>.cpp by SVEXPORT_PLUGIN(op, Class).
using Maker = std::unique_ptr<PluginBase> (*)();
#define SVEXPORT_DECLARE(op, Node) std::unique_ptr<PluginBase> make_##op();
SVEXPORT_NODES(SVEXPORT_DECLARE)
#undef SVEXPORT_DECLARE
#define SVEXPORT_PLUGIN(op, Class) \
  std::unique_ptr<PluginBase> make_##op() { return std::make_unique<Class>(); }

constexpr Maker kMakers[] = {
#define SVEXPORT_MAKER(op, Node) make_##op,
    SVEXPORT_NODES(SVEXPORT_MAKER)
#undef SVEXPORT_MAKER
};

// Makes a plugin with these attributes. Null, and the reason logged, if they are not the node's. Throws nothing.
std::unique_ptr<PluginBase> make(Maker maker, const PluginFieldCollection* fields) noexcept;

// Types and formats

inline bool is_float(DataType type) {
#if NV_TENSORRT_MAJOR >= 9
  if (type == DataType::kBF16) return true;
#endif
  return type == DataType::kFLOAT || type == DataType::kHALF;
}

inline bool is_half(DataType type) { return is_float(type) && type != DataType::kFLOAT; }

inline bool is_index(DataType type) {
#if NV_TENSORRT_MAJOR >= 9
  if (type == DataType::kINT64) return true;
#endif
  return type == DataType::kINT32;
}

inline bool is_linear(const PluginTensorDesc& tensor) { return tensor.format == TensorFormat::kLINEAR; }

// Floating point in row-major order.
inline bool is_linear_float(const PluginTensorDesc& tensor) { return is_linear(tensor) && is_float(tensor.type); }

// Floating point in row-major order, in the type of `other`.
inline bool is_linear_like(const PluginTensorDesc& tensor, const PluginTensorDesc& other) {
  return is_linear_float(tensor) && tensor.type == other.type;
}

// Floating point in row-major order: float32, the type of `other`, or the type that the input has in the network.
inline bool is_linear_beside(const Descriptions& tensors, int i, const PluginTensorDesc& other) {
  const DataType type = tensors[i].type;
  return is_linear_float(tensors[i]) && (type == DataType::kFLOAT || type == other.type || tensors.keeps_type(i));
}

// Coordinates: they keep the precision that the network gives them.
inline bool is_coordinates(const Descriptions& tensors, int i) {
  return is_linear_float(tensors[i]) && tensors.keeps_type(i);
}

// Floating point that launchers read by strides: row-major or channels-last. TensorRT's channels-last pads the channels
// to a multiple of 8 in half, and does not pad float32.
inline bool is_strided_float(const PluginTensorDesc& tensor) {
  return is_linear_float(tensor) || (tensor.format == TensorFormat::kHWC8 && is_half(tensor.type)) ||
         (tensor.format == TensorFormat::kHWC && tensor.type == DataType::kFLOAT);
}

// Whether there is no padding, which launchers do not write.
inline bool is_unpadded(const PluginTensorDesc& tensor) {
  return tensor.format != TensorFormat::kHWC8 || tensor.dims.d[tensor.dims.nbDims - 3] % 8 == 0;
}

// int8 either as it is in the network, where a step is worth `scale`, or as TensorRT quantized it by a dynamic range.
// In that case the scale comes with the tensor, and the node should have none.
inline bool is_int8(const Descriptions& tensors, int i, float scale) {
  return tensors[i].type == DataType::kINT8 && (tensors.keeps_type(i) || scale == 1);
}

// The formats of int8 that launchers read.
inline bool has_int8_format(const PluginTensorDesc& tensor) {
  return is_linear(tensor) || tensor.format == TensorFormat::kCHW4 || tensor.format == TensorFormat::kCHW32;
}

// What one step of an int8 input is worth; 1 for other types.
inline float scale_of(const Tensors& tensors, int i, float scale) {
  if (tensors.in(i).dtype != DType::kInt8) return 1;
  return scale == 1 && tensors.scales[i] > 0 ? tensors.scales[i] : scale;
}

DType dtype_of(DataType type);

// A view of `data` in the layout of the description. A format with vectors of channels becomes a tensor with one more
// dimension: (..., C, H, W) in CHW32 is (..., ceil(C/32), H, W, 32).
Tensor view(const PluginTensorDesc& description, void* data);

// Bytes of scratch into which sampling launchers copy an image that is row-major, if points are many. A launcher may
// ask for more for a smaller image than for a larger one, so this is a bound that grows with every size.
inline size_t bound_of_copy(const Tensor& image, const Tensor& grid) {
  if (image.rank != 4 || image.strides[3] != 1) return 0;
  const int64_t points = grid.sizes[1] * grid.sizes[2], pixels = image.sizes[2] * image.sizes[3];
  const int64_t copied = pixels < 2 * points ? pixels : 2 * points;
  return image.sizes[0] * (copied * image.sizes[1] * image.item_size() + points + 16);
}

// The scratch of a launcher that asks for `bytes`: null beyond the bound, where it has to do without.
inline void* for_copy(void* workspace, size_t bytes, const Tensor& image, const Tensor& grid) {
  return bytes <= bound_of_copy(image, grid) ? workspace : nullptr;
}

// Shapes

inline const IDimensionExpr* product(const IDimensionExpr* a, const IDimensionExpr* b, IExprBuilder& builder) {
  return builder.operation(DimensionOperation::kPROD, *a, *b);
}

inline void set_dims(DimsExprs& shape, std::initializer_list<const IDimensionExpr*> dims) {
  shape.nbDims = 0;
  for (const IDimensionExpr* dim : dims) shape.d[shape.nbDims++] = dim;
}

// Logs an error to TensorRT's logger where there is one, else to stderr.
void log_error(const char* type, const std::string& message) noexcept;
void set_logger(nvinfer1::ILogger* logger) noexcept;

// A function exported by the TensorRT library that this process has loaded; null if there is no such function.
void* tensorrt_function(const char* name) noexcept;

// Calls f; what it throws is logged and becomes `otherwise`.
template <class F, class Result>
Result guarded(const char* type, Result otherwise, F&& f) noexcept {
  try {
    return f();
  } catch (const std::exception& error) {
    log_error(type, error.what());
  } catch (...) {
    log_error(type, "unknown exception");
  }
  return otherwise;
}

}  // namespace svexport::plugin
