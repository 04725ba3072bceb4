// Kernels that compute each element of the output from the same element of one or two inputs, and possibly a scale.
#pragma once

#include "strided.cuh"

namespace svexport {

// The source of scales: a number, a tensor of one element, or a tensor with one element per index of an axis.
struct Scales {
  float number = 1;
  Tensor tensor = {};  // fp32
  int axis = 0;
};

// The arguments of a kernel. F is struct F { struct Scale { explicit Scale(float); };
// Vec<Out, N> operator()(Vec<In, N> x[K], Scale); }, for N = 1 and Elementwise::kVector.
template <class In, class Out, int K, class F>
struct Elementwise {
  const In* inputs[K];
  Out* output;
  int64_t count;
  float number;
  const float* scales;  // null: use number
  // In dense tensors, element i has scale i / inner % channels.
  int64_t inner, channels;
  F f;

  static constexpr int kThreads = 256;
  static constexpr int kVector = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));

  __device__ __forceinline__ float scale(int64_t channel) const { return scales ? scales[channel] : number; }
};

// For tensors of the same dense layout, in memory order. A thread computes kUnroll vectors, and reads all before it
// writes the first.
template <int kUnroll, class In, class Out, int K, class F>
__global__ void __launch_bounds__(256) dense_kernel(const __grid_constant__ Elementwise<In, Out, K, F> a) {
  using A = Elementwise<In, Out, K, F>;
  constexpr int N = A::kVector;
  const int64_t first = (blockIdx.x * static_cast<int64_t>(A::kThreads * kUnroll) + threadIdx.x) * N;
  Vec<In, N> in[kUnroll][K];
  UNROLL for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * A::kThreads * N;
    UNROLL for (int k = 0; k < K; ++k) in[u][k] = load_if<In, N>(a.inputs[k] + i, i + N <= a.count);
  }
  UNROLL for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * A::kThreads * N;
    if (i >= a.count) return;
    int64_t channel = 0, rest = 0;  // position within the channel
    if (a.channels > 1) {
      channel = a.count <= INT32_MAX ? static_cast<uint32_t>(i) / static_cast<uint32_t>(a.inner) : i / a.inner;
      rest = i - channel * a.inner;
      channel = a.count <= INT32_MAX ? static_cast<uint32_t>(channel) % static_cast<uint32_t>(a.channels)
                                     : channel % a.channels;
    }
    const auto next = [&] {  // the scale of the next element
      if (a.channels > 1 && ++rest == a.inner) {
        rest = 0;
        if (++channel == a.channels) channel = 0;
      }
    };
    if (i + N > a.count) {
#pragma unroll 1
      for (int64_t j = i; j < a.count; ++j, next()) {
        Vec<In, 1> x[K];
        UNROLL for (int k = 0; k < K; ++k) x[k] = load<In, 1>(a.inputs[k] + j);
        store<Out, 1>(a.output + j, a.f(x, typename F::Scale(a.scale(channel))));
      }
    } else if (std::is_empty_v<typename F::Scale> || a.channels <= 1 || rest + N <= a.inner) {
      store<Out, N>(a.output + i, a.f(in[u], typename F::Scale(a.scale(channel))));
    } else {
      Vec<Out, N> out;
      UNROLL for (int j = 0; j < N; ++j, next()) {
        Vec<In, 1> x[K];
        UNROLL for (int k = 0; k < K; ++k) x[k].at[0] = in[u][k].at[j];
        out.at[j] = a.f(x, typename F::Scale(a.scale(channel))).at[0];
      }
      store<Out, N>(a.output + i, out);
    }
  }
}

// For any strides. walk: strides of the output, the scales' channels and the inputs, in this order.
template <class In, class Out, int K, class F>
__global__ void __launch_bounds__(256) strided_kernel(const __grid_constant__ Elementwise<In, Out, K, F> a,
                                                      const __grid_constant__ Walk<K + 2> walk) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= a.count) return;
  int64_t at[K + 2];
  walk.offsets(i, at);
  Vec<In, 1> x[K];
  UNROLL for (int k = 0; k < K; ++k) x[k] = load<In, 1>(a.inputs[k] + at[k + 2]);
  store<Out, 1>(a.output + at[0], a.f(x, typename F::Scale(a.scale(at[1]))));
}

template <class In, class Out, int K, class F>
cudaError_t elementwise(const Tensor* const (&inputs)[K], const Scales& scales, const Tensor& output, F f,
                        cudaStream_t stream) {
  Elementwise<In, Out, K, F> a{{}, static_cast<Out*>(output.data), output.numel(), scales.number,
                               static_cast<const float*>(scales.tensor.data), 1, 1, f};
  if (a.count == 0) return cudaSuccess;
  Tensor channels = output;  // its offsets are the indices of scales
  std::fill_n(channels.strides, kMaxRank, 0);
  if (scales.tensor.data && scales.tensor.numel() > 1) {
    channels.strides[scales.axis] = 1;
    a.inner = output.strides[scales.axis];
    a.channels = output.sizes[scales.axis];
  }
  const Tensor* tensors[K + 2] = {&output, &channels};
  const Tensor* data[K + 1] = {&output};
  bool aligned = reinterpret_cast<uintptr_t>(output.data) % 16 == 0;
  for (int k = 0; k < K; ++k) {
    tensors[k + 2] = data[k + 1] = inputs[k];
    a.inputs[k] = static_cast<const In*>(inputs[k]->data);
    aligned = aligned && reinterpret_cast<uintptr_t>(inputs[k]->data) % 16 == 0;
  }
  const Axes<K + 1> dense(data, 0, Axes<K + 1>::Order::kMemory);
  bool vectors = aligned && dense.rank <= 1;
  for (int k = 0; k < K + 1; ++k) vectors = vectors && (dense.rank == 0 || dense.at[0].strides[k] == 1);
  const int64_t block = a.kThreads * a.kVector;
  const bool large = a.count > 1000 * block;  // enough for several blocks per multiprocessor
  const int64_t blocks = ceil_div<int64_t>(a.count, vectors ? (large ? 4 * block : block) : 256);
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  if (vectors) {
    (large ? dense_kernel<4, In, Out, K, F> : dense_kernel<1, In, Out, K, F>)<<<static_cast<int>(blocks), a.kThreads, 0,
                                                                                stream>>>(a);
  } else {
    const Walk<K + 2> walk(Axes<K + 2>(tensors, 0, Axes<K + 2>::Order::kMemory));
    strided_kernel<<<static_cast<int>(blocks), 256, 0, stream>>>(a, walk);
  }
  return cudaGetLastError();
}

}  // namespace svexport
