// The multi-camera transformer decoder, all layers in one launcher: svexport/ops/transformer_decoder.py.
#pragma once

#include "camera_sample/launch.h"
#include "tensor.h"

namespace svexport {

// Arguments and results. T is the dtype of query: fp32, fp16 or, from compute capability 8.0 on, bf16.
struct TransformerDecoder {
  Tensor query, query_pos;   // (B, Q, C) of T, contiguous
  Tensor reference_points;   // (B, Q, 3), any float type, contiguous
  // num_features levels: (B, cams, C, H, W), of T or fp32, any strides; or all int8 in CHW32, contiguous,
  // (B, cams, ceil(C/32), H, W, 32), one step of level i worth scales[i]. scales may be null without int8.
  const Tensor* features;
  int num_features;
  const float* scales;
  Tensor lidar2img;          // (B, cams, 4, 4), any float type and strides
  const Tensor* weights;     // of T, contiguous, in the order of the torch operator
  int num_weights;

  int num_layers, num_heads, num_points, num_groups;
  CameraSampleOptions sampling;
  bool learned_offsets, residual_query_pos;
  bool pool;                 // adds a level: the 2x2 maximum of the last one

  Tensor classes;            // (B, Q, num_classes) of T, contiguous
  Tensor boxes, points;      // (B, Q, code_size), (B, Q, 3), any float type, contiguous
};

// Bytes of scratch memory, which must be aligned to 256.
size_t transformer_decoder_workspace(const TransformerDecoder& decoder);

// Returns cudaErrorNotSupported for other dtypes and mixtures of them, for C above 1024 and C / num_heads above 64.
cudaError_t transformer_decoder(const TransformerDecoder& decoder, void* workspace, cudaStream_t stream);

}  // namespace svexport
