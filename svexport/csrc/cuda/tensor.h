// The arguments and results of every launcher. No torch, no TensorRT: torch operators and plugins share the launchers.
//
// A launcher enqueues on the given stream and returns. It allocates nothing and waits for nothing, so that a CUDA graph
// can capture it. The caller provides scratch memory; the launcher's *_workspace function says how much. Empty tensors
// are allowed everywhere. For data types, ranks or modes that have no kernel, a launcher enqueues nothing and returns
// cudaErrorNotSupported; otherwise it returns what the launch returned.
// tactic: the id of a tactic of <op>/tactics.h; 0, or an id that is not valid for these tensors, selects the cheapest.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#ifdef __CUDACC__
#define SVEXPORT_ANYWHERE __host__ __device__
#else
#define SVEXPORT_ANYWHERE
#endif

namespace svexport {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kInt8, kInt32, kInt64, kBool };

constexpr int kMaxRank = 8;

// A strided view of device memory, sizes and strides in elements.
struct Tensor {
  void* data = nullptr;  // null: an optional tensor that is absent
  DType dtype = DType::kFloat32;
  int32_t rank = 0;
  int64_t sizes[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= sizes[i];
    return n;
  }

  // Whether the elements lie in row-major order without gaps; dimensions of size 1 may have any stride.
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }

  // Whether vectors of `bytes` along `axis` can be accessed: its stride is 1; data and other strides are multiples.
  bool aligned(int axis, int64_t bytes) const {
    const int64_t size = item_size();
    if (reinterpret_cast<uintptr_t>(data) % bytes != 0 || (strides[axis] != 1 && sizes[axis] != 1)) return false;
    for (int i = 0; i < rank; ++i) {
      if (i != axis && sizes[i] > 1 && (strides[i] * size) % bytes != 0) return false;
    }
    return true;
  }

  SVEXPORT_ANYWHERE int64_t item_size() const {
    switch (dtype) {
      case DType::kFloat32:
      case DType::kInt32: return 4;
      case DType::kFloat16:
      case DType::kBFloat16: return 2;
      case DType::kInt64: return 8;
      default: return 1;
    }
  }

  void* element(int64_t i) const { return static_cast<char*>(data) + i * item_size(); }
};

// t with row-major strides without gaps.
inline Tensor row_major(Tensor t) {
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= t.sizes[i];
  }
  return t;
}

inline Tensor row_major(const void* data, DType dtype, std::initializer_list<int64_t> sizes) {
  Tensor t;
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), t.sizes);
  return row_major(t);
}

// A view of the same memory with other sizes and strides.
inline Tensor as_strided(const Tensor& t, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
  Tensor view = row_major(t.data, t.dtype, sizes);
  std::copy(strides.begin(), strides.end(), view.strides);
  return view;
}

}  // namespace svexport
