// From torch tensors to launchers and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "tensor.h"

namespace svexport {

inline bool has_dtype(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kBool: return tensor.dim() <= kMaxRank;
    default: return false;
  }
}

inline DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kChar: return DType::kInt8;
    case at::kInt: return DType::kInt32;
    case at::kLong: return DType::kInt64;
    case at::kBool: return DType::kBool;
    default: TORCH_CHECK(false, "svexport has no kernels for ", type);
  }
}

inline Tensor view(const at::Tensor& tensor) {
  Tensor result;
  if (!tensor.defined()) return result;
  TORCH_CHECK(tensor.dim() <= kMaxRank, "svexport's kernels take at most ", kMaxRank, " dimensions, got ", tensor.dim());
  result.data = tensor.data_ptr();
  result.dtype = to_dtype(tensor.scalar_type());
  result.rank = static_cast<int32_t>(tensor.dim());
  for (int i = 0; i < result.rank; ++i) {
    result.sizes[i] = tensor.size(i);
    result.strides[i] = tensor.stride(i);
  }
  return result;
}

inline Tensor view(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? view(*tensor) : Tensor{};
}

inline cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// Contiguous, of the type and on the device of `like`.
inline at::Tensor fresh(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, like.options().memory_format(at::MemoryFormat::Contiguous));
}
inline at::Tensor fresh(const at::Tensor& like) { return fresh(like.sizes(), like); }

inline at::Tensor workspace(size_t bytes, const at::Tensor& like) {
  return at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
}

// A fresh tensor for each argument whose gradient is needed; the others undefined.
struct Gradients {
  std::vector<at::Tensor> all;

  Gradients(at::TensorList arguments, const c10::List<bool>& needs_grad) : all(arguments.size()) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (i < needs_grad.size() && needs_grad.get(i)) all[i] = fresh(arguments[i]);
    }
  }

  std::vector<at::Tensor> wanted() const {
    std::vector<at::Tensor> results;
    for (const auto& t : all) {
      if (t.defined()) results.push_back(t);
    }
    return results;
  }
};

// Whether the launcher did it; false if it has no kernel for these arguments. Any other failure is an error.
inline bool done(cudaError_t status) {
  if (status == cudaErrorNotSupported) return false;
  TORCH_CHECK(status == cudaSuccess, "svexport: CUDA kernel launch failed: ", cudaGetErrorString(status));
  return true;
}

// The op's pure-torch definition on CUDA tensors: the Python kernel, which torch keeps under the CPU key.
template <class Function, class... Args>
decltype(auto) reference(const char* name, Function*, Args&&... args) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("svexport::") + name).c_str(), "");
  return op.template typed<Function>().redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<Args>(args)...);
}

}  // namespace svexport
