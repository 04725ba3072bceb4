#include "space_to_depth.h"

#include <algorithm>

#include "device.cuh"
#include "permute.h"

namespace svexport {
namespace {

struct Strides {
  int64_t n, c, h;
};

Strides strides_of(const Tensor& t) { return {t.strides[0], t.strides[1], t.strides[2]}; }

// Rows of an image and of depth, in pieces of N pixels of depth.
struct Rows {
  Strides image, depth;
  int64_t count;  // of these pieces
  int channels;
  Divider pieces, height, c;  // pieces of a row; rows of a channel; channels of an image
};

// A thread separates the even and the odd columns of U times 2 * N pixels of a row, or joins them (kInverse). All
// pixels are read before the first is written.
template <class T, int N, int U, bool kInverse>
__global__ void __launch_bounds__(256) rows_kernel(T* image, T* depth, const __grid_constant__ Rows a) {
  constexpr int kTogether = 2 * N * sizeof(T) <= 16 ? 2 * N : N, kAccesses = 2 * N / kTogether;  // of the image
  Vec<T, kTogether> both[U][kAccesses];
  Vec<T, N> even[U], odd[U];
  int64_t at_image[U], at_depth[U];
  bool there[U];
  const int64_t to_odd = 2 * a.channels * a.depth.c;
  UNROLL for (int u = 0; u < U; ++u) {
    const int64_t i = (blockIdx.x * static_cast<int64_t>(U) + u) * 256 + threadIdx.x;
    there[u] = i < a.count;
    uint32_t rest = there[u] ? static_cast<uint32_t>(i) : 0;
    const int64_t x = static_cast<int64_t>(a.pieces.split(rest)) * N, row = a.height.split(rest), channel = a.c.split(rest);
    at_image[u] = rest * a.image.n + channel * a.image.c + row * a.image.h + 2 * x;
    at_depth[u] = rest * a.depth.n + (row % 2 * a.channels + channel) * a.depth.c + row / 2 * a.depth.h + x;
    if constexpr (kInverse) {
      even[u] = load_if<T, N>(depth + at_depth[u], there[u]);
      odd[u] = load_if<T, N>(depth + at_depth[u] + to_odd, there[u]);
    } else {
      UNROLL for (int k = 0; k < kAccesses; ++k) {
        both[u][k] = load_if<T, kTogether>(image + at_image[u] + k * kTogether, there[u]);
      }
    }
  }
  UNROLL for (int u = 0; u < U; ++u) {
    UNROLL for (int k = 0; k < 2 * N; ++k) {
      T &of_image = both[u][k / kTogether].at[k % kTogether], &of_depth = (k % 2 ? odd : even)[u].at[k / 2];
      (kInverse ? of_image : of_depth) = kInverse ? of_depth : of_image;
    }
    if (!there[u]) continue;
    if constexpr (kInverse) {
      UNROLL for (int k = 0; k < kAccesses; ++k) store(image + at_image[u] + k * kTogether, both[u][k]);
    } else {
      store(depth + at_depth[u], even[u]);
      store(depth + at_depth[u] + to_odd, odd[u]);
    }
  }
}

constexpr int kPieceBytes = 8192;

// Channels-last pixels of few channels. A block transposes a piece of a row in shared memory, where one element of
// padding follows each pair of pixels, so that elements of one channel are in different banks.
struct Pixels {
  int64_t image_n, image_h;
  Strides depth;
  int channels;
  int pairs;  // pairs of pixels in a piece
  int64_t half_width;
  Divider pieces, height, step, words;  // per row, per image, elements per pair, words per row of output of a whole piece
};

template <class T, int V>  // V elements are written at once
__global__ void __launch_bounds__(256) pixels_kernel(const T* image, T* depth, const __grid_constant__ Pixels a) {
  constexpr int N = 16 / sizeof(T);
  __shared__ T piece[kPieceBytes / sizeof(T)];
  uint32_t block = blockIdx.x;
  const int64_t x = static_cast<int64_t>(a.pieces.split(block)) * a.pairs;
  const int64_t row = a.height.split(block), n = block;
  const int step = 2 * a.channels;
  image += n * a.image_n + row * a.image_h + x * step;
  depth += n * a.depth.n + row % 2 * a.channels * a.depth.c + row / 2 * a.depth.h + x;
  const int count = static_cast<int>(min(a.half_width - x, static_cast<int64_t>(a.pairs))), length = count * step;
  const int vectors = reinterpret_cast<uintptr_t>(image) % 16 == 0 ? length / N : 0;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const Vec<T, N> v = load<T, N>(image + i * N);
    uint32_t pair = i * N;
    int channel = static_cast<int>(a.step.split(pair));
    UNROLL for (int j = 0; j < N; ++j) {
      piece[pair * (step + 1) + channel] = v.at[j];
      if (++channel == step) {
        channel = 0;
        ++pair;
      }
    }
  }
  for (int i = vectors * N + threadIdx.x; i < length; i += blockDim.x) piece[i + a.step.divide(i)] = image[i];
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < step * a.words.d; i += blockDim.x) {
    uint32_t channel = i;  // channel within the pair
    const int k = static_cast<int>(a.words.split(channel)) * V;
    if (k >= count) continue;
    Vec<T, V> word;
    UNROLL for (int j = 0; j < V; ++j) word.at[j] = piece[(k + j) * (step + 1) + channel];
    store<T, V>(depth + (channel + (channel < a.channels ? 0 : a.channels)) * a.depth.c + k, word);
  }
}

// Pairs of pixels in a piece, where one element of padding follows each pair.
int64_t pairs_of(const Tensor& image) { return kPieceBytes / image.item_size() / (2 * image.sizes[1] + 1) / 8 * 8; }

template <class T>
cudaError_t launch_pixels(const Tensor& image, const Tensor& depth, cudaStream_t stream) {
  constexpr int V = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  const int64_t channels = image.sizes[1], half_width = depth.sizes[3];
  const int64_t pairs = std::min<int64_t>(half_width, pairs_of(image));
  const int64_t pieces = ceil_div<int64_t>(half_width, pairs), blocks = image.sizes[0] * image.sizes[2] * pieces;
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  const bool words = half_width % V == 0 && depth.aligned(3, V * sizeof(T));
  const Pixels pixels{image.strides[0], image.strides[2], strides_of(depth), static_cast<int>(channels),
                      static_cast<int>(pairs), half_width, Divider(pieces), Divider(image.sizes[2]),
                      Divider(2 * channels), Divider(words ? ceil_div<int64_t>(pairs, V) : pairs)};
  const int64_t length = 2 * channels * pairs;
  const int threads = length <= 256 ? 64 : length <= 1024 ? 128 : 256;  // short rows: more blocks are resident
  (words ? pixels_kernel<T, V> : pixels_kernel<T, 1>)<<<static_cast<int>(blocks), threads, 0, stream>>>(
      static_cast<const T*>(image.data), static_cast<T*>(depth.data), pixels);
  return cudaGetLastError();
}

// (N, C, H, W) as (N, 2, 2, C, H/2, W/2): the column within the 2 x 2 block comes before the row.
Tensor blocks_of(const Tensor& image) {
  const int64_t *size = image.sizes, *stride = image.strides;
  return as_strided(image, {size[0], 2, 2, size[1], size[2] / 2, size[3] / 2},
                    {stride[0], stride[3], stride[2], stride[1], 2 * stride[2], 2 * stride[3]});
}

// (N, 4C, H/2, W/2) as (N, 2, 2, C, H/2, W/2).
Tensor channels_of(const Tensor& depth, int64_t c) {
  const int64_t *size = depth.sizes, *stride = depth.strides;
  return as_strided(depth, {size[0], 2, 2, c, size[2], size[3]},
                    {stride[0], 2 * c * stride[1], c * stride[1], stride[1], stride[2], stride[3]});
}

// kBytes: bytes of one access to depth.
template <int kBytes, bool kInverse>
cudaError_t launch_rows(const Tensor& image, const Tensor& depth, cudaStream_t stream) {
  return dispatch_size(image.item_size(), [&](auto* p) {
    using T = element_t<decltype(p)>;
    constexpr int N = std::max<int>(1, kBytes / sizeof(T)), U = N == 1 ? 4 : 1;
    const Rows rows{strides_of(image), strides_of(depth), image.numel() / (2 * N), static_cast<int>(image.sizes[1]),
                    Divider(depth.sizes[3] / N), Divider(image.sizes[2]), Divider(image.sizes[1])};
    if (rows.count > INT32_MAX) return cudaErrorNotSupported;
    rows_kernel<T, N, U, kInverse><<<static_cast<int>(ceil_div<int64_t>(rows.count, 256 * U)), 256, 0, stream>>>(
        static_cast<T*>(image.data), static_cast<T*>(depth.data), rows);
    return cudaGetLastError();
  });
}

template <bool kInverse>
cudaError_t run(const Tensor& image, const Tensor& depth, cudaStream_t stream) {
  if (image.numel() == 0) return cudaSuccess;
  const int64_t size = image.item_size();
  const auto rows = [&](int64_t bytes) {  // bytes of one access to depth
    return depth.sizes[3] * size % bytes == 0 && image.aligned(3, std::min<int64_t>(2 * bytes, 16)) && depth.aligned(3, bytes);
  };
  cudaError_t status = cudaErrorNotSupported;
  if (rows(16)) {
    status = launch_rows<16, kInverse>(image, depth, stream);
  } else if (size <= 4 && rows(4)) {
    status = launch_rows<4, kInverse>(image, depth, stream);
  } else if (rows(size)) {
    status = launch_rows<1, kInverse>(image, depth, stream);
  }
  if (status != cudaErrorNotSupported) return status;
  const bool pixels = image.strides[1] == 1 && image.strides[3] == image.sizes[1] && depth.strides[3] == 1 &&
                      image.numel() > 4096;  // permute is faster for smaller ones
  // By measurement: narrow rows do not fill permute's tiles; it writes pairs of a half type where it can.
  const bool narrow = depth.sizes[3] <= 48 || (size == 2 && depth.sizes[3] % 2 != 0);
  if (!kInverse && pixels && (image.sizes[1] <= 16 || (narrow && pairs_of(image) >= 8))) {
    return dispatch_size(size, [&](auto* p) { return launch_pixels<element_t<decltype(p)>>(image, depth, stream); });
  }
  const Tensor blocks = blocks_of(image), channels = channels_of(depth, image.sizes[1]);
  return kInverse ? permute(channels, blocks, stream) : permute(blocks, channels, stream);
}

}  // namespace

cudaError_t space_to_depth(const Tensor& x, const Tensor& output, cudaStream_t stream) {
  return run<false>(x, output, stream);
}

cudaError_t depth_to_space(const Tensor& input, const Tensor& output, cudaStream_t stream) {
  return run<true>(output, input, stream);
}

}  // namespace svexport
