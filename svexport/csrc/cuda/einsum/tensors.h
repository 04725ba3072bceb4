// From tensors and their labels to the problem and the tactic, for whichever runtime owns the tensors. Host C++.
//
// Every dimension has a label; dimensions of size 1 broadcast.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "einsum/launch.h"
#include "einsum/tactics.h"
#include "gpu.h"

namespace svexport {

namespace einsum {

// The problem of views that are laid out as einsum_views() takes them.
inline Problem problem_of(const Tensor& x, const Tensor& y, const Tensor& z, bool sums) {
  Problem p;
  p.sums = sums;
  p.shared = x.sizes[0], p.outer = x.sizes[1], p.rows = x.sizes[3];
  p.x_count = x.sizes[2], p.x_width = x.sizes[4];
  p.z_count = z.sizes[2], p.z_width = z.sizes[4];
  p.item_size = static_cast<int32_t>(y.item_size());
  // Whether all elements of S, O, K or M begin at multiples of `bytes`.
  const auto begin = [](const Tensor& t, int64_t bytes) {
    bool all = reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
    for (int i = 0; i < 3; ++i) all = all && (t.sizes[i] == 1 || t.strides[i] * t.item_size() % bytes == 0);
    return all;
  };
  const auto row = [&](const Tensor& t) { return t.sizes[4] * p.item_size; };
  const auto whole = [&](const Tensor& t) { return begin(t, 16) && t.sizes[3] * row(t) % 16 == 0; };
  const auto pairs = [&](const Tensor& t) { return begin(t, 4) && row(t) % 4 == 0; };
  p.whole = whole(x) && whole(z);
  p.pairs = pairs(x) && pairs(z);
  for (const int count : {2, 4}) {
    const int64_t bytes = count * p.item_size;
    if (p.rows % count == 0 && begin(x, bytes) && begin(z, bytes)) p.aligned = count;
  }
  return p;
}

// Cached, because a model asks for the same in every step and the search takes longer than a launch.
inline Tactic choose(Problem problem, const Gpu& gpu, int32_t forced) {
  if (const int32_t winner = winner_of(problem, gpu); !forced) forced = winner;
  constexpr size_t kMost = 1024;
  static thread_local std::map<std::array<int64_t, 17>, Tactic> known;
  std::array<int64_t, 17> key{gpu.multiprocessors, gpu.shared_memory, gpu.capability, gpu.table, forced};
  size_t at = 5;
  problem.each([&](const char*, auto value) { key[at++] = value; });
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (known.size() >= kMost) known.clear();
  return known.emplace(key, cheapest(tactics(problem, gpu), forced, costs_of(problem, gpu))).first->second;
}

}  // namespace einsum

using EinsumLabels = std::vector<int64_t>;

// Whether every tensor has as many dimensions as labels, and all dimensions of a label have one size, or 1.
inline bool labels_fit(std::initializer_list<std::pair<const Tensor&, const EinsumLabels&>> tensors) {
  std::vector<std::pair<int64_t, int64_t>> known;  // label, size
  for (const auto& [t, labels] : tensors) {
    if (static_cast<int>(labels.size()) != t.rank) return false;
    for (int i = 0; i < t.rank; ++i) {
      if (t.sizes[i] == 1) continue;
      const int64_t label = labels[i];
      const auto found = std::find_if(known.begin(), known.end(), [&](const auto& k) { return k.first == label; });
      if (found == known.end()) {
        known.emplace_back(label, t.sizes[i]);
      } else if (found->second != t.sizes[i]) {
        return false;
      }
    }
  }
  return true;
}

// Views of three tensors as einsum_views() takes them. Which of the tensors have a label decides its role.
class EinsumViews {
 public:
  Tensor x, y, z;

  static std::optional<EinsumViews> of(const Tensor& x, const EinsumLabels& x_labels, const Tensor& y,
                                       const EinsumLabels& y_labels, const Tensor& z, const EinsumLabels& z_labels) {
    Dims of_x, of_y, of_z;
    if (!in_memory_order(x, x_labels, &of_x) || !in_memory_order(y, y_labels, &of_y) ||
        !in_memory_order(z, z_labels, &of_z)) {
      return {};
    }
    EinsumLabels S, O, K, T, V, M, W;
    Dims left_of_x = of_x, left_of_z = of_z;
    const auto take = [](Dims& from, const Dims& other, EinsumLabels& to) {  // innermost, contiguous, not in `other`
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

    EinsumViews views{without_dimensions(x), without_dimensions(y), without_dimensions(z)};
    const auto all = [](Tensor* view, const Dims& dims, std::initializer_list<const EinsumLabels*> groups) {
      return std::all_of(groups.begin(), groups.end(), [&](const EinsumLabels* l) { return push(view, dims, *l); });
    };
    if (!all(&views.x, of_x, {&S, &O, &K, &T, &V}) || !all(&views.y, of_y, {&S, &K, &V, &M, &W}) ||
        !all(&views.z, of_z, {&S, &O, &M, &T, &W})) {
      return {};
    }
    return views;
  }

 private:
  EinsumViews(Tensor a, Tensor b, Tensor c) : x(a), y(b), z(c) {}

  struct Dim {
    int64_t label, size, stride;
  };
  // Dimensions larger than 1, from the outermost in memory to the innermost.
  using Dims = std::vector<Dim>;

  static const Dim* find(const Dims& dims, int64_t label) {
    const auto found = std::find_if(dims.begin(), dims.end(), [&](const Dim& d) { return d.label == label; });
    return found == dims.end() ? nullptr : &*found;
  }

  // False if a label appears twice.
  static bool in_memory_order(const Tensor& t, const EinsumLabels& labels, Dims* dims) {
    for (int i = 0; i < t.rank; ++i) {
      if (t.sizes[i] == 1) continue;
      if (find(*dims, labels[i])) return false;
      dims->push_back({labels[i], t.sizes[i], t.strides[i]});
    }
    std::stable_sort(dims->begin(), dims->end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
    return true;
  }

  // Adds one dimension to a view: the dimensions of `labels`, outermost first, joined. False if their strides do not
  // allow that.
  static bool push(Tensor* view, const Dims& dims, const EinsumLabels& labels) {
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

  static Tensor without_dimensions(const Tensor& t) {
    Tensor view;
    view.data = t.data;
    view.dtype = t.dtype;
    return view;
  }
};

// The einsum_views() call that computes the sum of products of a and b; no views if no kernel can compute it.
struct EinsumProduct {
  std::optional<EinsumViews> views;
  bool sums;  // whether the result is the small tensor

  EinsumProduct(const Tensor& a, const EinsumLabels& a_labels, const Tensor& b, const EinsumLabels& b_labels,
                const Tensor& result, const EinsumLabels& labels)
      : sums(result.numel() <= std::min(a.numel(), b.numel())) {
    if (!sums) {
      const bool small_b = b.numel() <= a.numel();
      views = small_b ? EinsumViews::of(a, a_labels, b, b_labels, result, labels)
                      : EinsumViews::of(b, b_labels, a, a_labels, result, labels);
      return;
    }
    // Either operand may be x; the kernel of sums wants M to be 1.
    views = EinsumViews::of(a, a_labels, result, labels, b, b_labels);
    if (views && views->z.sizes[2] > 1 && views->x.sizes[2] == 1) {
      views = EinsumViews::of(b, b_labels, result, labels, a, a_labels);
    }
  }

  size_t workspace() const { return views ? einsum_views_workspace(views->x, views->y, views->z, sums) : 0; }
};

// Writes the sum of products of a and b to `result`; none is empty and all have one float type. cudaErrorNotSupported
// if no kernel can. tactic: as in einsum_views(). scratch(bytes) returns device memory. after_product: whether the
// previous kernel was einsum_views() without `sums`, its result not read here; on return, whether this one was.
template <class Scratch>
cudaError_t einsum_product(const Tensor& a, const EinsumLabels& a_labels, const Tensor& b, const EinsumLabels& b_labels,
                           const Tensor& result, const EinsumLabels& labels, int32_t tactic, bool& after_product,
                           Scratch&& scratch, cudaStream_t stream) {
  const bool early = std::exchange(after_product, false);
  const EinsumProduct product(a, a_labels, b, b_labels, result, labels);
  if (!product.views) return cudaErrorNotSupported;
  const auto& [x, y, z] = *product.views;
  const einsum::Problem problem = einsum::problem_of(x, y, z, product.sums);
  const Gpu gpu = current_gpu();
  const einsum::Tactic chosen = choose(problem, gpu, tactic);
  const size_t bytes = workspace(problem, chosen, gpu);
  void* const memory = bytes ? scratch(bytes) : nullptr;
  const cudaError_t status = einsum_views(x, y, z, product.sums, chosen.id(), memory, early, stream);
  after_product = status == cudaSuccess && !product.sums;
  return status;
}

}  // namespace svexport
