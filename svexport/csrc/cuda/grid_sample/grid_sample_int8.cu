#include <algorithm>

#include "grid_sample/int8.cuh"
#include "overlap.cuh"

namespace svexport {
namespace {

using namespace forward;

// (N, C, ...) as Space takes it, of (N, ceil(C/V), H, W, V) too: the strides of channels are no part of that.
Tensor image_of(const Tensor& input, bool blocks, int64_t channels) {
  Tensor image = input;
  image.rank -= blocks;
  image.sizes[1] = channels;
  return image;
}

constexpr int kManyThreads = 768;  // of a multiprocessor: then each does more, as it has to find its pixels

template <class T, int TAPS, int PADDING, int W>
cudaError_t launch_codes(const Space& s, const Codes& codes, int batch, int channels, const Output<T>& output,
                         cudaStream_t stream) {
  const int shift = W == 16 && channels > W, least = std::max(W << shift, 4), most = std::max(2 * least, 16);
  const auto threads = [&](int chunk) { return (static_cast<int64_t>(s.points) * ceil_div(channels, chunk)) << shift; };
  const int64_t many = int64_t{kManyThreads} * of_device(cudaDevAttrMultiProcessorCount);
  int chunk = least;
  while (chunk < most && chunk < channels && batch * threads(2 * chunk) >= many) chunk *= 2;
  if (threads(chunk) > INT32_MAX - kThreads) return cudaErrorNotSupported;
  const bool points_inside = output.channel != 1;
  const Divider inner(points_inside ? s.points : ceil_div(channels, chunk));
  const dim3 blocks(ceil_div<int64_t>(threads(chunk), kThreads), batch < 65535 ? batch : 65535);
  return launch(codes_kernel<T, TAPS, PADDING, W>, blocks, kThreads, 0, stream, false, s, codes, output, batch, channels,
                chunk, shift, inner, points_inside);
}

}  // namespace

cudaError_t sample_int8(const Tensor& input, const Tensor& grid, const Tensor& output, const Sampling& sampling,
                        float scale, cudaStream_t stream) {
  if (output.numel() == 0) return cudaSuccess;
  const bool blocks = input.rank == 5 && grid.rank == 4;
  const int64_t of_block = blocks ? input.sizes[4] : 1;
  const Tensor image = image_of(input, blocks, output.sizes[1]);
  Space s(grid);
  int64_t point = 1;
  if (image.sizes[0] > INT32_MAX || image.sizes[1] > INT32_MAX || !is_float(grid) ||
      !Space::of(image, grid, sampling, s) ||
      (blocks && ((of_block != 32 && of_block != 4) || input.strides[4] != 1)) ||
      !evenly_spaced(output, 2, output.rank - 1, point)) {
    return cudaErrorNotSupported;
  }
  const int batch = static_cast<int>(image.sizes[0]), channels = static_cast<int>(image.sizes[1]);
  const Codes codes{static_cast<const int8_t*>(input.data), input.strides[0], input.strides[1],
                    of_block == 32 ? 5 : of_block == 4 ? 2 : 0, scale};
  const int axis = blocks ? 4 : 1;  // whose neighbours are read at once
  const bool sixteen = (of_block == 32 || (!blocks && channels % 16 == 0)) && input.aligned(axis, 16);
  const bool four = (of_block == 4 || (!blocks && channels % 4 == 0)) && input.aligned(axis, 4);
  return dispatch_float(output.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Output<T> to{static_cast<T*>(output.data), output.strides[0], output.strides[1], point, nullptr};
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) {
      const auto with = [&](auto launcher) { return launcher(s, codes, batch, channels, to, stream); };
      constexpr int TAPS = taps.value;
      if constexpr (TAPS == 4) {
        if (sixteen && s.padding == kZeros) return with(launch_codes<T, TAPS, kZeros, 16>);
      }
      return with(sixteen  ? launch_codes<T, TAPS, kAnyPadding, 16>
                  : four   ? launch_codes<T, TAPS, kAnyPadding, 4>
                           : launch_codes<T, TAPS, kAnyPadding, 1>);
    });
  });
}

}  // namespace svexport
