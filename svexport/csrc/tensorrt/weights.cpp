#include "weights.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

namespace svexport::plugin {
namespace {

using nvinfer1::PluginFieldType;

template <class T>
T read(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

float to_float(PluginFieldType type, const char* data) {
#if NV_TENSORRT_MAJOR >= 10
  if (type == PluginFieldType::kBF16) return __bfloat162float(read<__nv_bfloat16>(data));
#endif
  return type == PluginFieldType::kFLOAT16 ? __half2float(read<__half>(data)) : read<float>(data);
}

size_t write(DType dtype, float value, char* data) {
  const auto put = [data](auto typed) { return std::memcpy(data, &typed, sizeof(typed)), sizeof(typed); };
  switch (dtype) {
    case DType::kFloat16: return put(__float2half_rn(value));
    case DType::kBFloat16: return put(__float2bfloat16_rn(value));
    default: return put(value);
  }
}

}  // namespace

size_t size_of(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kINT32:
    case PluginFieldType::kFLOAT32: return 4;
    case PluginFieldType::kFLOAT16: return 2;
#if NV_TENSORRT_MAJOR >= 10
    case PluginFieldType::kBF16: return 2;
#endif
    default: return 0;
  }
}

bool Weights::is_weight(PluginFieldType type) { return size_of(type) != 0 && type != PluginFieldType::kINT32; }

Weights::Weights(const std::vector<nvinfer1::PluginField>& fields) {
  for (const auto& field : fields) {
    const auto* data = static_cast<const char*>(field.data);
    all_.push_back({field.name, field.type, field.length, {data, data + field.length * size_of(field.type)}});
  }
}

void Weights::append_fields(std::vector<nvinfer1::PluginField>& fields) const {
  for (const Weight& weight : all_) {
    fields.emplace_back(weight.name.c_str(), weight.data.data(), weight.type, weight.length);
  }
}

cudaError_t Weights::on_device(DType dtype, std::shared_ptr<const OnDevice>& result) const {
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<const OnDevice>& known = on_devices_[{device, dtype}];
  if ((result = known.lock())) return cudaSuccess;
  std::vector<size_t> offsets;
  std::vector<char> bytes;
  for (const Weight& weight : all_) {
    size_t at = (bytes.size() + 255) / 256 * 256;
    offsets.push_back(at);
    bytes.resize(at + weight.length * sizeof(float));
    for (int32_t i = 0; i < weight.length; ++i) {
      at += write(dtype, to_float(weight.type, weight.data.data() + i * size_of(weight.type)), bytes.data() + at);
    }
    bytes.resize(at);
  }
  const auto made = std::make_shared<OnDevice>(std::move(offsets));
  cudaError_t status = cudaMalloc(&made->memory_, bytes.size());
  if (status == cudaSuccess) status = cudaMemcpy(made->memory_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  if (status != cudaSuccess) return status;
  known = result = made;
  return cudaSuccess;
}

}  // namespace svexport::plugin
