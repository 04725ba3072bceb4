#include "grid_sample/launch.h"

#include "grid_sample/boxes.cuh"
#include "grid_sample/narrow.cuh"
#include "grid_sample/points.cuh"
#include "grid_sample/sampled.cuh"
#include "grid_sample/tensors.h"
#include "grid_sample/vector.cuh"
#include "planned.cuh"

namespace svexport {
namespace {

using namespace forward;
using sampler::Kernel;
using sampler::Problem;
using sampler::Tactic;

// One call: what is asked, and how its tactic is launched.
template <class T, int TAPS, int PADDING>
struct Call {
  const Problem& problem;
  const Tactic& tactic;
  const Gpu& gpu;
  const Tensor& input;
  const Space& s;
  const Output<T>& output;
  void* workspace;
  cudaStream_t stream;

  const T* data() const { return static_cast<const T*>(input.data); }
  int batch() const { return static_cast<int>(problem.images); }
  int channels() const { return static_cast<int>(problem.channels); }
  int64_t image() const { return input.strides[0]; }
  int64_t channel() const { return input.strides[1]; }

  template <class... Parameters, class... Arguments>
  cudaError_t run(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    return launch_planned(kernel, sampler::launch(problem, tactic, gpu), false, stream, arguments...);
  }

  cudaError_t points() const {
    const Image<T> of{data(), image(), channel()};
    const auto with = [&](auto kernel) {
      return run(kernel, s, of, output, batch(), channels(), tactic.chunk, 0, Divider(s.points), true);
    };
    if constexpr (sizeof(T) == 4) {
      if (tactic.width > 1) return with(points_kernel<T, T, TAPS, PADDING, 4>);
    }
    return with(points_kernel<T, T, TAPS, PADDING, 1>);
  }

  // Of channels-last images at `from`; only: those that are marked.
  cudaError_t vectors(const Space& s, const T* from, int64_t image, const Tactic& t, const bool* only) const {
    const int at_once = sampler::vectors_at_once(TAPS, t.shift);
    int width = 0;
    if (!problem.output_last) {
      width = output.point == 1 ? pixel_width<T>(output.data, output.image, output.channel, at_once / 8) : 1;
    }
    return launch_planned(vector_kernel<T, TAPS, PADDING>, sampler::launch(problem, t, gpu), only != nullptr, stream, s,
                          from, image, output, batch(), channels(), t.shift, t.tile / at_once, width, only);
  }

  cudaError_t narrow() const {
    int log_tile = 0;
    while (1 << log_tile < tactic.tile) ++log_tile;
    const auto with = [&](auto kernel) {
      return run(kernel, s, data(), image(), output, batch(), channels(), tactic.shift, tactic.chunk, log_tile,
                 sampler::narrow_pitch(problem, tactic));
    };
    return tactic.width == 2 ? with(narrow_kernel<T, TAPS, 2>) : with(narrow_kernel<T, TAPS, 1>);
  }

  template <class G>
  cudaError_t planes() const {
    constexpr int P = PADDING;
    if (tactic.kernel == Kernel::kPlanes) {
      const auto kernel = tactic.width == 2 ? planes_kernel<T, G, P, 2> : planes_kernel<T, G, P, 1>;
      return run(kernel, s, data(), image(), channel(), output, channels(), tactic.chunk, tactic.pace);
    }
    const Work work(problem, tactic.width, gpu);
    const auto kernel = tactic.width == 2 ? sampled_kernel<T, G, P, 2> : sampled_kernel<T, G, P, 1>;
    return launch_planned(kernel, sampler::launch(work, gpu), false, stream, s, data(), image(), channel(), output,
                          channels(), work);
  }

  // Gathers from boxes; where points scatter, from a copy in channels-last.
  cudaError_t boxes() const {
    if (workspace == nullptr) return cudaErrorNotSupported;
    const int pixels = s.size[0] * s.size[1], images = sampler::images_of(problem);
    Tiles tiles{sampler::BoxTiles(problem)};
    tiles.pairs = output.point == 1 &&
                  (sizeof(T) == 4 || ((reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image |
                                       output.channel | tiles.across) % 2 == 0));
    T* copy = static_cast<T*>(workspace);
    bool* copied = reinterpret_cast<bool*>(copy + input.numel());
    bool* scattered = copied + batch();
    cudaError_t status = run(box_kernel<T, PADDING>, s, data(), image(), channel(), output, tiles, batch(), channels(),
                             tactic.chunk, sampler::kBoxMemory, unit_of(data(), image(), channel(), pixels), scattered);
    if (status != cudaSuccess) return status;
    const auto some = static_cast<unsigned>(ceil_of(sampler::enough_blocks(gpu), images));
    const Scattered of{scattered, static_cast<int>(tiles.count_across.d) * tiles.count_down, copied};
    status = launch(to_channels_last_kernel<T, Scattered>, dim3(some, images), kTileThreads, 0, stream, true, data(),
                    image(), channel(), copy, batch(), channels(), pixels,
                    pixel_width<T>(data(), image(), channel()), of);
    if (status != cudaSuccess) return status;
    Space last = s;
    last.stride[0] = channels();
    last.stride[1] = channels() * s.size[0];
    return vectors(last, copy, static_cast<int64_t>(pixels) * channels(), sampler::vectors(problem, gpu, 4), copied);
  }

  cudaError_t operator()() const {
    switch (tactic.kernel) {
      case Kernel::kVectors: return vectors(s, data(), image(), tactic, nullptr);
      case Kernel::kNarrow:
        if constexpr (TAPS == 4 || TAPS == 8) return narrow();
        break;
      case Kernel::kPlanes:
      case Kernel::kSampled:
        if constexpr (TAPS == 4) {
          if constexpr (PADDING == kAnyPadding) {
            const Call<T, TAPS, kBorder> border{problem, tactic, gpu, input, s, output, workspace, stream};
            const Call<T, TAPS, kReflection> reflection{problem, tactic, gpu, input, s, output, workspace, stream};
            return s.padding == kBorder ? border.of_grid() : reflection.of_grid();
          } else {
            return of_grid();
          }
        }
        break;
      case Kernel::kBoxes:
        if constexpr (TAPS == 4) return boxes();
        break;
      default: return points();
    }
    return cudaErrorNotSupported;
  }

  cudaError_t of_grid() const {
    return s.grid.dtype == input.dtype ? planes<T>() : planes<float>();
  }
};

// mask: (N, points) of the type of input, or absent.
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
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) {
      const auto with = [&](auto padding) {
        return Call<T, taps.value, padding.value>{problem, tactic, gpu, input, s, to, workspace, stream}();
      };
      if constexpr (taps.value == 4) {
        return with_constant<kZeros, kPixels, kAnyPadding>(s.padding, with);
      } else {
        return with(Int<kAnyPadding>());
      }
    });
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
