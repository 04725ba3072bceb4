// The common axes of several tensors of one shape. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "tensor.h"

namespace svexport {

template <int K>
struct Axis {
  int64_t size, strides[K];
};

// The axes of K tensors without their last `trailing` ones. Axes of size 1 are left out, and adjacent axes are joined
// where all tensors allow it. A tensor with null data is absent: its strides count as 0.
template <int K>
struct Axes {
  int rank = 0;
  Axis<K> at[kMaxRank];

  enum class Order { kRowMajor, kMemory };  // kMemory: by the first tensor's strides, if any order will do

  Axes(const Tensor* const (&tensors)[K], int trailing, Order order) {
    for (int i = 0; i < tensors[0]->rank - trailing; ++i) {
      if (tensors[0]->sizes[i] == 1) continue;
      at[rank].size = tensors[0]->sizes[i];
      for (int k = 0; k < K; ++k) at[rank].strides[k] = tensors[k]->data ? tensors[k]->strides[i] : 0;
      ++rank;
    }
    if (order == Order::kMemory) {
      std::stable_sort(at, at + rank, [](const auto& a, const auto& b) { return a.strides[0] > b.strides[0]; });
    }
    int joined = 0;
    for (int i = 0; i < rank; ++i) {
      bool joins = joined > 0;
      for (int k = 0; joins && k < K; ++k) joins = at[joined - 1].strides[k] == at[i].strides[k] * at[i].size;
      if (joins) at[i].size *= at[joined - 1].size;
      at[joins ? joined - 1 : joined++] = at[i];
    }
    rank = joined;
  }

  int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= at[i].size;
    return n;
  }
};

}  // namespace svexport
