#include "bilinear_sample.h"

#include "sampling.h"

namespace svexport {

cudaError_t bilinear_sample(const Tensor& image, const Tensor& grid, const Tensor& output, const Tensor& mask,
                            cudaStream_t stream) {
  return sample(image, grid, output, mask, Sampling{kBilinear, kPixels, true}, stream);
}

}  // namespace svexport
