// What the two implementations of the decoder share: the one of small kernels, for all devices, and the fused one.
#pragma once

#include "device.cuh"
#include "transformer_decoder.h"

namespace svexport {

#define SVEXPORT_TRY(call)                                        \
  do {                                                            \
    if (const cudaError_t e = (call); e != cudaSuccess) return e; \
  } while (0)

constexpr float kEps = 1e-5f;  // of layer norms and of the inverse sigmoid

// Weights of a layer in their order, each followed by its bias; then those of the class branch.
enum DecoderWeight {
  kInProj = 0, kOutProj = 2, kMhaNorm = 4, kAttentionWeights = 6, kOutputProj = 8, kPosition0 = 10, kPositionNorm0 = 12,
  kPosition3 = 14, kPositionNorm1 = 16, kSvcaNorm = 18, kFfn0 = 20, kFfn2 = 22, kFfnNorm = 24, kReg0 = 26, kReg2 = 28,
  kReg4 = 30, kOffsets = 32,
};
enum ClassWeight { kCls0 = 0, kClsNorm0 = 2, kCls3 = 4, kClsNorm1 = 6, kCls6 = 8, kClassWeights = 10 };

inline int weights_per_layer(const TransformerDecoder& d) { return d.learned_offsets ? kOffsets + 2 : kOffsets; }

// The weight and, after it, its bias.
inline const Tensor* weight_of(const TransformerDecoder& d, int layer, DecoderWeight weight) {
  return d.weights + layer * weights_per_layer(d) + weight;
}

inline const Tensor* weight_of(const TransformerDecoder& d, ClassWeight weight) {
  return d.weights + d.num_layers * weights_per_layer(d) + weight;
}

struct DecoderSizes {
  int batch, queries, channels, cams, levels, ffn, logits, offsets, code_size, classes;
  int64_t rows;
  bool widen;  // half queries, fp32 features: what is sampled is fp32 first

  explicit DecoderSizes(const TransformerDecoder& d);
};

// Step 2 of svca: sampled (B, Q, C) of T from points (B, Q, 3) fp32, logits (B, Q, cams, P, L, G) and offsets
// (B, Q, P, 3) of T. wide: memory for the same in fp32, where features are.
cudaError_t sample(const TransformerDecoder& d, const DecoderSizes& n, const float* points, const void* logits,
                   const void* offsets, void* sampled, float* wide, cudaStream_t stream);

// ---------------------------------------------------------------- the fused implementation, compute capability 9.0

size_t fused_decoder_workspace(const TransformerDecoder& d, const DecoderSizes& n);
cudaError_t fused_decoder(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream);

// Scratch memory in pieces; without memory it only counts.
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

__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }  // NaN stays

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float inverse_sigmoid(float x) {
  x = x < 0.f ? 0.f : x > 1.f ? 1.f : x;  // NaN stays
  const float a = x < kEps ? kEps : x, b = 1.f - x < kEps ? kEps : 1.f - x;
  return logf(a / b);
}

}  // namespace svexport
