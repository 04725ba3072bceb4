// What is asked of the kernels of add_bias_residual_layer_norm. Host C++, no CUDA.
#pragma once

#include <cstdint>

#include "fields.h"

namespace svexport::norm {

struct Figures;

// x, residual, extra, the outputs, and in the gradient dy and ds: (rows, columns). bias, weight, norm_bias: (columns).
struct Problem {
  static constexpr const char* kOp = "add_bias_residual_layer_norm";
  using Figures = norm::Figures;
  int32_t backward = 0;
  int64_t rows = 0, columns = 0;    // columns 0: not known, of a kernel that is compiled ahead of time
  int32_t item_size = 4;            // of an element of x, 2 or 4
  int32_t addresses = 16;           // bytes of which all addresses of (rows, columns) are multiples, 16 at most
  int32_t strides = 16;             // the same of what lies between rows
  int32_t parameters = 16;          // the same of the addresses of bias, weight, norm_bias
  int32_t dense = 1;                // whether rows lie one behind the other in all tensors
  int32_t extra = 0;                // whether there is one
  int32_t gradients = 3;            // backward: of those of x, residual, extra, how many are wanted
  int32_t sums = 1;                 // backward: whether a gradient of bias, weight or norm_bias is wanted

  SVEXPORT_EACH(backward, rows, columns, item_size, addresses, strides, parameters, dense, extra, gradients, sums)
};

}  // namespace svexport::norm
