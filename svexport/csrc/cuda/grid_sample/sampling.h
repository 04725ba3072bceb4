// Shared by grid_sample and bilinear_sample, which differ only in what a coordinate means.
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

// Whether dimensions first .. last collapse into one, whose stride is then set.
inline bool evenly_spaced(const Tensor& t, int first, int last, int64_t& stride) {
  int64_t expected = 0;
  bool any = false;
  for (int i = last; i >= first; --i) {
    if (t.sizes[i] == 1) continue;
    if (!any) {
      stride = expected = t.strides[i];
      any = true;
    } else if (t.strides[i] != expected) {
      return false;
    }
    expected *= t.sizes[i];
  }
  return true;
}

// grid_sample of an int8 input, one step of which is worth `scale`; the output has any float type.
cudaError_t sample_int8(const Tensor& input, const Tensor& grid, const Tensor& output, const Sampling& sampling,
                        float scale, int32_t tactic, cudaStream_t stream);

}  // namespace svexport
