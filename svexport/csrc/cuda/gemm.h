// A linear layer: y = relu?(x weight^T + bias).
#pragma once

#include "tensor.h"

namespace svexport {

// All tensors have one dtype (fp32, fp16, or bf16 from compute capability 8.0 on) and are row-major without gaps.
struct Linear {
  const void* x = nullptr;       // (rows, in)
  const void* x_tail = nullptr;  // (rows, in): replaces x for the outputs from `tail` on; null: x for all
  int tail = 0;
  const void* weight = nullptr;  // (out, in)
  const void* bias = nullptr;    // (out), or null
  void* y = nullptr;             // (rows, out)
  int64_t rows = 0;
  int in = 0, out = 0;
  bool relu = false;
};

// Sums are fp32. Returns cudaErrorNotSupported for another dtype.
cudaError_t linear(const Linear& layer, DType dtype, cudaStream_t stream);

}  // namespace svexport
