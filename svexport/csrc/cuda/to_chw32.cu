#include "to_chw32.h"

#include "device.cuh"
#include "permute.h"

namespace svexport {
namespace {

struct Image {
  int64_t n, channels, blocks, height, width;  // sizes of the output
  int64_t stride_n, stride_c, stride_h, stride_w;
};

// The 32 channels of a pixel are kLanes words of at least 4 bytes, one per lane, so that a warp reads and writes whole
// pixels. A lane does kPixels pixels of its channels, which are contiguous in NCHW: there it accesses vectors along the
// pixels, at least one whole sector in all.
template <class T>
struct Chw32 {
  static constexpr int kChannels = sizeof(T) < 4 ? 4 / sizeof(T) : 1;  // channels of a lane
  static constexpr int kLanes = 32 / kChannels;
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kPixels = sizeof(T) < 4 ? kVector : 32 / sizeof(T);
  static constexpr int kWarpPixels = kPixels * (32 / kLanes);
  static constexpr int kThreads = 256;

  int64_t pixel;    // the lane's first pixel
  int64_t channel;  // the first of the lane's kChannels channels
  int64_t n, block;

  // The grid has one warp per (image, block of channels, kWarpPixels pixels), the last of these fastest.
  __device__ __forceinline__ Chw32(int64_t blocks, int64_t parts) {
    const int64_t warp = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    pixel = warp % parts * kWarpPixels + lane / kLanes * kPixels;
    block = warp / parts % blocks;
    n = warp / parts / blocks;
    channel = block * 32 + lane % kLanes * kChannels;
  }
  // Offset of the lane's word of its first pixel, if words are contiguous; the next pixel's word is 32 elements on.
  __device__ __forceinline__ int64_t word(int64_t blocks, int64_t pixels) const {
    return ((n * blocks + block) * pixels + pixel) * 32 + channel % 32;
  }
  static int64_t parts(int64_t pixels) { return ceil_div<int64_t>(pixels, kWarpPixels); }
  static int64_t grid(int64_t n, int64_t blocks, int64_t pixels) {
    return ceil_div<int64_t>(n * blocks * parts(pixels), kThreads / 32);
  }
};

// NaN is larger than everything, as in F.max_pool2d.
template <class T>
__device__ __forceinline__ T larger(T a, T b) {
  return to_float(b) > to_float(a) || to_float(b) != to_float(b) ? b : a;
}

enum class Read { kVectors, kElements, kPooledVectors, kPooledElements };

template <class T, Read kRead>
__global__ void __launch_bounds__(Chw32<T>::kThreads) to_kernel(const T* x, T* output, const __grid_constant__ Image a) {
  using Warp = Chw32<T>;
  const int64_t pixels = a.height * a.width;
  const Warp warp(a.blocks, ceil_div<int64_t>(pixels, Warp::kWarpPixels));
  if (warp.n >= a.n) return;
  constexpr int V = Warp::kVector;
  Vec<T, V> values[Warp::kChannels][Warp::kPixels / V];
  UNROLL for (int c = 0; c < Warp::kChannels; ++c) {
    const bool channel = warp.channel + c < a.channels;
    const T* plane = x + warp.n * a.stride_n + (warp.channel + c) * a.stride_c;
    int64_t row = 0, column = 0;
    if constexpr (kRead != Read::kVectors) {
      row = warp.pixel / a.width;
      column = warp.pixel % a.width;
    }
    UNROLL for (int p = 0; p < Warp::kPixels; p += V) {
      if constexpr (kRead == Read::kVectors) {
        values[c][p / V] = load_if<T, V>(plane + warp.pixel + p, channel && warp.pixel + p < pixels);
      } else {
        constexpr int kStep = kRead == Read::kPooledVectors ? 2 : 1;  // pixels at once
        UNROLL for (int j = 0; j < V; j += kStep) {
          const bool there = channel && warp.pixel + p + j < pixels;
          auto element = [&](int64_t h, int64_t w) {
            return load_if<T, 1>(plane + h * a.stride_h + w * a.stride_w, there).at[0];
          };
          if constexpr (kRead == Read::kPooledVectors) {
            const T* corner = plane + 2 * row * a.stride_h + 2 * column;
            const auto top = load_if<T, 4>(corner, there), bottom = load_if<T, 4>(corner + a.stride_h, there);
            UNROLL for (int k = 0; k < 2; ++k) {
              const T left = larger(larger(top.at[2 * k], top.at[2 * k + 1]), bottom.at[2 * k]);
              values[c][p / V].at[j + k] = larger(left, bottom.at[2 * k + 1]);
            }
          } else if constexpr (kRead == Read::kPooledElements) {
            const T top = larger(element(2 * row, 2 * column), element(2 * row, 2 * column + 1));
            const T left = larger(top, element(2 * row + 1, 2 * column));
            values[c][p / V].at[j] = larger(left, element(2 * row + 1, 2 * column + 1));
          } else {
            values[c][p / V].at[j] = element(row, column);
          }
          if ((column += kStep) == a.width) {
            column = 0;
            ++row;
          }
        }
      }
    }
  }
  T* to = output + warp.word(a.blocks, pixels);
  UNROLL for (int p = 0; p < Warp::kPixels; ++p) {
    if (warp.pixel + p >= pixels) return;
    Vec<T, Warp::kChannels> word;
    UNROLL for (int c = 0; c < Warp::kChannels; ++c) word.at[c] = values[c][p / V].at[p % V];
    store<T, Warp::kChannels>(to + p * 32, word);
  }
}

template <class T, Read kRead>
cudaError_t launch(const Tensor& x, const Tensor& output, cudaStream_t stream) {
  const int64_t by = kRead == Read::kPooledVectors || kRead == Read::kPooledElements ? 2 : 1;
  const Image image{x.sizes[0],   x.sizes[1],   ceil_div<int64_t>(x.sizes[1], 32), x.sizes[2] / by, x.sizes[3] / by,
                    x.strides[0], x.strides[1], x.strides[2], x.strides[3]};
  const int64_t blocks = Chw32<T>::grid(image.n, image.blocks, image.height * image.width);
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  to_kernel<T, kRead><<<static_cast<int>(blocks), Chw32<T>::kThreads, 0, stream>>>(
      static_cast<const T*>(x.data), static_cast<T*>(output.data), image);
  return cudaGetLastError();
}

constexpr int kWarps = 2;  // warps of a block

// A warp transposes 32 channels x 32 words of pixels in shared memory, so that it accesses 128 contiguous bytes.
template <class T>
__global__ void __launch_bounds__(kWarps * 32) from_kernel(const T* x, T* output, uint32_t tiles, int channels,
                                                           int words, Divider parts, Divider blocks) {
  constexpr int W = 4 / sizeof(T), kLanes = 32 / W;  // pixels of a word, lanes that hold the 32 channels of a pixel
  __shared__ Vec<T, W> turned[kWarps][32][33];       // channel, word of pixels
  uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32;
  if (i >= tiles) return;
  auto& tile = turned[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, first = lane % kLanes * W;  // the lane's first channel
  const int word0 = static_cast<int>(parts.split(i)) * 32;
  x += (static_cast<int64_t>(i) * words + word0) * W * 32 + first;
  const int channel0 = static_cast<int>(blocks.split(i)) * 32;
  output += (static_cast<int64_t>(i) * channels + channel0) * words * W + word0 * W;
  Vec<T, W> in[32];
  UNROLL for (int k = 0; k < 32; ++k) {  // the W pixels of a word one after the other
    const int word = k / W * W + lane / kLanes;
    in[k] = load_if<T, W>(x + (word * W + k % W) * 32, word0 + word < words);
  }
  UNROLL for (int k = 0; k < 32; k += W) {
    UNROLL for (int c = 0; c < W; ++c) {
      Vec<T, W> word;
      UNROLL for (int j = 0; j < W; ++j) word.at[j] = in[k + j].at[c];
      tile[first + c][k + lane / kLanes] = word;
    }
  }
  __syncwarp();
  if (word0 + lane >= words) return;
  for (int c = 0; c < min(32, channels - channel0); ++c) {
    store<T, W>(output + static_cast<int64_t>(c) * words * W + lane * W, tile[c][lane]);
  }
}

// Copies `count` channels from channel `first` on, a multiple of 32, as a permutation.
cudaError_t copy(const Tensor& x, const Tensor& output, int64_t first, int64_t count, cudaStream_t stream) {
  const std::initializer_list<int64_t> sizes = {output.sizes[0], ceil_div<int64_t>(count, 32), count < 32 ? count : 32,
                                                output.sizes[2], output.sizes[3]};
  const int64_t *s = x.strides, *o = output.strides;
  Tensor from = as_strided(x, sizes, {s[0], s[1], s[4], s[2], s[3]});
  Tensor to = as_strided(output, sizes, {o[0], 32 * o[1], o[1], o[2], o[3]});
  from.data = x.element(first / 32 * s[1]);
  to.data = output.element(first * o[1]);
  return permute(from, to, stream);
}

}  // namespace

cudaError_t to_chw32(const Tensor& x, bool pool, const Tensor& output, cudaStream_t stream) {
  if (output.numel() == 0) return cudaSuccess;
  if (pool) {
    const bool vectors = x.sizes[3] / 2 % 2 == 0 && x.aligned(3, 4 * x.item_size());
    auto run = [&](auto* p) {
      using T = element_t<decltype(p)>;
      return vectors ? launch<T, Read::kPooledVectors>(x, output, stream)
                     : launch<T, Read::kPooledElements>(x, output, stream);
    };
    return x.dtype == DType::kInt8 ? run(static_cast<int8_t*>(nullptr)) : dispatch_float(x.dtype, run);
  }
  Tensor planes = x;  // (N, C, H*W), if the pixels are contiguous
  planes.rank = 3;
  planes.sizes[2] = x.sizes[2] * x.sizes[3];
  planes.strides[2] = x.strides[3];
  const bool contiguous = (x.strides[3] == 1 || x.sizes[3] == 1) && (x.strides[2] == x.sizes[3] || x.sizes[2] == 1);
  const bool vectors = contiguous && planes.sizes[2] * x.item_size() % 16 == 0 && planes.aligned(2, 16);
  return dispatch_size(x.item_size(), [&](auto* p) {
    using T = element_t<decltype(p)>;
    return vectors ? launch<T, Read::kVectors>(x, output, stream) : launch<T, Read::kElements>(x, output, stream);
  });
}

cudaError_t from_chw32(const Tensor& x, const Tensor& output, cudaStream_t stream) {
  if (output.numel() == 0) return cudaSuccess;
  const int64_t channels = output.sizes[1], pixels = output.sizes[2] * output.sizes[3], size = x.item_size();
  auto run = [&](auto* p) {
    using T = element_t<decltype(p)>;
    const int64_t words = pixels * size / 4, parts = ceil_div<int64_t>(words, 32);
    const int64_t tiles = x.sizes[0] * x.sizes[1] * parts;
    if (tiles > INT32_MAX || pixels > INT32_MAX) return cudaErrorNotSupported;
    from_kernel<<<static_cast<int>(ceil_div<int64_t>(tiles, kWarps)), kWarps * 32, 0, stream>>>(
        static_cast<const T*>(x.data), static_cast<T*>(output.data), static_cast<uint32_t>(tiles),
        static_cast<int>(channels), static_cast<int>(words), Divider(parts), Divider(x.sizes[1]));
    return cudaGetLastError();
  };
  auto aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 4 == 0; };
  const bool large = x.numel() > 4096;  // permute is faster for smaller ones
  if (large && x.contiguous() && pixels * size % 4 == 0 && aligned(x) && aligned(output)) {
    switch (size) {
      case 1: return run(static_cast<int8_t*>(nullptr));
      case 2: return run(static_cast<int16_t*>(nullptr));
      case 4: return run(static_cast<int32_t*>(nullptr));
      default: break;
    }
  }
  const int64_t whole = channels / 32 * 32;
  const cudaError_t status = whole ? copy(x, output, 0, whole, stream) : cudaSuccess;
  if (status != cudaSuccess || whole == channels) return status;
  return copy(x, output, whole, channels - whole, stream);
}

}  // namespace svexport
