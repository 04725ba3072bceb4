// Deformable convolution: svexport/ops/deform_conv2d.py.
#pragma once

#include "tensor.h"

namespace svexport {

struct DeformConv2d {
  int kernel[2], stride[2], padding[2], dilation[2];  // y, x
  int groups, offset_groups;
};

// x: (N, C, H, W) of any strides -> y: (N, H, W, C), contiguous. float32 may become a half type, other types stay.
cudaError_t to_channels_last(const Tensor& x, const Tensor& y, cudaStream_t stream);

// What the taps read, times mask, for output pixels first .. first + R - 1 of all N*oH*oW:
// columns: (groups, R, kH*kW, C/groups), contiguous, the type of input.
// input: (N, C, H, W), float32, float16 or bfloat16, with stride 1 along C; offset: (N, 2*offset_groups*kH*kW, oH, oW)
// and mask: (N, offset_groups*kH*kW, oH, oW) or absent, each of any of the three types and any strides.
cudaError_t deform_conv2d_columns(const Tensor& input, const Tensor& offset, const Tensor& mask,
                                  const DeformConv2d& conv, int64_t first, const Tensor& columns, cudaStream_t stream);

// Its backward: grad_columns as columns. grad_offset and grad_mask have the shapes and types of offset and mask and are
// contiguous. To grad_input, (N, H, W, C), contiguous, the sums are added: of float32 in no certain order, or, with a
// scale (one float32 on the device), of x * scale rounded to int64. Absent gradients are not computed.
cudaError_t deform_conv2d_columns_backward(const Tensor& grad_columns, const Tensor& input, const Tensor& offset,
                                           const Tensor& mask, const DeformConv2d& conv, int64_t first,
                                           const Tensor& grad_input, const Tensor& scale, const Tensor& grad_offset,
                                           const Tensor& grad_mask, cudaStream_t stream);

}  // namespace svexport
