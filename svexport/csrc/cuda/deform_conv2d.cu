// A matrix product whose one factor is what the taps read: columns, made for as many images at a time as fit into memory
// of a bounded size.
#include "deform_conv2d.h"

#include <algorithm>
#include <numeric>

#include "accumulate.cuh"
#include "matmul.h"
#include "permute.h"

namespace svexport {
namespace {

struct Geometry {
  DeformConv2d conv;
  unsigned height, width;
  int out_height, out_width, taps;
  Divider lines, images;  // of output pixels, of lines
  int channels, per_group, per_offset_group;  // of the input, packed or not
  int64_t image;                              // strides of the input: this in elements
  unsigned row, column;                       // these in the unit of Pixels
  int64_t offset[4], mask[4];                 // strides
};

// Where a tap of an output pixel reads, and by what it is multiplied.
struct Tap {
  float x, y, mask;
};

// A tap of an output pixel in one offset group after another.
struct Taps {
  int n;  // image
  int64_t offset, mask, next_offset, next_mask;  // where its numbers are; how much further those of the next group are
  float x, y;                                    // where it would read without an offset

  __device__ __forceinline__ Taps(int pixel, int offset_group, int tap, const Geometry& g) {
    uint32_t rest = pixel;
    const int column = static_cast<int>(g.lines.split(rest)), row = static_cast<int>(g.images.split(rest));
    n = static_cast<int>(rest);
    next_offset = 2 * g.taps * g.offset[1];
    next_mask = g.taps * g.mask[1];
    offset = n * g.offset[0] + row * g.offset[2] + column * g.offset[3];
    offset += offset_group * next_offset + 2 * tap * g.offset[1];
    mask = n * g.mask[0] + row * g.mask[2] + column * g.mask[3];
    mask += offset_group * next_mask + tap * g.mask[1];
    const int i = tap / g.conv.kernel[1], j = tap - i * g.conv.kernel[1];
    x = static_cast<float>(j * g.conv.dilation[1] + column * g.conv.stride[1] - g.conv.padding[1]);
    y = static_cast<float>(i * g.conv.dilation[0] + row * g.conv.stride[0] - g.conv.padding[0]);
  }

  __device__ __forceinline__ void next(bool moves) {
    offset += moves ? next_offset : 0;
    mask += moves ? next_mask : 0;
  }
  __device__ __forceinline__ Tap get(const Geometry& g, const AnyFloat& offsets, const AnyFloat& masks) const {
    const float dy = offsets.get(offset), dx = offsets.get(offset + g.offset[1]), factor = masks.get(mask, masks.data);
    return {dx + x, dy + y, masks.data ? factor : 1.0f};
  }
};

constexpr unsigned kOutside = ~0u;

// The four pixels around a tap: top left, top right, bottom left, bottom right.
struct alignas(16) Pixels {
  unsigned at[4];  // from the first pixel of the image, in vectors of 16 bytes, or in elements of planes; kOutside of it
};

// Where the tap lies between them; 0 if none of them is inside.
struct Between {
  float x, y;
  __device__ __forceinline__ float factor(int i) const { return (i / 2 ? y : 1 - y) * (i % 2 ? x : 1 - x); }
};

__device__ __forceinline__ Between locate(const Tap& tap, const Geometry& g, Pixels& pixels) {
  const float left = floorf(tap.x), top = floorf(tap.y);
  const float wide = static_cast<float>(g.width), high = static_cast<float>(g.height);
  const bool near = left >= -1 && left < wide && top >= -1 && top < high;
  // Unsigned, so that what is before the first pixel is past the last one too.
  const unsigned column = near ? static_cast<int>(left) : -2, row = static_cast<int>(top);
  const unsigned first = row * g.row + column * g.column;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    const bool inside = column + i % 2 < g.width && row + i / 2 < g.height;
    pixels.at[i] = inside ? first + i / 2 * g.row + i % 2 * g.column : kOutside;
  }
  return near ? Between{tap.x - left, tap.y - top} : Between{0, 0};
}

// 16 bytes of elements.
template <class T>
constexpr int kVector = 16 / sizeof(T);
template <class T>
using Vector = Vec<T, kVector<T>>;

// The compiler computes addresses from one that it does not see through in one instruction, not in four.
template <class T>
__device__ __forceinline__ const T* opaque(const T* p) {
  asm("" : "+l"(p));
  return p;
}

// p + 16 * vectors bytes
template <class T>
__device__ __forceinline__ const T* past(const T* p, unsigned vectors) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(p) + static_cast<uint64_t>(vectors) * 16);
}

// V channels of a pixel of an image, or zeros; `image` points at them in its first pixel.
template <int V, class T>
__device__ __forceinline__ Vec<T, V> read_pixel(const T* image, unsigned pixel, bool real = true) {
  return load_if<T, V>(past(image, pixel), real && pixel != kOutside);
}

constexpr int kPixels = 32;       // output pixels of a block
constexpr int kThreads = 256;     // of a block
constexpr int kOffsetGroups = 8;  // at most, of a block

// What a block of the kernels below works on: one tap of 32 output pixels in some offset groups. First its threads find
// what every (output pixel, offset group) reads, then `lanes` threads (a power of two) take one of them each.
struct Part {
  Geometry g;
  int first, rows, lanes;  // rows: output pixels, of images from `first` on

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

  // Of 16 bytes of channels in the columns of row, which is in image n, and tap().
  __device__ __forceinline__ int64_t column(int row, int n, int channel) const {
    const int group = g.conv.groups == 1 ? 0 : channel / g.per_group;
    const int64_t images = n - first, plane = g.out_height * g.out_width;  // before this one
    return (((images * (g.conv.groups - 1) + group) * plane + row) * g.taps + tap()) * g.per_group + channel -
           group * g.per_group;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const T* input, AnyFloat offset, AnyFloat mask, Part part, T* columns) {
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
    const T* image = input + __float_as_int(tap.w) * g.image;
    for (int c = threadIdx.x % part.lanes * V; c < g.per_offset_group; c += part.lanes * V) {
      const int channel = (part.offset_group() + i / kPixels) * g.per_offset_group + c;
      Vector<T> v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = read_pixel<V>(opaque(image + channel), at.at[k]);
      float sum[V] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) add_scaled(sum, b.factor(k) * tap.z, v[k]);
      if (row < part.rows) store(columns + part.column(row, __float_as_int(tap.w), channel), rounded<T, V>(sum));
    }
  }
}

// Planes of pixels, of which a thread reads one tap of one output pixel in some channels of an offset group.
template <class T>
struct Planes {
  const T* input;
  int64_t channel;  // stride
  AnyFloat offset, mask;
  Geometry g;
  int first, rows;  // rows: output pixels, of images from `first` on
  T* columns;
  int64_t pitch;  // between its rows

  __device__ __forceinline__ int row() const { return blockIdx.x * kThreads + threadIdx.x; }
  __device__ __forceinline__ int tap() const { return blockIdx.y; }
  __device__ __forceinline__ int plane() const { return g.out_height * g.out_width; }
  __device__ __forceinline__ Taps taps(int offset_group) const {
    return Taps(first * plane() + row(), offset_group, tap(), g);
  }
  // Of a channel of the input; the next channel's is g.taps * pitch further.
  __device__ __forceinline__ T* column(int n, int channel) const {
    return columns + (static_cast<int64_t>((n - first) * g.channels + channel) * g.taps + tap()) * pitch + row() -
           (n - first) * plane();
  }
};

// Up to kChannels channels of a thread, of one offset group or, kEach, each one of its own.
template <class T, int kChannels, bool kEach>
__global__ void __launch_bounds__(kThreads) planes_kernel(const __grid_constant__ Planes<T> a) {
  constexpr int kGroups = kEach ? kChannels : 1;
  const Geometry& g = a.g;
  if (a.row() >= a.rows) return;
  const int whole = kEach ? g.channels : g.per_offset_group;  // of which the thread's are a part
  const int chunks = ceil_div(whole, kChannels), group = kEach ? blockIdx.z * kChannels : blockIdx.z / chunks;
  const int channel = kEach ? group : group * whole + blockIdx.z % chunks * kChannels;
  const int count = min(kChannels, (kEach ? whole : (group + 1) * whole) - channel);
  Taps p = a.taps(group);
  float mask[kGroups];
  Pixels pixels[kGroups];
  Between b[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const Tap t = p.get(g, a.offset, a.mask);
    mask[i] = t.mask;
    b[i] = locate(t, g, pixels[i]);
    p.next(i + 1 < count);
  }
  const T* const from = a.input + p.n * g.image + channel * a.channel;
  Vec<T, 1> v[kChannels][4];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned at = pixels[c % kGroups].at[k];
      v[c][k] = load_if<T, 1>(from + c * a.channel + at, c < count && at != kOutside);
    }
  }
  T* const to = a.column(p.n, channel);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    float sum[1] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) add_scaled(sum, b[c % kGroups].factor(k) * mask[c % kGroups], v[c][k]);
    if (c < count) to[c * g.taps * a.pitch] = from_float<T>(sum[0]);
  }
  // The product reads whole 16 bytes: zeros behind the last pixel.
  const int place = a.row() - (p.n - a.first) * a.plane();
  if (place + 1 < a.plane()) return;
  for (int c = 0; c < count; ++c) {
    for (int64_t k = 1; k < a.pitch - place; ++k) to[c * g.taps * a.pitch + k] = from_float<T>(0.0f);
  }
}

// The gradients of what a tap reads, and of where: those of all channels of an offset group come together in a thread.
struct TapGradients {
  float x = 0, y = 0, mask = 0;

  // dot: of a pixel's channels and of the gradients of what is read there.
  __device__ __forceinline__ void add(const Between& b, const float (&dot)[4]) {
    x += (1 - b.y) * (dot[1] - dot[0]) + b.y * (dot[3] - dot[2]);
    y += (1 - b.x) * (dot[2] - dot[0]) + b.x * (dot[3] - dot[1]);
#pragma unroll
    for (int k = 0; k < 4; ++k) mask += b.factor(k) * dot[k];
  }
  // p: the place of the output pixel in its image.
  __device__ __forceinline__ void write(const AnyFloat& grad_offset, const AnyFloat& grad_mask, const Geometry& g, int n,
                                        int group, int tap, int p, float factor) const {
    const int64_t number = (static_cast<int64_t>(n) * g.conv.offset_groups + group) * g.taps + tap;
    const int64_t plane = g.out_height * g.out_width;
    if (grad_offset.data) {
      grad_offset.set(2 * number * plane + p, y * factor);
      grad_offset.set((2 * number + 1) * plane + p, x * factor);
    }
    if (grad_mask.data) grad_mask.set(number * plane + p, mask);
  }
};

// grad_input: (N, C, H, W), contiguous as the input. A thread takes an offset group.
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
  int64_t at = p.n * g.image + channel * a.channel;
  TapGradients sums;
#pragma unroll 2
  for (int c = 0; c < g.per_offset_group; ++c, at += a.channel, column += g.taps * a.pitch) {
    const float grad = to_float(*column);
    Vec<T, 1> v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = load_if<T, 1>(a.input + at + pixels.at[k], pixels.at[k] != kOutside);
    float dot[4], sum[1] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      dot[k] = grad * to_float(v[k].at[0]);
      add_scaled(sum, b.factor(k) * t.mask, v[k]);
    }
    sums.add(b, dot);
    if (replace) *column = from_float<T>(sum[0]);
    if (!grad_input.data) continue;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float share[1] = {b.factor(k) * t.mask * grad};
      if (pixels.at[k] != kOutside) grad_input.add(at + pixels.at[k], share);
    }
  }
  sums.write(grad_offset, grad_mask, g, p.n, group, a.tap(), a.row() - (p.n - a.first) * a.plane(), t.mask);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    columns_backward_kernel(T* columns, bool replace, const T* input, AnyFloat offset, AnyFloat mask, Part part,
                            Sums grad_input, AnyFloat grad_offset, AnyFloat grad_mask) {
  constexpr int V = 4;  // 16 bytes of sums, so that the additions of a warp are to whole sectors of memory
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
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = read_pixel<V>(input + n * g.image + channel, at.at[k]);
      float grad[V], dot[4] = {};
#pragma unroll
      for (int e = 0; e < V; ++e) grad[e] = to_float(grads.at[e]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int e = 0; e < V; ++e) dot[k] = fmaf(grad[e], to_float(v[k].at[e]), dot[k]);
      }
      sums.add(b, dot);
      if (replace) {
        float sum[V] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k) add_scaled(sum, b.factor(k) * tap.z, v[k]);
        store(column, rounded<T, V>(sum));
      }
      if (!grad_input.data) continue;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (at.at[k] == kOutside) continue;
        float share[V];
#pragma unroll
        for (int e = 0; e < V; ++e) share[e] = b.factor(k) * tap.z * grad[e];
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

constexpr int64_t kColumnsBytes = 128 << 20;  // of columns at a time
constexpr int64_t kFewTaps = 8 << 20;  // times channels
constexpr int kTile = 32;

struct Packing {
  int64_t images, pixels;
  int channels, packed_channels, run;
  Divider packed_run, width, across, down;  // tiles
  int64_t strides[4];                       // of what is not packed

  // The channel that a packed one is, or -1.
  __device__ int channel(uint32_t packed) const {
    const int i = static_cast<int>(packed_run.split(packed));
    return i < run ? static_cast<int>(packed) * run + i : -1;
  }
};

// 32 x 32 elements (channel, pixel) to a block of 32 x 8 threads.
template <class T>
__global__ void pack_kernel(const T* x, T* y, const __grid_constant__ Packing p) {
  __shared__ T tile[kTile][kTile + 1];
  uint32_t n = blockIdx.x;
  const int channel0 = static_cast<int>(p.across.split(n)) * kTile, pixel0 = static_cast<int>(p.down.split(n)) * kTile;
  uint32_t row = pixel0 + threadIdx.x;
  const bool real = row < p.pixels;
  const int64_t column = p.width.split(row);
  x += n * p.strides[0] + row * p.strides[2] + column * p.strides[3];
#pragma unroll
  for (int i = 0; i < kTile; i += 8) {
    const int packed = channel0 + static_cast<int>(threadIdx.y) + i, channel = p.channel(packed);
    const bool there = real && packed < p.packed_channels && channel >= 0;
    tile[threadIdx.y + i][threadIdx.x] = load_if<T, 1>(x + channel * p.strides[1], there).at[0];
  }
  __syncthreads();
  const int channel = channel0 + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kTile; i += 8) {
    const int pixel = pixel0 + static_cast<int>(threadIdx.y) + i;
    if (channel < p.packed_channels && pixel < p.pixels) {
      y[(n * p.pixels + pixel) * p.packed_channels + channel] = tile[threadIdx.x][threadIdx.y + i];
    }
  }
}

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

Packing packing(const Tensor& x, const Tensor& y, const DeformConv2d& conv) {
  Packing p{};
  p.images = x.sizes[0];
  p.pixels = x.sizes[2] * x.sizes[3];
  p.channels = static_cast<int>(x.sizes[1]);
  p.packed_channels = static_cast<int>(y.sizes[3]);
  p.run = run(conv);
  p.packed_run = Divider(p.packed_channels / (p.channels / p.run));
  p.width = Divider(x.sizes[3]);
  p.across = Divider(ceil_div<int64_t>(p.packed_channels, kTile));
  p.down = Divider(ceil_div<int64_t>(p.pixels, kTile));
  for (int i = 0; i < 4; ++i) p.strides[i] = x.strides[i];
  return p;
}

int64_t tiles(const Packing& p) {
  return p.images * p.across.d * p.down.d;
}

Geometry geometry(const Tensor& offset, const Tensor& mask, const DeformConv2d& conv, int64_t channels) {
  Geometry g{};
  g.conv = conv;
  g.channels = static_cast<int>(channels);
  g.per_group = g.channels / conv.groups;
  g.per_offset_group = g.channels / conv.offset_groups;
  g.out_height = static_cast<int>(offset.sizes[2]);
  g.out_width = static_cast<int>(offset.sizes[3]);
  g.taps = conv.kernel[0] * conv.kernel[1];
  g.lines = Divider(g.out_width);
  g.images = Divider(g.out_height);
  for (int i = 0; i < 4; ++i) {
    g.offset[i] = offset.strides[i];
    g.mask[i] = mask.strides[i];
  }
  return g;
}

// Of so many images from `first` on, for threads of v channels each. input: packed.
Part part_of(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv, int64_t first,
             int64_t images, int v) {
  Part part{geometry(offset, mask, conv, input.sizes[3]), static_cast<int>(first),
            static_cast<int>(images * offset.sizes[2] * offset.sizes[3]), 1};
  part.g.height = static_cast<unsigned>(input.sizes[1]);
  part.g.width = static_cast<unsigned>(input.sizes[2]);
  part.g.image = input.sizes[1] * input.sizes[2] * input.sizes[3];
  part.g.column = static_cast<unsigned>(input.sizes[3] * input.item_size() / 16);
  part.g.row = part.g.column * part.g.width;
  while (part.lanes < 32 && part.lanes * v < part.g.per_offset_group) part.lanes *= 2;
  return part;
}

dim3 blocks_of(const Part& part) {
  return dim3(ceil_div(part.rows, kPixels), part.g.taps * ceil_div(part.g.conv.offset_groups, kOffsetGroups));
}

template <class T>
Planes<T> planes_of(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv,
                    int64_t first, const Tensor& columns) {
  Planes<T> planes{static_cast<const T*>(input.data), input.strides[1], AnyFloat(offset), AnyFloat(mask),
                   geometry(offset, mask, conv, conv.channels), static_cast<int>(first),
                   static_cast<int>(columns.sizes[0] / conv.groups * columns.sizes[2]),
                   static_cast<T*>(columns.data), columns.strides[1]};
  planes.g.height = static_cast<unsigned>(input.sizes[2]);
  planes.g.width = static_cast<unsigned>(input.sizes[3]);
  planes.g.image = input.strides[0];
  planes.g.row = static_cast<unsigned>(input.strides[2]);
  planes.g.column = static_cast<unsigned>(input.strides[3]);
  return planes;
}

template <class T>
dim3 blocks_of(const Planes<T>& planes, int z) {
  return dim3(ceil_div(planes.rows, kThreads), planes.g.taps, z);
}

int64_t padded(int64_t size, int64_t multiple) { return ceil_div(size, multiple) * multiple; }

// What the forward takes from its workspace, in this order.
struct Plan {
  bool planes;           // what is read is not packed
  Tensor input, weight;  // as they are used, without data if they must be copied; weight: (groups, O/groups, K)
  Tensor columns;        // of one image, without data: (groups, oH*oW, K), from planes (groups, K, oH*oW)
  int64_t images;        // at a time
  size_t bytes[4];       // of copies of input and weight, of columns, for matmul

  Plan(const Tensor& x, const Tensor& offset, const Tensor& w, const DeformConv2d& conv)
      : planes(!is_worth_packing(x, offset, conv)), input(x), weight(w), columns(x), bytes{} {
    const int64_t plane = offset.sizes[2] * offset.sizes[3], groups = conv.groups, size = x.item_size();
    if (planes) {
      if (!w.contiguous()) weight.data = nullptr;
    } else {
      if (!is_packed(x, conv, &input)) input.data = nullptr;
      if (!is_packed(w, conv, &weight)) weight.data = nullptr;
    }
    const int64_t outputs = weight.sizes[0], k = weight.numel() / std::max<int64_t>(outputs, 1);
    weight = shaped(weight, groups, outputs / groups, k);
    columns = planes ? shaped(columns, groups, k, padded(plane, 8)) : shaped(columns, groups, plane, k);
    columns.data = nullptr;
    if (planes) columns.sizes[2] = plane;
    const int64_t image = groups * columns.strides[0] * size;
    images = std::min(std::max<int64_t>(kColumnsBytes / std::max<int64_t>(image, 1), 1), x.sizes[0]);
    if (!input.data) bytes[0] = padded(input.numel() * size, 256);
    if (!weight.data) bytes[1] = padded(weight.numel() * size, 256);
    bytes[2] = padded(std::min(x.sizes[0] * image, std::max<int64_t>(kColumnsBytes, image)), 256);
    bytes[3] = matmul_workspace();
  }

  // Contiguous, with the data and the type of t.
  static Tensor shaped(const Tensor& t, int64_t x, int64_t y, int64_t z) {
    Tensor result;
    result.data = t.data;
    result.dtype = t.dtype;
    result.rank = 3;
    const int64_t sizes[] = {x, y, z}, strides[] = {y * z, z, 1};
    std::copy(sizes, sizes + 3, result.sizes);
    std::copy(strides, strides + 3, result.strides);
    return result;
  }
};

}  // namespace

Tensor packed(const Tensor& x, const DeformConv2d& conv) {
  Tensor y;
  y.dtype = x.dtype;
  y.rank = 4;
  const int64_t channels = x.sizes[1] / run(conv) * packed_run(conv, x);
  const int64_t sizes[] = {x.sizes[0], x.sizes[2], x.sizes[3], channels};
  for (int64_t i = 3, stride = 1; i >= 0; stride *= sizes[i--]) {
    y.sizes[i] = sizes[i];
    y.strides[i] = stride;
  }
  return y;
}

bool is_packed(const Tensor& x, const DeformConv2d& conv, Tensor* y) {
  *y = packed(x, conv);
  if (y->sizes[3] != x.sizes[1] || !x.aligned(1, 16)) return false;
  y->data = x.data;
  return (x.sizes[0] <= 1 || x.strides[0] == y->strides[0]) && (x.sizes[2] <= 1 || x.strides[2] == y->strides[1]) &&
         (x.sizes[3] <= 1 || x.strides[3] == y->strides[2]);
}

bool has_short_runs(const Tensor& x, const DeformConv2d& conv) { return run(conv) * x.item_size() < 16; }

bool is_worth_packing(const Tensor& x, const Tensor& offset, const DeformConv2d& conv) {
  if ((x.sizes[2] - 1) * x.strides[2] + (x.sizes[3] - 1) * x.strides[3] >= kOutside) return true;
  Tensor y;
  return !has_short_runs(x, conv) &&
         (is_packed(x, conv, &y) || offset.numel() / (2 * conv.offset_groups) * conv.channels >= kFewTaps);
}

cudaError_t pack(const Tensor& x, const Tensor& y, const DeformConv2d& conv, cudaStream_t stream) {
  if (y.numel() == 0) return cudaSuccess;
  const Packing p = packing(x, y, conv);
  const int64_t blocks = tiles(p);
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  return dispatch_float(x.dtype, [&](auto* t) {
    using T = element_t<decltype(t)>;
    pack_kernel<<<static_cast<unsigned>(blocks), dim3(kTile, 8), 0, stream>>>(static_cast<const T*>(x.data),
                                                                              static_cast<T*>(y.data), p);
    return cudaGetLastError();
  });
}

cudaError_t unpack(const Tensor& y, const Tensor& x, const DeformConv2d& conv, cudaStream_t stream) {
  if (x.numel() == 0) return cudaSuccess;
  const Packing p = packing(x, y, conv);
  const int64_t blocks = tiles(p);
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  return dispatch_float(x.dtype, [&](auto* t) {
    using T = element_t<decltype(t)>;
    unpack_kernel<<<static_cast<unsigned>(blocks), dim3(kTile, 8), 0, stream>>>(static_cast<const float*>(y.data),
                                                                                static_cast<T*>(x.data), p);
    return cudaGetLastError();
  });
}

size_t deform_conv2d_workspace(const Tensor& input, const Tensor& offset, const Tensor& weight,
                               const DeformConv2d& conv) {
  const Plan plan(input, offset, weight, conv);
  return plan.bytes[0] + plan.bytes[1] + plan.bytes[2] + plan.bytes[3];
}

cudaError_t deform_conv2d(const Tensor& input, const Tensor& offset, const Tensor& weight, const Tensor& bias,
                          const Tensor& mask, const Tensor& output, const DeformConv2d& conv, void* workspace,
                          cudaStream_t stream) {
  // The kernels count pixels, and threads of parts of the output pixels, in int.
  if (!is_float(input) || weight.dtype != input.dtype || !is_float(offset) || (mask.data && !is_float(mask)) ||
      (bias.data && !is_float(bias)) || input.sizes[2] * input.sizes[3] > INT32_MAX ||
      offset.sizes[0] * offset.sizes[2] * offset.sizes[3] >= 1 << 30) {
    return cudaErrorNotSupported;
  }
  if (output.numel() == 0) return cudaSuccess;
  Plan plan(input, offset, weight, conv);
  char* rest = static_cast<char*>(workspace);
  cudaError_t status = cudaSuccess;
  if (plan.bytes[0]) {
    plan.input.data = rest;
    status = pack(input, plan.input, conv, stream);
  }
  rest += plan.bytes[0];
  if (plan.bytes[1] && status == cudaSuccess) {
    Tensor copy = packed(weight, conv);
    if (plan.planes) {
      copy = weight;
      for (int64_t i = 3, stride = 1; i >= 0; stride *= copy.sizes[i--]) copy.strides[i] = stride;
    }
    copy.data = plan.weight.data = rest;
    status = plan.planes ? permute(weight, copy, stream) : pack(weight, copy, conv, stream);
  }
  rest += plan.bytes[1];
  plan.columns.data = rest;
  Tensor images = Plan::shaped(output, output.sizes[0], output.sizes[1] / conv.groups, offset.sizes[2] * offset.sizes[3]);
  const int64_t image = conv.groups * images.strides[0] * input.item_size();
  for (int64_t first = 0; first < output.sizes[0] && status == cudaSuccess; first += plan.images) {
    Tensor columns = plan.columns;
    images.sizes[0] = columns.sizes[0] = conv.groups * std::min(plan.images, output.sizes[0] - first);
    images.data = static_cast<char*>(output.data) + first * image;
    status = plan.planes ? deform_conv2d_planes(input, offset, mask, conv, first, columns, stream)
                         : deform_conv2d_columns(plan.input, offset, mask, conv, first, columns, stream);
    if (!plan.planes) {
      std::swap(columns.sizes[1], columns.sizes[2]);
      std::swap(columns.strides[1], columns.strides[2]);
    }
    if (status == cudaSuccess) status = matmul(plan.weight, columns, bias, images, rest + plan.bytes[2], stream);
  }
  return status;
}

cudaError_t deform_conv2d_columns(const Tensor& input, const Tensor& offset, const Tensor& mask,
                                  const DeformConv2d& conv, int64_t first, const Tensor& columns, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Part part = part_of(input, offset, mask, conv, first, columns.sizes[0] / conv.groups, kVector<T>);
    columns_kernel<<<blocks_of(part), kThreads, 0, stream>>>(static_cast<const T*>(input.data), AnyFloat(offset),
                                                             AnyFloat(mask), part, static_cast<T*>(columns.data));
    return cudaGetLastError();
  });
}

cudaError_t deform_conv2d_planes(const Tensor& input, const Tensor& offset, const Tensor& mask,
                                 const DeformConv2d& conv, int64_t first, const Tensor& columns, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Planes<T> planes = planes_of<T>(input, offset, mask, conv, first, columns);
    const int channels = planes.g.per_offset_group;
    const auto with = [&](auto kernel, int z) {
      const dim3 blocks = blocks_of(planes, z);
      if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
      kernel<<<blocks, kThreads, 0, stream>>>(planes);
      return cudaGetLastError();
    };
    if (channels == 1) return with(planes_kernel<T, 4, true>, ceil_div(conv.channels, 4));
    return channels < 8 ? with(planes_kernel<T, 4, false>, conv.offset_groups * ceil_div(channels, 4))
                        : with(planes_kernel<T, 8, false>, conv.offset_groups * ceil_div(channels, 8));
  });
}

cudaError_t deform_conv2d_planes_backward(const Tensor& columns, bool replace, const Tensor& input,
                                          const Tensor& offset, const Tensor& mask, const DeformConv2d& conv,
                                          int64_t first, const Tensor& grad_input, const Tensor& scale,
                                          const Tensor& grad_offset, const Tensor& grad_mask, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Planes<T> planes = planes_of<T>(input, offset, mask, conv, first, columns);
    const dim3 blocks = blocks_of(planes, conv.offset_groups);
    if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
    planes_backward_kernel<<<blocks, kThreads, 0, stream>>>(
        planes, replace, Sums{grad_input.data, static_cast<const float*>(scale.data)}, AnyFloat(grad_offset),
        AnyFloat(grad_mask));
    return cudaGetLastError();
  });
}

cudaError_t deform_conv2d_columns_backward(const Tensor& columns, bool replace, const Tensor& input,
                                           const Tensor& offset, const Tensor& mask, const DeformConv2d& conv,
                                           int64_t first, const Tensor& grad_input, const Tensor& scale,
                                           const Tensor& grad_offset, const Tensor& grad_mask, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Part part = part_of(input, offset, mask, conv, first, columns.sizes[0] / conv.groups, 4);
    columns_backward_kernel<<<blocks_of(part), kThreads, 0, stream>>>(
        static_cast<T*>(columns.data), replace, static_cast<const T*>(input.data), AnyFloat(offset), AnyFloat(mask),
        part, Sums{grad_input.data, static_cast<const float*>(scale.data)}, AnyFloat(grad_offset), AnyFloat(grad_mask));
    return cudaGetLastError();
  });
}

}  // namespace svexport
