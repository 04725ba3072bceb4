// In place of torch's, for bindings on the emulated device: there is one.
#pragma once

#include <c10/core/Device.h>

#include <optional>

namespace c10::cuda {
struct OptionalCUDAGuard {
  explicit OptionalCUDAGuard(std::optional<Device>) {}
};
}  // namespace c10::cuda
