// Columns of a packed input, with channels innermost: a lane reads 16 bytes of channels at once.
#pragma once

#include "deform_conv2d/taps.cuh"

namespace svexport {
namespace {

// The work of a block of the kernels below: one tap of 32 output pixels in some offset groups. First, its threads
// locate what every (output pixel, offset group) reads; then `lanes` threads (a power of two) share each of these.
struct Part {
  Geometry g;
  int first, rows, lanes;  // rows: output pixels of the images from `first` on

  __device__ __forceinline__ int tap() const { return blockIdx.y % g.taps; }
  __device__ __forceinline__ int offset_group() const { return blockIdx.y / g.taps * kOffsetGroups; }
  __device__ __forceinline__ int offset_groups() const {
    return min(kOffsetGroups, g.conv.offset_groups - offset_group());
  }

  __device__ __forceinline__ void find(Pixels* pixels, float4* taps, const AnyFloat& offset, const AnyFloat& mask) const {
    for (int i = threadIdx.x; i < kPixels * offset_groups(); i += kThreads) {
      const int row = min(static_cast<int>(blockIdx.x * kPixels) + i % kPixels, rows - 1);
      const Taps p(first * g.out_height * g.out_width + row, offset_group() + i / kPixels, tap(), g);
      const Tap t = p.get(g, offset, mask);
      const Between b = locate(t, g, pixels[i]);
      taps[i] = make_float4(b.x, b.y, t.mask, __int_as_float(p.n));
    }
    __syncthreads();
  }

  // Index in columns of `channel` for output pixel `row`, which lies in image n, and tap().
  __device__ __forceinline__ int64_t column(int row, int n, int channel) const {
    const int group = g.conv.groups == 1 ? 0 : channel / g.per_group;
    const int64_t images = n - first, plane = g.out_height * g.out_width;  // images: of the piece, before image n
    return (((images * (g.conv.groups - 1) + group) * plane + row) * g.taps + tap()) * g.per_group + channel -
           group * g.per_group;
  }
};

// F: type of the input, T or int8.
template <class T, class F>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const F* input, AnyFloat offset, AnyFloat mask, Part part, T* columns) {
  constexpr int V = kVector<T>;
  __shared__ Pixels pixels[kPixels * kOffsetGroups];
  __shared__ float4 taps[kPixels * kOffsetGroups];
  part.find(pixels, taps, offset, mask);
  const Geometry& g = part.g;
#pragma unroll 2
  for (int i = threadIdx.x / part.lanes; i < kPixels * part.offset_groups(); i += kThreads / part.lanes) {
    const int row = blockIdx.x * kPixels + i % kPixels;
    const Pixels at = pixels[i];
    const float4 tap = taps[i];
    const Between b{tap.x, tap.y};
    const F* image = input + __float_as_int(tap.w) * g.image;
    for (int c = threadIdx.x % part.lanes * V; c < g.per_offset_group; c += part.lanes * V) {
      const int channel = (part.offset_group() + i / kPixels) * g.per_offset_group + c;
      const F* const from = image + (sizeof(F) == 1 ? g.channel(channel) : channel);
      Vec<F, V> v[4];
      UNROLL for (int k = 0; k < 4; ++k) v[k] = read_pixel<V>(opaque(from), at.at[k]);
      float sum[V] = {};
      if constexpr (kIntegers<F, T, V>) {
        add_scaled(sum, tap.z / CodeWeights::kOne, {b.factor(0), b.factor(1), b.factor(2), b.factor(3)}, v);
      } else {
        UNROLL for (int k = 0; k < 4; ++k) add_scaled(sum, b.factor(k) * tap.z, v[k]);
      }
      if (row < part.rows) store(columns + part.column(row, __float_as_int(tap.w), channel), rounded<T, V>(sum));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    columns_backward_kernel(T* columns, bool replace, const T* input, AnyFloat offset, AnyFloat mask, Part part,
                            Sums grad_input, AnyFloat grad_offset, AnyFloat grad_mask) {
  constexpr int V = 4;  // 16 bytes of sums, so that a warp's additions go to whole sectors
  __shared__ Pixels pixels[kPixels * kOffsetGroups];
  __shared__ float4 taps[kPixels * kOffsetGroups];
  part.find(pixels, taps, offset, mask);
  const Geometry& g = part.g;
  for (int i0 = 0; i0 < kPixels * part.offset_groups(); i0 += kThreads / part.lanes) {  // the same for a whole warp
    const int i = min(i0 + static_cast<int>(threadIdx.x) / part.lanes, kPixels * part.offset_groups() - 1);
    const int row = blockIdx.x * kPixels + i % kPixels, group = part.offset_group() + i / kPixels;
    const bool real = i == i0 + threadIdx.x / part.lanes && row < part.rows;
    const Pixels at = pixels[i];
    const float4 tap = taps[i];
    const Between b{tap.x, tap.y};
    const int n = __float_as_int(tap.w);
    TapGradients sums;
    for (int c = threadIdx.x % part.lanes * V; c < g.per_offset_group && real; c += part.lanes * V) {
      const int channel = group * g.per_offset_group + c;
      T* const column = columns + part.column(row, n, channel);
      const Vec<T, V> grads = load<T, V>(column);
      Vec<T, V> v[4];
      UNROLL for (int k = 0; k < 4; ++k) v[k] = read_pixel<V>(input + n * g.image + channel, at.at[k]);
      float grad[V], dot[4] = {};
      UNROLL for (int e = 0; e < V; ++e) grad[e] = to_float(grads.at[e]);
      UNROLL for (int k = 0; k < 4; ++k) {
        UNROLL for (int e = 0; e < V; ++e) dot[k] = fmaf(grad[e], to_float(v[k].at[e]), dot[k]);
      }
      sums.add(b, dot);
      if (replace) {
        float sum[V] = {};
        UNROLL for (int k = 0; k < 4; ++k) add_scaled(sum, b.factor(k) * tap.z, v[k]);
        store(column, rounded<T, V>(sum));
      }
      if (!grad_input.data) continue;
      UNROLL for (int k = 0; k < 4; ++k) {
        if (at.at[k] == kOutside) continue;
        float share[V];
        UNROLL for (int e = 0; e < V; ++e) share[e] = b.factor(k) * tap.z * grad[e];
        grad_input.add(n * g.image + static_cast<int64_t>(at.at[k]) * kVector<T> + channel, share);
      }
    }
    for (int step = part.lanes / 2; step; step /= 2) {
      sums.x += __shfl_xor_sync(0xffffffff, sums.x, step);
      sums.y += __shfl_xor_sync(0xffffffff, sums.y, step);
      sums.mask += __shfl_xor_sync(0xffffffff, sums.mask, step);
    }
    if (!real || threadIdx.x % part.lanes != 0) continue;
    const int pixel = row - (n - part.first) * g.out_height * g.out_width;
    sums.write(grad_offset, grad_mask, g, n, group, part.tap(), pixel, tap.z);
  }
}

// The work of a packed input for threads with v channels each.
Part part_of(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv, const Piece& piece,
             int v) {
  const bool int8 = input.dtype == DType::kInt8;
  const int y = int8 ? 2 : 1;  // axis
  Part part{geometry(input, offset, mask, conv, piece, int8 ? conv.channels : input.sizes[3]),
            static_cast<int>(piece.first), static_cast<int>(piece.images * piece.rows * offset.sizes[3]), 1};
  part.g.height = static_cast<unsigned>(input.sizes[y]);
  part.g.width = static_cast<unsigned>(input.sizes[y + 1]);
  part.g.row = static_cast<unsigned>(input.strides[y] * input.item_size() / 16);
  part.g.column = static_cast<unsigned>(input.strides[y + 1] * input.item_size() / 16);
  while (part.lanes < 32 && part.lanes * v < part.g.per_offset_group) part.lanes *= 2;
  return part;
}

}  // namespace
}  // namespace svexport
