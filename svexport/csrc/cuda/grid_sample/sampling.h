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

// Whether dimensions first .. last lie in memory like one of the given stride.
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

// Of int8, a step of which is worth `scale`, to any float type.
cudaError_t sample_int8(const Tensor& input, const Tensor& grid, const Tensor& output, const Sampling& sampling,
                        float scale, int32_t tactic, cudaStream_t stream);

}  // namespace svexport
