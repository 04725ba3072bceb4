#include <algorithm>
#include <climits>
#include <cmath>

#include "bilinear_sample.h"
#include "grid_sample.h"
#include "grid_sample_backward_box.cuh"
#include "grid_sample_backward_copies.cuh"
#include "grid_sample_backward_direct.cuh"
#include "grid_sample_backward_vector.cuh"

namespace svexport {
namespace {

using namespace backward;

int64_t pixels_of(const Tensor& input) {
  int64_t pixels = 1;
  for (int i = 2; i < input.rank; ++i) pixels *= input.sizes[i];
  return pixels;
}

size_t padded(size_t bytes) { return ceil_div<size_t>(bytes, 256) * 256; }

// Whether there are so many tiles of points that box_kernel fills the device; by measurement fewer do in float32.
bool many_tiles(int64_t across, int64_t down, int64_t batch, int64_t item) {
  return across >= 16 && ceil_div<int64_t>(across, kTileAcross) * ceil_div<int64_t>(down, kTileDown) * batch >=
                             8 / item * of_device(cudaDevAttrMultiProcessorCount);
}

// How the gradients are computed, and in how much memory. What is said of bilinear points is not done in other modes.
struct Plan {
  bool plane;   // the image's by plane_kernel,
  bool listed;  // or of bilinear points by owner_kernel, as far as these lie close together,
  bool vector;  // the others by vector_kernel, else by direct_kernel,
  bool pairs;   // of bilinear points with sums of pairs of pixels
  bool copied;  // the image transposed to channels-last first
  bool close;   // but for images whose points are close together: those by add_close or add_enlarged
  bool summed;  // sums in the second cache, or of few channels; others are sooner written once, by lists
  int tile;
  Lists lists;
  size_t sums = 0, list = 0, copy = 0;  // bytes

  Plan(const Tensor& input, const Tensor& grid, bool input_gradient, bool grid_gradient)
      : lists(static_cast<int>(input.sizes[input.rank - 1]), static_cast<int>(input.sizes[input.rank - 2]),
              grid.numel() / grid.sizes[0] / (grid.rank - 2), input.sizes[1] <= 4) {
    const int64_t v = 16 / input.item_size(), pixels = pixels_of(input), batch = input.sizes[0];
    const int64_t points = grid.numel() / batch / (grid.rank - 2), channels = input.sizes[1];
    tile = static_cast<int>(pixels < kPlanePixels ? pixels : kPlanePixels);
    plane = input_gradient && 4 * points * ceil_div<int64_t>(pixels, tile) <= pixels &&
            batch * channels * ceil_div<int64_t>(pixels, tile) < INT32_MAX;
    const bool last = input.strides[1] == 1 && input.aligned(1, 16);
    int64_t pixel = 1;
    const bool even = Space::evenly_spaced(input, 2, input.rank - 1, pixel);
    const bool dense = even && pixel == 1 && 2 * points >= pixels;
    const bool large = batch * points * channels >= (1 << 19);  // worth three or four kernels
    vector = channels % v == 0 && channels > 4 && pixels * channels < INT32_MAX &&
             (large ? last || dense : last && !input_gradient);
    copied = vector && !last && grid_gradient;
    listed = input.rank == 4 && input_gradient && !plane && points <= 4 * pixels && pixels <= 32 * points &&
             points < Lists::kFull && batch * points * channels >= (1 << 19) &&
             (batch * points * channels >= (1 << 23) || batch * pixels * channels >= (1 << 22));
    // Where few channels are enlarged, neighbours add to the same pixels.
    listed = listed && !(input.item_size() == 4 && channels <= 4 && 2 * points >= 5 * pixels);
    pairs = input_gradient && !plane && !vector && !listed && 2 * points >= pixels && input.item_size() == 2 &&
            input.numel() >= (1 << 17) && input.numel() <= (1 << 20);
    close = input.rank == 4 && input.item_size() == 4 && input_gradient && !plane && even && grid.sizes[2] >= 32 &&
            grid.sizes[1] >= kCloseDown;
    summed = input.numel() <= (1 << 23) || channels < 16;
    if (vector) {
      const bool many = listed && many_tiles(grid.sizes[2], grid.sizes[1], batch, 4);
      close = close && !last && (!many || summed);
      // With few tiles what scatters is added up no slower than by lists, with many box_kernel has its share.
      listed = listed && (!close || many);
    } else {
      close = close && listed;
      if (close) lists.most = Lists::kFull - 1;  // however the points lie
    }
    if (listed) {
      list = padded(lists.bytes(batch));
    } else if (close) {
      list = padded(batch * sizeof(int));
    }
    if (pairs) {
      sums = padded(2 * (input.numel() + input.numel() / input.sizes[input.rank - 1]) * sizeof(float));
    } else if (input_gradient && (vector || input.dtype != DType::kFloat32)) {
      sums = padded(input.numel() * sizeof(float));
    }
    if (copied) copy = padded(input.numel() * input.item_size());
  }
};

unsigned limited(int64_t blocks) { return static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20); }

// Writes what pixels the listed points make.
template <class T, int PADDING>
cudaError_t launch_owner(const Space& s, const Lists& lists, const Gradient<T>& gradient, T* output, int batch,
                         int channels, const Left& left, cudaStream_t stream) {
  const unsigned images = batch < 65535 ? batch : 65535;
  const bool pairs = s.size[0] % 2 == 0 && reinterpret_cast<uintptr_t>(output) % (2 * sizeof(T)) == 0;
  const auto with = [&](auto width) {
    constexpr int W = width.value;
    const int enough = 8 * of_device(cudaDevAttrMultiProcessorCount);
    int chunk = ceil_div(channels, W) * W;
    while (chunk >= 4 * W && static_cast<int64_t>(lists.tiles) * ceil_div(channels, chunk) * images < enough) {
      chunk = ceil_div(chunk, 2 * W) * W;
    }
    const auto kernel = owner_kernel<T, W, PADDING>;
    const int memory = static_cast<int>(owner_memory<T, W>(lists));
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (status != cudaSuccess) return status;
    return launch(kernel, dim3(lists.tiles, ceil_div(channels, chunk), images), kOwnerThreads, memory, stream, true, s,
                  lists, gradient, output, batch, channels, chunk, pairs, left);
  };
  if constexpr (sizeof(T) == 2) {
    if (channels > 4) return with(std::integral_constant<int, 8>());
  }
  return with(std::integral_constant<int, 4>());
}

// The gradient of points in images in NCHW that are not left.
template <class T, int PADDING>
cudaError_t launch_boxes(const Tensor& input, const Space& s, const Gradient<T>& gradient, const Tensor& grad_grid,
                         const Left& left, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int across = s.across.d, down = s.points / across;
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  const int64_t plane = static_cast<int64_t>(s.size[0]) * s.size[1];
  const bool copied = gradient.point == 1 &&
                      (reinterpret_cast<uintptr_t>(gradient.data) | gradient.image * sizeof(T) |
                       gradient.channel * sizeof(T) | across * sizeof(T)) % 16 == 0;
  const auto kernel = box_kernel<T, PADDING>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBoxMemory);
  if (status != cudaSuccess) return status;
  const dim3 blocks(ceil_div(across, kTileAcross) * ceil_div(down, kTileDown), 1, batch < 65535 ? batch : 65535);
  return launch(kernel, blocks, kThreads, kBoxMemory, stream, true, s, data, image, channel, gradient,
                AnyFloat(grad_grid), batch, channels, across, down, copied, unit_of(data, image, channel, plane), left);
}

template <class T, int TAPS>
cudaError_t run(const Tensor& grad, int64_t point, const Tensor& input, const Space& space, const Tensor& grad_input,
                const Tensor& grad_grid, bool deterministic, const Plan& plan, void* workspace, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int pixels = static_cast<int>(pixels_of(input));
  const Gradient<T> gradient{static_cast<const T*>(grad.data), grad.strides[0], grad.strides[1], point};
  const unsigned images = batch < 65535 ? batch : 65535;
  constexpr int V = 16 / sizeof(T), kUsual = TAPS == 4 || TAPS == 8 ? kZeros : kAnyPadding;  // padding
  T* output = static_cast<T*>(grad_input.data);
  const bool ordered = output && deterministic, plane = output && !ordered && plan.plane;
  const bool add = output && !ordered && !plane;  // by atomics
  const bool listed = add && plan.listed && TAPS == 4 && space.points * point * sizeof(T) <= UINT32_MAX;
  constexpr bool kPairs = TAPS == 4 || TAPS == 8;
  const bool pairs = add && plan.pairs && kPairs;
  float* sums = plan.sums ? static_cast<float*>(workspace) : reinterpret_cast<float*>(output);
  // Blocks for copies, and how many pixels side by side can be read at once.
  const int64_t squares = ceil_div<int64_t>(pixels, 64) * ceil_div(channels, 8) * batch;
  const int64_t tiles = sizeof(T) == 4 ? ceil_div<int64_t>(squares, kThreads / 32)
                                       : ceil_div<int64_t>(pixels, kTilePoints) * ceil_div(channels, 8 * V) * batch;
  const int copy_width =
      sizeof(T) == 4 && pixels % 4 != 0 ? 1 : pixel_width<T>(input.data, input.strides[0], input.strides[1]);
  const T* data = static_cast<const T*>(input.data);
  int64_t image = input.strides[0];
  Space s = space;
  const int64_t n = input.numel(), size = static_cast<int64_t>(channels) * pixels;
  const int64_t plane_sums = pairs ? 2 * (static_cast<int64_t>(pixels) + pixels / s.size[0]) : pixels;
  const int64_t cleared = plane_sums * batch * channels;
  constexpr bool kChoice = TAPS == 4 && sizeof(T) == 4;
  const bool chosen = add && plan.close && kChoice;  // how, on the device
  const bool deferred = listed || chosen;            // until then: kernels may find nothing to do
  const bool short_chain = add && !plan.vector && !chosen && n <= (1 << 20);  // of kernels that overlap
  Lists lists = plan.lists;
  Left left;

  int shift = 0;  // more threads for each point where there are few points, or many channels
  while (shift < 5 && (2 << shift) <= channels &&
         ((16 << shift) <= channels ||
          static_cast<int64_t>(ceil_div(s.points, kThreads >> shift)) * batch < (TAPS == 8 || channels <= 4 ? 128 : 512))) {
    ++shift;
  }
  // Behind another kernel it may begin early: nothing else writes what it reads before it waits.
  const auto direct = [&](float* sums, const AnyFloat& grad_grid, bool early, auto how) {
    constexpr int U = TAPS == 16 || (TAPS == 8 && sizeof(T) == 4) ? 1 : how.value == kPairSums ? 2 : 4;
    const auto with = [&](auto kernel) {
      return launch(kernel, dim3(ceil_div(s.points, kThreads >> shift), 1, images), kThreads, 0, stream, early, s,
                    Dense(s, 1), data, image, input.strides[1], gradient, sums, grad_grid, batch, channels, plane_sums,
                    shift, lists, left);
    };
    const auto choose = [&](auto padding) {
      constexpr int PADDING = padding.value;
      constexpr bool kSpills = PADDING == kAnyPadding && how.value == kNeighbourSums;
      const int each = ceil_div(channels, 1 << shift);
      return each == 1   ? with(direct_kernel<T, TAPS, PADDING, 1, how.value>)
             : each == 2 ? with(direct_kernel<T, TAPS, PADDING, std::min(U, 2), how.value>)
                         : with(direct_kernel<T, TAPS, PADDING, kSpills ? 2 : U, how.value>);
    };
    return s.padding == kUsual ? choose(std::integral_constant<int, kUsual>())
                               : choose(std::integral_constant<int, kAnyPadding>());
  };

  // One channel is sooner added up than handed on; with more threads for a point warps are not of neighbours.
  const bool neighbours = TAPS == 4 && sizeof(T) == 4 && add && channels > 1 && shift <= 3;
  const bool boxes = listed && plan.copied && many_tiles(s.across.d, s.points / s.across.d, batch, sizeof(T));
  const int few = 4 * of_device(cudaDevAttrMultiProcessorCount);  // blocks, where most often there is nothing to do
  T* const copy = plan.copied ? reinterpret_cast<T*>(static_cast<char*>(workspace) + plan.sums + plan.list) : nullptr;
  if (deferred) lists.in(static_cast<char*>(workspace) + plan.sums, listed ? batch : 0);
  // By measurement; without vectors lists are best however the points lie.
  const float tilted = boxes                               ? 0.09f
                       : !plan.vector && !plan.summed      ? 0.035f
                       : channels < (plan.vector ? 32 : 9) ? 0.25f
                                                           : 0.1f;
  const float turned = !plan.vector ? INFINITY : boxes ? 0.8f : 0.5f;
  // With few tiles and many channels a warp has too many of these one after the other.
  const int64_t points = s.points, doubled = static_cast<int64_t>(Close::tiles_of(s, kEnlargedAcross)) * batch;
  const bool enlarged = chosen && plan.vector && 2 * points >= 5 * (size / channels) && channels <= 2 * doubled;
  Choice choice{0.5f, 1.5f, tilted, listed, turned};
  if (enlarged) choice = {0.25f, 0.75f, 0.01f, listed, turned};
  const Close close(s, input, point, gradient.channel, static_cast<float*>(grad_input.data),
                    enlarged ? kEnlargedAcross : kCloseAcross, 4 * few);
  const auto close_images = [&] {
    if constexpr (kChoice) {
      const auto with = [&](auto kernel) {
        return launch(kernel, dim3(std::min(close.blocks(), few), 1, images), kThreads, 0, stream, true, s, choice,
                      close, gradient, AnyFloat(grad_grid), batch, channels, left, !plan.vector);
      };
      if (enlarged) {
        return s.padding == kZeros ? with(close_kernel<kZeros, true>) : with(close_kernel<kAnyPadding, true>);
      }
      return s.padding == kZeros ? with(close_kernel<kZeros, false>) : with(close_kernel<kAnyPadding, false>);
    }
    return cudaErrorNotSupported;
  };
  if constexpr (kChoice) {
    if (chosen) {
      choose_kernel<<<dim3(std::max<unsigned>(1, few / images), images), kTileThreads, 0, stream>>>(
          s, choice, lists, close, boxes ? nullptr : copy, copy_width, sums, batch, channels);
      left = {lists.runs, lists.most, plan.vector};
      if (left.chosen) {
        const cudaError_t status = close_images();
        if (status != cudaSuccess) return status;
      }
    }
  }
  if constexpr (TAPS == 4) {
    const auto with_lists = [&](auto padding) {
      constexpr int PADDING = padding.value;
      const int64_t counters = lists.counters(batch);
      if (!chosen) {
        zero_kernel<<<limited(ceil_div<int64_t>(counters, 4 * kThreads)), kThreads, 0, stream>>>(
            reinterpret_cast<float*>(lists.counts), 1, counters, Left());
      }
      cudaError_t status;
      if (plan.vector || !grad_grid.data) {
        const unsigned all = ceil_div(s.points, kListThreads), some = std::max<unsigned>(1, 2 * few / images);
        status = launch(list_kernel<PADDING>, dim3(chosen ? std::min(all, some) : all, 1, images), kListThreads, 0,
                        stream, true, s, lists, batch, left);
      } else {
        status = direct(nullptr, AnyFloat(grad_grid), true, std::integral_constant<int, kListSums>());
      }
      if (status != cudaSuccess) return status;
      left = {lists.runs, lists.most, left.chosen};
      status = launch_owner<T, PADDING>(s, lists, gradient, output, batch, channels, left, stream);
      if (status != cudaSuccess || !boxes) return status;
      return launch_boxes<T, PADDING>(input, s, gradient, grad_grid, left, stream);
    };
    if (listed) {
      const cudaError_t status = s.padding == kZeros ? with_lists(std::integral_constant<int, kZeros>())
                                                     : with_lists(std::integral_constant<int, kAnyPadding>());
      if (status != cudaSuccess) return status;
    }
  }
  // Images whose sums the second cache does not hold together come one after the other.
  const unsigned some = n <= (1 << 23) ? std::max<unsigned>(1, few / images) : few;
  const auto blocks_of = [&](int64_t work) {
    return deferred ? dim3(std::min(limited(work), some), images) : dim3(limited(work));
  };
  if (listed || short_chain) {
    const cudaError_t status =
        launch(zero_kernel, blocks_of(ceil_div<int64_t>(listed ? size : cleared, 4 * kThreads)), kThreads, 0, stream,
               listed, sums, listed ? batch : 1, listed ? size : cleared, left);
    if (status != cudaSuccess) return status;
  } else if (ordered || (add && !chosen)) {
    const cudaError_t status = cudaMemsetAsync(sums, 0, n * sizeof(float), stream);
    if (status != cudaSuccess) return status;
  }
  if (ordered) {
    const unsigned blocks = ceil_div<int64_t>(static_cast<int64_t>(batch) * channels, kThreads);
    ordered_kernel<T, TAPS><<<blocks, kThreads, 0, stream>>>(s, Dense(s, 1), gradient, sums, batch, channels, pixels);
  }
  if (plane) {
    const int memory = plan.tile * static_cast<int>(sizeof(float)), parts = ceil_div(pixels, plan.tile);
    const auto kernel = plane_kernel<T, TAPS>;
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (status != cudaSuccess) return status;
    kernel<<<batch * channels * parts, kPlaneThreads, memory, stream>>>(
        s, Dense(s, 1), data, image, gradient, output, channels == 1 ? AnyFloat(grad_grid) : AnyFloat(Tensor{}),
        channels, pixels, plan.tile, parts);
    if (channels == 1) return cudaGetLastError();
  }
  if (plan.vector && (add || grad_grid.data)) {
    const Left rest = !deferred                  ? Left()
                      : boxes || !grad_grid.data ? left
                      : chosen                   ? Left{lists.runs, Lists::kDone, true}
                                                 : Left();
    if (copy) {
      if (!chosen || boxes) {
        const cudaError_t status =
            launch(to_channels_last_kernel<T>, rest.runs ? blocks_of(tiles) : dim3(limited(tiles)), kTileThreads, 0,
                   stream, deferred, data, image, input.strides[1], copy, batch, channels, pixels,
                   copy_width, rest);
        if (status != cudaSuccess) return status;
      }
      data = copy;
      image = static_cast<int64_t>(pixels) * channels;
      for (int a = 0; a < 3; ++a) s.stride[a] = Dense(s, channels).stride[a];
    }
    shift = 0;
    while (shift < 3 && (V << shift) < channels) ++shift;
    const bool last = grad.strides[1] == 1 && (reinterpret_cast<uintptr_t>(grad.data) | point * sizeof(T) |
                                               grad.strides[0] * sizeof(T)) % 16 == 0;
    const int width = last ? 0 : point == 1 ? pixel_width<T>(grad.data, grad.strides[0], grad.strides[1], 4) : 1;
    const auto kernel = s.padding == kUsual ? vector_kernel<T, TAPS, kUsual> : vector_kernel<T, TAPS, kAnyPadding>;
    const unsigned blocks = ceil_div(s.points, kThreads >> shift);
    const unsigned resident = static_cast<unsigned>(std::min<int64_t>(few, static_cast<int64_t>(blocks) * batch));
    cudaError_t status = launch(kernel, rest.runs ? dim3(resident) : dim3(blocks, 1, images), kThreads, 0, stream,
                                deferred, s, Dense(s, channels), data, image, gradient, add ? sums : nullptr,
                                AnyFloat(grad_grid), batch, channels, pixels, shift, width, left, rest);
    if (status != cudaSuccess) return status;
    if (add) {
      return launch(from_channels_last_kernel<T>, blocks_of(tiles), kTileThreads, 0, stream, deferred, sums, output,
                    batch, channels, pixels, pixel_width<T>(output, pixels, pixels), left);
    }
  } else if (chosen) {
    return close_images();
  } else if (add || grad_grid.data) {
    const AnyFloat others(listed ? Tensor{} : grad_grid);
    float* to = add ? sums : nullptr;
    const bool early = short_chain || deferred || plane;
    cudaError_t status;
    if (neighbours) {
      status = cudaErrorNotSupported;
      if constexpr (TAPS == 4 && sizeof(T) == 4) {
        status = direct(to, others, early, std::integral_constant<int, kNeighbourSums>());
      }
    } else if constexpr (kPairs) {
      status = pairs ? direct(to, others, early, std::integral_constant<int, kPairSums>())
                     : direct(to, others, early, std::integral_constant<int, kPixelSums>());
    } else {
      status = direct(to, others, early, std::integral_constant<int, kPixelSums>());
    }
    if (status != cudaSuccess) return status;
  }
  if (pairs) {
    return launch(add_pairs_kernel<T>, limited(ceil_div<int64_t>(n, kThreads)), kThreads, 0, stream, true, sums, output,
                  Divider(s.size[0]), static_cast<int>(n));
  }
  if ((ordered || (add && !plan.vector)) && sums != reinterpret_cast<float*>(output)) {
    return launch(round_kernel<T>, blocks_of(ceil_div<int64_t>(listed ? size : n, kThreads)), kThreads, 0, stream,
                  short_chain || listed, sums, output, listed ? batch : 1, listed ? size : n, left);
  }
  return cudaGetLastError();
}

}  // namespace

size_t sample_backward_workspace(const Tensor& input, const Tensor& grid, bool input_gradient, bool grid_gradient) {
  if (input.numel() == 0 || grid.numel() == 0) return 0;
  const Plan plan(input, grid, input_gradient, grid_gradient);
  return plan.sums + plan.list + plan.copy;
}

cudaError_t sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                            const Tensor& grad_grid, const Sampling& sampling, bool deterministic, void* workspace,
                            cudaStream_t stream) {
  if (input.numel() == 0 || grid.numel() == 0) {
    for (const Tensor* t : {&grad_input, &grad_grid}) {
      if (t->data == nullptr || t->numel() == 0) continue;
      const cudaError_t status = cudaMemsetAsync(t->data, 0, t->numel() * t->item_size(), stream);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }
  Space s(grid);
  int64_t point = 1;
  if (grad.dtype != input.dtype || !is_float(input) || !is_float(grid) || input.sizes[0] > INT32_MAX ||
      input.sizes[1] > INT32_MAX || pixels_of(input) > INT32_MAX || !Space::of(input, grid, sampling, s) ||
      !Space::evenly_spaced(grad, 2, grad.rank - 1, point)) {
    return cudaErrorNotSupported;
  }
  const Plan plan(input, grid, grad_input.data, grad_grid.data);
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) {
      return run<T, taps()>(grad, point, input, s, grad_input, grad_grid, deterministic, plan, workspace, stream);
    });
  });
}

size_t grid_sample_backward_workspace(const Tensor& input, const Tensor& grid, bool input_gradient,
                                      bool grid_gradient) {
  return sample_backward_workspace(input, grid, input_gradient, grid_gradient);
}

cudaError_t grid_sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                                 const Tensor& grad_grid, int mode, int padding, bool align_corners, bool deterministic,
                                 void* workspace, cudaStream_t stream) {
  return sample_backward(grad, input, grid, grad_input, grad_grid, Sampling{mode, padding, align_corners},
                         deterministic, workspace, stream);
}

}  // namespace svexport
