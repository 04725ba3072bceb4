// The pixels that a tap of a deformable convolution reads, and the gradients of a tap.
#pragma once

#include "bilinear.cuh"
#include "deform_conv2d/launch.h"
#include "deform_conv2d/tactics.h"

namespace svexport {
namespace {

using namespace deform;

constexpr unsigned kOutside = ~0u;

struct Geometry {
  DeformConv2d conv;
  unsigned height, width;
  int first_row, out_height, out_width, taps;  // rows of the output in this piece, and its width
  Divider lines, images;                       // divide by out_width, by out_height
  int channels, per_group, per_offset_group;  // of the input, packed or not
  int64_t image, block;                       // strides of the input, in elements
  unsigned row, column;                       // strides of the input, in the unit of Pixels
  int shift;                                  // log2 of the adjacent channels of a block
  float scale;                                // value of one step of an int8 input; else 1
  int64_t offset[4], mask[4];                 // strides
  int64_t plane;                              // stride of channels in the gradients of offset and mask

  // Elements from channel 0 of a pixel to channel c.
  __device__ __forceinline__ int64_t channel(int c) const {
    return (c >> shift) * block + (c & ((1u << shift) - 1));
  }
};

// The position that a tap of an output pixel reads, and the factor of what it reads.
struct Tap {
  float x, y, mask;
};

// Reads a tap of an output pixel in one offset group after another.
struct Taps {
  int n;  // image
  int64_t offset, mask, next_offset, next_mask;  // indices of its numbers; distances to those of the next group
  float x, y;                                    // position without an offset

  __device__ __forceinline__ Taps(int pixel, int offset_group, int tap, const Geometry& g) {
    uint32_t rest = pixel;
    const int column = static_cast<int>(g.lines.split(rest)), row = g.first_row + static_cast<int>(g.images.split(rest));
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
    return {dx + x, dy + y, g.scale * (masks.data ? factor : 1.0f)};
  }
};

// The four pixels around a tap: top left, top right, bottom left, bottom right.
struct alignas(16) Pixels {
  unsigned at[4];  // offset in the image, in vectors of 16 bytes, or for planes in elements; kOutside if outside
};

// The fraction by which a tap lies beyond its top left pixel; 0 if no pixel is inside.
struct Between {
  float x, y;
  __device__ __forceinline__ float factor(int i) const { return (i / 2 ? y : 1 - y) * (i % 2 ? x : 1 - x); }
};

__device__ __forceinline__ Between locate(const Tap& tap, const Geometry& g, Pixels& pixels) {
  const float left = floorf(tap.x), top = floorf(tap.y);
  const float wide = static_cast<float>(g.width), high = static_cast<float>(g.height);
  const bool near = left >= -1 && left < wide && top >= -1 && top < high;
  // Unsigned, so that a negative index is larger than any size.
  const unsigned column = near ? static_cast<int>(left) : -2, row = static_cast<int>(top);
  const unsigned first = row * g.row + column * g.column;
  UNROLL for (unsigned i = 0; i < 4; ++i) {
    const bool inside = column + i % 2 < g.width && row + i / 2 < g.height;
    pixels.at[i] = inside ? first + i / 2 * g.row + i % 2 * g.column : kOutside;
  }
  return near ? Between{tap.x - left, tap.y - top} : Between{0, 0};
}

// 16 bytes of elements.
template <class T>
constexpr int kVector = 16 / sizeof(T);

// p + 16 * vectors bytes
template <class T>
__device__ __forceinline__ const T* past(const T* p, unsigned vectors) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(p) + static_cast<uint64_t>(vectors) * 16);
}

// Reads V channels of a pixel, or zeros if it is outside; `image` points at these channels of the first pixel.
template <int V, class T>
__device__ __forceinline__ Vec<T, V> read_pixel(const T* image, unsigned pixel, bool real = true) {
  return load_if<T, V>(past(image, pixel), real && pixel != kOutside);
}

// The gradients of a tap's position and mask. A thread sums them over the channels of an offset group.
struct TapGradients {
  float x = 0, y = 0, mask = 0;

  // dot: for each pixel, the product of its channels and the gradients of what the tap reads.
  __device__ __forceinline__ void add(const Between& b, const float (&dot)[4]) {
    x += (1 - b.y) * (dot[1] - dot[0]) + b.y * (dot[3] - dot[2]);
    y += (1 - b.x) * (dot[2] - dot[0]) + b.x * (dot[3] - dot[1]);
    UNROLL for (int k = 0; k < 4; ++k) mask += b.factor(k) * dot[k];
  }
  // p: index of the output pixel within this piece of its image.
  __device__ __forceinline__ void write(const AnyFloat& grad_offset, const AnyFloat& grad_mask, const Geometry& g, int n,
                                        int group, int tap, int p, float factor) const {
    const int64_t number = (static_cast<int64_t>(n) * g.conv.offset_groups + group) * g.taps + tap;
    p += g.first_row * g.out_width;
    if (grad_offset.data) {
      grad_offset.set(2 * number * g.plane + p, y * factor);
      grad_offset.set((2 * number + 1) * g.plane + p, x * factor);
    }
    if (grad_mask.data) grad_mask.set(number * g.plane + p, mask);
  }
};

// The geometry of a call, without height, width, row and column of the input.
Geometry geometry(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv,
                  const Piece& piece, int64_t channels) {
  Geometry g{};
  g.conv = conv;
  g.channels = static_cast<int>(channels);
  const bool blocks = input.rank == 5;
  g.image = input.strides[0];
  g.block = input.strides[1];
  while (blocks && 1 << g.shift < input.sizes[4]) ++g.shift;
  g.scale = input.dtype == DType::kInt8 ? conv.scale : 1;
  g.per_group = g.channels / conv.groups;
  g.per_offset_group = g.channels / conv.offset_groups;
  g.first_row = static_cast<int>(piece.row);
  g.out_height = static_cast<int>(piece.rows);
  g.out_width = static_cast<int>(offset.sizes[3]);
  g.taps = conv.kernel[0] * conv.kernel[1];
  g.lines = Divider(g.out_width);
  g.images = Divider(g.out_height);
  g.plane = offset.sizes[2] * offset.sizes[3];
  for (int i = 0; i < 4; ++i) {
    g.offset[i] = offset.strides[i];
    g.mask[i] = mask.strides[i];
  }
  return g;
}

}  // namespace
}  // namespace svexport
