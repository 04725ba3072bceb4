// Shared by the bindings of grid_sample and bilinear_sample.
#pragma once

#include <ATen/Context.h>

#include "binding.h"

namespace svexport {

// (N, C, ...) with the dimensions after C as if they were one, which the kernels can read.
inline at::Tensor evenly_spaced(const at::Tensor& t) {
  int64_t stride = 0, expected = -1;
  for (int64_t i = t.dim() - 1; i >= 2; --i) {
    if (t.size(i) == 1) continue;
    stride = t.stride(i);
    if (expected >= 0 && stride != expected) return t.contiguous();
    expected = stride * t.size(i);
  }
  return t;
}

}  // namespace svexport
