// Deformable convolution: svexport/ops/deform_conv2d.py.
#pragma once

#include "deform_conv2d/pieces.h"
#include "tensor.h"

namespace svexport {

struct DeformConv2d {
  int kernel[2], stride[2], padding[2], dilation[2];  // y, x
  int channels, groups, offset_groups;                // C of the input
  float scale;                                        // what a step of an int8 input is worth
};

// The kernels read 16 bytes of channels at once. So they want channels last, and in runs: the C channels of the input are
// as many runs of gcd(C/groups, C/offset_groups) channels, each padded by zeros to a multiple of 16 bytes. What is not
// packed so, and usual numbers of channels with channels last are, is copied first. int8 is never copied: it is packed if it
// lies in CHW32 or with channels last, and runs are of 16 channels and more.

// Description of the packed x, (N, C, H, W) or weight, (O, C/groups, kH, kW): (N, H, W, packed C), contiguous. No data.
Tensor packed(const Tensor& x, const DeformConv2d& conv);

// Whether x is packed; *y: packed(x), with the data of x if it is. Of int8 x itself.
bool is_packed(const Tensor& x, const DeformConv2d& conv, Tensor* y);

// Whether runs are so short that packing would add zeros mostly; x: of the type of the input.
bool has_short_runs(const Tensor& x, const DeformConv2d& conv);

// y: packed(x), contiguous.
cudaError_t pack(const Tensor& x, const Tensor& y, const DeformConv2d& conv, cudaStream_t stream);

// y: packed; x: (N, C, H, W), of the same type, any strides.
cudaError_t unpack(const Tensor& y, const Tensor& x, const DeformConv2d& conv, cudaStream_t stream);

// Bytes of scratch for deform_conv2d by any tactic; no more for smaller tensors.
size_t deform_conv2d_workspace(const Tensor& input, const Tensor& offset, const Tensor& weight,
                               const DeformConv2d& conv);

// Of that, what these tensors by this tactic need.
size_t deform_conv2d_scratch(const Tensor& input, const Tensor& offset, const Tensor& weight, const DeformConv2d& conv,
                             int32_t tactic);

// weight: (O, C/groups, kH, kW), float32, float16 or bfloat16; input: (N, C, H, W), of the type of weight, or int8, then
// also in CHW32 or CHW4, (N, ceil(C/V), H, W, V) for V = 32 or 4; offset: (N, 2*offset_groups*kH*kW, oH, oW), mask:
// (N, offset_groups*kH*kW, oH, oW) or absent and bias: (O) or absent, each of any of the three types; all of any strides.
// output: (N, O, oH, oW), the type of weight, contiguous.
cudaError_t deform_conv2d(const Tensor& input, const Tensor& offset, const Tensor& weight, const Tensor& bias,
                          const Tensor& mask, const Tensor& output, const DeformConv2d& conv, int32_t tactic,
                          void* workspace, cudaStream_t stream);

// What the taps read, times mask, for the output pixels of a piece: columns, of the type of input, of any float type if
// that is int8. Of a packed input (images*groups, rows*oW, kH*kW*packed C/groups), contiguous. planes: of one as it lies,
// (N, C, H, W), of int8 also (N, ceil(C/V), H, W, V), and an image within 2^32 elements, for runs of few channels, which
// would be packed mostly with zeros: (images*groups, C/groups*kH*kW, rows*oW), of which the last axis is contiguous; zeros
// are written to what lies between its rows.
cudaError_t deform_conv2d_columns(bool planes, const Tensor& input, const Tensor& offset, const Tensor& mask,
                                  const DeformConv2d& conv, const deform::Piece& piece, const Tensor& columns,
                                  cudaStream_t stream);

// Backward of that: columns hold the gradient of what the taps read; what they read takes its place if `replace`.
// grad_offset and grad_mask have the shapes and types of offset and mask and are contiguous. To grad_input, shaped as the
// input, and both contiguous, the sums are added: of float32 in no certain order, or, with a scale (one float32 on the
// device), of x * scale rounded to int64. Absent gradients are not computed.
cudaError_t deform_conv2d_columns_backward(bool planes, const Tensor& columns, bool replace, const Tensor& input,
                                           const Tensor& offset, const Tensor& mask, const DeformConv2d& conv,
                                           const deform::Piece& piece, const Tensor& grad_input, const Tensor& scale,
                                           const Tensor& grad_offset, const Tensor& grad_mask, cudaStream_t stream);

}  // namespace svexport
