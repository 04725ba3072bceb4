// What the nodes of csrc/tensorrt use of TensorRT, under its names, for a library that is compiled without TensorRT.
//
// Types, formats and sizes are plain data. Dimensions are numbers, because ONNX Runtime asks when shapes are known.
#pragma once

#include <cstdint>
#include <deque>

#define NV_TENSORRT_MAJOR 10

namespace nvinfer1 {

enum class DataType : int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64 };
enum class TensorFormat : int32_t { kLINEAR, kCHW2, kHWC8, kCHW4, kCHW16, kCHW32, kHWC, kHWC16 };
enum class DimensionOperation : int32_t { kSUM, kPROD };

struct Dims {
  static constexpr int MAX_DIMS = 8;
  int32_t nbDims = 0;
  int64_t d[MAX_DIMS] = {};
};

struct PluginTensorDesc {
  Dims dims;
  DataType type = DataType::kFLOAT;
  TensorFormat format = TensorFormat::kLINEAR;
  float scale = 0;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
};

struct IDimensionExpr {
  int64_t value;
};

struct DimsExprs {
  int32_t nbDims = 0;
  const IDimensionExpr* d[Dims::MAX_DIMS] = {};
};

// Owns the expressions that it makes.
class IExprBuilder {
 public:
  const IDimensionExpr* constant(int64_t value) {
    all_.push_back({value});
    return &all_.back();
  }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) {
    return constant(op == DimensionOperation::kPROD ? a.value * b.value : a.value + b.value);
  }

 private:
  std::deque<IDimensionExpr> all_;
};

enum class PluginFieldType : int32_t { kFLOAT16, kFLOAT32, kFLOAT64, kINT8, kINT16, kINT32, kCHAR, kDIMS, kUNKNOWN, kBF16 };

struct PluginField {
  PluginField(const char* name_, const void* data_, PluginFieldType type_, int32_t length_)
      : name(name_), data(data_), type(type_), length(length_) {}
  const char* name;
  const void* data;
  PluginFieldType type;
  int32_t length;
};

struct PluginFieldCollection {
  int32_t nbFields;
  const PluginField* fields;
};

class ILogger {
 public:
  enum class Severity : int32_t { kINTERNAL_ERROR, kERROR };
  virtual void log(Severity severity, const char* message) noexcept = 0;
  virtual ~ILogger() = default;
};

}  // namespace nvinfer1
