// Inputs and weights with channels last, in runs of multiples of 16 bytes.
#include <numeric>

#include "deform_conv2d/launch.h"
#include "device.cuh"
#include "permute.h"

namespace svexport {
namespace {

int run(const DeformConv2d& conv) {
  return std::gcd(conv.channels / conv.groups, conv.channels / conv.offset_groups);
}

int packed_run(const DeformConv2d& conv, const Tensor& x) {
  const int v = static_cast<int>(16 / x.item_size());
  return ceil_div(run(conv), v) * v;
}

// (N, C, H, W) as (N, H, W, runs, channels of a run).
Tensor runs_of(const Tensor& x, const DeformConv2d& conv) {
  const int64_t channels = run(conv), *size = x.sizes, *stride = x.strides;
  return as_strided(x, {size[0], size[2], size[3], size[1] / channels, channels},
                    {stride[0], stride[2], stride[3], channels * stride[1], stride[1]});
}

// The same of what is packed.
Tensor packed_runs_of(const Tensor& y, const DeformConv2d& conv) {
  const int64_t padded = packed_run(conv, y), *size = y.sizes, *stride = y.strides;
  return as_strided(y, {size[0], size[1], size[2], size[3] / padded, run(conv)},
                    {stride[0], stride[1], stride[2], padded, 1});
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
  if (packed_run(conv, x) != run(conv)) {
    const cudaError_t status = cudaMemsetAsync(y.data, 0, y.numel() * y.item_size(), stream);
    if (status != cudaSuccess) return status;
  }
  return permute(runs_of(x, conv), packed_runs_of(y, conv), stream);
}

cudaError_t unpack(const Tensor& y, const Tensor& x, const DeformConv2d& conv, cudaStream_t stream) {
  return permute(packed_runs_of(y, conv), runs_of(x, conv), stream);
}

}  // namespace svexport
