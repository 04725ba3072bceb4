#include "add_bias_residual_layer_norm/launch.h"
#include "add_bias_residual_layer_norm/tensors.h"

#include "plugin.h"

namespace svexport::plugin {
namespace {

enum { kX, kBias, kResidual, kWeight, kNormBias, kExtra };

class AddBiasResidualLayerNorm final : public Plugin<AddBiasResidualLayerNorm, AddBiasResidualLayerNormNode> {
 public:
  const char* shapes(const DimsExprs* in, int count, DimsExprs* out, IExprBuilder&) const override {
    if (in[kX].nbDims < 1) return "x should be (*, C)";
    for (int i : {kBias, kWeight, kNormBias}) {
      if (in[i].nbDims != 1) return "bias, weight and norm_bias should be (C)";
    }
    if (in[kResidual].nbDims != in[kX].nbDims || (count > kExtra && in[kExtra].nbDims != in[kX].nbDims)) {
      return "residual and extra should be of the shape of x";
    }
    out[0] = out[1] = in[kX];
    return nullptr;
  }

  bool supports(int i, const Descriptions& t) const override {
    if (i == kX) return is_linear_float(t[i]);
    if (i == kBias || i == kWeight || i == kNormBias) return is_linear_beside(t, i, t[kX]);
    return is_linear_like(t[i], t[kX]);
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor& x = t.in(kX);
    for (int i = 1; i < t.count(); ++i) {
      const Tensor& other = t.in(i);
      for (int axis = 1; axis <= other.rank; ++axis) {
        if (other.sizes[other.rank - axis] != x.sizes[x.rank - axis]) {
          return "bias, weight and norm_bias should be (C), residual and extra of the shape (*, C) of x";
        }
      }
    }
    return nullptr;
  }

  cudaError_t run(const Tensors& t, void*, cudaStream_t stream) const override {
    return add_bias_residual_layer_norm(t.in(kX), t.in(kBias), t.in(kResidual), t.in(kWeight), t.in(kNormBias), node.eps,
                                        extra(t), t.out(0), t.out(1), tactic_, stream);
  }

  Few<int32_t> tactics(const Tensors& t) const override {
    const Tensor& x = t.in(kX);
    if (x.numel() == 0) return {};
    const norm::Problem problem =
        norm::problem_of(x, t.in(kResidual), extra(t), norm::axes_of(x, t.in(kResidual), extra(t)),
                         {t.out(0).data, t.out(1).data}, {t.in(kBias).data, t.in(kWeight).data, t.in(kNormBias).data});
    return worth_timing(problem, current_gpu());
  }

 private:
  static Tensor extra(const Tensors& t) { return t.count() > kExtra ? t.in(kExtra) : Tensor{}; }
};

}  // namespace

SVEXPORT_PLUGIN(add_bias_residual_layer_norm, AddBiasResidualLayerNorm)

}  // namespace svexport::plugin
