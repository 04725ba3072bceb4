// Shared by the two implementations of the decoder: small kernels, for all devices, and the fused one.
#pragma once

#include "device.cuh"
#include "transformer_decoder.h"

namespace svexport {

#define SVEXPORT_TRY(call)                                        \
  do {                                                            \
    if (const cudaError_t e = (call); e != cudaSuccess) return e; \
  } while (0)

constexpr float kEps = 1e-5f;  // for layer norms and the inverse sigmoid

// Indices of a layer's weights, each followed by its bias. The class branch's weights follow those of all layers.
enum DecoderWeight {
  kInProj = 0, kOutProj = 2, kMhaNorm = 4, kAttentionWeights = 6, kOutputProj = 8, kPosition0 = 10, kPositionNorm0 = 12,
  kPosition3 = 14, kPositionNorm1 = 16, kSvcaNorm = 18, kFfn0 = 20, kFfn2 = 22, kFfnNorm = 24, kReg0 = 26, kReg2 = 28,
  kReg4 = 30, kOffsets = 32,
};
enum ClassWeight { kCls0 = 0, kClsNorm0 = 2, kCls3 = 4, kClsNorm1 = 6, kCls6 = 8, kClassWeights = 10 };

inline int weights_per_layer(const TransformerDecoder& d) { return d.learned_offsets ? kOffsets + 2 : kOffsets; }

// Points at the weight, which its bias follows.
inline const Tensor* weight_of(const TransformerDecoder& d, int layer, DecoderWeight weight) {
  return d.weights + layer * weights_per_layer(d) + weight;
}

inline const Tensor* weight_of(const TransformerDecoder& d, ClassWeight weight) {
  return d.weights + d.num_layers * weights_per_layer(d) + weight;
}

struct DecoderSizes {
  int batch, queries, channels, cams, levels, ffn, logits, offsets, code_size, classes;
  int64_t rows;
  bool widen;  // half queries, fp32 features: samples are fp32 first

  explicit DecoderSizes(const TransformerDecoder& d);
};

// Step 2 of svca: computes sampled, (B, Q, C) of T, from points, (B, Q, 3) fp32, logits, (B, Q, cams, P, L, G), and
// offsets, (B, Q, P, 3), of T. wide: memory for `sampled` in fp32, needed if n.widen.
cudaError_t sample(const TransformerDecoder& d, const DecoderSizes& n, const float* points, const void* logits,
                   const void* offsets, void* sampled, float* wide, cudaStream_t stream);

// ---------------------------------------------------------------- the fused implementation, compute capability 9.0

size_t fused_decoder_workspace(const TransformerDecoder& d, const DecoderSizes& n);
cudaError_t fused_decoder(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream);

// Divides scratch memory; with memory null, it only counts bytes.
struct Scratch {
  char* memory;
  size_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* p = memory ? reinterpret_cast<T*>(memory + used) : nullptr;
    used += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return p;
  }
};

// ---------------------------------------------------------------- device functions

__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }  // keeps NaN

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float inverse_sigmoid(float x) {
  x = x < 0.f ? 0.f : x > 1.f ? 1.f : x;  // keeps NaN
  const float a = x < kEps ? kEps : x, b = 1.f - x < kEps ? kEps : 1.f - x;
  return logf(a / b);
}

}  // namespace svexport
