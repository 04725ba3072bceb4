#include "deform_conv2d.h"

#include <algorithm>

#include "gemm.h"
#include "permute.h"
#include "plugin.h"

namespace svexport::plugin {
namespace {

enum { kInput, kOffset, kWeight };

constexpr int64_t kColumnsBytes = 64 << 20;  // of columns at a time

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

  bool supports(int i, const Descriptions& t) const override {
    if (i == kInput) return is_strided_float(t[i]);
    if (i == t.inputs()) return is_strided_float(t[i]) && is_unpadded(t[i]) && t[i].type == t[kInput].type;
    return i == kOffset ? is_coordinates(t, i) : is_linear_like(t[i], t[kInput]);
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
    if (bias.data && bias.sizes[0] != weight.sizes[0]) return "bias should be (O)";
    if (mask.data && (mask.sizes[0] != offset.sizes[0] || 2 * mask.sizes[1] != offset.sizes[1] ||
                      mask.sizes[2] != offset.sizes[2] || mask.sizes[3] != offset.sizes[3])) {
      return "mask should be (N, offset_groups*kH*kW, oH, oW)";
    }
    return nullptr;
  }

  size_t workspace(const Tensors& t) const override { return Scratch(t, node.groups, nullptr).size; }

  cudaError_t run(const Tensors& t, void* workspace, cudaStream_t stream) const override {
    const Tensor &weight = t.in(kWeight), &offset = t.in(kOffset), &output = t.out(0);
    const Tensor bias = optional(t, 1), mask = optional(t, 4);
    const Scratch scratch(t, node.groups, workspace);
    if (scratch.rows == 0 || weight.numel() == 0) return cudaSuccess;
    const auto [groups, rows] = std::pair<int64_t, int64_t>(node.groups, scratch.rows);
    const int64_t outputs = weight.sizes[0] / groups;

    Tensor input = t.in(kInput);
    cudaError_t status = to_channels_last(weight, scratch.weight, stream);
    if (status == cudaSuccess && input.strides[1] != 1) {
      status = to_channels_last(input, scratch.input, stream);
      input = scratch.input;
      const int64_t sizes[] = {input.sizes[0], input.sizes[3], input.sizes[1], input.sizes[2]};
      const int64_t strides[] = {input.strides[0], 1, input.strides[1], input.strides[2]};
      std::copy(sizes, sizes + 4, input.sizes);
      std::copy(strides, strides + 4, input.strides);
    }
    svexport::DeformConv2d conv{};
    for (int i : {0, 1}) {
      conv.kernel[i] = static_cast<int>(weight.sizes[2 + i]);
      conv.stride[i] = node.stride[i];
      conv.padding[i] = node.padding[i];
      conv.dilation[i] = node.dilation[i];
    }
    conv.groups = node.groups;
    conv.offset_groups = node.offset_groups;

    // The product of a group's columns and kernels is (rows, O/groups).
    Linear layer;
    layer.in = static_cast<int>(weight.numel() / weight.sizes[0]);
    layer.out = static_cast<int>(outputs);
    for (int64_t first = 0; first < rows && status == cudaSuccess; first += scratch.part) {
      Tensor columns = scratch.columns;
      layer.rows = columns.sizes[1] = std::min(scratch.part, rows - first);
      columns.strides[0] = columns.sizes[1] * columns.strides[1];
      status = deform_conv2d_columns(input, offset, mask, conv, first, columns, stream);
      for (int64_t g = 0; g < groups && status == cudaSuccess; ++g) {
        layer.x = at(columns, g * columns.strides[0]);
        layer.weight = at(scratch.weight, g * outputs * layer.in);
        layer.bias = bias.data ? at(bias, g * outputs) : nullptr;
        layer.y = at(scratch.product, (g * rows + first) * outputs);
        status = linear(layer, input.dtype, stream);
      }
    }
    if (status != cudaSuccess) return status;

    // (groups, N, oH, oW, O/groups) -> (N, groups, O/groups, oH, oW)
    Tensor from = output, to = output;
    from.data = scratch.product.data;
    from.rank = to.rank = 5;
    const int64_t height = output.sizes[2], width = output.sizes[3];
    const int64_t sizes[] = {output.sizes[0], groups, outputs, height, width};
    const int64_t source[] = {height * width * outputs, rows * outputs, 1, width * outputs, outputs};
    const int64_t target[] = {output.strides[0], outputs * output.strides[1], output.strides[1], output.strides[2],
                              output.strides[3]};
    for (Tensor* tensor : {&from, &to}) std::copy(sizes, sizes + 5, tensor->sizes);
    std::copy(source, source + 5, from.strides);
    std::copy(target, target + 5, to.strides);
    return permute(from, to, stream);
  }

 private:
  static void* at(const Tensor& tensor, int64_t element) {
    return static_cast<char*>(tensor.data) + element * tensor.item_size();
  }

  // Bias or mask, told apart by their ranks: either may be left out.
  static Tensor optional(const Tensors& t, int rank) {
    for (int i = kWeight + 1; i < t.count(); ++i) {
      if (t.in(i).data && t.in(i).rank == rank) return t.in(i);
    }
    return {};
  }

  // What lies where in the workspace: everything with the channels last.
  struct Scratch {
    Scratch(const Tensors& t, int64_t groups, void* workspace) : size(0), base(static_cast<char*>(workspace)) {
      const Tensor &x = t.in(kInput), &offset = t.in(kOffset), &w = t.in(kWeight);
      rows = offset.sizes[0] * offset.sizes[2] * offset.sizes[3];
      const int64_t taps = w.sizes[2] * w.sizes[3], row = std::max<int64_t>(taps * x.sizes[1] * x.item_size(), 1);
      part = std::min(std::max<int64_t>(kColumnsBytes / row, 1), std::max<int64_t>(rows, 1));
      weight = place(x.dtype, {w.sizes[0], w.sizes[2], w.sizes[3], w.sizes[1]});
      columns = place(x.dtype, {groups, part, taps, w.sizes[1]});
      product = place(x.dtype, {groups, rows, w.sizes[0] / groups});
      if (x.strides[1] != 1) input = place(x.dtype, {x.sizes[0], x.sizes[2], x.sizes[3], x.sizes[1]});
    }

    Tensor place(DType dtype, std::initializer_list<int64_t> sizes) {
      Tensor tensor;
      tensor.data = base ? base + size : nullptr;
      tensor.dtype = dtype;
      for (int64_t n : sizes) tensor.sizes[tensor.rank++] = n;
      int64_t stride = 1;
      for (int i = tensor.rank - 1; i >= 0; --i) {
        tensor.strides[i] = stride;
        stride *= tensor.sizes[i];
      }
      size += (stride * tensor.item_size() + 255) / 256 * 256;
      return tensor;
    }

    int64_t rows, part;  // output pixels, and how many of them have their columns at a time
    Tensor weight, columns, product, input;
    size_t size;
    char* base;
  };
};

}  // namespace

SVEXPORT_PLUGIN(deform_conv2d, DeformConv2dPlugin)

}  // namespace svexport::plugin
