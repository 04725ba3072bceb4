#include "inverse.h"

#include "plugin.h"

namespace svexport::plugin {
namespace {

class Inverse final : public Plugin<Inverse, InverseNode> {
 public:
  const char* wrong_attributes() const override { return node.n >= 1 && node.n <= 8 ? nullptr : "n should be 1 to 8"; }

  const char* shapes(const DimsExprs* in, int, DimsExprs* out, IExprBuilder&) const override {
    if (in[0].nbDims < 2) return "A should be (*, n, n)";
    out[0] = in[0];
    return nullptr;
  }

  bool supports(int i, const Descriptions& t) const override {
    return i == 0 ? is_linear_float(t[i]) : is_linear_like(t[i], t[0]);
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor& a = t.in(0);
    return a.sizes[a.rank - 1] == node.n && a.sizes[a.rank - 2] == node.n ? nullptr : "A should be (*, n, n)";
  }

  cudaError_t run(const Tensors& t, void*, cudaStream_t stream) const override {
    return inverse(t.in(0), t.out(0), Tensor{}, stream);
  }
};

}  // namespace

SVEXPORT_PLUGIN(inverse, Inverse)

}  // namespace svexport::plugin
