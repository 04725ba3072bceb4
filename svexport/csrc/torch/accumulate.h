// Gradients to which many threads add: in float32, or, where torch asks for deterministic algorithms, in fixed point.
#pragma once

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "binding.h"

namespace svexport {

struct Accumulator {
  at::Tensor sums;
  at::Tensor scale;  // undefined if sums are float32

  // For sums of at most `count` terms, none larger than the product of the largest magnitudes of all `factors`. Where
  // these are not finite, the results are not finite either.
  Accumulator(at::IntArrayRef sizes, const at::Tensor& like, at::TensorList factors, double count) {
    const auto options = like.options().memory_format(at::MemoryFormat::Contiguous);
    if (!at::globalContext().deterministicAlgorithms()) {
      sums = at::zeros(sizes, options.dtype(at::kFloat));
      return;
    }
    sums = at::zeros(sizes, options.dtype(at::kLong));
    scale = at::zeros({}, options.dtype(at::kFloat));
    if (sums.numel() == 0) return;
    scale += 60 - std::log2(std::max(count, 1.0));
    for (const auto& factor : factors) scale -= at::log2(largest(factor));
    scale = at::exp2(at::floor(scale).clamp_max(100));
  }

  // Makes the results not finite if these terms, which the factors only bound, are not finite.
  void check(const at::Tensor& terms) {
    if (scale.defined()) scale += largest(terms) * 0;
  }

  at::Tensor result(at::ScalarType type) const {
    return (scale.defined() ? sums.to(at::kDouble) / scale.to(at::kDouble) : sums).to(type);
  }

 private:
  static at::Tensor largest(const at::Tensor& t) {
    return t.numel() == 0
               ? at::zeros({}, t.options().dtype(at::kFloat))
               : at::linalg_vector_norm(t, std::numeric_limits<double>::infinity(), {}, false, at::kFloat);
  }
};

}  // namespace svexport
