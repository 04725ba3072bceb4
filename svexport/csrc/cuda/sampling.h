// What grid_sample and bilinear_sample have in common, which is everything but the meaning of a coordinate.
#pragma once

#include "tensor.h"

namespace svexport {

enum Mode { kBilinear = 0, kNearest = 1, kBicubic = 2 };                            // as in ATen
enum Padding { kZeros = 0, kBorder = 1, kReflection = 2, kPixels = 3 };  // kPixels: coordinates are bilinear_sample's

struct Sampling {
  int mode = kBilinear;
  int padding = kZeros;
  bool align_corners = false;
};

// mask: (N, points) of the type of input, or absent.
cudaError_t sample(const Tensor& input, const Tensor& grid, const Tensor& output, const Tensor& mask,
                   const Sampling& sampling, cudaStream_t stream, void* workspace);

// Of int8, a step of which is worth `scale`, to any float type.
cudaError_t sample_int8(const Tensor& input, const Tensor& grid, const Tensor& output, const Sampling& sampling,
                        float scale, cudaStream_t stream);

size_t sample_workspace(const Tensor& input, const Tensor& grid, int mode);

size_t sample_backward_workspace(const Tensor& input, const Tensor& grid, bool input_gradient, bool grid_gradient);

cudaError_t sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                            const Tensor& grad_grid, const Sampling& sampling, bool deterministic, void* workspace,
                            cudaStream_t stream);

}  // namespace svexport
