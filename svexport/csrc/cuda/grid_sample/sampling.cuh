// Maps a point's coordinates to pixels and weights of an image, with the arithmetic of svexport/ops/grid_sample.py.
#pragma once

#include "bilinear.cuh"
#include "grid_sample/sampling.h"

namespace svexport {

// The image that is sampled, and the grid of points.
struct Space {
  __host__ __device__ explicit Space(const Tensor& grid) : grid(grid) {}

  int axes;             // 2, or 3
  int size[3] = {};     // pixels along x, y[, z]
  int stride[3] = {};   // between pixels along x, y[, z], in elements
  float slope[3] = {};  // a coordinate means the pixel (coordinate + 1) * slope - shift
  float shift;
  int padding;
  bool align_corners;

  AnyFloat grid;
  int points;          // per image
  int64_t grid_image;  // strides of the grid: between images,
  int64_t grid_coordinate;      // between coordinates of a point,
  int64_t grid_stride[3] = {};  // between points along x, y, z
  bool grid_pairs;              // one access can read both coordinates of a point
  Divider across, down;         // divide by the number of points along x and y

  __host__ __device__ void describe(const Sampling& sampling) {
    padding = sampling.padding;
    align_corners = sampling.align_corners;
    shift = align_corners ? 0.0f : 0.5f;
  }
  __host__ __device__ void describe(int axis, int pixels, int between) {
    size[axis] = pixels;
    stride[axis] = between;
    slope[axis] = 0.5f * static_cast<float>(align_corners ? pixels - 1 : pixels);
  }

  // Fills s from 4-D or 5-D tensors. False if an image is too large for 32-bit offsets, or the mode is unknown.
  static bool of(const Tensor& input, const Tensor& grid, const Sampling& sampling, Space& s) {
    s.axes = input.rank - 2;
    const int modes = s.axes == 2 ? 3 : 2;
    if (sampling.mode < 0 || sampling.mode >= modes) return false;
    s.describe(sampling);
    int64_t extent = 0, points = 1;
    for (int i = 0; i < s.axes; ++i) {
      const int64_t size = input.sizes[input.rank - 1 - i], stride = input.strides[input.rank - 1 - i];
      if (size > INT32_MAX) return false;
      s.describe(i, static_cast<int>(size), static_cast<int>(stride));
      extent += (size - 1) * stride;
      points *= grid.sizes[grid.rank - 2 - i];
      s.grid_stride[i] = grid.strides[grid.rank - 2 - i];
    }
    if (extent >= INT32_MAX || points == 0 || points >= INT32_MAX - 4096) return false;  // blocks round up
    s.points = static_cast<int>(points);
    s.across = Divider(grid.sizes[grid.rank - 2]);
    s.down = Divider(grid.sizes[grid.rank - 3]);
    s.grid_image = grid.strides[0];
    s.grid_coordinate = grid.strides[grid.rank - 1];
    s.grid_pairs = s.axes == 2 && grid.aligned(grid.rank - 1, 2 * grid.item_size());
    return true;
  }
};

// Reads the coordinates x, y[, z] at offsets into the grid, all before the first is used.
template <int AXES, int POINTS>
__device__ __forceinline__ void read_coordinates(const Space& s, const int64_t (&offset)[POINTS],
                                                 float (&x)[POINTS][3]) {
  auto read = [&](auto* data) {
    using G = element_t<decltype(data)>;
    data = static_cast<G*>(s.grid.data);
    if (AXES == 2 && s.grid_pairs) {
      Vec<G, 2> v[POINTS];
      UNROLL for (int k = 0; k < POINTS; ++k) v[k] = load_if<G, 2>(data + offset[k], true);
      UNROLL for (int k = 0; k < POINTS; ++k) x[k][0] = to_float(v[k].at[0]), x[k][1] = to_float(v[k].at[1]);
    } else {
      UNROLL for (int k = 0; k < POINTS; ++k) {
        UNROLL for (int a = 0; a < AXES; ++a) x[k][a] = to_float(data[offset[k] + a * s.grid_coordinate]);
      }
    }
  };
  if (s.grid.dtype == DType::kFloat32) {
    read(static_cast<float*>(nullptr));
  } else if (s.grid.dtype == DType::kFloat16) {
    read(static_cast<__half*>(nullptr));
  } else {
    read(static_cast<__nv_bfloat16*>(nullptr));
  }
}

// Reads the coordinates of points p of image n.
template <int AXES, int POINTS>
__device__ __forceinline__ void coordinates(const Space& s, int n, const int (&p)[POINTS], float (&x)[POINTS][3]) {
  int64_t offset[POINTS];
  UNROLL for (int k = 0; k < POINTS; ++k) {
    uint32_t rest = p[k];
    offset[k] = n * s.grid_image + s.across.split(rest) * s.grid_stride[0];
    if (AXES == 3) offset[k] += s.down.split(rest) * s.grid_stride[1];
    offset[k] += rest * s.grid_stride[AXES - 1];
  }
  read_coordinates<AXES>(s, offset, x);
}

// The pixels along one axis that contribute to a point: 1 (nearest), 2 (linear) or 4 (cubic).
template <int K>
struct Pixels {
  int first;  // K = 2: the lower pixel, also where it is outside
  bool inside[K];
  int index[K];  // -1: outside
  float weight[K];
  float slope[K];  // d(weight)/d(coordinate)
};

// Every operation is rounded as on a CPU (no fused multiply-add), because the last bit decides which pixel is nearest.
__device__ __forceinline__ float reflect(float x, int size, bool align_corners, float& slope) {
  const float edge = align_corners ? 0.0f : 0.5f, period = align_corners ? 2.0f * (size - 1) : 2.0f * size;
  x = __fadd_rn(x, edge);
  if (x < 0) slope = -slope;
  x = fabsf(x);
  x = __fsub_rn(x, __fmul_rn(truncf(__fdiv_rn(x, fmaxf(period, 1.0f))), period));
  const float back = __fsub_rn(period, x);
  if (back < x) slope = -slope;
  return __fsub_rn(fminf(x, back), edge);
}

template <int K>
__device__ __forceinline__ Pixels<K> pixels(float x, int axis, int axes, const Space& s, int padding) {
  const int size = s.size[axis];
  const float last = static_cast<float>(size - 1);
  Pixels<K> result;
  if (K == 2 && padding == kPixels) {
    const bool seen = x >= 0 && x < last;
    const float first = floorf(x);
    result.first = static_cast<int>(first);
    UNROLL for (int i = 0; i < K; ++i) {
      result.inside[i] = seen;
      result.index[i] = seen ? result.first + i : -1;
      result.weight[i] = !seen ? 0.0f : i ? x - first : 1 - (x - first);
      result.slope[i] = !seen ? 0.0f : i ? 1.0f : -1.0f;
    }
    return result;
  }
  float slope = s.slope[axis];
  x = __fsub_rn(__fmul_rn(__fadd_rn(x, 1.0f), slope), s.shift);

  auto clip = [&](float x, float& slope) {  // NaN becomes the first pixel, in 5-D the last
    if (axes == 3) {
      if (!(x < last)) x = last, slope = 0;
      if (!(x > 0)) x = 0, slope = 0;
    } else {
      if (!(x > 0)) x = 0, slope = 0;
      if (!(x < last)) x = last, slope = 0;
    }
    return x;
  };
  auto index = [&](float x) { return x >= 0 && x <= last ? static_cast<int>(x) : -1; };

  if constexpr (K == 4) {
    const float first = floorf(x), t = __fsub_rn(x, first);
    constexpr float a = -0.75f;
    UNROLL for (int i = 0; i < K; ++i) {
      const float d = i == 0 ? t + 1 : i == 1 ? t : i == 2 ? 1 - t : 2 - t;  // distance of the pixel
      const bool far = i == 0 || i == 3;
      result.weight[i] = far ? ((a * d - 5 * a) * d + 8 * a) * d - 4 * a : ((a + 2) * d - (a + 3)) * d * d + 1;
      const float derivative = far ? (3 * a * d - 10 * a) * d + 8 * a : (3 * (a + 2) * d - 2 * (a + 3)) * d;
      result.slope[i] = i < 2 ? slope * derivative : -slope * derivative;
      float pixel = first + static_cast<float>(i - 1), unused = 0;
      if (padding == kReflection) pixel = reflect(pixel, size, s.align_corners, unused);
      if (padding != kZeros) pixel = clip(pixel, unused);
      result.index[i] = index(pixel);
    }
    return result;
  }

  if (padding == kReflection) x = reflect(x, size, s.align_corners, slope);
  if (padding != kZeros) {
    x = clip(x, slope);
  } else if (axes == 3) {  // NaN: outside
    x = x > -2 ? x : -2;
    x = x < size + 1 ? x : size + 1;
  }
  if constexpr (K == 1) {
    result.index[0] = index(rintf(x));
    result.weight[0] = 1;
    result.slope[0] = 0;
  } else {
    const float first = floorf(x), t = __fsub_rn(x, first);
    result.first = __float2int_rd(fmaxf(x, -2.0f));  // NaN: outside
    UNROLL for (int i = 0; i < K; ++i) {
      const uint32_t pixel = static_cast<uint32_t>(result.first) + i;
      result.inside[i] = pixel < static_cast<uint32_t>(size);
      result.index[i] = result.inside[i] ? static_cast<int>(pixel) : -1;
    }
    result.weight[0] = 1 - t;
    result.weight[1] = t;
    result.slope[0] = -slope;
    result.slope[1] = slope;
  }
  return result;
}

// A point: its pixels along every axis. TAPS pixels in all: 1 (nearest), 4 (bilinear), 8 (trilinear) or 16 (bicubic).
template <int TAPS>
struct Point {
  static constexpr int K = TAPS == 1 ? 1 : TAPS == 16 ? 4 : 2;   // pixels along an axis
  static constexpr int AXES = TAPS == 1 || TAPS == 8 ? 3 : 2;  // in 4-D, the third index of a nearest point is always 0
  Pixels<K> axis[AXES];

  // Elements from the first pixel of an image to a tap, given the strides of pixels; -1: outside, where the image is 0.
  __device__ __forceinline__ int offset(int tap, const int (&stride)[3]) const {
    int sum = 0, outside = 0;
    UNROLL for (int a = 0; a < AXES; ++a) {
      const int index = axis[a].index[at(tap, a)];
      sum += index * stride[a];
      outside |= index;
    }
    return outside < 0 ? -1 : sum;
  }

  __device__ __forceinline__ float weight(int tap) const {
    if (TAPS == 1) return 1;
    float product = axis[AXES - 1].weight[at(tap, AXES - 1)];
    UNROLL for (int a = AXES - 2; a >= 0; --a) product *= axis[a].weight[at(tap, a)];
    return product;
  }

  // d(weight)/d(coordinate along `along`)
  __device__ __forceinline__ float slope(int tap, int along) const {
    float product = axis[along].slope[at(tap, along)];
    UNROLL for (int a = 0; a < AXES; ++a) {
      if (a != along) product *= axis[a].weight[at(tap, a)];
    }
    return product;
  }

  static __device__ __forceinline__ constexpr int at(int tap, int a) {
    return a == 0 ? tap % K : a == 1 ? tap / K % K : tap / K / K;
  }
};

constexpr int kAnyPadding = -1;

// PADDING: s.padding as a constant, which saves a third of the instructions; kAnyPadding: s.padding is read.
template <int TAPS, int PADDING = kAnyPadding, int POINTS>
__device__ __forceinline__ void locate(const Space& s, int n, const int (&p)[POINTS], Point<TAPS> (&points)[POINTS]) {
  constexpr int AXES = Point<TAPS>::AXES, K = Point<TAPS>::K;
  const int axes = TAPS == 1 ? s.axes : AXES;
  float x[POINTS][3];
  if (axes == 2) {
    coordinates<2>(s, n, p, x);
  } else {
    coordinates<3>(s, n, p, x);
  }
  UNROLL for (int k = 0; k < POINTS; ++k) {
    UNROLL for (int a = 0; a < AXES; ++a) {
      if (a < axes) {
        points[k].axis[a] = pixels<K>(x[k][a], a, axes, s, PADDING == kAnyPadding ? s.padding : PADDING);
      } else {
        points[k].axis[a].index[0] = 0;
      }
    }
  }
}

template <int TAPS, int PADDING = kAnyPadding>
__device__ __forceinline__ Point<TAPS> locate(const Space& s, int n, int p) {
  Point<TAPS> points[1];
  locate<TAPS, PADDING>(s, n, {p}, points);
  return points[0];
}

// The offsets (-1: outside) and weights of a point's pixels.
template <int TAPS>
struct Taps {
  int offset[TAPS];
  float weight[TAPS];

  Taps() = default;
  __device__ __forceinline__ Taps(const Point<TAPS>& point, const int (&stride)[3]) {
    UNROLL for (int i = 0; i < TAPS; ++i) {
      offset[i] = point.offset(i, stride);
      weight[i] = point.weight(i);
    }
  }
};

// A tile of points x granules (16 bytes of channels) in shared memory transposes between NCHW and channels-last. The
// swizzle puts 8 groups of `width` points into different banks; a point has 1 << shift granules.
__device__ __forceinline__ int tile_bits(int shift, int width) {
  return max(3, shift + (width == 8 ? 3 : width == 4 ? 2 : 0));
}

__device__ __forceinline__ int swizzled(int granule, int bits) { return granule ^ (granule >> bits & 7); }

// Writes the tile to memory with the points innermost, W of them per access. A warp's lanes: 8 groups of points x the 4
// words of a granule.
template <int W, class T>
__device__ __forceinline__ void write_points(const uint4* tile, int bits, int shift, int tile_points, T* target,
                                             int64_t channel, int64_t point, int points, int channels) {
  constexpr int V = 16 / sizeof(T), kPerWord = 4 / sizeof(T);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
  const int word = threadIdx.x % 4, group = threadIdx.x / 4 % 8, warp = threadIdx.x / 32, lanes = 1 << shift;
  const int units = lanes * (tile_points / (8 * W));
  for (int u = warp; u < units; u += blockDim.x / 32) {
    const int granule = u & (lanes - 1), p = (u >> shift) * (8 * W) + group * W, c = granule * V + word * kPerWord;
    if (p >= points || c >= channels) continue;
    T values[kPerWord][W];
    UNROLL for (int i = 0; i < W; ++i) {
      const uint32_t bytes = words[swizzled((p + i) * lanes + granule, bits) * 4 + word];
      memcpy(&values[0][i], &bytes, sizeof(T));
      if constexpr (kPerWord == 2) {
        const uint16_t high = bytes >> 16;
        memcpy(&values[1][i], &high, sizeof(T));
      }
    }
    UNROLL for (int k = 0; k < kPerWord; ++k) {
      T* to = target + (c + k) * channel + p * point;
      if (W > 1 && p + W <= points) {
        Vec<T, W> v;
        UNROLL for (int i = 0; i < W; ++i) v.at[i] = values[k][i];
        store(to, v);
      } else {
        UNROLL for (int i = 0; i < W; ++i) {
          if (p + i < points) to[i * point] = values[k][i];
        }
      }
    }
  }
}

// Fills the tile from memory with the points innermost, W of them per access; lanes as in write_points.
template <int W, class T>
__device__ __forceinline__ void read_points(uint4* tile, int bits, int shift, int tile_points, const T* source,
                                            int64_t channel, int64_t point, int points, int channels) {
  constexpr int V = 16 / sizeof(T), kPerWord = 4 / sizeof(T);
  uint32_t* words = reinterpret_cast<uint32_t*>(tile);
  const int word = threadIdx.x % 4, group = threadIdx.x / 4 % 8, warp = threadIdx.x / 32, lanes = 1 << shift;
  const int units = lanes * (tile_points / (8 * W));
  for (int u = warp; u < units; u += blockDim.x / 32) {
    const int granule = u & (lanes - 1), p = (u >> shift) * (8 * W) + group * W, c = granule * V + word * kPerWord;
    if (p >= points || c >= channels) continue;
    Vec<T, W> values[kPerWord] = {};
    UNROLL for (int k = 0; k < kPerWord; ++k) {
      const T* from = source + (c + k) * channel + p * point;
      if (W > 1 && p + W <= points) {
        values[k] = load<T, W>(from);
      } else {
        UNROLL for (int i = 0; i < W; ++i) {
          if (p + i < points) values[k].at[i] = from[i * point];
        }
      }
    }
    UNROLL for (int i = 0; i < W; ++i) {
      T pair[kPerWord];
      UNROLL for (int k = 0; k < kPerWord; ++k) pair[k] = values[k].at[i];
      memcpy(&words[swizzled((p + i) * lanes + granule, bits) * 4 + word], pair, 4);
    }
  }
}

constexpr int kTileThreads = 256, kTilePoints = 64;  // of the two copies below; a point has 8 granules

// How many pixels one access can read or write where pixels are innermost: 16 bytes of them, 4 pixels or 1.
template <class T>
int pixel_width(const void* data, int64_t image, int64_t channel, int most = 8) {
  for (const int w : {16 / static_cast<int>(sizeof(T)), 4}) {
    const uint64_t bytes = w * sizeof(T);
    const bool aligned = (reinterpret_cast<uintptr_t>(data) | image * sizeof(T) | channel * sizeof(T)) % bytes == 0;
    if (w <= most && aligned) return w;
  }
  return 1;
}

// Calls f(n, first pixel, first channel) for every tile of this block; all blocks together cover all tiles.
template <class T, class F>
__device__ __forceinline__ void each_tile(int batch, int channels, int pixels, F&& f) {
  constexpr int CHANNELS = 8 * (16 / sizeof(T));
  const int across = ceil_div(pixels, kTilePoints), down = ceil_div(channels, CHANNELS);
  const int64_t tiles = static_cast<int64_t>(across) * down * batch;
  for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
    f(i / across / down, static_cast<int>(i % across) * kTilePoints, static_cast<int>(i / across % down) * CHANNELS);
  }
}

// Copies (N, C, pixels), pixels innermost, to (N, pixels, C), contiguous, C a multiple of 16 bytes. All blocks of the
// grid take part.
template <class T>
__device__ __forceinline__ void to_channels_last(const T* __restrict__ from, int64_t image, int64_t channel,
                                                 T* __restrict__ to, int batch, int channels, int pixels, int width) {
  constexpr int V = 16 / sizeof(T);
  __shared__ uint4 tile[kTilePoints * 8];
  const int bits = tile_bits(3, width);
  each_tile<T>(batch, channels, pixels, [&](int64_t n, int first, int c0) {
    with_constant<8, 4, 1>(width, [&](auto w) {
      constexpr int W = w.value;
      if constexpr (W <= V) {
        read_points<W>(tile, bits, 3, kTilePoints, from + n * image + c0 * channel + first, channel, 1, pixels - first,
                         channels - c0);
      }
    });
    __syncthreads();
    UNROLL for (int i = threadIdx.x; i < kTilePoints * 8; i += kTileThreads) {
      const int p = first + i / 8, c = c0 + i % 8 * V;
      if (p < pixels && c < channels) {
        Vec<T, V> v;
        memcpy(&v, &tile[swizzled(i, bits)], 16);
        store(to + (n * pixels + p) * channels + c, v);
      }
    }
    __syncthreads();
  });
}

// The same for some images: images.each(batch, f) calls f(first image, count) for them. All of `to` is contiguous.
template <class T, class Images>
__global__ void __launch_bounds__(kTileThreads)
    to_channels_last_kernel(const T* __restrict__ from, int64_t image, int64_t channel, T* __restrict__ to, int batch,
                            int channels, int pixels, int width, Images images) {
  images.each(batch, [&](int n, int count) {
    to_channels_last(from + n * image, image, channel, to + static_cast<int64_t>(n) * channels * pixels, count, channels,
                     pixels, width);
  });
}

// Copies (N, pixels, C) to (N, C, pixels), both contiguous, C a multiple of 16 bytes of T. All blocks take part.
template <class T>
__device__ __forceinline__ void from_channels_last(const float* __restrict__ from, T* __restrict__ to, int batch,
                                                   int channels, int pixels, int width) {
  constexpr int V = 16 / sizeof(T);
  __shared__ uint4 tile[kTilePoints * 8];
  const int bits = tile_bits(3, width);
  each_tile<T>(batch, channels, pixels, [&](int64_t n, int first, int c0) {
    UNROLL for (int i = threadIdx.x; i < kTilePoints * 8; i += kTileThreads) {
      const int p = first + i / 8, c = c0 + i % 8 * V;
      if (p < pixels && c < channels) {
        const float* source = from + (n * pixels + p) * channels + c;
        float x[V];
        UNROLL for (int k = 0; k < V; k += 4) {
          const Vec<float, 4> v = load<float, 4>(source + k);
          UNROLL for (int j = 0; j < 4; ++j) x[k + j] = v.at[j];
        }
        const Vec<T, V> v = rounded<T>(x);
        memcpy(&tile[swizzled(i, bits)], &v, 16);
      }
    }
    __syncthreads();
    with_constant<8, 4, 1>(width, [&](auto w) {
      constexpr int W = w.value;
      if constexpr (W <= V) {
        write_points<W>(tile, bits, 3, kTilePoints, to + (n * channels + c0) * pixels + first, pixels, 1,
                        pixels - first, channels - c0);
      }
    });
    __syncthreads();
  });
}

// Calls f with `taps`, the pixels per point, as a constant.
template <class F>
auto with_taps(int taps, F&& f) {
  return with_constant<1, 4, 8, 16>(taps, f);
}

}  // namespace svexport
