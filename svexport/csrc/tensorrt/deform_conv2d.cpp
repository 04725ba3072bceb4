#include "deform_conv2d/launch.h"
#include "deform_conv2d/tensors.h"

#include "plugin.h"

namespace svexport::plugin {
namespace {

enum { kInput, kOffset, kWeight };

class DeformConv2dPlugin final : public Plugin<DeformConv2dPlugin, DeformConv2dNode> {
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

  // For an int8 input, the output has the type of the weight.
  DataType output_type(int, const DataType* inputs) const override {
    return inputs[inputs[kInput] == DataType::kINT8 ? kWeight : kInput];
  }

  bool supports(int i, const Descriptions& t) const override {
    switch (i) {
      case kInput: return is_strided_float(t[i]) || (is_int8(t, i, node.scale) && has_int8_format(t[i]));
      case kOffset: return is_coordinates(t, i);
      case kWeight: return t[kInput].type == DataType::kINT8 ? is_linear_float(t[i]) : is_linear_like(t[i], t[kInput]);
      default: return i < t.inputs() ? is_linear_beside(t, i, t[kWeight]) : is_linear_like(t[i], t[kWeight]);
    }
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor &input = t.in(kInput), &offset = t.in(kOffset), &weight = t.in(kWeight);
    const Tensor bias = optional(t, 1), mask = optional(t, 4);
    const int64_t taps = weight.sizes[2] * weight.sizes[3];
    const int64_t channels = weight.sizes[1] * node.groups, block = input.rank == 5 ? input.sizes[4] : 1;
    if (input.sizes[1] != (channels + block - 1) / block || weight.sizes[0] % node.groups != 0 ||
        channels % node.offset_groups != 0) {
      return "weight (O, C/groups, kH, kW) does not fit input (N, C, H, W), groups and offset_groups";
    }
    if (offset.sizes[0] != input.sizes[0] || offset.sizes[1] != 2 * node.offset_groups * taps) {
      return "offset should be (N, 2*offset_groups*kH*kW, oH, oW)";
    }
    if (bias.data && bias.sizes[0] != weight.sizes[0]) return "bias should be (O)";
    if (mask.data && (mask.sizes[0] != offset.sizes[0] || 2 * mask.sizes[1] != offset.sizes[1] ||
                      mask.sizes[2] != offset.sizes[2] || mask.sizes[3] != offset.sizes[3])) {
      return "mask should be (N, offset_groups*kH*kW, oH, oW)";
    }
    return nullptr;
  }

  size_t workspace(const Tensors& t) const override {
    return deform_conv2d_workspace(t.in(kInput), t.in(kOffset), t.in(kWeight), convolution(t));
  }

  cudaError_t run(const Tensors& t, void* workspace, cudaStream_t stream) const override {
    return deform_conv2d(t.in(kInput), t.in(kOffset), t.in(kWeight), optional(t, 1), optional(t, 4), t.out(0),
                         convolution(t), tactic_, workspace, stream);
  }

  Few<int32_t> tactics(const Tensors& t) const override {
    if (t.out(0).numel() == 0) return {};
    return worth_timing(deform::problem_of(t.in(kInput), t.in(kOffset), convolution(t)), current_gpu());
  }

 private:
  // The bias or the mask, told apart by rank, because either may be left out.
  static Tensor optional(const Tensors& t, int rank) {
    for (int i = kWeight + 1; i < t.count(); ++i) {
      if (t.in(i).data && t.in(i).rank == rank) return t.in(i);
    }
    return {};
  }

  svexport::DeformConv2d convolution(const Tensors& t) const {
    svexport::DeformConv2d result{};
    for (int i : {0, 1}) {
      result.kernel[i] = static_cast<int>(t.in(kWeight).sizes[2 + i]);
      result.stride[i] = node.stride[i];
      result.padding[i] = node.padding[i];
      result.dilation[i] = node.dilation[i];
    }
    result.channels = static_cast<int>(t.in(kWeight).sizes[1] * node.groups);
    result.groups = node.groups;
    result.offset_groups = node.offset_groups;
    result.scale = scale_of(t, kInput, node.scale);
    return result;
  }
};

}  // namespace

SVEXPORT_PLUGIN(deform_conv2d, DeformConv2dPlugin)

}  // namespace svexport::plugin
