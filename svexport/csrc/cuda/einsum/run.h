// The functions by which einsum.cu runs tactics, one for each kernel. Host C++.
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
  bool early;       // as in einsum_views()
  cudaStream_t stream;
};

// y as the sum of parts (count, S, K, V, W); any four dimensions may take the places of S, K, V and W.
struct PartedSum {
  const float* parts;
  int count;
  int64_t sizes[4], strides[4];  // S, K, V, W
  void* y;
  DType dtype;
};

cudaError_t add_up(const PartedSum& sum, cudaStream_t stream);  // waits for the kernel that writes the parts

cudaError_t run_large(const Call& call);
template <class T>
cudaError_t run_small(const Call& call);  // T: float or Narrow; einsum_narrow.cu has the latter
cudaError_t run_channel_product(const Call& call);
cudaError_t run_channel_correlation(const Call& call);

}  // namespace svexport::einsum
