// Multi-scale deformable attention: svexport/ops/ms_deform_attn.py.
#pragma once

#include "tensor.h"

namespace svexport {

// value: (N, S, M, D), float32, float16, bfloat16, or int8, one step of which is worth `scale`; spatial_shapes: (L, 2)
// and level_start_index: (L), int64 or int32 on the device; sampling_locations: (N, Lq, M, L, P, 2) and
// attention_weights: (N, Lq, M, L, P), any float type each. Any strides; fastest if value is aligned(3, 16) and D is a
// multiple of 16 bytes. output: (N, Lq, M*D), contiguous, of value's type, or of any float type if that is int8.
cudaError_t ms_deform_attn(const Tensor& value, const Tensor& spatial_shapes, const Tensor& level_start_index,
                           const Tensor& sampling_locations, const Tensor& attention_weights, const Tensor& output,
                           float scale, int32_t tactic, cudaStream_t stream);

// grad_output: (N, Lq, M*D), of value's type, any strides. grad_locations and grad_weights: contiguous, shapes and
// types of sampling_locations and attention_weights. grad_value: (N, S, M, D), contiguous; the launcher adds to what it
// holds: float32, in no fixed order, or, with `scale` (one float32 on the device), int64, x * scale rounded. Absent
// gradients are not computed.
cudaError_t ms_deform_attn_backward(const Tensor& grad_output, const Tensor& value, const Tensor& spatial_shapes,
                                    const Tensor& level_start_index, const Tensor& sampling_locations,
                                    const Tensor& attention_weights, const Tensor& grad_value, const Tensor& scale,
                                    const Tensor& grad_locations, const Tensor& grad_weights, int32_t tactic, cudaStream_t stream);

}  // namespace svexport
