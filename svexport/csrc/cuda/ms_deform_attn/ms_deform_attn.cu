#include <algorithm>
#include <type_traits>

#include "ms_deform_attn/kernels.cuh"
#include "ms_deform_attn/launch.h"
#include "ms_deform_attn/tensors.h"
#include "planned.cuh"

namespace svexport {
namespace {

using namespace ms_deform;

template <size_t R>
void copy_strides(const Tensor& t, int64_t (&strides)[R]) {
  for (size_t i = 0; i < R; ++i) strides[i] = t.strides[i];
}

Sizes sizes_of(const Tensor& value, const Tensor& locations, const Tensor& weights) {
  Sizes sizes{};
  sizes.images = static_cast<int>(value.sizes[0]);
  sizes.rows = static_cast<int>(locations.sizes[1] * value.sizes[2]);
  sizes.s = static_cast<int>(value.sizes[1]);
  sizes.heads = static_cast<int>(value.sizes[2]);
  sizes.channels = static_cast<int>(value.sizes[3]);
  sizes.points = static_cast<int>(locations.sizes[4]);
  sizes.samples = static_cast<int>(locations.sizes[3] * locations.sizes[4]);
  sizes.per_point = 1.0f / static_cast<float>(sizes.points);
  sizes.scale = 1;
  copy_strides(value, sizes.value);
  copy_strides(locations, sizes.locations);
  copy_strides(weights, sizes.weights);
  return sizes;
}

Levels levels_of(const Tensor& shapes, const Tensor& starts) {
  return {shapes.data, starts.data, {shapes.strides[0], shapes.strides[1]}, starts.strides[0],
          shapes.dtype == DType::kInt64, starts.dtype == DType::kInt64};
}

bool supported(const Tensor& value, const Tensor& shapes, const Tensor& starts, const Tensor& locations,
               const Tensor& weights) {
  const auto integers = [](const Tensor& t) { return t.dtype == DType::kInt64 || t.dtype == DType::kInt32; };
  return (is_float(value) || value.dtype == DType::kInt8) && integers(shapes) && integers(starts) && is_float(locations) && is_float(weights) &&
         value.sizes[1] <= INT32_MAX && locations.sizes[1] * value.sizes[2] < (1 << 30) &&
         locations.sizes[3] * locations.sizes[4] < (1 << 20);  // the level of a sample is computed in float
}

// Calls run(null pointer to an element of value, V, sizes, lanes, launch) for the chosen tactic; V is at most kMost.
template <int kMost, class F>
cudaError_t dispatch(const Problem& problem, int32_t forced, const Tensor& value, Sizes sizes, F&& run) {
  const Gpu gpu = current_gpu();
  const Tactic tactic = choose(problem, gpu, forced);
  const Launch l = launch(problem, tactic, gpu);
  const int64_t step = value.strides[1] / tactic.width;
  if (l.blocks() > INT32_MAX || step > UINT32_MAX) return cudaErrorNotSupported;
  sizes.step = static_cast<unsigned>(step);
  const auto of = [&](auto* p) {
    constexpr int kFull = std::min<int>(kMost, 16 / sizeof(*p));
    if constexpr (sizeof(*p) == 1) {
      if (tactic.width == 8) return run(p, Int<8>(), sizes, tactic.lanes, l);
    }
    return with_constant<1, kFull>(tactic.width, [&](auto v) { return run(p, v, sizes, tactic.lanes, l); });
  };
  if constexpr (kMost == 16) {  // forward
    return value.dtype == DType::kInt8 ? of(static_cast<int8_t*>(nullptr)) : dispatch_float(value.dtype, of);
  } else {
    return dispatch_narrow(value.dtype, of);
  }
}

}  // namespace

cudaError_t ms_deform_attn(const Tensor& value, const Tensor& spatial_shapes, const Tensor& level_start_index,
                           const Tensor& sampling_locations, const Tensor& attention_weights, const Tensor& output,
                           float scale, int32_t tactic, cudaStream_t stream) {
  const bool int8 = value.dtype == DType::kInt8;
  if (!supported(value, spatial_shapes, level_start_index, sampling_locations, attention_weights) ||
      (!int8 && value.dtype != output.dtype)) {
    return cudaErrorNotSupported;
  }
  if (output.numel() == 0) return cudaSuccess;
  Sizes sizes = sizes_of(value, sampling_locations, attention_weights);
  if (int8) sizes.scale = scale;
  const Levels levels = levels_of(spatial_shapes, level_start_index);
  const Problem problem = problem_of(value, sampling_locations);
  return dispatch<16>(problem, tactic, value, sizes, [&](auto* p, auto v, const Sizes& sizes, int g, const Launch& l) {
    using F = element_t<decltype(p)>;
    const auto to = [&](auto* p) {
      using T = element_t<decltype(p)>;
      return launch_planned(forward_kernel<F, v.value, T>, l, false, stream, static_cast<const F*>(value.data), levels,
                            AnyFloat(sampling_locations), AnyFloat(attention_weights), static_cast<T*>(output.data),
                            sizes, g);
    };
    if constexpr (std::is_same_v<F, int8_t>) {
      return dispatch_float(output.dtype, to);
    } else {
      return to(p);
    }
  });
}

cudaError_t ms_deform_attn_backward(const Tensor& grad_output, const Tensor& value, const Tensor& spatial_shapes,
                                    const Tensor& level_start_index, const Tensor& sampling_locations,
                                    const Tensor& attention_weights, const Tensor& grad_value, const Tensor& scale,
                                    const Tensor& grad_locations, const Tensor& grad_weights, int32_t tactic, cudaStream_t stream) {
  if (grad_output.dtype != value.dtype || !is_float(value) ||
      !supported(value, spatial_shapes, level_start_index, sampling_locations, attention_weights)) {
    return cudaErrorNotSupported;
  }
  Sizes sizes = sizes_of(value, sampling_locations, attention_weights);
  if (value.numel() == 0 || sampling_locations.numel() == 0) return cudaSuccess;
  copy_strides(grad_output, sizes.grad_output);
  const Levels levels = levels_of(spatial_shapes, level_start_index);
  const Gradients grads{{grad_value.data, static_cast<const float*>(scale.data)}, AnyFloat(grad_locations),
                        AnyFloat(grad_weights)};
  Problem problem = problem_of(value, sampling_locations);
  problem.backward = true;
  return dispatch<4>(problem, tactic, value, sizes, [&](auto* p, auto v, const Sizes& sizes, int g, const Launch& l) {
    using T = element_t<decltype(p)>;
    return launch_planned(backward_kernel<T, v.value>, l, false, stream, static_cast<const T*>(grad_output.data),
                          static_cast<const T*>(value.data), levels, AnyFloat(sampling_locations),
                          AnyFloat(attention_weights), grads, sizes, Format<T>(value.dtype), grad_output.aligned(2, 4 * value.item_size()), g);
  });
}

}  // namespace svexport
