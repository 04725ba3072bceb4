#include "grid_sample/launch.h"
#include "grid_sample/tensors.h"

#include "plugin.h"

namespace svexport::plugin {
namespace {

enum { kImage, kGrid };

class BilinearSample final : public Plugin<BilinearSample, BilinearSampleNode> {
 public:
  const char* shapes(const DimsExprs* in, int, DimsExprs* out, IExprBuilder& builder) const override {
    if (in[kImage].nbDims != 4 || in[kGrid].nbDims != 4) {
      return "image should be (N, C, H, W) and grid (N, gH, gW, 2)";
    }
    const auto *image = in[kImage].d, *grid = in[kGrid].d;
    set_dims(out[0], {image[0], image[1], grid[1], grid[2]});
    set_dims(out[1], {image[0], grid[1], grid[2], builder.constant(1)});
    return nullptr;
  }

  bool supports(int i, const Descriptions& t) const override {
    switch (i) {
      case kImage: return is_strided_float(t[i]);
      case kGrid: return is_coordinates(t, i);
      case 2: return is_strided_float(t[i]) && is_unpadded(t[i]) && t[i].type == t[kImage].type;
      default: return is_linear_like(t[i], t[kImage]);
    }
  }

  const char* wrong_sizes(const Tensors& t) const override {
    if (t.in(kGrid).sizes[0] != t.in(kImage).sizes[0]) return "image and grid differ in N";
    return t.in(kGrid).sizes[3] == 2 ? nullptr : "grid should be (N, gH, gW, 2)";
  }

  size_t workspace(const Tensors& t) const override { return bound_of_copy(t.in(kImage), t.in(kGrid)); }

  cudaError_t run(const Tensors& t, void* workspace, cudaStream_t stream) const override {
    const Tensor &image = t.in(kImage), &grid = t.in(kGrid);
    const size_t bytes = grid_sample_workspace(image, grid, kBilinear);
    return bilinear_sample(image, grid, t.out(0), t.out(1), tactic_, stream,
                           for_copy(workspace, bytes, image, grid));
  }

  Few<int32_t> tactics(const Tensors& t) const override {
    return sampler::worth_timing(t.in(kImage), t.in(kGrid), t.out(0), kBilinear);
  }
};

}  // namespace

SVEXPORT_PLUGIN(bilinear_sample, BilinearSample)

}  // namespace svexport::plugin
