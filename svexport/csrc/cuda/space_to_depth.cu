#include "space_to_depth.h"

#include "device.cuh"

namespace svexport {
namespace {

template <class T>
__global__ void space_to_depth_kernel(const T* x, T* output, int64_t count, int c, int h, int w, int64_t sn, int64_t sc,
                                      int64_t sh, int64_t sw) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t x_out = i % w, y_out = i / w % h, channel = i / w / h % (4 * c), n = i / w / h / (4 * c);
    const int64_t block = channel / c;  // 2*j + i: column j, row i of the 2x2 block
    output[i] = x[n * sn + channel % c * sc + (2 * y_out + block % 2) * sh + (2 * x_out + block / 2) * sw];
  }
}

}  // namespace

cudaError_t space_to_depth(const Tensor& x, const Tensor& output, cudaStream_t stream) {
  const int64_t count = output.numel();
  if (count == 0) return cudaSuccess;
  const int blocks = static_cast<int>(ceil_div<int64_t>(count, 256) < 65535 ? ceil_div<int64_t>(count, 256) : 65535);
  auto launch = [&](auto* p) {
    using T = element_t<decltype(p)>;
    space_to_depth_kernel<T><<<blocks, 256, 0, stream>>>(
        static_cast<const T*>(x.data), static_cast<T*>(output.data), count, static_cast<int>(x.sizes[1]),
        static_cast<int>(x.sizes[2] / 2), static_cast<int>(x.sizes[3] / 2), x.strides[0], x.strides[1], x.strides[2],
        x.strides[3]);
    return cudaGetLastError();
  };
  switch (x.item_size()) {
    case 1: return launch(static_cast<int8_t*>(nullptr));
    case 2: return launch(static_cast<int16_t*>(nullptr));
    case 4: return launch(static_cast<int32_t*>(nullptr));
    default: return launch(static_cast<int64_t*>(nullptr));
  }
}

}  // namespace svexport
