#include <algorithm>

#include "einsum/tensors.h"
#include "matmul.h"
#include "node.h"
#include "permute.h"

namespace svexport::plugin {
namespace {

// operands...
struct EinsumNode {
  static constexpr NodeType kNode{"SvEinsum", 2, 0, 1};
  std::vector<int32_t> labels{};
  std::vector<int32_t> ranks{};

  SVEXPORT_EACH(labels, ranks)
};

// A label's role in a matrix product: in both operands and the output, in one operand and the output, or summed.
enum Role { kBatch, kRow, kColumn, kSummed, kRoles };

constexpr int64_t kMostMatrices = 16384;  // of one launch, whose grid has at most 65535 blocks on an axis

size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Any einsum of two tensors in which no tensor has a label twice, as one matrix product. Operands and result are copied
// where their memory is in another order.
class MatrixProduct {
 public:
  MatrixProduct(const Tensor& a, const EinsumLabels& a_labels, const Tensor& b, const EinsumLabels& b_labels,
                const Tensor& c, const EinsumLabels& c_labels) {
    EinsumLabels of_role[kRoles];
    EinsumLabels all = c_labels;
    for (const EinsumLabels* labels : {&a_labels, &b_labels}) {
      for (const int64_t label : *labels) {
        if (std::find(all.begin(), all.end(), label) == all.end()) all.push_back(label);
      }
    }
    for (const int64_t label : all) {
      const bool in_a = size_of(a, a_labels, label) > 1, in_b = size_of(b, b_labels, label) > 1;
      const bool kept = std::find(c_labels.begin(), c_labels.end(), label) != c_labels.end();
      of_role[!kept ? kSummed : in_a && in_b ? kBatch : in_b ? kColumn : kRow].push_back(label);
    }
    const auto sizes = [&](Role role) {
      int64_t product = 1;
      for (const int64_t label : of_role[role]) {
        product *= std::max(size_of(a, a_labels, label), size_of(b, b_labels, label));
      }
      return product;
    };
    batch = sizes(kBatch), rows = sizes(kRow), columns = sizes(kColumn), summed = sizes(kSummed);
    const auto shape = [&](std::initializer_list<Role> roles, const Tensor& t, const EinsumLabels& labels) {
      Tensor result = t;
      result.rank = 0;
      for (const Role role : roles) {
        for (const int64_t label : of_role[role]) {
          const int64_t size = std::max(size_of(a, a_labels, label), size_of(b, b_labels, label));
          if (size == 1) continue;
          if (result.rank == kMaxRank) fits = false;
          if (!fits) return result;
          const auto found = std::find(labels.begin(), labels.end(), label);
          const int64_t own = found == labels.end() ? 1 : t.sizes[found - labels.begin()];
          result.sizes[result.rank] = size;
          result.strides[result.rank++] = own == 1 ? 0 : t.strides[found - labels.begin()];
        }
      }
      return result;
    };
    left = shape({kBatch, kRow, kSummed}, a, a_labels);
    right = shape({kBatch, kSummed, kColumn}, b, b_labels);
    result = shape({kBatch, kRow, kColumn}, c, c_labels);
  }

  size_t workspace() const {
    size_t bytes = matmul_workspace();
    for (const Tensor* t : {&left, &right, &result}) {
      if (!t->contiguous()) bytes += rounded(t->numel() * t->item_size());
    }
    return bytes;
  }

  cudaError_t run(void* workspace, cudaStream_t stream) const {
    char* free = static_cast<char*>(workspace) + rounded(matmul_workspace());
    const auto in_order = [&](const Tensor& t) {
      if (t.contiguous()) return t;
      Tensor copy = row_major(t);
      copy.data = free;
      free += rounded(t.numel() * t.item_size());
      return copy;
    };
    const Tensor a = in_order(left), b = in_order(right), c = in_order(result);
    for (const auto& [from, to] : {std::pair(&left, &a), std::pair(&right, &b)}) {
      if (from->data == to->data) continue;
      if (const cudaError_t status = permute(*from, *to, stream); status != cudaSuccess) return status;
    }
    for (int64_t first = 0; first < batch; first += kMostMatrices) {
      const int64_t count = std::min(kMostMatrices, batch - first);
      const cudaError_t status = matmul(matrices(a, first, count, rows, summed), matrices(b, first, count, summed, columns),
                                        Tensor{}, matrices(c, first, count, rows, columns), false, workspace, stream);
      if (status != cudaSuccess) return status;
    }
    return c.data == result.data ? cudaSuccess : permute(c, result, stream);
  }

  bool fits = true;  // whether kMaxRank dimensions are enough

 private:
  static int64_t size_of(const Tensor& t, const EinsumLabels& labels, int64_t label) {
    const auto found = std::find(labels.begin(), labels.end(), label);
    return found == labels.end() ? 1 : t.sizes[found - labels.begin()];
  }

  static Tensor matrices(const Tensor& t, int64_t first, int64_t count, int64_t rows, int64_t columns) {
    return row_major(t.element(first * rows * columns), t.dtype, {count, rows, columns});
  }

  int64_t batch, rows, columns, summed;
  Tensor left, right, result;
};

class EinsumPlugin final : public Plugin<EinsumPlugin, EinsumNode> {
 public:
  const char* wrong_attributes() const override {
    if (node.ranks.size() != 3) return "ranks should be three numbers: the kernel is for two operands";
    int64_t total = 0;
    for (const int32_t rank : node.ranks) {
      if (rank < 0 || rank > kMaxRank) return "operands and output should have at most 8 dimensions";
      total += rank;
    }
    if (total != static_cast<int64_t>(node.labels.size())) return "labels should be as many as ranks says";
    for (int i = 0; i < 3; ++i) {
      EinsumLabels own = of(i);
      std::sort(own.begin(), own.end());
      if (std::adjacent_find(own.begin(), own.end()) != own.end()) return "no tensor should have a label twice";
    }
    return nullptr;
  }

  const char* shapes(const DimsExprs* in, int, DimsExprs* out, IExprBuilder& builder) const override {
    for (int i = 0; i < 2; ++i) {
      if (in[i].nbDims != node.ranks[i]) return "operands should have as many dimensions as ranks says";
    }
    out[0].nbDims = 0;
    for (const int64_t label : of(2)) {
      int64_t size = 1;
      for (int i = 0; i < 2; ++i) {
        const EinsumLabels own = of(i);
        for (size_t j = 0; j < own.size(); ++j) {
          if (own[j] == label && in[i].d[j]->value != 1) size = in[i].d[j]->value;
        }
      }
      out[0].d[out[0].nbDims++] = builder.constant(size);
    }
    return nullptr;
  }

  bool supports(int i, const Descriptions& t) const override {
    return i == 0 ? is_linear_float(t[i]) : is_linear_like(t[i], t[0]);
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const bool fit = labels_fit({{t.in(0), of(0)}, {t.in(1), of(1)}});
    return fit ? nullptr : "dimensions of one label should be of one size, or 1";
  }

  size_t workspace(const Tensors& t) const override {
    if (empty(t)) return 0;
    const size_t kernels = EinsumProduct(t.in(0), of(0), t.in(1), of(1), t.out(0), of(2)).workspace();
    return std::max(kernels, MatrixProduct(t.in(0), of(0), t.in(1), of(1), t.out(0), of(2)).workspace());
  }

  cudaError_t run(const Tensors& t, void* workspace, cudaStream_t stream) const override {
    const Tensor& out = t.out(0);
    if (empty(t)) return cudaMemsetAsync(out.data, 0, out.numel() * out.item_size(), stream);
    bool after_product = false;
    const auto scratch = [&](size_t) { return workspace; };
    const cudaError_t status =
        einsum_product(t.in(0), of(0), t.in(1), of(1), out, of(2), tactic_, after_product, scratch, stream);
    if (status != cudaErrorNotSupported) return status;
    const MatrixProduct product(t.in(0), of(0), t.in(1), of(1), out, of(2));
    return product.fits ? product.run(workspace, stream) : status;
  }

 private:
  // A sum over nothing is zero.
  static bool empty(const Tensors& t) { return t.in(0).numel() == 0 || t.in(1).numel() == 0; }

  // The labels of operand i or, for i = 2, of the output.
  EinsumLabels of(int i) const {
    auto first = node.labels.begin();
    for (int j = 0; j < i; ++j) first += node.ranks[j];
    return {first, first + node.ranks[i]};
  }
};

}  // namespace

SVEXPORT_PLUGIN(einsum, EinsumPlugin)

}  // namespace svexport::plugin
