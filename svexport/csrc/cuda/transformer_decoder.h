// The multi-camera transformer decoder, all layers in one launcher: svexport/ops/transformer_decoder.py.
#pragma once

#include "camera_sample.h"
#include "tensor.h"

namespace svexport {

// Arguments and results. T: the dtype of query, fp32, fp16 or (from compute capability 8.0 on) bf16.
struct TransformerDecoder {
  Tensor query, query_pos;   // (B, Q, C) of T, contiguous
  Tensor reference_points;   // (B, Q, 3), any float type, contiguous
  // num_features given levels: (B, cams, C, H, W) of T (of fp32 too) and any strides, or all int8 in CHW32, (B, cams,
  // ceil(C/32), H, W, 32), contiguous, a step of level i worth scales[i]. scales may be null without int8.
  const Tensor* features;
  int num_features;
  const float* scales;
  Tensor lidar2img;          // (B, cams, 4, 4), any float type and strides
  const Tensor* weights;     // of T, contiguous; their order is that of the torch operator
  int num_weights;

  int num_layers, num_heads, num_points, num_groups;
  double image_size[2];      // height, width
  double pc_range[6];
  double depth_eps;
  bool in_image;
  double uv_clamp[2];
  int activation;            // 0: sigmoid, 1: softmax
  bool learned_offsets, residual_query_pos;
  bool pool;                 // one level more: the 2x2 maximum of the last given one

  Tensor classes;            // (B, Q, num_classes) of T, contiguous
  Tensor boxes, points;      // (B, Q, code_size), (B, Q, 3), any float type, contiguous
};

// Bytes of scratch memory; the launcher wants it aligned to 256.
size_t transformer_decoder_workspace(const TransformerDecoder& decoder);

// The kernels for compute capability 9.0 read the weights in an order of their own. Bytes of that copy, aligned to 256; 0 if
// these arguments on the current device have no need of it.
size_t transformer_decoder_packed_size(const TransformerDecoder& decoder);

// Makes that copy, of the weights and configuration alone: query, features and the other tensors give sizes only.
cudaError_t transformer_decoder_pack(const TransformerDecoder& decoder, void* packed, cudaStream_t stream);

// packed: what transformer_decoder_pack made of the same weights; null where its size is 0, and otherwise for kernels that
// read the weights as they are, more of them and slower.
// cudaErrorNotSupported for other dtypes, sizes (C above 1024, C / num_heads above 64) and mixtures of dtypes.
cudaError_t transformer_decoder(const TransformerDecoder& decoder, const void* packed, void* workspace,
                                cudaStream_t stream);

}  // namespace svexport
