// Columns of an input that is not packed, with pixels innermost.
#pragma once

#include "deform_conv2d/taps.cuh"

namespace svexport {
namespace {

// The arguments of the kernels below. A thread computes one tap of one output pixel in some channels of an offset
// group. F: type of the input, T or int8.
template <class T, class F = T>
struct Planes {
  const F* input;
  AnyFloat offset, mask;
  Geometry g;
  int first, rows;  // rows: output pixels of the images from `first` on
  T* columns;
  int64_t pitch;  // stride of the rows of columns, in elements

  __device__ __forceinline__ int row() const { return blockIdx.x * kThreads + threadIdx.x; }
  __device__ __forceinline__ int tap() const { return blockIdx.y; }
  __device__ __forceinline__ int plane() const { return g.out_height * g.out_width; }
  __device__ __forceinline__ Taps taps(int offset_group) const {
    return Taps(first * plane() + row(), offset_group, tap(), g);
  }
  // This thread's element of columns for a channel of image n; that of the next channel is g.taps * pitch further.
  __device__ __forceinline__ T* column(int n, int channel) const {
    return columns + (static_cast<int64_t>((n - first) * g.channels + channel) * g.taps + tap()) * pitch + row() -
           (n - first) * plane();
  }
};

// A thread takes up to kChannels channels of one offset group; with kEach, every channel has its own offset group.
template <class T, class F, int kChannels, bool kEach>
__global__ void __launch_bounds__(kThreads) planes_kernel(const __grid_constant__ Planes<T, F> a) {
  constexpr int kGroups = kEach ? kChannels : 1;
  const Geometry& g = a.g;
  if (a.row() >= a.rows) return;
  const int whole = kEach ? g.channels : g.per_offset_group;  // channels that the blocks divide
  const int chunks = ceil_div(whole, kChannels), group = kEach ? blockIdx.z * kChannels : blockIdx.z / chunks;
  const int channel = kEach ? group : group * whole + blockIdx.z % chunks * kChannels;
  const int count = min(kChannels, (kEach ? whole : (group + 1) * whole) - channel);
  Taps p = a.taps(group);
  float mask[kGroups];
  Pixels pixels[kGroups];
  Between b[kGroups];
  UNROLL for (int i = 0; i < kGroups; ++i) {
    const Tap t = p.get(g, a.offset, a.mask);
    mask[i] = t.mask;
    b[i] = locate(t, g, pixels[i]);
    p.next(i + 1 < count);
  }
  constexpr bool kCodes = sizeof(F) == 1;
  const F* const from = a.input + p.n * g.image + (kCodes ? 0 : channel * g.block);
  Vec<F, 1> v[kChannels][4];
  UNROLL for (int c = 0; c < kChannels; ++c) {
    UNROLL for (int k = 0; k < 4; ++k) {
      const unsigned at = pixels[c % kGroups].at[k];
      v[c][k] = load_if<F, 1>(from + (kCodes ? g.channel(channel + c) : c * g.block) + at, c < count && at != kOutside);
    }
  }
  T* const to = a.column(p.n, channel);
  UNROLL for (int c = 0; c < kChannels; ++c) {
    float sum[1] = {};
    UNROLL for (int k = 0; k < 4; ++k) add_scaled(sum, b[c % kGroups].factor(k) * mask[c % kGroups], v[c][k]);
    if (c < count) to[c * g.taps * a.pitch] = from_float<T>(sum[0]);
  }
  // Writes zeros after the last pixel, because the matrix product reads whole 16 bytes.
  const int place = a.row() - (p.n - a.first) * a.plane();
  if (place + 1 < a.plane()) return;
  for (int c = 0; c < count; ++c) {
    for (int64_t k = 1; k < a.pitch - place; ++k) to[c * g.taps * a.pitch + k] = from_float<T>(0.0f);
  }
}

// grad_input: (N, C, H, W), contiguous, as is the input. A thread takes all channels of an offset group.
template <class T>
__global__ void __launch_bounds__(kThreads)
    planes_backward_kernel(const __grid_constant__ Planes<T> a, bool replace, Sums grad_input, AnyFloat grad_offset,
                           AnyFloat grad_mask) {
  const Geometry& g = a.g;
  if (a.row() >= a.rows) return;
  const int group = blockIdx.z, channel = group * g.per_offset_group;
  const Taps p = a.taps(group);
  const Tap t = p.get(g, a.offset, a.mask);
  Pixels pixels;
  const Between b = locate(t, g, pixels);
  T* column = a.column(p.n, channel);
  int64_t at = p.n * g.image + channel * g.block;
  TapGradients sums;
#pragma unroll 2
  for (int c = 0; c < g.per_offset_group; ++c, at += g.block, column += g.taps * a.pitch) {
    const float grad = to_float(*column);
    Vec<T, 1> v[4];
    UNROLL for (int k = 0; k < 4; ++k) v[k] = load_if<T, 1>(a.input + at + pixels.at[k], pixels.at[k] != kOutside);
    float dot[4], sum[1] = {};
    UNROLL for (int k = 0; k < 4; ++k) {
      dot[k] = grad * to_float(v[k].at[0]);
      add_scaled(sum, b.factor(k) * t.mask, v[k]);
    }
    sums.add(b, dot);
    if (replace) *column = from_float<T>(sum[0]);
    if (!grad_input.data) continue;
    UNROLL for (int k = 0; k < 4; ++k) {
      const float share[1] = {b.factor(k) * t.mask * grad};
      if (pixels.at[k] != kOutside) grad_input.add(at + pixels.at[k], share);
    }
  }
  sums.write(grad_offset, grad_mask, g, p.n, group, a.tap(), a.row() - (p.n - a.first) * a.plane(), t.mask);
}

template <class T, class F = T>
Planes<T, F> planes_of(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv,
                       const Piece& piece, const Tensor& columns) {
  Planes<T, F> planes{static_cast<const F*>(input.data), AnyFloat(offset), AnyFloat(mask),
                      geometry(input, offset, mask, conv, piece, conv.channels), static_cast<int>(piece.first),
                      static_cast<int>(piece.images * piece.rows * offset.sizes[3]),
                      static_cast<T*>(columns.data), columns.strides[1]};
  planes.g.height = static_cast<unsigned>(input.sizes[2]);
  planes.g.width = static_cast<unsigned>(input.sizes[3]);
  planes.g.row = static_cast<unsigned>(input.strides[2]);
  planes.g.column = static_cast<unsigned>(input.strides[3]);
  return planes;
}

}  // namespace
}  // namespace svexport
