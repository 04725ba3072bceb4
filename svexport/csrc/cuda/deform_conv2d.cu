#include "deform_conv2d.h"

#include "accumulate.cuh"

namespace svexport {
namespace {

struct Geometry {
  DeformConv2d conv;
  int channels, height, width, out_height, out_width, taps;
  int64_t input[4], offset[4], mask[4];  // strides
};

// Where a tap of an output pixel reads, and by what it is multiplied.
struct Tap {
  float x, y, mask;
};

struct OutputPixel {
  int64_t n;
  int row, column;

  __device__ OutputPixel(int64_t pixel, const Geometry& g)
      : n(pixel / g.out_width / g.out_height),
        row(static_cast<int>(pixel / g.out_width % g.out_height)),
        column(static_cast<int>(pixel % g.out_width)) {}

  __device__ int64_t in(const int64_t (&strides)[4], int channel) const {
    return n * strides[0] + channel * strides[1] + row * strides[2] + column * strides[3];
  }
};

__device__ __forceinline__ Tap find_tap(const OutputPixel& p, int offset_group, int tap, const Geometry& g,
                                        const AnyFloat& offset, const AnyFloat& mask) {
  const int number = offset_group * g.taps + tap, i = tap / g.conv.kernel[1], j = tap % g.conv.kernel[1];
  return {offset.get(p.in(g.offset, 2 * number + 1)) +
              static_cast<float>(j * g.conv.dilation[1] + p.column * g.conv.stride[1] - g.conv.padding[1]),
          offset.get(p.in(g.offset, 2 * number)) +
              static_cast<float>(i * g.conv.dilation[0] + p.row * g.conv.stride[0] - g.conv.padding[0]),
          mask.data ? mask.get(p.in(g.mask, number)) : 1.0f};
}

// The four pixels around a tap: top left, top right, bottom left, bottom right.
struct Pixels {
  int64_t at[4];  // offset in the image, -1 outside of it
  float x, y;     // where the tap lies between them; 0 if none of them is inside

  __device__ Pixels(const Tap& tap, const Geometry& g) {
    const float left = floorf(tap.x), top = floorf(tap.y);
    const float wide = static_cast<float>(g.width), high = static_cast<float>(g.height);
    const bool near = left >= -1 && left < wide && top >= -1 && top < high;
    x = near ? tap.x - left : 0;
    y = near ? tap.y - top : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float column = left + static_cast<float>(i % 2), row = top + static_cast<float>(i / 2);
      const bool inside = near && column >= 0 && column < wide && row >= 0 && row < high;
      at[i] = inside ? static_cast<int>(row) * g.input[2] + static_cast<int>(column) * g.input[3] : -1;
    }
  }

  __device__ float factor(int i) const { return (i / 2 ? y : 1 - y) * (i % 2 ? x : 1 - x); }
};

template <class T, int V>
__device__ __forceinline__ Vec<T, V> load_or_zero(const T* p, bool inside) {
  Vec<T, V> v;
#pragma unroll
  for (int i = 0; i < V; ++i) v.at[i] = from_float<T>(0.0f);
  return inside ? load<T, V>(p) : v;
}

// V channels of a tap of an output pixel to a thread.
template <class T, int V>
__global__ void columns_kernel(const T* input, AnyFloat offset, AnyFloat mask, Geometry g, int64_t first, int64_t rows,
                               T* columns) {
  const int vectors = g.channels / V;
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= rows * g.taps * vectors) return;
  const int channel = static_cast<int>(i % vectors) * V, tap = static_cast<int>(i / vectors % g.taps);
  const int64_t row = i / vectors / g.taps;
  const OutputPixel p(first + row, g);
  const Tap t = find_tap(p, channel / (g.channels / g.conv.offset_groups), tap, g, offset, mask);
  const Pixels pixels(t, g);
  const T* image = input + p.n * g.input[0] + channel;
  Vec<T, V> v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = load_or_zero<T, V>(image + pixels.at[j], pixels.at[j] >= 0);
  float sum[V] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) add_scaled(sum, pixels.factor(j), v[j]);
#pragma unroll
  for (int c = 0; c < V; ++c) sum[c] *= t.mask;
  const int per_group = g.channels / g.conv.groups;
  store(columns + ((channel / per_group * rows + row) * g.taps + tap) * per_group + channel % per_group,
        rounded<T, V>(sum));
}

// G lanes (a power of two) for a tap of an output pixel in an offset group, V channels each at a time.
template <class T, int V>
__global__ void columns_backward_kernel(const T* grad_columns, const T* input, AnyFloat offset, AnyFloat mask,
                                        Geometry g, int64_t first, int64_t rows, Sums grad_input, AnyFloat grad_offset,
                                        AnyFloat grad_mask, int lanes) {
  const int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / lanes;
  const int lane = threadIdx.x % lanes;
  const bool real = i < rows * g.taps * g.conv.offset_groups;
  const int tap = real ? static_cast<int>(i % g.taps) : 0;
  const int group = real ? static_cast<int>(i / g.taps % g.conv.offset_groups) : 0;
  const int64_t row = real ? i / g.taps / g.conv.offset_groups : 0;
  const OutputPixel p(first + row, g);
  const Tap t = find_tap(p, group, tap, g, offset, mask);
  const Pixels pixels(t, g);
  const int count = real ? g.channels / g.conv.offset_groups : 0, per_group = g.channels / g.conv.groups;
  float x = 0, y = 0, m = 0;
  for (int c = lane * V; c < count; c += lanes * V) {
    const int channel = group * count + c;
    const T* image = input + p.n * g.input[0] + channel;
    const Vec<T, V> grads = load<T, V>(
        grad_columns + ((channel / per_group * rows + row) * g.taps + tap) * per_group + channel % per_group);
    Vec<T, V> v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = load_or_zero<T, V>(image + pixels.at[j], pixels.at[j] >= 0);
    float grad[V], dot[4] = {};
#pragma unroll
    for (int k = 0; k < V; ++k) grad[k] = to_float(grads.at[k]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < V; ++k) dot[j] = fmaf(grad[k], to_float(v[j].at[k]), dot[j]);
    }
    x += (1 - pixels.y) * (dot[1] - dot[0]) + pixels.y * (dot[3] - dot[2]);
    y += (1 - pixels.x) * (dot[2] - dot[0]) + pixels.x * (dot[3] - dot[1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) m += pixels.factor(j) * dot[j];
    if (!grad_input.data) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (pixels.at[j] < 0) continue;
      const int64_t pixel = (static_cast<int64_t>(p.n) * g.height + static_cast<int>(floorf(t.y)) + j / 2) * g.width +
                            static_cast<int>(floorf(t.x)) + j % 2;
      const float factor = pixels.factor(j) * t.mask;
      float share[V];
#pragma unroll
      for (int k = 0; k < V; ++k) share[k] = factor * grad[k];
      grad_input.add(pixel * g.channels + channel, share);
    }
  }
  for (int step = lanes / 2; step; step /= 2) {
    x += __shfl_xor_sync(0xffffffff, x, step);
    y += __shfl_xor_sync(0xffffffff, y, step);
    m += __shfl_xor_sync(0xffffffff, m, step);
  }
  if (!real || lane != 0) return;
  const int64_t plane = static_cast<int64_t>(g.out_height) * g.out_width;
  const int64_t number = (p.n * g.conv.offset_groups + group) * g.taps + tap;
  const int64_t at = static_cast<int64_t>(p.row) * g.out_width + p.column;
  if (grad_offset.data) {
    grad_offset.set(2 * number * plane + at, y * t.mask);
    grad_offset.set((2 * number + 1) * plane + at, x * t.mask);
  }
  if (grad_mask.data) grad_mask.set(number * plane + at, m);
}

constexpr int kTile = 32;

// 32 x 32 elements (channel, pixel) to a block of 32 x 8 threads.
template <class In, class Out>
__global__ void to_channels_last_kernel(const In* x, Out* y, int channels, int64_t pixels, int width, int64_t stride_n,
                                        int64_t stride_c, int64_t stride_h, int64_t stride_w) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t first = blockIdx.x * static_cast<int64_t>(kTile), n = blockIdx.z;
  const int channel0 = blockIdx.y * kTile;
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int64_t pixel = first + threadIdx.x;
    if (channel0 + i < channels && pixel < pixels) {
      tile[i][threadIdx.x] = to_float(
          x[n * stride_n + (channel0 + i) * stride_c + pixel / width * stride_h + pixel % width * stride_w]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int channel = channel0 + threadIdx.x;
    if (channel < channels && first + i < pixels) {
      y[(n * pixels + first + i) * channels + channel] = from_float<Out>(tile[threadIdx.x][i]);
    }
  }
}

Geometry geometry(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv) {
  Geometry g{};
  g.conv = conv;
  g.channels = static_cast<int>(input.sizes[1]);
  g.height = static_cast<int>(input.sizes[2]);
  g.width = static_cast<int>(input.sizes[3]);
  g.out_height = static_cast<int>(offset.sizes[2]);
  g.out_width = static_cast<int>(offset.sizes[3]);
  g.taps = conv.kernel[0] * conv.kernel[1];
  for (int i = 0; i < 4; ++i) {
    g.input[i] = input.strides[i];
    g.offset[i] = offset.strides[i];
    g.mask[i] = mask.strides[i];
  }
  return g;
}

// Whether a kernel may read V = 16 bytes of channels at once.
bool vectors(const Tensor& input, const DeformConv2d& conv) {
  const int64_t v = 16 / input.item_size();
  return input.aligned(1, 16) && input.sizes[1] / conv.groups % v == 0 && input.sizes[1] / conv.offset_groups % v == 0;
}

// Calls launch(null pointer to T, V).
template <class F>
cudaError_t dispatch(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv, F&& launch) {
  if ((input.strides[1] != 1 && input.sizes[1] != 1) || !is_float(offset) || (mask.data && !is_float(mask))) {
    return cudaErrorNotSupported;
  }
  return dispatch_float(input.dtype, [&](auto* p) {
    return vectors(input, conv) ? launch(p, std::integral_constant<int, 16 / sizeof(*p)>())
                                : launch(p, std::integral_constant<int, 1>());
  });
}

}  // namespace

cudaError_t to_channels_last(const Tensor& x, const Tensor& y, cudaStream_t stream) {
  if (x.numel() == 0) return cudaSuccess;
  const int64_t pixels = x.sizes[2] * x.sizes[3];
  const dim3 blocks(static_cast<unsigned>(ceil_div<int64_t>(pixels, kTile)),
                    static_cast<unsigned>(ceil_div<int64_t>(x.sizes[1], kTile)), static_cast<unsigned>(x.sizes[0]));
  if (blocks.y > 65535 || x.sizes[0] > 65535) return cudaErrorNotSupported;
  const auto launch = [&](auto* in, auto* out) {
    to_channels_last_kernel<<<blocks, dim3(kTile, 8), 0, stream>>>(
        static_cast<const element_t<decltype(in)>*>(x.data), static_cast<element_t<decltype(out)>*>(y.data),
        static_cast<int>(x.sizes[1]), pixels, static_cast<int>(x.sizes[3]), x.strides[0], x.strides[1], x.strides[2],
        x.strides[3]);
    return cudaGetLastError();
  };
  return dispatch_float(y.dtype, [&](auto* out) {
    if (x.dtype == y.dtype) return launch(out, out);
    return x.dtype == DType::kFloat32 ? launch(static_cast<float*>(nullptr), out) : cudaErrorNotSupported;
  });
}

cudaError_t deform_conv2d_columns(const Tensor& input, const Tensor& offset, const Tensor& mask,
                                  const DeformConv2d& conv, int64_t first, const Tensor& columns, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  return dispatch(input, offset, mask, conv, [&](auto* p, auto v) {
    using T = element_t<decltype(p)>;
    const int64_t blocks = ceil_div<int64_t>(columns.numel() / v.value, 256);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    columns_kernel<T, v.value><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
        static_cast<const T*>(input.data), AnyFloat(offset), AnyFloat(mask), geometry(input, offset, mask, conv), first,
        columns.sizes[1], static_cast<T*>(columns.data));
    return cudaGetLastError();
  });
}

cudaError_t deform_conv2d_columns_backward(const Tensor& grad_columns, const Tensor& input, const Tensor& offset,
                                           const Tensor& mask, const DeformConv2d& conv, int64_t first,
                                           const Tensor& grad_input, const Tensor& scale, const Tensor& grad_offset,
                                           const Tensor& grad_mask, cudaStream_t stream) {
  if (grad_columns.numel() == 0) return cudaSuccess;
  return dispatch(input, offset, mask, conv, [&](auto* p, auto v) {
    using T = element_t<decltype(p)>;
    int lanes = 1;
    while (lanes < 32 && lanes * v.value < input.sizes[1] / conv.offset_groups) lanes *= 2;
    const Geometry g = geometry(input, offset, mask, conv);
    const int64_t rows = grad_columns.sizes[1];
    const int64_t blocks = ceil_div<int64_t>(rows * g.taps * conv.offset_groups, 256 / lanes);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    columns_backward_kernel<T, v.value><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
        static_cast<const T*>(grad_columns.data), static_cast<const T*>(input.data), AnyFloat(offset), AnyFloat(mask), g,
        first, rows, Sums{grad_input.data, static_cast<const float*>(scale.data)}, AnyFloat(grad_offset),
        AnyFloat(grad_mask), lanes);
    return cudaGetLastError();
  });
}

}  // namespace svexport
