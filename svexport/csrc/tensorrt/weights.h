// Weights that a node has as attributes.
#pragma once

#include <NvInferRuntime.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensor.h"

namespace svexport::plugin {

// Kept in host memory, as the engine holds them, and copied to a device in the type of the computation. The clones of a
// plugin share one of these, with its copies on devices.
class Weights {
 public:
  // Copies the fields. Each is of a type that is_weight(), and its data has its length.
  explicit Weights(const std::vector<nvinfer1::PluginField>& fields);
  Weights(const Weights&) = delete;

  static bool is_weight(nvinfer1::PluginFieldType type);

  int count() const { return static_cast<int>(all_.size()); }
  int64_t length(int i) const { return all_[i].length; }
  // Appends fields that point into this object.
  void append_fields(std::vector<nvinfer1::PluginField>& fields) const;

  // The weights on one device, one after the other, each aligned to 256 bytes.
  class OnDevice {
   public:
    explicit OnDevice(std::vector<size_t> offsets) : offsets_(std::move(offsets)) {}
    OnDevice(const OnDevice&) = delete;
    ~OnDevice() { cudaFree(memory_); }
    void* at(int i) const { return static_cast<char*>(memory_) + offsets_[i]; }

   private:
    friend class Weights;
    std::vector<size_t> offsets_;
    void* memory_ = nullptr;
  };

  // The weights on the current device in this type, as long as the pointer is held. Allocates and waits if none is.
  cudaError_t on_device(DType dtype, std::shared_ptr<const OnDevice>& result) const;

 private:
  struct Weight {
    std::string name;
    nvinfer1::PluginFieldType type;
    int32_t length;
    std::vector<char> data;
  };

  std::vector<Weight> all_;
  mutable std::mutex mutex_;
  mutable std::map<std::pair<int, DType>, std::weak_ptr<const OnDevice>> on_devices_;
};

// Bytes of one number in a field; 0 for types that neither attributes nor weights have.
size_t size_of(nvinfer1::PluginFieldType type);

}  // namespace svexport::plugin
