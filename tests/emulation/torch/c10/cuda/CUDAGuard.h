// In place of torch's, for bindings on the emulated device: there is one.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(Device) {}
};
}  // namespace c10::cuda
