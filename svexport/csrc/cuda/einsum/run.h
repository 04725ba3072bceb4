// What runs a tactic of einsum, kernel by kernel: for einsum.cu alone. Host C++.
#pragma once

#include "einsum/tactics.h"
#include "tensor.h"

namespace svexport::einsum {

struct Call {
  Problem problem;
  Tactic tactic;
  Gpu gpu;
  Launch launch;
  Tensor x, y, z;   // (S, O, K, T, V), (S, K, V, M, W), (S, O, M, T, W)
  void* workspace;
  bool early;       // as einsum_views() has it
  cudaStream_t stream;
};

// y as its parts lie in memory, (count, S, K, V, W): what of it is which does not matter.
struct PartedSum {
  const float* parts;
  int count;
  int64_t sizes[4], strides[4];  // S, K, V, W
  void* y;
  DType dtype;
};

cudaError_t add_up(const PartedSum& sum, cudaStream_t stream);  // as soon as the kernel before has left the parts

cudaError_t run_large(const Call& call);
template <class T>
cudaError_t run_small(const Call& call);  // each type in a source of its own
cudaError_t run_channel_product(const Call& call);
cudaError_t run_channel_correlation(const Call& call);

}  // namespace svexport::einsum
