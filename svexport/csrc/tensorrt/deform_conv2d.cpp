#include "deform_conv2d.h"

#include "plugin.h"

namespace svexport::plugin {
namespace {

enum { kInput, kOffset, kWeight };

class DeformConv2d final : public Plugin<DeformConv2d, DeformConv2dNode> {
 public:
  const char* wrong_attributes() const override {
    for (const auto* pair : {&node.stride, &node.padding, &node.dilation}) {
      if (pair->size() != 2) return "stride, padding and dilation should be two numbers each";
    }
    for (int i : {0, 1}) {
      if (node.stride[i] < 1 || node.dilation[i] < 1 || node.padding[i] < 0) {
        return "stride and dilation should be at least 1, padding at least 0";
      }
    }
    return node.groups >= 1 && node.offset_groups >= 1 ? nullptr : "groups and offset_groups should be at least 1";
  }

  const char* shapes(const DimsExprs* in, int count, DimsExprs* out, IExprBuilder&) const override {
    for (int i : {kInput, kOffset, kWeight}) {
      if (in[i].nbDims != 4) return "input, offset and weight should have 4 dimensions";
    }
    for (int i = kWeight + 1; i < count; ++i) {
      if (in[i].nbDims != 1 && in[i].nbDims != 4) return "bias should be (O) and mask (N, offset_groups*kH*kW, oH, oW)";
    }
    set_dims(out[0], {in[kInput].d[0], in[kWeight].d[0], in[kOffset].d[2], in[kOffset].d[3]});
    return nullptr;
  }

  bool supports(int i, const Descriptions& t) const override {
    if (i == kInput) return is_linear_float(t[i]);
    // Offsets in pixels: half is too coarse for them in large maps.
    if (i == kOffset) return is_linear_float32_or(t[i], t[kInput]);
    return is_linear_float(t[i], t[kInput]);
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor &input = t.in(kInput), &offset = t.in(kOffset), &weight = t.in(kWeight);
    const Tensor bias = optional(t, 1), mask = optional(t, 4);
    const int64_t taps = weight.sizes[2] * weight.sizes[3];
    if (input.sizes[1] != weight.sizes[1] * node.groups || weight.sizes[0] % node.groups != 0 ||
        input.sizes[1] % node.offset_groups != 0) {
      return "weight (O, C/groups, kH, kW) does not fit input (N, C, H, W), groups and offset_groups";
    }
    if (offset.sizes[0] != input.sizes[0] || offset.sizes[1] != 2 * node.offset_groups * taps) {
      return "offset should be (N, 2*offset_groups*kH*kW, oH, oW)";
    }
    for (int axis : {0, 1}) {
      const int64_t reach = node.dilation[axis] * (weight.sizes[2 + axis] - 1) + 1;
      const int64_t room = input.sizes[2 + axis] + 2 * node.padding[axis] - reach;
      if (room < 0 || offset.sizes[2 + axis] != room / node.stride[axis] + 1) {
        return "offset (N, 2*offset_groups*kH*kW, oH, oW) has other oH and oW than the convolution";
      }
    }
    if (bias.data && bias.sizes[0] != weight.sizes[0]) return "bias should be (O)";
    if (mask.data && (mask.sizes[0] != offset.sizes[0] || 2 * mask.sizes[1] != offset.sizes[1] ||
                      mask.sizes[2] != offset.sizes[2] || mask.sizes[3] != offset.sizes[3])) {
      return "mask should be (N, offset_groups*kH*kW, oH, oW)";
    }
    return nullptr;
  }

  size_t workspace(const Tensors& t) const override {
    return deform_conv2d_workspace(t.in(kInput), t.in(kOffset), t.in(kWeight), node.groups, node.offset_groups);
  }

  cudaError_t run(const Tensors& t, void* workspace, cudaStream_t stream) const override {
    return deform_conv2d(t.in(kInput), t.in(kOffset), t.in(kWeight), optional(t, 1), optional(t, 4),
                         node.stride.data(), node.padding.data(), node.dilation.data(), node.groups,
                         node.offset_groups, t.out(0), workspace, stream);
  }

 private:
  // Bias or mask, told apart by their ranks: either may be left out.
  static Tensor optional(const Tensors& t, int rank) {
    for (int i = kWeight + 1; i < t.count(); ++i) {
      if (t.in(i).data && t.in(i).rank == rank) return t.in(i);
    }
    return {};
  }
};

}  // namespace

SVEXPORT_PLUGIN(deform_conv2d, DeformConv2d)

}  // namespace svexport::plugin
