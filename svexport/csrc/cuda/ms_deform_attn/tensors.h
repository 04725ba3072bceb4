// Builds the planner's problem of ms_deform_attn from tensors. Host C++.
#pragma once

#include "gpu.h"
#include "ms_deform_attn/tactics.h"
#include "tensor.h"

namespace svexport::ms_deform {

inline Problem problem_of(const Tensor& value, const Tensor& locations) {
  Problem p;
  p.images = value.sizes[0];
  p.rows = locations.sizes[1] * value.sizes[2];
  p.channels = value.sizes[3];
  p.samples = locations.sizes[3] * locations.sizes[4];
  p.item_size = static_cast<int32_t>(value.item_size());
  while (p.alignment > p.item_size && !value.aligned(3, p.alignment)) p.alignment /= 2;
  return p;
}

}  // namespace svexport::ms_deform
