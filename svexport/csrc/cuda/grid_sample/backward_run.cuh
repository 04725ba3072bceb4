// The gradient of sampling: which kernels, and their launches.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <optional>

#include "grid_sample/backward_boxes.cuh"
#include "grid_sample/backward_copies.cuh"
#include "grid_sample/backward_direct.cuh"
#include "grid_sample/backward_vector.cuh"

namespace svexport::backward {

inline int64_t pixels_of(const Tensor& input) {
  int64_t pixels = 1;
  for (int i = 2; i < input.rank; ++i) pixels *= input.sizes[i];
  return pixels;
}

inline size_t padded(size_t bytes) { return ceil_div<size_t>(bytes, 256) * 256; }

// Whether there are so many tiles of points that box_kernel fills the device; by measurement fewer do in float32.
inline bool many_tiles(int64_t across, int64_t down, int64_t batch, int64_t item) {
  return across >= 16 && ceil_div<int64_t>(across, kTileAcross) * ceil_div<int64_t>(down, kTileDown) * batch >=
                             8 / item * of_device(cudaDevAttrMultiProcessorCount);
}

// How the gradients are computed, and in how much memory. What is said of bilinear points is not done in other modes.
struct Plan {
  bool plane;          // the image's by plane_kernel,
  bool nearest_plane;  // of nearest points too,
  bool listed;         // or by owner_kernel, as far as points lie close together,
  bool vector;         // the others by vector_kernel, else by direct_kernel,
  bool pairs;          // of bilinear points with sums of pairs of pixels
  bool copied;         // the image transposed to channels-last first
  bool close;          // but for images whose points are close together: those by close_kernel
  bool summed;         // sums in the second cache, or of few channels; others are sooner written once, by lists
  int tile;
  Lists lists;
  size_t sums = 0, list = 0, copy = 0;  // bytes

  // Whether plane_kernel takes less time than sums by atomics, which have to be cleared before and, of half types,
  // rounded after; both as measured, in microseconds on 132 multiprocessors. of_points: by a kernel of their own, where
  // there is more than one channel.
  bool few_points(int64_t batch, int64_t channels, int64_t pixels, int64_t points, int64_t item, int taps,
                  bool of_points) const {
    const int64_t blocks = batch * channels * ceil_div<int64_t>(pixels, tile);
    if (4 * points * ceil_div<int64_t>(pixels, kPlanePixels) > pixels || blocks >= INT32_MAX) return false;
    const int64_t resident = of_device(cudaDevAttrMultiProcessorCount) * std::min(4, 2 * kPlanePixels / tile);
    const double turns = static_cast<double>(ceil_div(blocks, resident) * ceil_div<int64_t>(points, kPlaneThreads));
    const double sums = static_cast<double>(batch * channels * points * taps), all = static_cast<double>(blocks * tile);
    return (of_points && channels > 1 ? 4 : 0) + turns * (0.6 + 0.25 * taps) <=
           2 + 2e-5 * sums + (item == 2 ? 2 + 2.3e-6 * all : 0);
  }

  Plan(const Tensor& input, const Tensor& grid, bool input_gradient, bool grid_gradient)
      : lists(static_cast<int>(input.sizes[input.rank - 1]),
              static_cast<int>(pixels_of(input) / input.sizes[input.rank - 1]),
              grid.numel() / grid.sizes[0] / (grid.rank - 2), input.sizes[1] <= 4) {
    const int64_t v = 16 / input.item_size(), pixels = pixels_of(input), batch = input.sizes[0];
    const int64_t points = grid.numel() / batch / (grid.rank - 2), channels = input.sizes[1];
    // Few planes are divided among more blocks.
    const int64_t apart = ceil_div<int64_t>(of_device(cudaDevAttrMultiProcessorCount), batch * channels);
    const int64_t share = std::max<int64_t>(ceil_div<int64_t>(pixels, apart), 1 << 11);
    tile = static_cast<int>(std::min<int64_t>({pixels, share, kPlanePixels}));
    const auto few = [&](int taps) {
      return few_points(batch, channels, pixels, points, input.item_size(), taps, grid_gradient);
    };
    plane = input_gradient && few(1 << (input.rank - 2));
    nearest_plane = plane && few(1);
    const bool last = input.strides[1] == 1 && input.aligned(1, 16);
    int64_t pixel = 1;
    const bool even = evenly_spaced(input, 2, input.rank - 1, pixel);
    const bool dense = even && pixel == 1 && 2 * points >= pixels;
    const bool large = batch * points * channels >= (1 << 19);  // worth three or four kernels
    vector = channels % v == 0 && channels > 4 && pixels * channels < INT32_MAX &&
             (large ? last || dense : last && !input_gradient);
    copied = vector && !last && grid_gradient;
    // In half types sums of pixels to which hardly a point is added cost five times what the pixels do.
    const bool half = input.item_size() == 2, sparse = half && pixels >= 3 * points && pixels <= 256 * points;
    listed = input.rank == 4 && input_gradient && !plane && points <= 4 * pixels && points < Lists::kFull &&
             (sparse ? batch * pixels * channels >= (1 << 21)
                     : pixels <= 32 * points && batch * points * channels >= (1 << 19) &&
                           (batch * points * channels >= (1 << 23) || batch * pixels * channels >= (1 << 22)));
    // Of one channel what lists cost is more than the atomics that they save.
    listed = listed && !(half && channels == 1 && !sparse);
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
      lists.most = Lists::kFull - 1;  // however the points lie
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

inline unsigned limited(int64_t blocks) { return static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20); }

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

// One call: what of the plan its arguments leave, and the launches.
template <class T, int TAPS>
class Backward {
 public:
  // point: of the output's gradient, from a point to the next.
  Backward(const Tensor& grad, int64_t point, const Tensor& input, const Space& space, const Tensor& grad_input,
           const Tensor& grad_grid, bool deterministic, const Plan& plan, void* workspace, cudaStream_t stream)
      : grad_(grad),
        input_(input),
        grad_grid_(grad_grid),
        plan_(plan),
        stream_(stream),
        s_(space),
        gradient_{static_cast<const T*>(grad.data), grad.strides[0], grad.strides[1], point},
        output_(static_cast<T*>(grad_input.data)),
        batch_(static_cast<int>(input.sizes[0])),
        channels_(static_cast<int>(input.sizes[1])),
        pixels_(static_cast<int>(pixels_of(input))),
        images_(batch_ < 65535 ? batch_ : 65535),
        few_(4 * of_device(cudaDevAttrMultiProcessorCount)),
        lists_(plan.lists) {
    ordered_ = output_ && deterministic;
    plane_ = output_ && !ordered_ && (TAPS == 1 ? plan.nearest_plane : plan.plane);
    add_ = output_ && !ordered_ && !plane_;
    listed_ = add_ && plan.listed && kLists && s_.points * point * sizeof(T) <= UINT32_MAX;
    pairs_ = add_ && plan.pairs && kPairs && !listed_;
    chosen_ = add_ && plan.close && kChoice;
    deferred_ = listed_ || chosen_;
    vector_ = plan.vector && (TAPS > 1 || s_.points > 2 * static_cast<int64_t>(pixels_) ||
                              (sizeof(T) == 2 && channels_ >= 16));
    short_chain_ = add_ && !vector_ && !chosen_ && input.numel() <= (1 << 20);
    boxes_ = listed_ && TAPS == 4 && plan.copied &&
             many_tiles(s_.across.d, s_.points / s_.across.d, batch_, sizeof(T));
    char* const memory = static_cast<char*>(workspace);
    sums_ = vector_ || sizeof(T) == 2 ? static_cast<float*>(workspace) : reinterpret_cast<float*>(output_);
    if (deferred_) lists_.in(memory + plan.sums, listed_ ? batch_ : 0);
    if (chosen_) choose_how();
    if (vector_ && plan.copied && TAPS > 1) copy_ = reinterpret_cast<T*>(memory + plan.sums + plan.list);
  }

  cudaError_t run() {
    cudaError_t status = cudaSuccess;
    if (chosen_) status = choose();
    if (status == cudaSuccess && listed_) status = list();
    if (status == cudaSuccess) status = clear();
    if (status == cudaSuccess && ordered_) status = add_in_order();
    if (status == cudaSuccess && plane_) status = add_planes();
    if (status != cudaSuccess || (plane_ && channels_ == 1)) return status;  // the points' too
    if (vector_ && (add_ || grad_grid_.data)) {
      status = vectors();
      return status == cudaSuccess && ordered_ ? round() : status;
    }
    if (chosen_) return close_images();
    if (add_ || grad_grid_.data) status = points();
    return status == cudaSuccess && (ordered_ || add_) ? round() : status;
  }

 private:
  static constexpr int V = 16 / sizeof(T), kUsual = TAPS == 4 || TAPS == 8 ? kZeros : kAnyPadding;  // padding
  static constexpr bool kPairs = TAPS == 4 || TAPS == 8, kChoice = TAPS == 4 && sizeof(T) == 4;
  static constexpr bool kLists = TAPS == 4;

  int64_t size() const { return static_cast<int64_t>(channels_) * pixels_; }  // of an image
  int64_t plane_sums() const { return pairs_ ? 2 * (static_cast<int64_t>(pixels_) + pixels_ / s_.size[0]) : pixels_; }

  // Where there may be nothing to do blocks are few. Images whose sums the second cache does not hold together come one
  // after the other.
  dim3 blocks_of(int64_t work) const {
    if (!deferred_) return dim3(limited(work));
    const unsigned some = input_.numel() <= (1 << 23) ? std::max<unsigned>(1, few_ / images_) : few_;
    return dim3(std::min(limited(work), some), images_);
  }

  // The gradient of points that list() has not written.
  AnyFloat others() const { return AnyFloat(listed_ && !vector_ ? Tensor{} : grad_grid_); }

  // Blocks for copies between layouts.
  int64_t tiles() const {
    const int64_t squares = ceil_div<int64_t>(pixels_, 64) * ceil_div(channels_, 8) * batch_;
    return sizeof(T) == 4 ? ceil_div<int64_t>(squares, kThreads / 32)
                          : ceil_div<int64_t>(pixels_, kTilePoints) * ceil_div(channels_, 8 * V) * batch_;
  }

  // How many pixels of the image side by side can be read at once.
  int copy_width() const {
    return sizeof(T) == 4 && pixels_ % 4 != 0 ? 1
                                              : pixel_width<T>(input_.data, input_.strides[0], input_.strides[1]);
  }

  // More threads for each point where there are few points, or many channels.
  int sharing() const {
    int shift = 0;
    while (shift < 5 && (2 << shift) <= channels_ &&
           ((16 << shift) <= channels_ || static_cast<int64_t>(ceil_div(s_.points, kThreads >> shift)) * batch_ <
                                              (TAPS == 8 ? 256 : channels_ <= 4 ? 128 : 512))) {
      ++shift;
    }
    return shift;
  }

  // How close an image's points have to be, by measurement.
  void choose_how() {
    const float tilted = boxes_                           ? 0.09f
                         : !vector_ && !plan_.summed      ? 0.035f
                         : channels_ < (vector_ ? 32 : 9) ? 0.25f
                                                          : 0.1f;
    const float turned = !vector_ ? INFINITY : boxes_ ? 0.8f : 0.5f;  // without vectors lists are best anyhow
    choice_ = {tilted, listed_, turned};
    close_.emplace(s_, input_, gradient_.point, gradient_.channel, reinterpret_cast<float*>(output_), 4 * few_);
  }

  // How each image's is added up is found on the device; those of close points are.
  cudaError_t choose() {
    if constexpr (kChoice) {
      choose_kernel<<<dim3(std::max<unsigned>(1, few_ / images_), images_), kTileThreads, 0, stream_>>>(
          s_, choice_, lists_, *close_, boxes_ ? nullptr : copy_, copy_width(), sums_, batch_, channels_);
    }
    left_ = {lists_.runs, lists_.most, vector_};
    const cudaError_t status = cudaGetLastError();
    return status == cudaSuccess && left_.chosen ? close_images() : status;
  }

  // Images of close points, and without vectors those that are left.
  cudaError_t close_images() const {
    if constexpr (kChoice) {
      return launch(s_.padding == kZeros ? close_kernel<kZeros> : close_kernel<kAnyPadding>,
                    dim3(std::min(close_->blocks(), few_), 1, images_), kThreads, 0, stream_, true, s_, choice_, *close_,
                    gradient_, AnyFloat(grad_grid_), batch_, channels_, left_, !vector_);
    }
    return cudaErrorNotSupported;
  }

  // Lists of points, and what pixels these make. With boxes, or without vectors, the gradient of the points too.
  cudaError_t list() {
    if constexpr (kLists) {
      return s_.padding == kUsual ? list<kUsual>() : list<kAnyPadding>();
    }
    return cudaErrorNotSupported;
  }

  template <int PADDING>
  cudaError_t list() {
    const int64_t counters = lists_.counters(batch_);
    if (!chosen_) {
      zero_kernel<<<limited(ceil_div<int64_t>(counters, 4 * kThreads)), kThreads, 0, stream_>>>(
          reinterpret_cast<float*>(lists_.counts), 1, counters, Left());
    }
    cudaError_t status;
    if (vector_ || !grad_grid_.data) {
      const unsigned all = ceil_div(s_.points, kListThreads), some = std::max<unsigned>(1, 2 * few_ / images_);
      status = launch(list_kernel<PADDING>, dim3(chosen_ ? std::min(all, some) : all, 1, images_), kListThreads,
                      0, stream_, true, s_, lists_, batch_, left_);
    } else {
      status = direct<kListSums>(nullptr, AnyFloat(grad_grid_), true);
    }
    if (status != cudaSuccess) return status;
    left_ = {lists_.runs, lists_.most, left_.chosen};
    status = launch_owner<T, PADDING>(s_, lists_, gradient_, output_, batch_, channels_, left_, stream_);
    if (status == cudaSuccess && boxes_) {
      return launch_boxes<T, PADDING>(input_, s_, gradient_, grad_grid_, left_, stream_);
    }
    return status;
  }

  // Sums of images that are left, if they are not cleared already.
  cudaError_t clear() const {
    if (listed_) {
      return launch(zero_kernel, blocks_of(ceil_div<int64_t>(size(), 4 * kThreads)), kThreads, 0, stream_, true, sums_,
                    batch_, size(), left_);
    }
    if (short_chain_) {
      const int64_t cleared = plane_sums() * batch_ * channels_;
      return launch(zero_kernel, blocks_of(ceil_div<int64_t>(cleared, 4 * kThreads)), kThreads, 0, stream_, false,
                    sums_, 1, cleared, left_);
    }
    if (!ordered_ && (!add_ || chosen_)) return cudaSuccess;
    return cudaMemsetAsync(sums_, 0, plane_sums() * batch_ * channels_ * sizeof(float), stream_);
  }

  cudaError_t add_in_order() const {
    const unsigned blocks = ceil_div<int64_t>(static_cast<int64_t>(batch_) * channels_, kThreads);
    ordered_kernel<T, TAPS>
        <<<blocks, kThreads, 0, stream_>>>(s_, Dense(s_, 1), gradient_, sums_, batch_, channels_, pixels_);
    return cudaGetLastError();
  }

  // In shared memory; of images of one channel the gradient of the points too.
  cudaError_t add_planes() const {
    const int memory = plan_.tile * static_cast<int>(sizeof(float)), parts = ceil_div(pixels_, plan_.tile);
    constexpr int U = TAPS == 16 ? 1 : 2;
    const auto kernel = s_.points > kPlaneThreads ? plane_kernel<T, TAPS, U> : plane_kernel<T, TAPS, 1>;
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (status != cudaSuccess) return status;
    kernel<<<batch_ * channels_ * parts, kPlaneThreads, memory, stream_>>>(
        s_, Dense(s_, 1), static_cast<const T*>(input_.data), input_.strides[0], gradient_, output_,
        AnyFloat(channels_ == 1 ? grad_grid_ : Tensor{}), channels_, pixels_, plan_.tile, parts);
    return cudaGetLastError();
  }

  // Image and sums in channels-last; these back to (N, C, pixels).
  cudaError_t vectors() const {
    const T* data = static_cast<const T*>(input_.data);
    int64_t image = input_.strides[0];
    Space s = s_;
    const Left rest = !deferred_                 ? Left()
                      : boxes_ || !others().data ? left_
                      : chosen_                  ? Left{lists_.runs, Lists::kDone, true}
                                                 : Left();
    if (copy_) {
      if (!chosen_ || boxes_) {
        const cudaError_t status =
            launch(to_channels_last_kernel<T>, rest.runs ? blocks_of(tiles()) : dim3(limited(tiles())), kTileThreads,
                   0, stream_, deferred_, data, image, input_.strides[1], copy_, batch_, channels_, pixels_,
                   copy_width(), rest);
        if (status != cudaSuccess) return status;
      }
      data = copy_;
      image = size();
      for (int a = 0; a < 3; ++a) s.stride[a] = Dense(s, channels_).stride[a];
    }
    int shift = 0;
    while (shift < 3 && (V << shift) < channels_) ++shift;
    const int64_t point = gradient_.point;
    const bool last = grad_.strides[1] == 1 && (reinterpret_cast<uintptr_t>(grad_.data) | point * sizeof(T) |
                                                grad_.strides[0] * sizeof(T)) % 16 == 0;
    const int width = last ? 0 : point == 1 ? pixel_width<T>(grad_.data, grad_.strides[0], grad_.strides[1], 4) : 1;
    const auto kernel = s.padding == kUsual ? vector_kernel<T, TAPS, kUsual> : vector_kernel<T, TAPS, kAnyPadding>;
    const unsigned blocks = ceil_div(s.points, kThreads >> shift);
    const unsigned resident = static_cast<unsigned>(std::min<int64_t>(few_, static_cast<int64_t>(blocks) * batch_));
    const cudaError_t status =
        launch(kernel, rest.runs && TAPS <= 4 ? dim3(resident) : dim3(blocks, 1, images_), kThreads, 0, stream_,
               deferred_, s, Dense(s, channels_), data, image, gradient_, add_ ? sums_ : nullptr, others(), batch_,
               channels_, pixels_, shift, width, left_, rest);
    if (status != cudaSuccess || !add_) return status;
    return launch(from_channels_last_kernel<T>, blocks_of(tiles()), kTileThreads, 0, stream_, deferred_, sums_,
                  output_, batch_, channels_, pixels_, pixel_width<T>(output_, pixels_, pixels_), left_);
  }

  // Any strides. Behind another kernel it may begin early: nothing else writes what it reads before it waits.
  template <int SUMS>
  cudaError_t direct(float* sums, const AnyFloat& grad_grid, bool early) const {
    return s_.padding == kUsual ? direct<SUMS, kUsual>(sums, grad_grid, early)
                                : direct<SUMS, kAnyPadding>(sums, grad_grid, early);
  }

  template <int SUMS, int PADDING>
  cudaError_t direct(float* sums, const AnyFloat& grad_grid, bool early) const {
    constexpr bool kSpills = PADDING == kAnyPadding && SUMS == kNeighbourSums;
    constexpr int U = TAPS == 16 || (TAPS == 8 && sizeof(T) == 4) ? 1 : SUMS == kPairSums ? 2 : 4;
    const int shift = sharing(), each = ceil_div(channels_, 1 << shift);
    const auto with = [&](auto kernel) {
      return launch(kernel, dim3(ceil_div(s_.points, kThreads >> shift), 1, images_), kThreads, 0, stream_, early, s_,
                    Dense(s_, 1), static_cast<const T*>(input_.data), input_.strides[0], input_.strides[1], gradient_,
                    sums, grad_grid, batch_, channels_, plane_sums(), shift, lists_, left_);
    };
    return each == 1   ? with(direct_kernel<T, TAPS, PADDING, 1, SUMS>)
           : each == 2 ? with(direct_kernel<T, TAPS, PADDING, std::min(U, 2), SUMS>)
                       : with(direct_kernel<T, TAPS, PADDING, kSpills ? std::min(U, 2) : U, SUMS>);
  }

  cudaError_t points() const {
    float* const sums = add_ ? sums_ : nullptr;
    const bool early = short_chain_ || deferred_ || plane_;
    if constexpr (kPairs && sizeof(T) == 4) {
      // One channel is sooner added up than handed on; with more threads for a point warps are not of neighbours.
      if (add_ && (TAPS == 8 || channels_ > 1) && sharing() <= 3) return direct<kNeighbourSums>(sums, others(), early);
    }
    if constexpr (kPairs) {
      if (pairs_) return direct<kPairSums>(sums, others(), early);
    }
    return direct<kPixelSums>(sums, others(), early);
  }

  // Sums to the output, in its type.
  cudaError_t round() const {
    const int64_t n = input_.numel();
    if (pairs_) {
      return launch(add_pairs_kernel<T>, limited(ceil_div<int64_t>(n, kThreads)), kThreads, 0, stream_, true, sums_,
                    output_, Divider(s_.size[0]), static_cast<int>(n));
    }
    if (sums_ == reinterpret_cast<float*>(output_)) return cudaSuccess;
    const int64_t each = listed_ ? size() : n;
    return launch(round_kernel<T>, blocks_of(ceil_div<int64_t>(each, kThreads)), kThreads, 0, stream_,
                  short_chain_ || listed_, sums_, output_, listed_ ? batch_ : 1, each, left_);
  }

  const Tensor &grad_, &input_, &grad_grid_;
  const Plan& plan_;
  const cudaStream_t stream_;
  const Space s_;
  const Gradient<T> gradient_;
  T* const output_;
  const int batch_, channels_, pixels_;
  const unsigned images_;
  const int few_;  // blocks, where most often there is nothing to do
  bool vector_;    // as planned; but nearest points add once and read nothing: by measurement few are not worth it
  bool ordered_;   // the image's gradient in one order,
  bool plane_;     // by plane_kernel,
  bool add_;       // or by atomics:
  bool listed_, pairs_, boxes_;
  bool chosen_;       // how, on the device,
  Choice choice_{};
  std::optional<Close> close_;
  bool deferred_;     // until then kernels may find nothing to do
  bool short_chain_;  // of kernels that overlap
  float* sums_;
  T* copy_ = nullptr;  // of the image, in channels-last
  Lists lists_;
  Left left_;  // images for the kernels that follow
};

// With kernels of one type, which are compiled apart: grid_sample_backward_float.cu, _half.cu and _bfloat16.cu.
template <class T>
cudaError_t run_backward(const Tensor& grad, int64_t point, const Tensor& input, const Space& s, const Tensor& grad_input,
                         const Tensor& grad_grid, int mode, bool deterministic, const Plan& plan, void* workspace,
                         cudaStream_t stream) {
  return dispatch_taps(mode, s.axes, [&](auto taps) {
    return Backward<T, taps()>(grad, point, input, s, grad_input, grad_grid, deterministic, plan, workspace, stream).run();
  });
}

extern template cudaError_t run_backward<float>(const Tensor&, int64_t, const Tensor&, const Space&, const Tensor&,
                                                const Tensor&, int, bool, const Plan&, void*, cudaStream_t);
extern template cudaError_t run_backward<__half>(const Tensor&, int64_t, const Tensor&, const Space&, const Tensor&,
                                                 const Tensor&, int, bool, const Plan&, void*, cudaStream_t);
extern template cudaError_t run_backward<__nv_bfloat16>(const Tensor&, int64_t, const Tensor&, const Space&,
                                                        const Tensor&, const Tensor&, int, bool, const Plan&, void*,
                                                        cudaStream_t);

}  // namespace svexport::backward
