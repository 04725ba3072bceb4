// From tensors to the problem. Host C++.
#pragma once

#include <initializer_list>

#include "add_bias_residual_layer_norm/tactics.h"
#include "axes.h"
#include "gpu.h"

namespace svexport::norm {

// x, residual and extra (data null: none) without their columns, as rows that are walked together.
inline Axes<3> axes_of(const Tensor& x, const Tensor& residual, const Tensor& extra) {
  return Axes<3>({&x, &residual, &extra}, 1, Axes<3>::Order::kRowMajor);
}

// others: contiguous tensors of the same shape; parameters: vectors. Both are addresses, null for a missing tensor.
inline Problem problem_of(const Tensor& x, const Tensor& residual, const Tensor& extra, const Axes<3>& axes,
                          std::initializer_list<const void*> others, std::initializer_list<const void*> parameters) {
  const Tensor* const tensors[] = {&x, &residual, &extra};
  Multiple addresses, strides, of_parameters;
  Problem p;
  p.columns = x.sizes[x.rank - 1];
  p.rows = axes.count();
  p.item_size = static_cast<int32_t>(x.item_size());
  p.dense = axes.rank <= 1;
  p.extra = extra.data != nullptr;
  for (int k = 0; k < 3; ++k) {
    addresses.add(tensors[k]->data);
    for (int i = 0; i < axes.rank; ++i) strides.add(axes.at[i].strides[k] * p.item_size);
    if (p.dense && axes.rank && tensors[k]->data) p.dense = axes.at[0].strides[k] == p.columns;
  }
  for (const void* data : others) addresses.add(data);
  for (const void* data : parameters) of_parameters.add(data);
  p.addresses = addresses.bytes();
  p.strides = strides.bytes();
  p.parameters = of_parameters.bytes();
  return p;
}

}  // namespace svexport::norm
