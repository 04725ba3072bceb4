// Self attention of several heads, without a mask: softmax(q k^T / sqrt(D)) v.
#pragma once

#include "tensor.h"

namespace svexport {

// qkv: (B, Q, 3, heads, D), output: (B, Q, heads, D), both contiguous, fp32, fp16 or bf16. Scores and sums are fp32.
// Returns cudaErrorNotSupported for another dtype, and for D above 64.
cudaError_t attention(const void* qkv, void* output, int batch, int queries, int heads, int head_dim, DType dtype,
                      cudaStream_t stream);

}  // namespace svexport
