#include "grid_sample/launch.h"
#include "grid_sample/tensors.h"

#include "plugin.h"

namespace svexport::plugin {
namespace {

enum { kInput, kGrid };

class GridSample final : public Plugin<GridSample, GridSampleNode> {
 public:
  const char* wrong_attributes() const override {
    if (node.interpolation_mode < 0 || node.interpolation_mode > 2) return "interpolation_mode should be 0, 1 or 2";
    if (node.padding_mode < 0 || node.padding_mode > 2) return "padding_mode should be 0, 1 or 2";
    if (node.align_corners < 0 || node.align_corners > 1) return "align_corners should be 0 or 1";
    return nullptr;
  }

  const char* shapes(const DimsExprs* in, int, DimsExprs* out, IExprBuilder&) const override {
    const int rank = in[kInput].nbDims;
    if ((rank != 4 && rank != 5) || in[kGrid].nbDims != rank) {
      return "input should be (N, C, H, W) and grid (N, gH, gW, 2), or input (N, C, D, H, W) and grid (N, gD, gH, gW, 3)";
    }
    if (rank == 5 && node.interpolation_mode == 2) return "bicubic takes images (N, C, H, W) only";
    out[0] = in[kInput];
    for (int i = 2; i < rank; ++i) out[0].d[i] = in[kGrid].d[i - 1];
    return nullptr;
  }

  // For an int8 image, the output has the type of the grid.
  DataType output_type(int, const DataType* inputs) const override {
    return inputs[inputs[kInput] == DataType::kINT8 ? kGrid : kInput];
  }

  bool supports(int i, const Descriptions& t) const override {
    const bool int8 = t[kInput].type == DataType::kINT8;
    switch (i) {
      case kInput: return int8 ? is_int8(t, i, node.scale) && is_int8_image(t[i]) : is_image(t[i]);
      case kGrid: return is_coordinates(t, i);
      default: return is_image(t[i]) && is_unpadded(t[i]) && (int8 || t[i].type == t[kInput].type);
    }
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor &input = t.in(kInput), &grid = t.in(kGrid);
    if (grid.sizes[0] != input.sizes[0]) return "input and grid differ in N";
    if (grid.sizes[grid.rank - 1] != grid.rank - 2) return "grid should have a coordinate for each axis of the input";
    return nullptr;
  }

  size_t workspace(const Tensors& t) const override {
    return node.interpolation_mode == 0 && t.in(kInput).dtype != DType::kInt8 ? bound_of_copy(t.in(kInput), t.in(kGrid)) : 0;
  }

  cudaError_t run(const Tensors& t, void* workspace, cudaStream_t stream) const override {
    const Tensor &input = t.in(kInput), &grid = t.in(kGrid);
    const size_t bytes = grid_sample_workspace(input, grid, node.interpolation_mode);
    return grid_sample(input, grid, t.out(0), node.interpolation_mode, node.padding_mode, node.align_corners,
                       scale_of(t, kInput, node.scale), tactic_, stream, for_copy(workspace, bytes, input, grid));
  }

  Few<int32_t> tactics(const Tensors& t) const override {
    return sampler::worth_timing(t.in(kInput), t.in(kGrid), t.out(0), node.interpolation_mode);
  }

 private:
  // TensorRT's channels-last formats have the channels third from the end, which is wrong for volumes.
  static bool is_image(const PluginTensorDesc& tensor) {
    return tensor.dims.nbDims == 4 ? is_strided_float(tensor) : is_linear_float(tensor);
  }
  static bool is_int8_image(const PluginTensorDesc& tensor) {
    return tensor.dims.nbDims == 4 ? has_int8_format(tensor) : is_linear(tensor);
  }
};

}  // namespace

SVEXPORT_PLUGIN(grid_sample, GridSample)

}  // namespace svexport::plugin
