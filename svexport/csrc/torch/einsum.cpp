#include "einsum.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "binding.h"
#include "channel_product.h"

namespace svexport {
namespace {

struct Dim {
  int64_t label, size, stride;
};

// The dimensions of a tensor that are larger than 1, in the order of memory.
using Dims = std::vector<Dim>;
using Labels = std::vector<int64_t>;

const Dim* find(const Dims& dims, int64_t label) {
  const auto found = std::find_if(dims.begin(), dims.end(), [&](const Dim& d) { return d.label == label; });
  return found == dims.end() ? nullptr : &*found;
}

// False if a label appears twice.
bool in_memory_order(const at::Tensor& t, at::IntArrayRef labels, Dims* dims) {
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) == 1) continue;
    if (find(*dims, labels[i])) return false;
    dims->push_back({labels[i], t.size(i), t.stride(i)});
  }
  std::stable_sort(dims->begin(), dims->end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  return true;
}

// Adds one dimension to a view: those of the labels, the outermost first, joined. False if the tensor has them otherwise.
bool push(Tensor* view, const Dims& dims, const Labels& labels) {
  int64_t size = 1, stride = 0;
  for (auto label = labels.rbegin(); label != labels.rend(); ++label) {
    const Dim* const dim = find(dims, *label);
    if (!dim || (size > 1 && dim->stride != stride * size)) return false;
    if (size == 1) stride = dim->stride;
    size *= dim->size;
  }
  view->sizes[view->rank] = size;
  view->strides[view->rank++] = stride;
  return true;
}

// Some dimensions of a view.
Tensor dimensions(const Tensor& view, std::initializer_list<int> chosen) {
  Tensor result;
  result.data = view.data;
  result.dtype = view.dtype;
  for (const int i : chosen) {
    result.sizes[result.rank] = view.sizes[i];
    result.strides[result.rank++] = view.strides[i];
  }
  return result;
}

// Views of three tensors, as einsum.h has them: whatever a label is called, it is known by which of them have it.
struct Views {
  Tensor x, y, z;

  static std::optional<Views> of(const at::Tensor& x, at::IntArrayRef x_labels, const at::Tensor& y,
                                 at::IntArrayRef y_labels, const at::Tensor& z, at::IntArrayRef z_labels) {
    Dims of_x, of_y, of_z;
    if (!in_memory_order(x, x_labels, &of_x) || !in_memory_order(y, y_labels, &of_y) ||
        !in_memory_order(z, z_labels, &of_z)) {
      return {};
    }
    Labels S, O, K, T, V, M, W;
    Dims left_of_x = of_x, left_of_z = of_z;
    const auto take = [](Dims& from, const Dims& other, Labels& to) {  // what lies side by side and `other` lacks
      int64_t size = 1;
      for (; !from.empty() && !find(other, from.back().label) && from.back().stride == size; from.pop_back()) {
        to.insert(to.begin(), from.back().label);
        size *= from.back().size;
      }
      return size;
    };
    int64_t x_size = take(left_of_x, of_z, V), z_size = take(left_of_z, of_x, W);
    while (!left_of_x.empty() && !left_of_z.empty()) {
      const Dim a = left_of_x.back(), b = left_of_z.back();
      if (a.label != b.label || find(of_y, a.label) || a.stride != x_size || b.stride != z_size) break;
      T.insert(T.begin(), a.label);
      x_size *= a.size;
      z_size *= b.size;
      left_of_x.pop_back();
      left_of_z.pop_back();
    }
    for (const Dim& d : left_of_x) (!find(of_z, d.label) ? K : find(of_y, d.label) ? S : O).push_back(d.label);
    for (const Dim& d : left_of_z) {
      if (!find(of_x, d.label)) M.push_back(d.label);
    }
    if (T.empty() || of_y.size() != S.size() + K.size() + V.size() + M.size() + W.size()) return {};

    Views views{view_of(x), view_of(y), view_of(z)};
    const auto all = [](Tensor* view, const Dims& dims, std::initializer_list<const Labels*> groups) {
      return std::all_of(groups.begin(), groups.end(), [&](const Labels* labels) { return push(view, dims, *labels); });
    };
    if (!all(&views.x, of_x, {&S, &O, &K, &T, &V}) || !all(&views.y, of_y, {&S, &K, &V, &M, &W}) ||
        !all(&views.z, of_z, {&S, &O, &M, &T, &W})) {
      return {};
    }
    return views;
  }

  // Whether they are what channel_product.h has, as channels() has them.
  bool of_channels() const { return x.sizes[0] == 1 && x.sizes[4] == 1 && z.sizes[4] == 1; }
  Views channels() const {
    return {dimensions(x, {1, 2, 3}), dimensions(y, {1, 3}), dimensions(z, {1, 2, 3})};
  }

 private:
  static Tensor view_of(const at::Tensor& t) {  // without dimensions as yet
    Tensor view;
    view.data = t.data_ptr();
    view.dtype = to_dtype(t.scalar_type());
    return view;
  }
};

bool same_sizes(std::initializer_list<std::pair<at::IntArrayRef, at::IntArrayRef>> tensors) {
  std::vector<std::pair<int64_t, int64_t>> known;  // label, size
  for (const auto& [labels, sizes] : tensors) {
    if (labels.size() != sizes.size()) return false;
    for (size_t i = 0; i < labels.size(); ++i) {
      if (sizes[i] == 1) continue;
      const auto found = std::find_if(known.begin(), known.end(), [&](const auto& k) { return k.first == labels[i]; });
      if (found == known.end()) {
        known.emplace_back(labels[i], sizes[i]);
      } else if (found->second != sizes[i]) {
        return false;
      }
    }
  }
  return true;
}

// The sum of products of a and b, of a given shape; undefined if there is no kernel for it. after_large: whether the
// kernel before was einsum_large, with a result that this one does not read; also what it will be.
at::Tensor product(const at::Tensor& a, at::IntArrayRef a_labels, const at::Tensor& b, at::IntArrayRef b_labels,
                   at::IntArrayRef labels, at::IntArrayRef shape, bool& after_large) {
  const bool early = std::exchange(after_large, false);
  if (!has_dtype(a) || !a.is_floating_point() || b.scalar_type() != a.scalar_type() || b.device() != a.device() ||
      a.numel() == 0 || b.numel() == 0 ||
      !same_sizes({{a_labels, a.sizes()}, {b_labels, b.sizes()}, {labels, shape}})) {
    return {};
  }
  const auto result = at::empty(shape, a.options().memory_format(at::MemoryFormat::Contiguous));
  if (result.numel() <= std::min(a.numel(), b.numel())) {
    auto views = Views::of(a, a_labels, result, labels, b, b_labels);
    if (views && views->of_channels()) {
      const auto [x, y, z] = views->channels();
      const auto scratch = workspace(channel_correlation_workspace(x, z), a);
      if (done(channel_correlation(x, z, y, scratch.data_ptr(), stream()))) return result;
    }
    if (views && views->z.sizes[2] > 1) views = Views::of(b, b_labels, result, labels, a, a_labels);
    if (!views) return {};
    const auto scratch = workspace(einsum_small_workspace(views->x, views->z), a);
    return done(einsum_small(views->x, views->z, views->y, scratch.data_ptr(), early, stream())) ? result
                                                                                                 : at::Tensor();
  }
  const bool small_b = b.numel() <= a.numel();
  const auto views = small_b ? Views::of(a, a_labels, b, b_labels, result, labels)
                             : Views::of(b, b_labels, a, a_labels, result, labels);
  if (views && views->of_channels()) {
    const auto [x, y, z] = views->channels();
    if (done(channel_product(x, y, z, stream()))) return result;
  }
  after_large = views && done(einsum_large(views->x, views->y, views->z, stream()));
  return after_large ? result : at::Tensor();
}

// The labels of two operands and of the output.
struct Terms {
  at::IntArrayRef a, b, output;

  static std::optional<Terms> of(at::TensorList operands, at::IntArrayRef labels, at::IntArrayRef ranks) {
    if (operands.size() != 2 || ranks.size() != 3) return {};
    return Terms{labels.slice(0, ranks[0]), labels.slice(ranks[0], ranks[1]), labels.slice(ranks[0] + ranks[1])};
  }
};

at::Tensor einsum_torch(at::TensorList operands, at::IntArrayRef labels, at::IntArrayRef ranks) {
  const c10::cuda::CUDAGuard guard(operands[0].device());
  if (const auto terms = Terms::of(operands, labels, ranks)) {
    const auto &a = operands[0], &b = operands[1];
    std::vector<int64_t> shape;
    for (const int64_t label : terms->output) {
      int64_t size = 1;
      for (int64_t i = 0; i < a.dim(); ++i) size = terms->a[i] == label ? std::max(size, a.size(i)) : size;
      for (int64_t i = 0; i < b.dim(); ++i) size = terms->b[i] == label ? std::max(size, b.size(i)) : size;
      shape.push_back(size);
    }
    bool after_large = false;
    const auto result = product(a, terms->a, b, terms->b, terms->output, shape, after_large);
    if (result.defined()) return result;
  }
  return reference("einsum", einsum_torch, operands, labels, ranks);
}

std::vector<at::Tensor> einsum_backward_torch(at::TensorList grads, at::TensorList operands, at::IntArrayRef labels,
                                              at::IntArrayRef ranks, c10::List<bool> needs_grad) {
  const c10::cuda::CUDAGuard guard(operands[0].device());
  if (const auto terms = Terms::of(operands, labels, ranks)) {
    // One that is expanded, such as that of a sum, would have no rows side by side.
    const auto grad = grads[0].is_non_overlapping_and_dense() ? grads[0] : grads[0].contiguous();
    const at::IntArrayRef of[] = {terms->a, terms->b};
    std::vector<at::Tensor> results;
    bool after_large = false;
    for (int i = 0; i < 2; ++i) {
      if (!needs_grad.get(i)) continue;
      const auto& other = operands[1 - i];
      results.push_back(product(grad, terms->output, other, of[1 - i], of[i], operands[i].sizes(), after_large));
      if (!results.back().defined()) break;
    }
    if (results.empty() || results.back().defined()) return results;
  }
  return reference("einsum_backward", einsum_backward_torch, grads, operands, labels, ranks, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("einsum", &einsum_torch);
  m.impl("einsum_backward", &einsum_backward_torch);
}

}  // namespace svexport
