// The gradient of sampling: launches the kernels of a tactic.
#pragma once

#include <algorithm>

#include "grid_sample/backward_boxes.cuh"
#include "grid_sample/backward_copies.cuh"
#include "grid_sample/backward_direct.cuh"
#include "grid_sample/backward_vector.cuh"
#include "planned.cuh"

namespace svexport::backward {

inline unsigned limited(int64_t blocks) { return static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20); }

template <class T, int TAPS>
class Backward : Call {
 public:
  explicit Backward(const Call& call) : Call(call) {
    const sampler::gradient::Workspace sizes(problem, tactic);
    char* const memory = static_cast<char*>(workspace);
    sums_ = sizes.sums ? static_cast<float*>(workspace) : reinterpret_cast<float*>(output_);
    if (listed_) lists_.in(memory + sizes.sums, batch_);
    if (sizes.copy) copy_ = reinterpret_cast<T*>(memory + sizes.sums + sizes.lists);
  }

  cudaError_t run() {
    cudaError_t status = cudaSuccess;
    if (listed_) status = list();
    if (status == cudaSuccess) status = clear();
    if (status == cudaSuccess && ordered_) status = add_in_order();
    if (status == cudaSuccess && planes()) status = add_planes();
    if (status != cudaSuccess || (planes() && channels_ == 1)) return status;  // grad_grid is done too
    if (tactic.vectors && (add_ || grad_grid.data)) {
      status = vectors();
      return status == cudaSuccess && ordered_ ? round() : status;
    }
    if (add_ || grad_grid.data) status = points();
    return status == cudaSuccess && (ordered_ || add_) ? round() : status;
  }

 private:
  static constexpr int V = 16 / sizeof(T), kUsual = TAPS == 4 || TAPS == 8 ? kZeros : kAnyPadding;  // usual padding
  static constexpr bool kPairs = TAPS == 4 || TAPS == 8;
  static constexpr bool kLists = TAPS == 4;

  bool planes() const { return tactic.sums == Sums::kPlane; }
  bool pairs() const { return tactic.sums == Sums::kPairs; }
  int64_t size() const { return static_cast<int64_t>(channels_) * pixels_; }  // elements of an image
  int64_t plane_sums() const { return pairs() ? 2 * (static_cast<int64_t>(pixels_) + pixels_ / s.size[0]) : pixels_; }

  // With lists there may be nothing left to do, so there are few blocks. Images whose sums do not fit into L2 together
  // are worked on one after the other.
  dim3 blocks_of(int64_t work) const {
    if (!listed_) return dim3(limited(work));
    const unsigned some = input.numel() <= (1 << 23) ? std::max<unsigned>(1, few_ / images_) : few_;
    return dim3(std::min(limited(work), some), images_);
  }

  // grad_grid where list() does not write it; else absent.
  AnyFloat others() const { return AnyFloat(listed_ && !tactic.vectors ? Tensor{} : grad_grid); }

  // Tiles of the copies between layouts.
  int64_t tiles() const {
    return ceil_div<int64_t>(pixels_, kTilePoints) * ceil_div(channels_, 8 * V) * batch_;
  }

  // How many adjacent pixels of the image one access can read.
  int copy_width() const { return pixel_width<T>(input.data, input.strides[0], input.strides[1]); }

  // log2 of the threads that share a point: more where there are few points, or many channels.
  int sharing() const {
    int shift = 0;
    while (shift < 5 && (2 << shift) <= channels_ &&
           ((16 << shift) <= channels_ || static_cast<int64_t>(ceil_div(s.points, kThreads >> shift)) * batch_ <
                                              (TAPS == 8 ? 256 : channels_ <= 4 ? 128 : 512))) {
      ++shift;
    }
    return shift;
  }

  // Lists the points and writes the listed images. With boxes, or without vectors, it writes grad_grid too.
  cudaError_t list() {
    if constexpr (kLists) {
      const int64_t counters = lists_.counters(batch_);
      zero_kernel<<<limited(ceil_div<int64_t>(counters, 4 * kThreads)), kThreads, 0, stream>>>(
          reinterpret_cast<float*>(lists_.counts), 1, counters, Left());
      cudaError_t status = direct<kListSums>(nullptr, AnyFloat(tactic.vectors ? Tensor{} : grad_grid), true);
      if (status != cudaSuccess) return status;
      left_ = {lists_.runs, lists_.most};
      status = sizeof(T) == 2 && channels_ > 4 ? write_pixels<16 / sizeof(T)>() : write_pixels<4>();
      return status == cudaSuccess && tactic.boxes ? boxes() : status;
    }
    return cudaErrorNotSupported;
  }

  // Writes the gradient of the listed images from their lists, W channels at once.
  template <int W>
  cudaError_t write_pixels() const {
    const bool pairs = s.size[0] % 2 == 0 && reinterpret_cast<uintptr_t>(output_) % (2 * sizeof(T)) == 0;
    int chunk = ceil_div(channels_, W) * W;
    while (chunk >= 4 * W && static_cast<int64_t>(lists_.tiles) * ceil_div(channels_, chunk) * images_ < 2 * few_) {
      chunk = ceil_div(chunk, 2 * W) * W;
    }
    return launch(owner_kernel<T, W>, dim3(lists_.tiles, ceil_div(channels_, chunk), images_), kOwnerThreads,
                  static_cast<int>(owner_memory<T, W>(lists_)), stream, true, s, lists_, gradient_, output_, batch_,
                  channels_, chunk, pairs);
  }

  // grad_grid of NCHW images that are not left.
  cudaError_t boxes() const {
    const int across = s.across.d, down = s.points / across;
    const int64_t image = input.strides[0], channel = input.strides[1];
    const T* data = static_cast<const T*>(input.data);
    const bool copied = gradient_.point == 1 &&
                        (reinterpret_cast<uintptr_t>(gradient_.data) | gradient_.image * sizeof(T) |
                         gradient_.channel * sizeof(T) | across * sizeof(T)) % 16 == 0;
    return launch(box_kernel<T>, dim3(ceil_div(across, kTileAcross) * ceil_div(down, kTileDown), 1, images_), kThreads,
                  kBoxMemory, stream, true, s, data, image, channel, gradient_, AnyFloat(grad_grid), batch_, channels_,
                  across, down, copied, unit_of(data, image, channel, pixels_), left_);
  }

  // Clears the sums that the next kernels add to.
  cudaError_t clear() const {
    if (listed_) {
      return launch(zero_kernel, blocks_of(ceil_div<int64_t>(size(), 4 * kThreads)), kThreads, 0, stream, true, sums_,
                    batch_, size(), left_);
    }
    if (short_chain_) {
      const int64_t cleared = plane_sums() * batch_ * channels_;
      return launch(zero_kernel, blocks_of(ceil_div<int64_t>(cleared, 4 * kThreads)), kThreads, 0, stream, false, sums_,
                    1, cleared, left_);
    }
    if (!ordered_ && !add_) return cudaSuccess;
    return cudaMemsetAsync(sums_, 0, plane_sums() * batch_ * channels_ * sizeof(float), stream);
  }

  cudaError_t add_in_order() const {
    const unsigned blocks = ceil_div<int64_t>(static_cast<int64_t>(batch_) * channels_, kThreads);
    ordered_kernel<T, TAPS>
        <<<blocks, kThreads, 0, stream>>>(s, Dense(s, 1), gradient_, sums_, batch_, channels_, pixels_);
    return cudaGetLastError();
  }

  // Sums planes in shared memory; for images of one channel, it computes grad_grid too.
  cudaError_t add_planes() const {
    const Launch l = sampler::gradient::launch(problem, tactic, gpu);
    const int tile = l.shared_memory / static_cast<int>(sizeof(float));
    return launch_planned(plane_kernel<T, TAPS>, l, false, stream, s, Dense(s, 1), static_cast<const T*>(input.data), input.strides[0],
                          gradient_, output_, AnyFloat(channels_ == 1 ? grad_grid : Tensor{}), channels_, pixels_, tile,
                          ceil_div(pixels_, tile));
  }

  // Works on image and sums in channels-last, then copies the sums to (N, C, pixels).
  cudaError_t vectors() const {
    const T* data = static_cast<const T*>(input.data);
    int64_t image = input.strides[0];
    Space s = this->s;
    const Left rest = listed_ && (tactic.boxes || !others().data) ? left_ : Left();
    if (copy_) {
      const cudaError_t status = launch(
          to_channels_last_kernel<T, Left>, rest.runs ? blocks_of(tiles()) : dim3(limited(tiles())), kTileThreads, 0,
          stream, listed_, data, image, input.strides[1], copy_, batch_, channels_, pixels_, copy_width(), rest);
      if (status != cudaSuccess) return status;
      data = copy_;
      image = size();
      for (int a = 0; a < 3; ++a) s.stride[a] = Dense(s, channels_).stride[a];
    }
    int shift = 0;
    while (shift < 3 && (V << shift) < channels_) ++shift;
    const bool last =
        grad.strides[1] == 1 &&
        (reinterpret_cast<uintptr_t>(grad.data) | point * sizeof(T) | grad.strides[0] * sizeof(T)) % 16 == 0;
    const int width = last ? 0 : point == 1 ? pixel_width<T>(grad.data, grad.strides[0], grad.strides[1], 4) : 1;
    const unsigned blocks = ceil_div(s.points, kThreads >> shift);
    const unsigned resident = static_cast<unsigned>(std::min<int64_t>(few_, static_cast<int64_t>(blocks) * batch_));
    // These two kernels are compiled for each type: with Narrow, they take 7 % longer.
    return dispatch_float(grad.dtype, [&](auto* p) {
      using E = element_t<decltype(p)>;
      if constexpr (sizeof(E) == sizeof(T)) {
        const Gradient<E> gradient{static_cast<const E*>(grad.data), gradient_.image, gradient_.channel, point,
                                   Format<E>()};
        const cudaError_t status =
            launch(vector_kernel<E, TAPS>, rest.runs && TAPS <= 4 ? dim3(resident) : dim3(blocks, 1, images_), kThreads,
                   0, stream, listed_, s, Dense(s, channels_), reinterpret_cast<const E*>(data), image, gradient,
                   add_ ? sums_ : nullptr, others(), batch_, channels_, pixels_, shift, width, left_, rest);
        if (status != cudaSuccess || !add_) return status;
        return launch(from_channels_last_kernel<E>, blocks_of(tiles()), kTileThreads, 0, stream, listed_, sums_,
                      static_cast<E*>(grad_input.data), batch_, channels_, pixels_,
                      pixel_width<T>(output_, pixels_, pixels_), left_);
      } else {
        return cudaErrorNotSupported;
      }
    });
  }

  template <int SUMS, int PADDING>
  static auto direct_kernel_of(int each) {
    constexpr bool kSpills = PADDING == kAnyPadding && SUMS == kNeighbourSums;
    constexpr int U = TAPS == 16 || (TAPS == 8 && sizeof(T) == 4) ? 1 : SUMS == kPairSums || kSpills ? 2 : 4;
    return each <= 1   ? direct_kernel<T, TAPS, PADDING, 1, SUMS>
           : each == 2 ? direct_kernel<T, TAPS, PADDING, std::min(U, 2), SUMS>
                       : direct_kernel<T, TAPS, PADDING, U, SUMS>;
  }

  // Launches direct_kernel. early: overlaps the previous one, which writes nothing that this one reads before its wait.
  template <int SUMS>
  cudaError_t direct(float* sums, const AnyFloat& grad_grid, bool early) const {
    const int channels = sums || grad_grid.data ? channels_ : 0;  // listing the points needs none
    const int shift = channels ? sharing() : 0, each = ceil_div(channels, 1 << shift);
    const auto kernel =
        s.padding == kUsual ? direct_kernel_of<SUMS, kUsual>(each) : direct_kernel_of<SUMS, kAnyPadding>(each);
    return launch(kernel, dim3(ceil_div(s.points, kThreads >> shift), 1, images_), kThreads, 0, stream, early, s,
                  Dense(s, 1), static_cast<const T*>(input.data), input.strides[0], input.strides[1], gradient_, sums,
                  grad_grid, batch_, channels, plane_sums(), shift, lists_, left_);
  }

  cudaError_t points() const {
    float* const sums = add_ ? sums_ : nullptr;
    const bool early = short_chain_ || listed_ || planes();
    if constexpr (kPairs && sizeof(T) == 4) {
      // Handing sums on does not pay for one channel; with more threads per point, a warp has no adjacent points.
      if (add_ && !pairs() && (TAPS == 8 || channels_ > 1) && sharing() <= 3) {
        return direct<kNeighbourSums>(sums, others(), early);
      }
    }
    if constexpr (kPairs) {
      if (pairs()) return direct<kPairSums>(sums, others(), early);
    }
    return direct<kPixelSums>(sums, others(), early);
  }

  // Converts the sums to the output's type and layout.
  cudaError_t round() const {
    const int64_t n = input.numel();
    if (pairs()) {
      return launch(add_pairs_kernel<T>, limited(ceil_div<int64_t>(n, kThreads)), kThreads, 0, stream, true, sums_,
                    output_, Divider(s.size[0]), static_cast<int>(n), gradient_.format);
    }
    if (sums_ == reinterpret_cast<float*>(output_)) return cudaSuccess;
    const int64_t each = listed_ ? size() : n;
    return launch(round_kernel<T>, blocks_of(ceil_div<int64_t>(each, kThreads)), kThreads, 0, stream,
                  short_chain_ || listed_, sums_, output_, listed_ ? batch_ : 1, each, gradient_.format, left_);
  }

  const Gradient<T> gradient_{static_cast<const T*>(grad.data), grad.strides[0], grad.strides[1], point,
                              Format<T>(grad.dtype)};
  T* const output_ = static_cast<T*>(grad_input.data);
  const int batch_ = static_cast<int>(input.sizes[0]), channels_ = static_cast<int>(input.sizes[1]);
  const int pixels_ = static_cast<int>(problem.pixels());
  const unsigned images_ = batch_ < 65535 ? batch_ : 65535;
  const int few_ = 4 * gpu.multiprocessors;  // blocks of kernels that mostly have nothing to do
  // The image's gradient is summed in a fixed order, or by atomics; lists also use atomics for the images left.
  const bool ordered_ = tactic.sums == Sums::kOrdered, add_ = tactic.adds(), listed_ = tactic.sums == Sums::kLists;
  const bool short_chain_ = add_ && !tactic.vectors && input.numel() <= (1 << 20);  // short kernels, which overlap
  float* sums_;
  T* copy_ = nullptr;  // the image in channels-last
  Lists lists_{sampler::gradient::lists_of(problem, tactic)};
  Left left_;  // the images that are left to the kernels after list()
};

template <class T>
cudaError_t run_backward(const Call& call) {
  return with_taps(call.problem.taps, [&](auto taps) { return Backward<T, taps()>(call).run(); });
}

}  // namespace svexport::backward
