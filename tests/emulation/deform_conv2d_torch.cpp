// The torch operators of deform_conv2d on the emulated device, in small pieces, under names of their own.
#define SVEXPORT_LEAST_COLUMNS (16 << 10)
#include <torch/library.h>

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(library, key, m) [[maybe_unused]] static void register_##library(torch::Library& m)
#include "torch/deform_conv2d.cpp"

namespace svexport {

int32_t forced_tactic(const char*) { return 0; }

TORCH_LIBRARY(svexport_emulated, m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, int[] stride, "
      "int[] padding, int[] dilation, int groups, int offset_groups, float scale) -> Tensor");
  m.def(
      "deform_conv2d_backward(Tensor[] grads, Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, "
      "int[] stride, int[] padding, int[] dilation, int groups, int offset_groups, float scale, bool[] needs_grad) -> "
      "Tensor[]");
  implement(m, "deform_conv2d", deform_conv2d_torch);
  implement(m, "deform_conv2d_backward", deform_conv2d_backward_torch);
}

}  // namespace svexport
