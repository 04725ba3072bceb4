#include "aot.cuh"
#include "ms_deform_attn/kernels.cuh"

namespace svexport::aot {

// The planner's tactic is given as constants: kLanes for the channels of a row, kWidth of them at once. Where addresses
// do not allow these, single channels are read.
// F: type of the value, T or int8.
template <class F, class I, class L, class W, class T, int kLanes, int kWidth>
__device__ void ms_deform_attn(const View<const F, 4>& value, const View<const I, 2>& spatial_shapes,
                               const View<const I, 1>& level_start_index, const View<const L, 6>& sampling_locations,
                               const View<const W, 5>& attention_weights, float scale, const View<T, 3>& output,
                               Int<kLanes>, Int<kWidth>) {
  Sizes sizes{};
  sizes.scale = std::is_same_v<F, int8_t> ? scale : 1;
  sizes.images = value.sizes[0];
  sizes.rows = sampling_locations.sizes[1] * value.sizes[2];
  sizes.s = value.sizes[1];
  sizes.heads = value.sizes[2];
  sizes.channels = value.sizes[3];
  sizes.points = sampling_locations.sizes[4];
  if (sizes.images == 0 || sizes.rows == 0 || sizes.channels == 0) return;
  sizes.samples = sampling_locations.sizes[3] * sizes.points;
  sizes.per_point = 1.0f / static_cast<float>(sizes.points);
  const auto strides = [](const auto& view, auto& to) {
    constexpr int R = std::extent_v<std::remove_reference_t<decltype(view.sizes)>>;
    int64_t stride = 1;
    UNROLL for (int i = R - 1; i >= 0; --i) {
      to[i] = stride;
      stride *= view.sizes[i];
    }
  };
  strides(value, sizes.value);
  strides(sampling_locations, sizes.locations);
  strides(attention_weights, sizes.weights);
  const bool is_long = sizeof(I) == 8;
  const Levels levels{spatial_shapes.data, level_start_index.data, {2, 1}, 1, is_long, is_long};
  const AnyFloat locations(untyped(sampling_locations)), weights(untyped(attention_weights));
  const bool vectors = value.aligned(16) && output.aligned(16) && sizes.channels % kWidth == 0;
  sizes.step = static_cast<unsigned>(sizes.value[1] / (vectors ? kWidth : 1));
  vectors ? forward_kernel<F, kWidth>(value.data, levels, locations, weights, output.data, sizes, kLanes)
          : forward_kernel<F, 1>(value.data, levels, locations, weights, output.data, sizes, kLanes);
}

}  // namespace svexport::aot
