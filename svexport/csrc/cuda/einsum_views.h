// An einsum of two tensors on the kernels of einsum.h and channel_product.h, for whichever runtime has the tensors.
//
// Labels name dimensions, one for each; a tensor's dimensions of size 1 broadcast. Host code alone.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "channel_product.h"
#include "einsum.h"

namespace svexport {

using EinsumLabels = std::vector<int64_t>;

// Views of three tensors, as einsum.h has them: whatever a label is called, it is known by which of them have it.
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
    const auto take = [](Dims& from, const Dims& other, EinsumLabels& to) {  // what lies side by side, `other` lacks it
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

  // Whether they are what channel_product.h has, as channels() has them.
  bool of_channels() const { return x.sizes[0] == 1 && x.sizes[4] == 1 && z.sizes[4] == 1; }
  EinsumViews channels() const {
    return {dimensions(x, {1, 2, 3}), dimensions(y, {1, 3}), dimensions(z, {1, 2, 3})};
  }

 private:
  EinsumViews(Tensor a, Tensor b, Tensor c) : x(a), y(b), z(c) {}

  struct Dim {
    int64_t label, size, stride;
  };
  // The dimensions of a tensor that are larger than 1, in the order of memory.
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

  // Adds one dimension to a view: those of the labels, the outermost first, joined. False if the tensor has them
  // otherwise.
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

  static Tensor dimensions(const Tensor& view, std::initializer_list<int> chosen) {
    Tensor result = without_dimensions(view);
    for (const int i : chosen) {
      result.sizes[result.rank] = view.sizes[i];
      result.strides[result.rank++] = view.strides[i];
    }
    return result;
  }
};

// The sum of products of a and b, into `result`, none of them empty and all of one float type; cudaErrorNotSupported if
// there is no kernel for it. scratch(bytes): device memory. after_large: whether the kernel before was einsum_large, with
// a result that this one does not read; also what it will be.
template <class Scratch>
cudaError_t einsum_product(const Tensor& a, const EinsumLabels& a_labels, const Tensor& b, const EinsumLabels& b_labels,
                           const Tensor& result, const EinsumLabels& labels, bool& after_large, Scratch&& scratch,
                           cudaStream_t stream) {
  const bool early = std::exchange(after_large, false);
  if (result.numel() <= std::min(a.numel(), b.numel())) {
    auto views = EinsumViews::of(a, a_labels, result, labels, b, b_labels);
    if (views && views->of_channels()) {
      const auto [x, y, z] = views->channels();
      const auto memory = scratch(channel_correlation_workspace(x, z));
      const cudaError_t status = channel_correlation(x, z, y, memory, stream);
      if (status != cudaErrorNotSupported) return status;
    }
    if (views && views->z.sizes[2] > 1) views = EinsumViews::of(b, b_labels, result, labels, a, a_labels);
    if (!views) return cudaErrorNotSupported;
    const auto memory = scratch(einsum_small_workspace(views->x, views->z));
    return einsum_small(views->x, views->z, views->y, memory, early, stream);
  }
  const bool small_b = b.numel() <= a.numel();
  const auto views = small_b ? EinsumViews::of(a, a_labels, b, b_labels, result, labels)
                             : EinsumViews::of(b, b_labels, a, a_labels, result, labels);
  if (!views) return cudaErrorNotSupported;
  if (views->of_channels()) {
    const auto [x, y, z] = views->channels();
    const cudaError_t status = channel_product(x, y, z, stream);
    if (status != cudaErrorNotSupported) return status;
  }
  const cudaError_t status = einsum_large(views->x, views->y, views->z, stream);
  after_large = status == cudaSuccess;
  return status;
}

// The most that einsum_product() asks scratch memory for.
inline size_t einsum_workspace(const Tensor& a, const EinsumLabels& a_labels, const Tensor& b,
                               const EinsumLabels& b_labels, const Tensor& result, const EinsumLabels& labels) {
  if (result.numel() > std::min(a.numel(), b.numel())) return 0;
  auto views = EinsumViews::of(a, a_labels, result, labels, b, b_labels);
  size_t bytes = 0;
  if (views && views->of_channels()) {
    const auto [x, y, z] = views->channels();
    bytes = channel_correlation_workspace(x, z);
  }
  if (views && views->z.sizes[2] > 1) views = EinsumViews::of(b, b_labels, result, labels, a, a_labels);
  return views ? std::max(bytes, einsum_small_workspace(views->x, views->z)) : bytes;
}

}  // namespace svexport
