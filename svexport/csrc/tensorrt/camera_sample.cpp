#include "camera_sample/tensors.h"

#include <algorithm>

#include "cameras.h"
#include "plugin.h"

namespace svexport::plugin {
namespace {

// Inputs that follow the features.
enum { kPoints, kLidar2img, kWeights, kOffsets, kOthers };

class CameraSample final : public Plugin<CameraSample, CameraSampleNode> {
 public:
  int min_inputs() const override { return levels() + kOthers; }
  int max_inputs() const override { return levels() + kOthers; }

  const char* wrong_attributes() const override {
    if (const char* why = wrong_cameras(node)) return why;
    if (levels() < 1 || levels() > kMaxCameraLevels) return "scales should be one number for each feature";
    return nullptr;
  }

  const char* shapes(const DimsExprs* in, int, DimsExprs* out, IExprBuilder&) const override {
    for (int i = 0; i < levels(); ++i) {
      if (in[i].nbDims != 5) return "every feature should be (B, cams, C, H, W)";
    }
    const DimsExprs* others = in + levels();
    if (others[kPoints].nbDims != 3) return "reference_points should be (B, Q, 3)";
    if (others[kLidar2img].nbDims != 4) return "lidar2img should be (B, cams, 4, 4)";
    if (others[kWeights].nbDims != 6) return "weights should be (B, Q, cams, points, L, groups)";
    if (others[kOffsets].nbDims != 4) return "offsets should be (B, Q, points, 3)";
    set_dims(out[0], {others[kPoints].d[0], others[kPoints].d[1], in[0].d[2]});
    return nullptr;
  }

  // For int8 features, the output has the type of the weights.
  DataType output_type(int, const DataType* inputs) const override {
    return inputs[inputs[0] == DataType::kINT8 ? levels() + kWeights : 0];
  }

  // All features have one type and format.
  bool supports(int i, const Descriptions& t) const override {
    if (i < levels()) {
      if (i > 0 && (t[i].type != t[0].type || t[i].format != t[0].format)) return false;
      return is_strided_float(t[i]) || (is_int8(t, i, node.scales[i]) && has_int8_format(t[i]));
    }
    if (i == t.inputs()) return t[0].type == DataType::kINT8 ? is_linear_float(t[i]) : is_linear_like(t[i], t[0]);
    return i == levels() + kWeights ? is_linear_beside(t, i, t[0]) : is_coordinates(t, i);
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor *others = &t.in(levels()), &weights = others[kWeights];
    const int64_t batch = others[kPoints].sizes[0], queries = others[kPoints].sizes[1], cams = t.in(0).sizes[1];
    for (int i = 0; i < levels(); ++i) {
      if (t.in(i).sizes[0] != batch || t.in(i).sizes[1] != cams || t.in(i).sizes[2] != t.in(0).sizes[2]) {
        return "features (B, cams, C, H, W) and reference_points (B, Q, 3) do not fit each other";
      }
    }
    if (others[kPoints].sizes[2] != 3) return "reference_points should be (B, Q, 3)";
    const int64_t projections[] = {batch, cams, 4, 4};
    if (!std::equal(projections, projections + 4, others[kLidar2img].sizes)) {
      return "lidar2img should be (B, cams, 4, 4), with B and cams as in the features";
    }
    const int64_t known[] = {batch, queries, cams, weights.sizes[3], levels()};
    if (!std::equal(known, known + 5, weights.sizes) || weights.sizes[5] < 1 ||
        t.out(0).sizes[2] % weights.sizes[5] != 0) {
      return "weights should be (B, Q, cams, points, L, groups), groups a divisor of C";
    }
    const int64_t offsets[] = {batch, queries, weights.sizes[3], 3};
    for (int axis = 0; axis < 4; ++axis) {
      const int64_t size = others[kOffsets].sizes[axis];
      if (size != offsets[axis] && size != 1) return "offsets should broadcast to (B, Q, points, 3)";
    }
    return nullptr;
  }

  cudaError_t run(const Tensors& t, void*, cudaStream_t stream) const override {
    const Maps maps(*this, t);
    const Tensor* others = &t.in(levels());
    return camera_sample(maps.at, levels(), others[kPoints], others[kLidar2img], others[kWeights], others[kOffsets],
                         options_of(node), t.out(0), tactic_, stream);
  }

  Few<int32_t> tactics(const Tensors& t) const override {
    if (t.out(0).numel() == 0) return {};
    const Maps maps(*this, t);
    const Tensor* others = &t.in(levels());
    return worth_timing(camera::problem_of(maps.at, levels(), others[kPoints], others[kWeights],
                                                   others[kOffsets], options_of(node), t.out(0)),
                                current_gpu());
  }

 private:
  struct Maps {
    CameraLevel at[kMaxCameraLevels];

    Maps(const CameraSample& plugin, const Tensors& t) {
      for (int i = 0; i < plugin.levels(); ++i) at[i] = {t.in(i), scale_of(t, i, plugin.node.scales[i]), false};
    }
  };

  int levels() const { return static_cast<int>(node.scales.size()); }
};

}  // namespace

SVEXPORT_PLUGIN(camera_sample, CameraSample)

}  // namespace svexport::plugin
