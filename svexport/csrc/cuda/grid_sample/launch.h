// Sampling of images at normalized coordinates, svexport/ops/grid_sample.py, and at pixel coordinates,
// svexport/ops/bilinear_sample.py.
#pragma once

#include "grid_sample/sampling.h"

namespace svexport {

// input: (N, C, H, W) or (N, C, D, H, W), float32, float16 or bfloat16, of any strides. Read natively: NCHW, and
// channels-last with channels in multiples of 16 bytes (TensorRT's HWC8 for halves); other strides work, slower.
// Or int8, one step worth `scale`: any strides, or CHW32 or CHW4, which is (N, ceil(C/V), H, W, V) for V = 32 or 4.
// grid: (N, gH, gW, 2) or (N, gD, gH, gW, 3), float32, float16 or bfloat16, of any strides.
// output: (N, C, gH, gW) or (N, C, gD, gH, gW), of input's type, or of any float type if input is int8. Its points must
// be evenly spaced in memory, as they are in NCHW and channels-last.
// mode: 0 bilinear, 1 nearest, 2 bicubic (4-D only); padding: 0 zeros, 1 border, 2 reflection.
// workspace: grid_sample_workspace bytes, aligned to 16, or null. With it, an NCHW image with many points is read
// through shared memory or, if its points turn out to scatter, copied to channels-last: up to several times faster.
cudaError_t grid_sample(const Tensor& input, const Tensor& grid, const Tensor& output, int mode, int padding,
                        bool align_corners, float scale, int32_t tactic, cudaStream_t stream,
                        void* workspace = nullptr);
size_t grid_sample_workspace(const Tensor& input, const Tensor& grid, int mode);

// Bytes of scratch memory that grid_sample_backward needs for these arguments.
size_t grid_sample_backward_workspace(const Tensor& grad, const Tensor& input, const Tensor& grid, int mode,
                                      bool deterministic, bool input_gradient, bool grid_gradient, int32_t tactic);

// grad: gradient of the output; its points are evenly spaced, as in a contiguous or channels-last tensor. grad_input,
// grad_grid: contiguous, shape and type of input and grid; null data: not wanted. deterministic: adds in a fixed order,
// which is slower. tactic: an id of gradient.h; 0 or an invalid one selects the cheapest. For the gradient of
// bilinear_sample, whose mask has none, pass mode bilinear, padding kPixels and align_corners = true.
cudaError_t grid_sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                                 const Tensor& grad_grid, int mode, int padding, bool align_corners, bool deterministic,
                                 int32_t tactic, void* workspace, cudaStream_t stream);

// image: (N, C, H, W), any float type; grid: (N, gH, gW, 2), output: (N, C, gH, gW), as for grid_sample.
// mask: (N, gH, gW, 1), of image's type, contiguous: 1 where the point lies inside the image, 0 elsewhere.
cudaError_t bilinear_sample(const Tensor& image, const Tensor& grid, const Tensor& output, const Tensor& mask,
                            int32_t tactic, cudaStream_t stream, void* workspace = nullptr);

}  // namespace svexport
