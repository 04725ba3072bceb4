#include "ms_deform_attn/launch.h"
#include "ms_deform_attn/tensors.h"

#include "plugin.h"

namespace svexport::plugin {
namespace {

enum { kValue, kShapes, kStarts, kLocations, kWeights };

class MsDeformAttn final : public Plugin<MsDeformAttn, MsDeformAttnNode> {
 public:
  const char* shapes(const DimsExprs* in, int, DimsExprs* out, IExprBuilder& builder) const override {
    if (in[kValue].nbDims != 4) return "value should be (N, S, M, D)";
    if (in[kShapes].nbDims != 2 || in[kStarts].nbDims != 1) {
      return "spatial_shapes should be (L, 2) and level_start_index (L)";
    }
    if (in[kLocations].nbDims != 6) return "sampling_locations should be (N, Lq, M, L, P, 2)";
    if (in[kWeights].nbDims != 5) return "attention_weights should be (N, Lq, M, L, P)";
    const auto* value = in[kValue].d;
    set_dims(out[0], {value[0], in[kLocations].d[1], product(value[2], value[3], builder)});
    return nullptr;
  }

  // For an int8 value, the output has the type of the weights.
  DataType output_type(int, const DataType* inputs) const override {
    return inputs[inputs[kValue] == DataType::kINT8 ? kWeights : kValue];
  }

  bool supports(int i, const Descriptions& t) const override {
    switch (i) {
      case kValue: return is_linear(t[i]) && (is_float(t[i].type) || is_int8(t, i, node.scale));
      case kShapes: return is_linear(t[i]) && is_index(t[i].type);
      case kStarts: return is_linear(t[i]) && t[i].type == t[kShapes].type;
      case kLocations: return is_coordinates(t, i);
      case kWeights: return is_linear_beside(t, i, t[kValue]);
      default: return t[kValue].type == DataType::kINT8 ? is_linear_float(t[i]) : is_linear_like(t[i], t[kValue]);
    }
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor &value = t.in(kValue), &locations = t.in(kLocations), &weights = t.in(kWeights);
    if (locations.sizes[0] != value.sizes[0] || locations.sizes[2] != value.sizes[2] || locations.sizes[5] != 2) {
      return "sampling_locations (N, Lq, M, L, P, 2) and value (N, S, M, D) do not fit each other";
    }
    if (t.in(kShapes).sizes[0] != locations.sizes[3] || t.in(kShapes).sizes[1] != 2 ||
        t.in(kStarts).sizes[0] != locations.sizes[3]) {
      return "spatial_shapes (L, 2), level_start_index (L) and sampling_locations (N, Lq, M, L, P, 2) differ in L";
    }
    for (int axis = 0; axis < 5; ++axis) {
      if (weights.sizes[axis] != locations.sizes[axis]) {
        return "attention_weights (N, Lq, M, L, P) and sampling_locations (N, Lq, M, L, P, 2) do not fit each other";
      }
    }
    return nullptr;
  }

  cudaError_t run(const Tensors& t, void*, cudaStream_t stream) const override {
    return ms_deform_attn(t.in(kValue), t.in(kShapes), t.in(kStarts), t.in(kLocations), t.in(kWeights), t.out(0),
                          scale_of(t, kValue, node.scale), tactic_, stream);
  }

  Few<int32_t> tactics(const Tensors& t) const override {
    if (t.out(0).numel() == 0) return {};
    return worth_timing(ms_deform::problem_of(t.in(kValue), t.in(kLocations)), current_gpu());
  }
};

}  // namespace

SVEXPORT_PLUGIN(ms_deform_attn, MsDeformAttn)

}  // namespace svexport::plugin
