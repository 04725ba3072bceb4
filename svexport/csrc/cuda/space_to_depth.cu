#include "space_to_depth.h"

#include <algorithm>

#include "device.cuh"
#include "permute.h"

namespace svexport {
namespace {

struct Strides {
  int64_t n, c, h;
};

// A thread takes 2 * N pixels of a row apart, or puts them together: the even ones and the odd ones of its columns.
template <class T, int N, bool kInverse>
__global__ void __launch_bounds__(256) rows_kernel(T* image, Strides image_strides, T* depth, Strides depth_strides,
                                                   uint32_t count, int channels, Divider vectors, Divider height,
                                                   Divider c) {
  uint32_t i = blockIdx.x * 256u + threadIdx.x;
  if (i >= count) return;
  const int64_t x = static_cast<int64_t>(vectors.split(i)) * N;
  const int64_t row = height.split(i);
  const int64_t channel = c.split(i);
  const int64_t n = i;
  image += n * image_strides.n + channel * image_strides.c + row * image_strides.h + 2 * x;
  depth += n * depth_strides.n + (row % 2 * channels + channel) * depth_strides.c + row / 2 * depth_strides.h + x;
  T* odd_depth = depth + 2 * channels * depth_strides.c;
  Vec<T, N> first, second, even, odd;
  if constexpr (kInverse) {
    even = load<T, N>(depth);
    odd = load<T, N>(odd_depth);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      (2 * k < N ? first : second).at[2 * k % N] = even.at[k];
      (2 * k + 1 < N ? first : second).at[(2 * k + 1) % N] = odd.at[k];
    }
    store<T, N>(image, first);
    store<T, N>(image + N, second);
  } else {
    first = load<T, N>(image);
    second = load<T, N>(image + N);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      even.at[k] = (2 * k < N ? first : second).at[2 * k % N];
      odd.at[k] = (2 * k + 1 < N ? first : second).at[(2 * k + 1) % N];
    }
    store<T, N>(depth, even);
    store<T, N>(odd_depth, odd);
  }
}

// (N, C, H, W) as (N, 2, 2, C, H/2, W/2), the column in the block before the row.
Tensor blocks_of(const Tensor& image) {
  Tensor view = image;
  view.rank = 6;
  const int64_t *size = image.sizes, *stride = image.strides;
  const int64_t sizes[] = {size[0], 2, 2, size[1], size[2] / 2, size[3] / 2};
  const int64_t strides[] = {stride[0], stride[3], stride[2], stride[1], 2 * stride[2], 2 * stride[3]};
  std::copy(sizes, sizes + 6, view.sizes);
  std::copy(strides, strides + 6, view.strides);
  return view;
}

// (N, 4C, H/2, W/2) as (N, 2, 2, C, H/2, W/2).
Tensor channels_of(const Tensor& depth, int64_t c) {
  Tensor view = depth;
  view.rank = 6;
  const int64_t *size = depth.sizes, *stride = depth.strides;
  const int64_t sizes[] = {size[0], 2, 2, c, size[2], size[3]};
  const int64_t strides[] = {stride[0], 2 * c * stride[1], c * stride[1], stride[1], stride[2], stride[3]};
  std::copy(sizes, sizes + 6, view.sizes);
  std::copy(strides, strides + 6, view.strides);
  return view;
}

template <class T, int N, bool kInverse>
cudaError_t launch_rows(const Tensor& image, const Tensor& depth, cudaStream_t stream) {
  auto strides = [](const Tensor& t) { return Strides{t.strides[0], t.strides[1], t.strides[2]}; };
  const int64_t vectors = depth.sizes[3] / N, count = image.numel() / (2 * N);
  if (count > INT32_MAX) return cudaErrorNotSupported;
  rows_kernel<T, N, kInverse><<<static_cast<int>(ceil_div<int64_t>(count, 256)), 256, 0, stream>>>(
      static_cast<T*>(image.data), strides(image), static_cast<T*>(depth.data), strides(depth),
      static_cast<uint32_t>(count), static_cast<int>(image.sizes[1]), Divider(vectors), Divider(image.sizes[2]),
      Divider(image.sizes[1]));
  return cudaGetLastError();
}

template <bool kInverse>
cudaError_t run(const Tensor& image, const Tensor& depth, cudaStream_t stream) {
  if (image.numel() == 0) return cudaSuccess;
  const int64_t size = image.item_size();
  auto rows = [&](int64_t bytes) {  // of one access
    return depth.sizes[3] * size % bytes == 0 && image.aligned(3, bytes) && depth.aligned(3, bytes);
  };
  cudaError_t status = cudaErrorNotSupported;
  if (rows(16)) {
    switch (size) {
      case 1: status = launch_rows<int8_t, 16, kInverse>(image, depth, stream); break;
      case 2: status = launch_rows<int16_t, 8, kInverse>(image, depth, stream); break;
      case 4: status = launch_rows<int32_t, 4, kInverse>(image, depth, stream); break;
      default: status = launch_rows<int64_t, 2, kInverse>(image, depth, stream);
    }
  } else if (rows(4)) {
    switch (size) {
      case 1: status = launch_rows<int8_t, 4, kInverse>(image, depth, stream); break;
      case 2: status = launch_rows<int16_t, 2, kInverse>(image, depth, stream); break;
      case 4: status = launch_rows<int32_t, 1, kInverse>(image, depth, stream); break;
      default: break;
    }
  }
  if (status != cudaErrorNotSupported) return status;
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
