#include "camera_sample.h"

#include "plugin.h"

namespace svexport::plugin {
namespace {

// Behind the features, from the end.
enum { kPoints = -4, kLidar2img, kWeights, kOffsets };

class CameraSample final : public Plugin<CameraSample, CameraSampleNode> {
 public:
  const char* wrong_attributes() const override {
    if (node.image_size.size() != 2 || node.image_size[0] < 1 || node.image_size[1] < 1) {
      return "image_size should be (height, width)";
    }
    if (node.pc_range.size() != 6) return "pc_range should be 6 numbers";
    if (node.uv_clamp.size() != 2) return "uv_clamp should be (low, high)";
    if (node.activation < 0 || node.activation > 1) return "activation should be 0 (sigmoid) or 1 (softmax)";
    return nullptr;
  }

  const char* shapes(const DimsExprs* in, int count, DimsExprs* out, IExprBuilder&) const override {
    for (int i = 0; i < count + kPoints; ++i) {
      if (in[i].nbDims != 5) return "every feature should be (B, cams, C, H, W)";
    }
    in += count;
    if (in[kPoints].nbDims != 3) return "reference_points should be (B, Q, 3)";
    if (in[kLidar2img].nbDims != 4) return "lidar2img should be (B, cams, 4, 4)";
    if (in[kWeights].nbDims != 6) return "weights should be (B, Q, cams, points, L, groups)";
    if (in[kOffsets].nbDims != 4) return "offsets should be (B, Q, points, 3)";
    set_dims(out[0], {in[kPoints].d[0], in[kPoints].d[1], in[-count].d[2]});
    return nullptr;
  }

  bool supports(int i, const Descriptions& t) const override {
    const int features = t.inputs() + kPoints;
    if (i < features) return i == 0 ? is_strided_float(t[i]) : t[i].type == t[0].type && t[i].format == t[0].format;
    if (i >= t.inputs()) return is_linear_float(t[i], t[0]);
    return is_linear_float32_or(t[i], t[0]);
  }

  const char* wrong_sizes(const Tensors& t) const override { return nullptr; }

  cudaError_t run(const Tensors& t, void* workspace, cudaStream_t stream) const override {
    return camera_sample(t.inputs.data(), t.count() + kPoints, t.last(kPoints), t.last(kLidar2img), t.last(kWeights),
                         t.last(kOffsets), node.image_size.data(), node.pc_range.data(), node.depth_eps, node.in_image,
                         node.uv_clamp.data(), node.activation, t.out(0), stream);
  }
};

}  // namespace

SVEXPORT_PLUGIN(camera_sample, CameraSample)

}  // namespace svexport::plugin
