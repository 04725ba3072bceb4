// Deformable convolution: svexport/ops/deform_conv2d.py.
#pragma once

#include "deform_conv2d/pieces.h"
#include "tensor.h"

namespace svexport {

struct DeformConv2d {
  int kernel[2], stride[2], padding[2], dilation[2];  // y, x
  int channels, groups, offset_groups;                // C of the input
  float scale;                                        // value of one step of an int8 input
};

// The packed kernels read 16 bytes of channels at once. They need channels-last in runs: the C channels of the input
// form runs of gcd(C/groups, C/offset_groups) channels, each padded with zeros to a multiple of 16 bytes. Usual numbers
// of channels in channels-last are packed as they are; other tensors are copied first. int8 is never copied: it is
// packed if it is CHW32 or channels-last, and its runs have 16 channels or more.

// Describes x, (N, C, H, W), or the weight, (O, C/groups, kH, kW), as packed: (N, H, W, packed C), contiguous, no data.
Tensor packed(const Tensor& x, const DeformConv2d& conv);

// Whether x is packed already. Sets *y to packed(x), with the data of x if so; for int8, to x itself.
bool is_packed(const Tensor& x, const DeformConv2d& conv, Tensor* y);

// Whether runs are so short that packing would mostly add zeros; x: of the input's type.
bool has_short_runs(const Tensor& x, const DeformConv2d& conv);

// Packs x into y, which is packed(x), contiguous.
cudaError_t pack(const Tensor& x, const Tensor& y, const DeformConv2d& conv, cudaStream_t stream);

// Unpacks y into x: (N, C, H, W), of the same type, any strides.
cudaError_t unpack(const Tensor& y, const Tensor& x, const DeformConv2d& conv, cudaStream_t stream);

// Bytes of scratch memory that deform_conv2d needs at most, by any tactic. Smaller tensors never need more.
size_t deform_conv2d_workspace(const Tensor& input, const Tensor& offset, const Tensor& weight,
                               const DeformConv2d& conv);

// Bytes of scratch memory that deform_conv2d needs for these tensors by this tactic.
size_t deform_conv2d_scratch(const Tensor& input, const Tensor& offset, const Tensor& weight, const DeformConv2d& conv,
                             int32_t tactic);

// weight: (O, C/groups, kH, kW), float32, float16 or bfloat16; input: (N, C, H, W), of weight's type or int8; int8 also
// in CHW32 or CHW4, (N, ceil(C/V), H, W, V) for V = 32 or 4; offset: (N, 2*offset_groups*kH*kW, oH, oW); mask: (N,
// offset_groups*kH*kW, oH, oW), or absent; bias: (O), or absent; offset, mask and bias of any float type each. All have
// any strides. output: (N, O, oH, oW), of weight's type, contiguous.
cudaError_t deform_conv2d(const Tensor& input, const Tensor& offset, const Tensor& weight, const Tensor& bias,
                          const Tensor& mask, const Tensor& output, const DeformConv2d& conv, int32_t tactic,
                          void* workspace, cudaStream_t stream);

// Writes what the taps read, times mask, for the output pixels of a piece. columns: of input's type, or any float type
// if that is int8. From a packed input: (images*groups, rows*oW, kH*kW*packed C/groups), contiguous. planes: from an
// input that is not packed, (N, C, H, W), for int8 also (N, ceil(C/V), H, W, V), an image within 2^32 elements; this
// suits runs of few channels, which packing would mostly fill with zeros. Then columns are
// (images*groups, C/groups*kH*kW, rows*oW), the last axis contiguous; gaps between its rows are filled with zeros.
cudaError_t deform_conv2d_columns(bool planes, const Tensor& input, const Tensor& offset, const Tensor& mask,
                                  const DeformConv2d& conv, const deform::Piece& piece, const Tensor& columns,
                                  cudaStream_t stream);

// The backward. columns hold the gradient of what the taps read; `replace` overwrites it with what they read.
// grad_offset, grad_mask: contiguous, shapes and types of offset and mask. grad_input: the shape of input, both
// contiguous; the launcher adds to what it holds: float32, in no fixed order, or, with `scale` (one float32 on the
// device), int64, x * scale rounded. Absent gradients are not computed.
cudaError_t deform_conv2d_columns_backward(bool planes, const Tensor& columns, bool replace, const Tensor& input,
                                           const Tensor& offset, const Tensor& mask, const DeformConv2d& conv,
                                           const deform::Piece& piece, const Tensor& grad_input, const Tensor& scale,
                                           const Tensor& grad_offset, const Tensor& grad_mask, cudaStream_t stream);

}  // namespace svexport
