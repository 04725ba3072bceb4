// The gradients of grid_sample and of bilinear_sample.
#pragma once

#include <ATen/Context.h>

#include "binding.h"
#include "grid_sample/launch.h"

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

inline Wanted sampling_gradients(const char* op, const at::Tensor& grad_output, const at::Tensor& input,
                                 const at::Tensor& grid, int64_t mode, int64_t padding, bool align_corners,
                                 const c10::List<bool>& needs_grad) {
  const Gradients results({input, grid}, needs_grad);
  const auto grad = evenly_spaced(grad_output);
  const bool deterministic = at::globalContext().deterministicAlgorithms();
  const int32_t tactic = forced_tactic(op);
  const auto scratch = workspace(
      grid_sample_backward_workspace(view(grad), view(input), view(grid), static_cast<int>(mode), deterministic,
                                     needs_grad[0], needs_grad[1], tactic),
      input);
  return if_done(grid_sample_backward(view(grad), view(input), view(grid), view(results.all[0]), view(results.all[1]),
                                      static_cast<int>(mode), static_cast<int>(padding), align_corners, deterministic,
                                      tactic, scratch.data_ptr(), stream()),
                 results.wanted());
}

}  // namespace svexport
