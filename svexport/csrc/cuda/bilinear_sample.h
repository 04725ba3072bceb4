// Bilinear sampling at pixel coordinates: svexport/ops/bilinear_sample.py.
#pragma once

#include "tensor.h"

namespace svexport {

// image: (N, C, H, W); grid: (N, gH, gW, 2); output: (N, C, gH, gW): as for grid_sample (grid_sample.h).
// mask: (N, gH, gW, 1), the type of image, contiguous: 1 where the point lies inside of the image, 0 elsewhere.
cudaError_t bilinear_sample(const Tensor& image, const Tensor& grid, const Tensor& output, const Tensor& mask,
                            cudaStream_t stream, void* workspace = nullptr);
size_t bilinear_sample_workspace(const Tensor& image, const Tensor& grid);

// Scratch memory of bilinear_sample_backward, in bytes.
size_t bilinear_sample_backward_workspace(const Tensor& image, const Tensor& grid, bool image_gradient,
                                          bool grid_gradient);

// grad: of the output; the mask has no gradient. Otherwise as grid_sample_backward.
cudaError_t bilinear_sample_backward(const Tensor& grad, const Tensor& image, const Tensor& grid,
                                     const Tensor& grad_image, const Tensor& grad_grid, bool deterministic,
                                     void* workspace, cudaStream_t stream);

}  // namespace svexport
