#include "grid_sample/launch.h"

#include "grid_sample/boxes.cuh"
#include "grid_sample/narrow.cuh"
#include "grid_sample/points.cuh"
#include "grid_sample/run.cuh"
#include "grid_sample/tensors.h"
#include "grid_sample/vector.cuh"

namespace svexport {
namespace {

using namespace forward;
using sampler::Kernel;
using sampler::Problem;
using sampler::Tactic;

// Calls f with TAPS and PADDING as constants. Kernels of four taps are compiled for the two usual paddings and for any.
template <class F>
auto with_sampling(const Problem& problem, const Space& s, F&& f) {
  return with_taps(problem.taps, [&](auto taps) {
    if constexpr (taps.value == 4) {
      return with_constant<kZeros, kPixels, kAnyPadding>(s.padding, [&](auto padding) { return f(taps, padding); });
    } else {
      return f(taps, Int<kAnyPadding>());
    }
  });
}

template <class T>
cudaError_t run_points(const Call<T>& call) {
  const Tactic& tactic = call.tactic;
  const auto kernel = with_sampling(call.problem, call.s, [&](auto taps, auto padding) {
    constexpr int TAPS = taps.value, PADDING = padding.value;
    if constexpr (sizeof(T) == 4) {
      if (tactic.width > 1) return points_kernel<T, T, TAPS, PADDING, 4>;
    }
    return points_kernel<T, T, TAPS, PADDING, 1>;
  });
  const Image<T> image{call.data(), call.image(), call.channel()};
  return call.run(kernel, call.s, image, call.output, call.batch(), call.channels(), tactic.chunk, 0,
                  Divider(call.s.points), true);
}

// Samples the channels-last images at `from`; with `only`, those that it marks.
template <class T>
cudaError_t run_vectors(const Call<T>& call, const Space& s, const T* from, int64_t image, const Tactic& t,
                        const bool* only) {
  const Output<T>& to = call.output;
  const int at_once = sampler::vectors_at_once(call.problem.taps, t.shift);
  int width = 0;
  if (!call.problem.output_last) {
    width = to.point == 1 ? pixel_width<T>(to.data, to.image, to.channel, at_once / 8) : 1;
  }
  const auto kernel = with_sampling(call.problem, s, [](auto taps, auto padding) {
    return vector_kernel<T, taps.value, padding.value>;
  });
  return launch_planned(kernel, sampler::launch(call.problem, t, call.gpu), only != nullptr, call.stream, s, from, image,
                        to, call.batch(), call.channels(), t.shift, t.tile / at_once, width, only);
}

template <class T>
cudaError_t run_narrow(const Call<T>& call) {
  const Tactic& tactic = call.tactic;
  int log_tile = 0;
  while (1 << log_tile < tactic.tile) ++log_tile;
  const auto kernel = with_constant<4, 8>(call.problem.taps, [&](auto taps) {
    return tactic.width == 2 ? narrow_kernel<T, taps.value, 2> : narrow_kernel<T, taps.value, 1>;
  });
  return call.run(kernel, call.s, call.data(), call.image(), call.output, call.batch(), call.channels(), tactic.shift,
                  tactic.chunk, log_tile, sampler::narrow_pitch(call.problem, tactic));
}

// Gathers from boxes; for images whose points scatter, from a channels-last copy.
template <class T>
cudaError_t run_boxes(const Call<T>& call) {
  const Problem& problem = call.problem;
  const Space& s = call.s;
  const Output<T>& output = call.output;
  if (call.workspace == nullptr) return cudaErrorNotSupported;
  const int pixels = s.size[0] * s.size[1], images = sampler::images_of(problem);
  Tiles tiles{sampler::BoxTiles(problem)};
  tiles.pairs = output.point == 1 &&
                (sizeof(T) == 4 || ((reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image |
                                     output.channel | tiles.across) % 2 == 0));
  T* copy = static_cast<T*>(call.workspace);
  bool* copied = reinterpret_cast<bool*>(copy + call.input.numel());
  bool* scattered = copied + call.batch();
  cudaError_t status = call.run(box_kernel<T>, s, call.data(), call.image(), call.channel(), output, tiles, call.batch(),
                                call.channels(), call.tactic.chunk, sampler::kBoxMemory,
                                unit_of(call.data(), call.image(), call.channel(), pixels), scattered);
  if (status != cudaSuccess) return status;
  const auto some = static_cast<unsigned>(ceil_of(sampler::enough_blocks(call.gpu), images));
  const Scattered of{scattered, static_cast<int>(tiles.count_across.d) * tiles.count_down, copied};
  status = launch(to_channels_last_kernel<T, Scattered>, dim3(some, images), kTileThreads, 0, call.stream, true,
                  call.data(), call.image(), call.channel(), copy, call.batch(), call.channels(), pixels,
                  pixel_width<T>(call.data(), call.image(), call.channel()), of);
  if (status != cudaSuccess) return status;
  Space last = s;
  last.stride[0] = call.channels();
  last.stride[1] = call.channels() * s.size[0];
  return run_vectors(call, last, copy, static_cast<int64_t>(pixels) * call.channels(),
                     sampler::vectors(problem, call.gpu, 4), copied);
}

template <class T>
cudaError_t run(const Call<T>& call) {
  switch (call.tactic.kernel) {
    case Kernel::kPoints: return run_points(call);
    case Kernel::kVectors: return run_vectors(call, call.s, call.data(), call.image(), call.tactic, nullptr);
    case Kernel::kNarrow: return run_narrow(call);
    case Kernel::kBoxes: return run_boxes(call);
    default: return run_planes(call);
  }
}

// mask: (N, points), of input's type, or absent.
cudaError_t sample(const Tensor& input, const Tensor& grid, const Tensor& output, const Tensor& mask,
                   const Sampling& sampling, int32_t forced, cudaStream_t stream, void* workspace) {
  Space s(grid);
  if (output.numel() == 0 && mask.data == nullptr) return cudaSuccess;
  if (output.numel() == 0 || input.sizes[0] > INT32_MAX || input.sizes[1] > INT32_MAX || !is_float(grid) ||
      !Space::of(input, grid, sampling, s)) {
    return cudaErrorNotSupported;
  }
  int64_t point = 1;
  if (!evenly_spaced(output, 2, output.rank - 1, point)) return cudaErrorNotSupported;
  const Gpu gpu = current_gpu();
  const Problem problem = sampler::problem_of(input, grid, output, point, sampling.mode, workspace != nullptr);
  const Tactic tactic = choose(problem, gpu, forced);
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Output<T> to{static_cast<T*>(output.data), output.strides[0], output.strides[1], point,
                       static_cast<T*>(mask.data)};
    return run(Call<T>{problem, tactic, gpu, input, s, to, workspace, stream});
  });
}

}  // namespace

size_t grid_sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  if (input.dtype == DType::kInt8 || grid.numel() == 0) return 0;
  return sampler::workspace(sampler::problem_of(input, grid, mode));
}

cudaError_t grid_sample(const Tensor& input, const Tensor& grid, const Tensor& output, int mode, int padding,
                        bool align_corners, float scale, int32_t tactic, cudaStream_t stream, void* workspace) {
  const Sampling sampling{mode, padding, align_corners};
  if (input.dtype == DType::kInt8) return sample_int8(input, grid, output, sampling, scale, tactic, stream);
  return sample(input, grid, output, Tensor{}, sampling, tactic, stream, workspace);
}

cudaError_t bilinear_sample(const Tensor& image, const Tensor& grid, const Tensor& output, const Tensor& mask,
                            int32_t tactic, cudaStream_t stream, void* workspace) {
  return sample(image, grid, output, mask, Sampling{kBilinear, kPixels, true}, tactic, stream, workspace);
}

}  // namespace svexport
