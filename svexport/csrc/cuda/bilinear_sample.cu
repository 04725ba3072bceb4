#include "bilinear_sample.h"

#include "sampling.h"

namespace svexport {

cudaError_t bilinear_sample(const Tensor& image, const Tensor& grid, const Tensor& output, const Tensor& mask,
                            cudaStream_t stream, void* workspace) {
  return sample(image, grid, output, mask, Sampling{kBilinear, kPixels, true}, stream, workspace);
}

size_t bilinear_sample_workspace(const Tensor& image, const Tensor& grid) {
  return sample_workspace(image, grid, kBilinear);
}

size_t bilinear_sample_backward_workspace(const Tensor& image, const Tensor& grid, bool image_gradient,
                                          bool grid_gradient) {
  return sample_backward_workspace(image, grid, image_gradient, grid_gradient);
}

cudaError_t bilinear_sample_backward(const Tensor& grad, const Tensor& image, const Tensor& grid,
                                     const Tensor& grad_image, const Tensor& grad_grid, bool deterministic,
                                     void* workspace, cudaStream_t stream) {
  return sample_backward(grad, image, grid, grad_image, grad_grid, Sampling{kBilinear, kPixels, true}, deterministic,
                         workspace, stream);
}

}  // namespace svexport
