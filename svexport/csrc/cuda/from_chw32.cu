#include "from_chw32.h"

#include "device.cuh"
#include "permute.h"

namespace svexport {
namespace {

constexpr int kWarps = 2;  // of a block

// A warp turns 32 channels of 32 words of pixels in shared memory, so that it reads and writes 128 contiguous bytes.
template <class T>
__global__ void __launch_bounds__(kWarps * 32) from_kernel(const T* x, T* output, uint32_t tiles, int channels,
                                                           int words, Divider parts, Divider blocks) {
  constexpr int W = 4 / sizeof(T), kLanes = 32 / W;  // pixels of a word, lanes that hold the 32 channels of a pixel
  __shared__ Vec<T, W> turned[kWarps][32][33];       // channel, word of pixels
  uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32;
  if (i >= tiles) return;
  auto& tile = turned[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, first = lane % kLanes * W;  // channel
  const int word0 = static_cast<int>(parts.split(i)) * 32;
  x += (static_cast<int64_t>(i) * words + word0) * W * 32 + first;
  const int channel0 = static_cast<int>(blocks.split(i)) * 32;
  output += (static_cast<int64_t>(i) * channels + channel0) * words * W + word0 * W;
  Vec<T, W> in[32];
#pragma unroll
  for (int k = 0; k < 32; ++k) {  // W pixels of a word after each other
    const int word = k / W * W + lane / kLanes;
    in[k] = load_if<T, W>(x + (word * W + k % W) * 32, word0 + word < words);
  }
#pragma unroll
  for (int k = 0; k < 32; k += W) {
#pragma unroll
    for (int c = 0; c < W; ++c) {
      Vec<T, W> word;
#pragma unroll
      for (int j = 0; j < W; ++j) word.at[j] = in[k + j].at[c];
      tile[first + c][k + lane / kLanes] = word;
    }
  }
  __syncwarp();
  if (word0 + lane >= words) return;
  for (int c = 0; c < min(32, channels - channel0); ++c) {
    store<T, W>(output + static_cast<int64_t>(c) * words * W + lane * W, tile[c][lane]);
  }
}

// `count` channels from channel `first` on, a multiple of 32, as a permutation.
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
  const bool large = x.numel() > 4096;  // else a copy element by element has done before
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
