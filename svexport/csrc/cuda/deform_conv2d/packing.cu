// Inputs and weights with channels last, in runs of multiples of 16 bytes.
#include <algorithm>
#include <numeric>

#include "deform_conv2d/launch.h"
#include "device.cuh"
#include "permute.h"

namespace svexport {
namespace {

constexpr int kTile = 32;

struct Packing {
  int64_t pixels;
  int channels, packed_channels, run;
  Divider packed_run, across, down;  // tiles

  // The channel that a packed one is, or -1.
  __device__ int channel(uint32_t packed) const {
    const int i = static_cast<int>(packed_run.split(packed));
    return i < run ? static_cast<int>(packed) * run + i : -1;
  }
};

// 32 x 32 elements (channel, pixel) to a block of 32 x 8 threads.
template <class T>
__global__ void unpack_kernel(const float* y, T* x, const __grid_constant__ Packing p) {
  __shared__ float tile[kTile][kTile + 1];
  uint32_t n = blockIdx.x;
  const int channel0 = static_cast<int>(p.across.split(n)) * kTile, pixel0 = static_cast<int>(p.down.split(n)) * kTile;
  const int packed = channel0 + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kTile; i += 8) {
    const int pixel = pixel0 + static_cast<int>(threadIdx.y) + i;
    tile[threadIdx.x][threadIdx.y + i] =
        load_if<float, 1>(y + (n * p.pixels + pixel) * p.packed_channels + packed,
                          packed < p.packed_channels && pixel < p.pixels).at[0];
  }
  __syncthreads();
  const int pixel = pixel0 + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kTile; i += 8) {
    const int channel = p.channel(channel0 + threadIdx.y + i);
    if (channel0 + static_cast<int>(threadIdx.y) + i < p.packed_channels && channel >= 0 && pixel < p.pixels) {
      x[(n * static_cast<int64_t>(p.channels) + channel) * p.pixels + pixel] =
          from_float<T>(tile[threadIdx.y + i][threadIdx.x]);
    }
  }
}

int run(const DeformConv2d& conv) {
  return std::gcd(conv.channels / conv.groups, conv.channels / conv.offset_groups);
}

int packed_run(const DeformConv2d& conv, const Tensor& x) {
  const int v = static_cast<int>(16 / x.item_size());
  return ceil_div(run(conv), v) * v;
}

}  // namespace

Tensor packed(const Tensor& x, const DeformConv2d& conv) {
  const int64_t channels = x.sizes[1] / run(conv) * packed_run(conv, x);
  return row_major(nullptr, x.dtype, {x.sizes[0], x.sizes[2], x.sizes[3], channels});
}

bool is_packed(const Tensor& x, const DeformConv2d& conv, Tensor* y) {
  if (x.dtype == DType::kInt8) {
    *y = x;
    const int channel = x.rank == 5 ? 4 : 1;
    return run(conv) % 16 == 0 && x.sizes[channel] % 16 == 0 && x.aligned(channel, 16);
  }
  *y = packed(x, conv);
  if (y->sizes[3] != x.sizes[1] || !x.aligned(1, 16)) return false;
  y->data = x.data;
  return (x.sizes[0] <= 1 || x.strides[0] == y->strides[0]) && (x.sizes[2] <= 1 || x.strides[2] == y->strides[1]) &&
         (x.sizes[3] <= 1 || x.strides[3] == y->strides[2]);
}

bool has_short_runs(const Tensor& x, const DeformConv2d& conv) { return run(conv) * x.item_size() < 16; }

cudaError_t pack(const Tensor& x, const Tensor& y, const DeformConv2d& conv, cudaStream_t stream) {
  if (y.numel() == 0) return cudaSuccess;
  const int64_t channels = run(conv), padded = packed_run(conv, x);
  if (padded != channels) {
    const cudaError_t status = cudaMemsetAsync(y.data, 0, y.numel() * y.item_size(), stream);
    if (status != cudaSuccess) return status;
  }
  const std::initializer_list<int64_t> sizes = {x.sizes[0], x.sizes[2], x.sizes[3], x.sizes[1] / channels, channels};
  const int64_t* s = x.strides;
  return permute(as_strided(x, sizes, {s[0], s[2], s[3], channels * s[1], s[1]}),
                 as_strided(y, sizes, {y.strides[0], y.strides[1], y.strides[2], padded, 1}), stream);
}

cudaError_t unpack(const Tensor& y, const Tensor& x, const DeformConv2d& conv, cudaStream_t stream) {
  if (x.numel() == 0) return cudaSuccess;
  Packing p{};
  p.pixels = x.sizes[2] * x.sizes[3];
  p.channels = static_cast<int>(x.sizes[1]);
  p.packed_channels = static_cast<int>(y.sizes[3]);
  p.run = run(conv);
  p.packed_run = Divider(p.packed_channels / (p.channels / p.run));
  p.across = Divider(ceil_div<int64_t>(p.packed_channels, kTile));
  p.down = Divider(ceil_div<int64_t>(p.pixels, kTile));
  const int64_t blocks = x.sizes[0] * p.across.d * p.down.d;
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  return dispatch_float(x.dtype, [&](auto* t) {
    using T = element_t<decltype(t)>;
    unpack_kernel<<<static_cast<unsigned>(blocks), dim3(kTile, 8), 0, stream>>>(static_cast<const float*>(y.data),
                                                                                static_cast<T*>(x.data), p);
    return cudaGetLastError();
  });
}

}  // namespace svexport
