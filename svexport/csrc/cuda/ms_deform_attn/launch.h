// Multi-scale deformable attention: svexport/ops/ms_deform_attn.py.
#pragma once

#include "tensor.h"

namespace svexport {

// value: (N, S, M, D), float32, float16, bfloat16, or int8, a step of which is worth `scale`; spatial_shapes: (L, 2) and level_start_index: (L), int64 or int32 on
// the device; sampling_locations: (N, Lq, M, L, P, 2) and attention_weights: (N, Lq, M, L, P), each of any of the three
// types; all of any strides, with access by 16 bytes where value is aligned(3, 16) and D is a multiple of that.
// output: (N, Lq, M*D), the type of value, any float type if that is int8, contiguous.
cudaError_t ms_deform_attn(const Tensor& value, const Tensor& spatial_shapes, const Tensor& level_start_index,
                           const Tensor& sampling_locations, const Tensor& attention_weights, const Tensor& output,
                           float scale, int32_t tactic, cudaStream_t stream);

// grad_output: (N, Lq, M*D), the type of value, any strides. grad_locations and grad_weights have the shapes and types of
// what they are for and are contiguous. To grad_value, (N, S, M, D), contiguous, the sums are added: of float32 in no
// certain order, or, with a scale (one float32 on the device), of x * scale rounded to int64. Absent gradients are not
// computed.
cudaError_t ms_deform_attn_backward(const Tensor& grad_output, const Tensor& value, const Tensor& spatial_shapes,
                                    const Tensor& level_start_index, const Tensor& sampling_locations,
                                    const Tensor& attention_weights, const Tensor& grad_value, const Tensor& scale,
                                    const Tensor& grad_locations, const Tensor& grad_weights, int32_t tactic, cudaStream_t stream);

}  // namespace svexport
