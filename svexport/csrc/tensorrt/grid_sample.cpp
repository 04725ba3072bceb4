#include "grid_sample.h"

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

  bool supports(int i, const Descriptions& t) const override {
    switch (i) {
      case kInput: return t[i].dims.nbDims == 4 ? is_strided_float(t[i]) : is_linear_float(t[i]);
      case kGrid: return is_linear_float32_or(t[i], t[kInput]);
      default: return t[i].type == t[kInput].type && t[i].format == t[kInput].format;
    }
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor &input = t.in(kInput), &grid = t.in(kGrid);
    if (grid.sizes[0] != input.sizes[0]) return "input and grid differ in N";
    if (grid.sizes[grid.rank - 1] != input.rank - 2) return "grid should have a coordinate for each axis of the input";
    return nullptr;
  }

  cudaError_t run(const Tensors& t, void*, cudaStream_t stream) const override {
    return grid_sample(t.in(kInput), t.in(kGrid), node.interpolation_mode, node.padding_mode, node.align_corners,
                       t.out(0), stream);
  }
};

}  // namespace

SVEXPORT_PLUGIN(grid_sample, GridSample)

}  // namespace svexport::plugin
