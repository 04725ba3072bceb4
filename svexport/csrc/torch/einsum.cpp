#include "einsum/tensors.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "binding.h"

namespace svexport {
namespace {

// The sum of products of a and b, of the given shape; undefined if no kernel can compute it. after_product: as in
// einsum_product().
at::Tensor product(const at::Tensor& a, const EinsumLabels& a_labels, const at::Tensor& b, const EinsumLabels& b_labels,
                   const EinsumLabels& labels, at::IntArrayRef shape, bool& after_product) {
  const bool early = std::exchange(after_product, false);
  if (shape.size() > kMaxRank || !a.is_floating_point() || b.scalar_type() != a.scalar_type() || a.numel() == 0 ||
      b.numel() == 0) {
    return {};
  }
  const auto result = fresh(shape, a);
  const Tensor x = view(a), y = view(b), z = view(result);
  if (!labels_fit({{x, a_labels}, {y, b_labels}, {z, labels}})) return {};
  after_product = early;
  at::Tensor memory;
  const auto scratch = [&](size_t bytes) { return (memory = workspace(bytes, a)).data_ptr(); };
  const cudaError_t status = einsum_product(x, a_labels, y, b_labels, z, labels, forced_tactic("einsum"), after_product,
                                            scratch, stream());
  return done(status) ? result : at::Tensor();
}

// The labels of two operands and of the output.
struct Terms {
  EinsumLabels a, b, output;

  static std::optional<Terms> of(at::TensorList operands, at::IntArrayRef labels, at::IntArrayRef ranks) {
    if (operands.size() != 2 || ranks.size() != 3) return {};
    return Terms{labels.slice(0, ranks[0]).vec(), labels.slice(ranks[0], ranks[1]).vec(),
                 labels.slice(ranks[0] + ranks[1]).vec()};
  }
};

std::optional<at::Tensor> einsum_torch(at::TensorList operands, at::IntArrayRef labels, at::IntArrayRef ranks) {
  const auto terms = Terms::of(operands, labels, ranks);
  if (!terms) return {};
  const auto &a = operands[0], &b = operands[1];
  std::vector<int64_t> shape;
  for (const int64_t label : terms->output) {
    int64_t size = 1;
    for (int64_t i = 0; i < a.dim(); ++i) size = terms->a[i] == label ? std::max(size, a.size(i)) : size;
    for (int64_t i = 0; i < b.dim(); ++i) size = terms->b[i] == label ? std::max(size, b.size(i)) : size;
    shape.push_back(size);
  }
  bool after_product = false;
  const auto result = product(a, terms->a, b, terms->b, terms->output, shape, after_product);
  return result.defined() ? std::optional(result) : std::nullopt;
}

Wanted einsum_backward_torch(at::TensorList grads, at::TensorList operands, at::IntArrayRef labels,
                             at::IntArrayRef ranks, c10::List<bool> needs_grad) {
  const auto terms = Terms::of(operands, labels, ranks);
  if (!terms) return {};
  // An expanded gradient, such as that of a sum, has no contiguous rows.
  const auto grad = grads[0].is_non_overlapping_and_dense() ? grads[0] : grads[0].contiguous();
  const EinsumLabels* const of[] = {&terms->a, &terms->b};
  std::vector<at::Tensor> results;
  bool after_product = false;
  for (int i = 0; i < 2; ++i) {
    if (!needs_grad.get(i)) continue;
    const auto& other = operands[1 - i];
    results.push_back(product(grad, terms->output, other, *of[1 - i], *of[i], operands[i].sizes(), after_product));
    if (!results.back().defined()) return {};
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "einsum", einsum_torch);
  implement(m, "einsum_backward", einsum_backward_torch);
}

}  // namespace svexport
