#include "from_chw32.h"

#include "chw32.cuh"
#include "permute.h"

namespace svexport {
namespace {

template <class T>
__global__ void __launch_bounds__(Chw32<T>::kThreads) from_kernel(const T* x, T* output, int64_t n, int64_t blocks,
                                                                  int64_t channels, int64_t pixels) {
  using Warp = Chw32<T>;
  const Warp warp(blocks, ceil_div<int64_t>(pixels, Warp::kWarpPixels));
  if (warp.n >= n) return;
  const T* from = x + warp.word(blocks, pixels);
  Vec<T, Warp::kChannels> words[Warp::kPixels];
#pragma unroll
  for (int p = 0; p < Warp::kPixels; ++p) {
    words[p] = load_if<T, Warp::kChannels>(from + p * 32, warp.pixel + p < pixels);
  }
#pragma unroll
  for (int c = 0; c < Warp::kChannels; ++c) {
    if (warp.channel + c >= channels) return;
    T* plane = output + (warp.n * channels + warp.channel + c) * pixels + warp.pixel;
#pragma unroll
    for (int p = 0; p < Warp::kPixels; p += Warp::kVector) {
      if (warp.pixel + p >= pixels) break;
      Vec<T, Warp::kVector> v;
#pragma unroll
      for (int j = 0; j < Warp::kVector; ++j) v.at[j] = words[p + j].at[c];
      store<T, Warp::kVector>(plane + p, v);
    }
  }
}

// `count` channels from channel `first` on, a multiple of 32, as a permutation.
cudaError_t copy(const Tensor& x, const Tensor& output, int64_t first, int64_t count, cudaStream_t stream) {
  const int64_t blocks = ceil_div<int64_t>(count, 32), width = count < 32 ? count : 32;
  auto view = [&](const Tensor& t, int64_t offset, int64_t block, int64_t channel, int64_t row, int64_t column) {
    Tensor result = t;
    result.data = static_cast<char*>(t.data) + offset * t.item_size();
    result.rank = 5;
    const int64_t sizes[] = {t.sizes[0], blocks, width, output.sizes[2], output.sizes[3]};
    const int64_t strides[] = {t.strides[0], block, channel, row, column};
    for (int i = 0; i < 5; ++i) {
      result.sizes[i] = sizes[i];
      result.strides[i] = strides[i];
    }
    return result;
  };
  return permute(view(x, first / 32 * x.strides[1], x.strides[1], x.strides[4], x.strides[2], x.strides[3]),
                 view(output, first * output.strides[1], 32 * output.strides[1], output.strides[1], output.strides[2],
                      output.strides[3]),
                 stream);
}

}  // namespace

cudaError_t from_chw32(const Tensor& x, const Tensor& output, cudaStream_t stream) {
  if (output.numel() == 0) return cudaSuccess;
  const int64_t channels = output.sizes[1], pixels = output.sizes[2] * output.sizes[3];
  auto run = [&](auto* p) {
    using T = element_t<decltype(p)>;
    const int64_t grid = Chw32<T>::grid(x.sizes[0], x.sizes[1], pixels);
    if (grid > INT32_MAX) return cudaErrorNotSupported;
    from_kernel<<<static_cast<int>(grid), Chw32<T>::kThreads, 0, stream>>>(
        static_cast<const T*>(x.data), static_cast<T*>(output.data), x.sizes[0], x.sizes[1], channels, pixels);
    return cudaGetLastError();
  };
  auto aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; };
  if (x.contiguous() && pixels * x.item_size() % 16 == 0 && aligned(x) && aligned(output)) {
    switch (x.item_size()) {
      case 1: return run(static_cast<int8_t*>(nullptr));
      case 2: return run(static_cast<int16_t*>(nullptr));
      case 4: return run(static_cast<int32_t*>(nullptr));
      default: return run(static_cast<int64_t*>(nullptr));
    }
  }
  const int64_t whole = channels / 32 * 32;
  const cudaError_t status = whole ? copy(x, output, 0, whole, stream) : cudaSuccess;
  if (status != cudaSuccess || whole == channels) return status;
  return copy(x, output, whole, channels - whole, stream);
}

}  // namespace svexport
