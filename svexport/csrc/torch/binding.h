// From torch tensors to launchers and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensor.h"

namespace svexport {

// The kernels' DType of a torch type, if they have it.
inline std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kChar: return DType::kInt8;
    case at::kInt: return DType::kInt32;
    case at::kLong: return DType::kInt64;
    case at::kBool: return DType::kBool;
    default: return std::nullopt;
  }
}

inline Tensor view(const at::Tensor& tensor) {
  Tensor result;
  if (!tensor.defined()) return result;
  const auto dtype = dtype_of(tensor.scalar_type());
  TORCH_CHECK(dtype, "svexport has no kernels for ", tensor.scalar_type());
  TORCH_CHECK(tensor.dim() <= kMaxRank, "svexport's kernels take at most ", kMaxRank, " dimensions, got ", tensor.dim());
  result.data = tensor.data_ptr();
  result.dtype = *dtype;
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

// A contiguous tensor of the type and on the device of `like`.
inline at::Tensor fresh(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, like.options().memory_format(at::MemoryFormat::Contiguous));
}
inline at::Tensor fresh(const at::Tensor& like) { return fresh(like.sizes(), like); }

inline at::Tensor workspace(size_t bytes, const at::Tensor& like) {
  return at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
}

// A fresh tensor for each argument whose gradient is needed; undefined tensors for the others.
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

// Whether the launcher ran; false if it has no kernel for these arguments. Any other failure is an error.
inline bool done(cudaError_t status) {
  if (status == cudaErrorNotSupported) return false;
  TORCH_CHECK(status == cudaSuccess, "svexport: CUDA kernel launch failed: ", cudaGetErrorString(status));
  return true;
}

// The result that a launcher has written; nothing if it has no kernel for the arguments.
template <class Result>
std::optional<Result> if_done(cudaError_t status, Result result) {
  return done(status) ? std::optional(std::move(result)) : std::nullopt;
}

// The gradients of the arguments that need one, in order.
using Wanted = std::optional<std::vector<at::Tensor>>;

// Calls f with each defined tensor of an operator's argument.
template <class F, class Argument>
void each_tensor(F&& f, const Argument& argument) {
  if constexpr (std::is_same_v<Argument, at::TensorList>) {
    for (const at::Tensor& tensor : argument) each_tensor(f, tensor);
  } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
    if (argument) each_tensor(f, *argument);
  } else if constexpr (std::is_same_v<Argument, at::Tensor>) {
    if (argument.defined()) f(argument);
  }
}

// An operator on CUDA tensors: `kernel` or, if it returns nothing, the pure-torch definition, the Python kernel that
// torch keeps under the CPU key. Tensors of several devices, or of types that no kernel reads, go there at once.
template <class Result, class... Arguments>
struct Operator {
  std::string name;
  std::optional<Result> (*kernel)(Arguments...);

  Result operator()(Arguments... arguments) const {
    std::optional<at::Device> device;
    bool readable = true;
    const auto check = [&](const at::Tensor& tensor) {
      if (!device) device = tensor.device();
      readable = readable && tensor.device() == *device && tensor.dim() <= kMaxRank && dtype_of(tensor.scalar_type());
    };
    (each_tensor(check, arguments), ...);
    const c10::cuda::OptionalCUDAGuard guard(device && device->is_cuda() ? device : std::nullopt);
    if (auto result = readable ? kernel(arguments...) : std::nullopt) return *std::move(result);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
    return op.template typed<Result(Arguments...)>().redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), arguments...);
  }
};

template <class Result, class... Arguments>
void implement(torch::Library& library, const std::string& name, std::optional<Result> (*kernel)(Arguments...)) {
  library.impl(name.c_str(), Operator<Result, Arguments...>{"svexport::" + name, kernel});
}

// The tactic that calls of an op take, as set by svexport::_force_tactic for tests and for timing tactics one by one;
// 0: the planner's choice.
int32_t forced_tactic(const char* op);

}  // namespace svexport
