// Offsets of elements in several tensors of one shape and any strides.
#pragma once

#include "axes.h"
#include "device.cuh"

namespace svexport {

// offsets() gives the offset of element i, in row-major order of the axes, in each tensor.
template <int K>
struct Walk {
  int rank = 0;
  int64_t count = 1;
  Divider dividers[kMaxRank];  // the last axis first
  int64_t sizes[kMaxRank], strides[kMaxRank][K];

  __host__ __device__ void push(const Axis<K>& axis) {
    count *= axis.size;
    dividers[rank] = Divider(axis.size);
    sizes[rank] = axis.size;
    for (int k = 0; k < K; ++k) strides[rank][k] = axis.strides[k];
    ++rank;
  }
  Walk() = default;
  explicit Walk(const Axes<K>& axes) {
    for (int i = axes.rank - 1; i >= 0; --i) push(axes.at[i]);
  }

  __device__ __forceinline__ void offsets(int64_t i, int64_t (&to)[K]) const {
    UNROLL for (int t = 0; t < K; ++t) to[t] = 0;
    if (rank == 1) return add(0, i, to);
    if (count <= INT32_MAX) {
      auto rest = static_cast<uint32_t>(i);
      for (int k = 0; k < rank; ++k) add(k, dividers[k].split(rest), to);
    } else {
      for (int k = 0; k < rank; ++k) {
        add(k, i % sizes[k], to);
        i /= sizes[k];
      }
    }
  }

 private:
  __device__ __forceinline__ void add(int k, int64_t index, int64_t (&to)[K]) const {
    UNROLL for (int t = 0; t < K; ++t) to[t] += index * strides[k][t];
  }
};

}  // namespace svexport
