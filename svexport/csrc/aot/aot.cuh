// Kernels of plugins, compiled ahead of time. TensorRT launches one kernel, whose arguments are pointers and 32-bit
// integers. svexport/tensorrt/aot.py writes that entry point, which describes the tensors and calls <op>.cuh. This
// prepares what a launcher would, and calls the kernel of csrc/cuda/<op>.cu as a function.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include "device.cuh"

namespace svexport::aot {

using svexport::Int;  // for the entry point: an attribute, or a choice by shapes that TensorRT knows

// A list of inputs or attributes of a node.
template <class T, int N>
struct List {
  static constexpr int kSize = N;
  T at[N ? N : 1];
};

// A tensor from TensorRT: row-major, or channels-last (*, H, W, C).
template <class T, int R>
struct View {
  T* data;
  int sizes[R];

  __device__ __forceinline__ int64_t product(int first, int last) const {
    int64_t n = 1;
    UNROLL for (int i = first; i < last; ++i) n *= sizes[i];
    return n;
  }
  __device__ __forceinline__ bool aligned(int bytes) const { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }
};

template <class T>
constexpr DType kDType = std::is_same_v<std::remove_const_t<T>, __half>          ? DType::kFloat16
                         : std::is_same_v<std::remove_const_t<T>, __nv_bfloat16> ? DType::kBFloat16
                         : std::is_same_v<std::remove_const_t<T>, int8_t>        ? DType::kInt8
                                                                                 : DType::kFloat32;

// A Tensor with data and dtype only, for kernels that read few numbers of it.
template <class T, int R>
__device__ __forceinline__ Tensor untyped(const View<T, R>& view) {
  Tensor t;
  t.data = const_cast<std::remove_const_t<T>*>(view.data);
  t.dtype = kDType<T>;
  return t;
}

// A Tensor as launchers take it; last: the view is channels-last.
template <class T, int R>
__device__ __forceinline__ Tensor tensor(const View<T, R>& view, bool last = false) {
  Tensor t = untyped(view);
  t.rank = R;
  int64_t stride = 1;
  if (last) {
    t.strides[R - 3] = 1;
    stride = view.sizes[R - 3];
  }
  UNROLL for (int i = R - 1; i >= 0; --i) {
    t.sizes[i] = view.sizes[i];
    if (last && i == R - 3) continue;
    t.strides[i] = stride;
    stride *= view.sizes[i];
  }
  return t;
}

}  // namespace svexport::aot

// From here on kernels are functions, and the entry point has the launch bounds.
#define SVEXPORT_AOT
#pragma push_macro("__global__")
#pragma push_macro("__launch_bounds__")
#pragma push_macro("__grid_constant__")
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__ __device__ __forceinline__
#define __launch_bounds__(...)
#define __grid_constant__ SVEXPORT_BY
#ifndef SVEXPORT_BY  // how a function takes what is a parameter of the kernel
#define SVEXPORT_BY
#endif
