// The nodes as custom ops of ONNX Runtime on CUDA.
//
// An op of the domain svexport.kernels is named after a node and the types of its outputs, "SvGridSample_FLOAT16",
// because ONNX Runtime has no rule by which outputs of several types follow from a list of inputs. Its outputs are the
// node's and one more, the workspace: memory that ONNX Runtime allocates and frees in the order of the stream, also
// while it records a CUDA graph. Every error becomes a status: nothing is thrown into ONNX Runtime.
#include <onnxruntime_c_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "node.h"

namespace svexport::plugin {
namespace {

// The first version of the C API with statuses instead of exceptions: ONNX Runtime 1.16.
constexpr uint32_t kApiVersion = 16;

const OrtApi* api = nullptr;

struct Failure {
  std::string why;
};

void check(OrtStatus* status) {
  if (!status) return;
  const std::string why = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw Failure{why};
}

// Calls f; an exception becomes the status.
template <class F>
OrtStatus* guarded_status(const char* type, F&& f) noexcept {
  std::string why = "unknown exception";
  try {
    f();
    return nullptr;
  } catch (const Failure& failure) {
    why = failure.why;
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
  }
  return api->CreateStatus(ORT_FAIL, ("svexport::" + std::string(type) + ": " + why).c_str());
}

struct Type {
  ONNXTensorElementDataType onnx;
  DataType own;
  const char* name;
};

constexpr Type kTypes[] = {
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, DataType::kFLOAT, "FLOAT"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, DataType::kHALF, "FLOAT16"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, DataType::kBF16, "BFLOAT16"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, DataType::kINT8, "INT8"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, DataType::kINT32, "INT32"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, DataType::kINT64, "INT64"},
};
constexpr int kFloatTypes = 3;  // the first ones, which are the types that outputs may have

// The numbers of an attribute: `one` reads a number, `many` a list.
template <class T, class One, class Many>
std::vector<T> numbers_of(const OrtKernelInfo* info, const PluginField& field, One one, Many many) {
  size_t size = 1;
  if (field.length != 1) check(many(info, field.name, nullptr, &size));  // a list has length 0 before it is set
  std::vector<T> numbers(size);
  if (field.length == 1) {
    check(one(info, field.name, numbers.data()));
  } else if (size) {
    check(many(info, field.name, numbers.data(), &size));
  }
  return numbers;
}

// The attributes of a node, read from ONNX Runtime.
void set_attributes(PluginBase& plugin, const OrtKernelInfo* info) {
  std::vector<std::vector<int32_t>> integers;
  std::vector<std::vector<float>> floats;
  std::vector<PluginField> given;
  for (const PluginField& field : plugin.attributes()) {
    if (field.type == PluginFieldType::kINT32) {
      auto& narrow = integers.emplace_back();
      for (const int64_t value : numbers_of<int64_t>(info, field, api->KernelInfoGetAttribute_int64,
                                                     api->KernelInfoGetAttributeArray_int64)) {
        if (value != static_cast<int32_t>(value)) throw Failure{std::string(field.name) + " is out of range"};
        narrow.push_back(static_cast<int32_t>(value));
      }
      given.push_back(field_of(field.name, narrow));
    } else {
      floats.push_back(numbers_of<float>(info, field, api->KernelInfoGetAttribute_float,
                                         api->KernelInfoGetAttributeArray_float));
      given.push_back(field_of(field.name, floats.back()));
    }
  }
  const PluginFieldCollection collection{static_cast<int32_t>(given.size()), given.data()};
  if (const std::string why = plugin.set_fields(&collection); !why.empty()) throw Failure{why};
}

// One node of a session. Threads that run the session share it: nothing changes after construction.
class Kernel {
 public:
  Kernel(std::unique_ptr<PluginBase> plugin, const OrtKernelInfo* info) : plugin_(std::move(plugin)) {
    set_attributes(*plugin_, info);
  }

  const char* type() const { return plugin_->type(); }

  void compute(OrtKernelContext* context, const std::vector<DataType>& outputs) const {
    size_t count = 0;
    check(api->KernelContext_GetInputCount(context, &count));
    if (static_cast<int>(count) < plugin_->min_inputs() || static_cast<int>(count) > plugin_->max_inputs()) {
      throw Failure{"takes " + std::to_string(plugin_->min_inputs()) + " to " + std::to_string(plugin_->max_inputs()) +
                    " inputs, not " + std::to_string(count)};
    }
    std::vector<PluginTensorDesc> descriptions(count + outputs.size());
    std::vector<DataType> types(count);
    Tensors tensors;
    tensors.scales.resize(count);
    for (size_t i = 0; i < count; ++i) {
      tensors.inputs.push_back(input(context, i, descriptions[i]));
      types[i] = descriptions[i].type;
    }
    set_outputs(context, outputs, descriptions, tensors);
    for (int i = 0; i < static_cast<int>(descriptions.size()); ++i) {
      if (!plugin_->supports(i, {descriptions.data(), static_cast<int>(count), types})) {
        throw Failure{"has no kernel for the data type of tensor " + std::to_string(i) + ", inputs counted first"};
      }
    }
    if (const char* why = plugin_->wrong_sizes(tensors)) throw Failure{why};
    void* stream = nullptr;
    check(api->KernelContext_GetGPUComputeStream(context, &stream));
    const int64_t bytes = static_cast<int64_t>(plugin_->workspace(tensors));
    void* const workspace = output(context, outputs.size(), &bytes, 1);
    const cudaError_t status = plugin_->run(tensors, bytes ? workspace : nullptr, static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) throw Failure{cudaGetErrorString(status)};
  }

 private:
  // An empty tensor may have no memory, but is not absent.
  static void* present(void* data) { return data ? data : reinterpret_cast<void*>(256); }

  static Tensor input(OrtKernelContext* context, size_t i, PluginTensorDesc& description) {
    const OrtValue* value = nullptr;
    check(api->KernelContext_GetInput(context, i, &value));
    if (!value) throw Failure{"input " + std::to_string(i) + " is absent"};
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(api->GetTensorTypeAndShape(value, &info));
    ONNXTensorElementDataType type{};
    size_t rank = 0;
    OrtStatus* status = api->GetTensorElementType(info, &type);
    if (!status) status = api->GetDimensionsCount(info, &rank);
    if (!status && rank <= kMaxRank) status = api->GetDimensions(info, description.dims.d, rank);
    api->ReleaseTensorTypeAndShapeInfo(info);
    check(status);
    const auto found = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type& t) { return t.onnx == type; });
    if (rank > kMaxRank || found == std::end(kTypes)) {
      throw Failure{"input " + std::to_string(i) + " is of a data type or of more dimensions than kernels take"};
    }
    description.type = found->own;
    description.dims.nbDims = static_cast<int32_t>(rank);
    void* data = nullptr;
    check(api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    return view(description, present(data));
  }

  static void* output(OrtKernelContext* context, size_t i, const int64_t* sizes, size_t rank) {
    OrtValue* value = nullptr;
    check(api->KernelContext_GetOutput(context, i, sizes, rank, &value));
    if (!value) throw Failure{"output " + std::to_string(i) + " is absent"};
    void* data = nullptr;
    check(api->GetTensorMutableData(value, &data));
    return present(data);
  }

  // Allocates the outputs, whose descriptions follow those of the inputs.
  void set_outputs(OrtKernelContext* context, const std::vector<DataType>& types,
                   std::vector<PluginTensorDesc>& descriptions, Tensors& tensors) const {
    const size_t count = tensors.inputs.size();
    nvinfer1::IExprBuilder builder;
    std::vector<DimsExprs> in(count), out(types.size());
    for (size_t i = 0; i < count; ++i) {
      in[i].nbDims = descriptions[i].dims.nbDims;
      for (int axis = 0; axis < in[i].nbDims; ++axis) in[i].d[axis] = builder.constant(descriptions[i].dims.d[axis]);
    }
    if (const char* why = plugin_->shapes(in.data(), static_cast<int>(count), out.data(), builder)) throw Failure{why};
    for (size_t i = 0; i < types.size(); ++i) {
      PluginTensorDesc& description = descriptions[count + i];
      description.type = types[i];
      description.dims.nbDims = out[i].nbDims;
      for (int axis = 0; axis < out[i].nbDims; ++axis) description.dims.d[axis] = out[i].d[axis]->value;
      tensors.outputs.push_back(view(description, output(context, i, description.dims.d, out[i].nbDims)));
    }
  }

  std::unique_ptr<PluginBase> plugin_;
};

// A custom op: a node whose outputs have these types. Never destroyed, because sessions may outlive statics.
struct CustomOp : OrtCustomOp {
  CustomOp(Maker maker, std::vector<Type> types) : OrtCustomOp{}, maker_(maker), name_(maker()->type()) {
    for (const Type& type : types) {
      name_ += std::string("_") + type.name;
      outputs_.push_back(type.own);
      onnx_.push_back(type.onnx);
    }
    onnx_.push_back(ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8);
    version = kApiVersion;
    GetName = [](const OrtCustomOp* op) { return self(op).name_.c_str(); };
    GetExecutionProviderType = [](const OrtCustomOp*) { return "CUDAExecutionProvider"; };
    GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
    GetInputType = [](const OrtCustomOp*, size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_VARIADIC; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    GetOutputTypeCount = [](const OrtCustomOp* op) { return self(op).onnx_.size(); };
    GetOutputType = [](const OrtCustomOp* op, size_t i) { return self(op).onnx_[i]; };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
    GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
      return guarded_status(self(op).name_.c_str(), [&] { *kernel = new Made{&self(op), {self(op).maker_(), info}}; });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      const auto* made = static_cast<const Made*>(kernel);
      return guarded_status(made->op->name_.c_str(), [&] { made->kernel.compute(context, made->op->outputs_); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Made*>(kernel); };
  }

 private:
  struct Made {
    const CustomOp* op;
    Kernel kernel;
  };
  static const CustomOp& self(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }

  Maker maker_;
  std::string name_;
  std::vector<DataType> outputs_;
  std::vector<ONNXTensorElementDataType> onnx_;
};

// Adds an op of every node for each choice of output types: one for the first output, one for all others.
OrtCustomOpDomain* make_domain() {
  OrtCustomOpDomain* domain = nullptr;
  check(api->CreateCustomOpDomain("svexport.kernels", &domain));
  std::vector<Maker> makers(std::begin(kMakers), std::end(kMakers));
  makers.push_back(make_einsum);
  for (const Maker maker : makers) {
    const int outputs = maker()->outputs();
    for (int first = 0; first < kFloatTypes; ++first) {
      for (int others = 0; others < (outputs > 1 ? kFloatTypes : 1); ++others) {
        std::vector<Type> types(1, kTypes[first]);
        types.resize(outputs, kTypes[others]);
        check(api->CustomOpDomain_Add(domain, new CustomOp(maker, types)));
      }
    }
  }
  return domain;
}

}  // namespace
}  // namespace svexport::plugin

// What ONNX Runtime calls for every session that registers the library.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  using namespace svexport::plugin;
  const OrtApi* found = base->GetApi(kApiVersion);
  if (!found) {  // without an API there is no status either; version 1 is in every ONNX Runtime
    return base->GetApi(1)->CreateStatus(ORT_FAIL, "svexport's kernels need ONNX Runtime 1.16 or newer");
  }
  api = found;
  return guarded_status("RegisterCustomOps", [&] {
    static OrtCustomOpDomain* const domain = make_domain();
    check(api->AddCustomOpDomain(options, domain));
  });
}
