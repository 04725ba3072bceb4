// Where points fall in an image: coordinates -> pixels and weights, by the arithmetic of svexport/ops/grid_sample.py.
#pragma once

#include "bilinear.cuh"
#include "sampling.h"

namespace svexport {

// The image that is sampled and the points at which it is.
struct Space {
  int axes;       // 2, or 3
  int size[3];    // of x, y[, z]
  int stride[3];  // between pixels along x, y[, z], in elements
  int padding;
  bool align_corners;

  const void* grid;
  DType dtype;         // of the grid
  int points;          // of one image
  int grid_size[2];    // points along x and y
  int64_t grid_image;  // strides: between images,
  int64_t grid_coordinate;
  int64_t grid_stride[3];  // points along x, y, z
  bool grid_even;          // points lie grid_stride[0] apart, all of an image

  // From tensors of 4 or 5 dimensions; false if an image is too large for 32-bit offsets.
  static bool of(const Tensor& input, const Tensor& grid, const Sampling& sampling, Space& s) {
    s.axes = input.rank - 2;
    s.padding = sampling.padding;
    s.align_corners = sampling.align_corners;
    int64_t extent = 0, points = 1;
    for (int i = 0; i < s.axes; ++i) {
      const int64_t size = input.sizes[input.rank - 1 - i], stride = input.strides[input.rank - 1 - i];
      if (size > INT32_MAX) return false;
      s.size[i] = static_cast<int>(size);
      s.stride[i] = static_cast<int>(stride);
      extent += (size - 1) * stride;
      points *= grid.sizes[grid.rank - 2 - i];
      s.grid_stride[i] = grid.strides[grid.rank - 2 - i];
    }
    if (extent >= INT32_MAX || points >= INT32_MAX) return false;
    s.grid = grid.data;
    s.dtype = grid.dtype;
    s.points = static_cast<int>(points);
    s.grid_size[0] = static_cast<int>(grid.sizes[grid.rank - 2]);
    s.grid_size[1] = static_cast<int>(grid.sizes[grid.rank - 3]);
    s.grid_image = grid.strides[0];
    s.grid_coordinate = grid.strides[grid.rank - 1];
    s.grid_even = evenly_spaced(grid, 1, grid.rank - 2, s.grid_stride[0]);
    return true;
  }

  // Whether dimensions first .. last lie in memory like one of the given stride.
  static bool evenly_spaced(const Tensor& t, int first, int last, int64_t& stride) {
    int64_t expected = 0;
    bool any = false;
    for (int i = last; i >= first; --i) {
      if (t.sizes[i] == 1) continue;
      if (!any) {
        stride = expected = t.strides[i];
        any = true;
      } else if (t.strides[i] != expected) {
        return false;
      }
      expected *= t.sizes[i];
    }
    return true;
  }
};

// Coordinate `axis` of point p of image n.
__device__ __forceinline__ int64_t grid_offset(const Space& s, int n, int p) {
  const int64_t start = n * s.grid_image;
  if (s.grid_even) return start + p * s.grid_stride[0];
  const int x = p % s.grid_size[0], rest = p / s.grid_size[0];
  if (s.axes == 2) return start + x * s.grid_stride[0] + rest * s.grid_stride[1];
  return start + x * s.grid_stride[0] + rest % s.grid_size[1] * s.grid_stride[1] +
         rest / s.grid_size[1] * s.grid_stride[2];
}

template <int AXES>
struct Coordinates {
  float at[AXES];  // x, y[, z]
};

template <int AXES>
__device__ __forceinline__ Coordinates<AXES> coordinates(const Space& s, int n, int p) {
  const int64_t offset = grid_offset(s, n, p);
  Coordinates<AXES> x;
#pragma unroll
  for (int i = 0; i < AXES; ++i) {
    const int64_t at = offset + i * s.grid_coordinate;
    if (s.dtype == DType::kFloat32) x.at[i] = static_cast<const float*>(s.grid)[at];
    if (s.dtype == DType::kFloat16) x.at[i] = to_float(static_cast<const __half*>(s.grid)[at]);
    if (s.dtype == DType::kBFloat16) x.at[i] = to_float(static_cast<const __nv_bfloat16*>(s.grid)[at]);
  }
  return x;
}

// The pixels along one axis that a point is made of: 1 (nearest), 2 (linear) or 4 (cubic).
template <int K>
struct Pixels {
  int index[K];  // -1: outside
  float weight[K];
  float slope[K];  // d(weight)/d(coordinate)
};

// Every operation is rounded as on a CPU (no fused multiply-add): nearest pixels turn on the last bit.
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
__device__ __forceinline__ Pixels<K> pixels(float x, int size, const Space& s) {
  const float last = static_cast<float>(size - 1);
  Pixels<K> result;
  if (K == 2 && s.padding == kPixels) {
    const bool seen = x >= 0 && x < last;
    const float first = floorf(x);
#pragma unroll
    for (int i = 0; i < K; ++i) {
      result.index[i] = seen ? static_cast<int>(first) + i : -1;
      result.weight[i] = !seen ? 0.0f : i ? x - first : 1 - (x - first);
      result.slope[i] = !seen ? 0.0f : i ? 1.0f : -1.0f;
    }
    return result;
  }
  float slope = s.align_corners ? 0.5f * last : 0.5f * size;
  x = __fmul_rn(__fadd_rn(x, 1.0f), slope);
  if (!s.align_corners) x = __fsub_rn(x, 0.5f);

  auto clip = [&](float x, float& slope) {  // NaN: the first pixel, in 5-D the last
    if (s.axes == 3) {
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
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const float d = i == 0 ? t + 1 : i == 1 ? t : i == 2 ? 1 - t : 2 - t;  // distance of the pixel
      const bool far = i == 0 || i == 3;
      result.weight[i] = far ? ((a * d - 5 * a) * d + 8 * a) * d - 4 * a : ((a + 2) * d - (a + 3)) * d * d + 1;
      const float derivative = far ? (3 * a * d - 10 * a) * d + 8 * a : (3 * (a + 2) * d - 2 * (a + 3)) * d;
      result.slope[i] = i < 2 ? slope * derivative : -slope * derivative;
      float pixel = first + static_cast<float>(i - 1), unused = 0;
      if (s.padding == kReflection) pixel = reflect(pixel, size, s.align_corners, unused);
      if (s.padding != kZeros) pixel = clip(pixel, unused);
      result.index[i] = index(pixel);
    }
    return result;
  }

  if (s.padding == kReflection) x = reflect(x, size, s.align_corners, slope);
  if (s.padding != kZeros) {
    x = clip(x, slope);
  } else if (s.axes == 3) {  // NaN: outside
    x = x > -2 ? x : -2;
    x = x < size + 1 ? x : size + 1;
  }
  if constexpr (K == 1) {
    result.index[0] = index(rintf(x));
    result.weight[0] = 1;
    result.slope[0] = 0;
  } else {
    const float first = floorf(x), t = __fsub_rn(x, first);
    result.index[0] = index(first);
    result.index[1] = index(first + 1);
    result.weight[0] = 1 - t;
    result.weight[1] = t;
    result.slope[0] = -slope;
    result.slope[1] = slope;
  }
  return result;
}

constexpr int kTapsOfMode[] = {4, 1, 16};

// The pixels that a point is made of: 1 (nearest), 4 (bilinear), 8 (trilinear) or 16 (bicubic).
template <int TAPS>
struct Taps {
  int offset[TAPS];  // in elements from the first pixel; -1: outside, the pixel is 0
  float weight[TAPS];
};

template <int TAPS>
__device__ __forceinline__ Taps<TAPS> locate(const Space& s, int n, int p) {
  Taps<TAPS> taps;
  if constexpr (TAPS == 1) {
    if (s.axes == 2) {
      const auto at = coordinates<2>(s, n, p);
      const int x = pixels<1>(at.at[0], s.size[0], s).index[0], y = pixels<1>(at.at[1], s.size[1], s).index[0];
      taps.offset[0] = (x | y) < 0 ? -1 : x * s.stride[0] + y * s.stride[1];
    } else {
      const auto at = coordinates<3>(s, n, p);
      const int x = pixels<1>(at.at[0], s.size[0], s).index[0], y = pixels<1>(at.at[1], s.size[1], s).index[0],
                z = pixels<1>(at.at[2], s.size[2], s).index[0];
      taps.offset[0] = (x | y | z) < 0 ? -1 : x * s.stride[0] + y * s.stride[1] + z * s.stride[2];
    }
    taps.weight[0] = 1;
  } else if constexpr (TAPS == 8) {
    const auto at = coordinates<3>(s, n, p);
    const auto x = pixels<2>(at.at[0], s.size[0], s), y = pixels<2>(at.at[1], s.size[1], s),
               z = pixels<2>(at.at[2], s.size[2], s);
#pragma unroll
    for (int i = 0; i < TAPS; ++i) {
      const int kx = i % 2, ky = i / 2 % 2, kz = i / 4;
      taps.offset[i] = (x.index[kx] | y.index[ky] | z.index[kz]) < 0
                           ? -1
                           : x.index[kx] * s.stride[0] + y.index[ky] * s.stride[1] + z.index[kz] * s.stride[2];
      taps.weight[i] = z.weight[kz] * y.weight[ky] * x.weight[kx];
    }
  } else {
    constexpr int K = TAPS == 4 ? 2 : 4;
    const auto at = coordinates<2>(s, n, p);
    const auto x = pixels<K>(at.at[0], s.size[0], s), y = pixels<K>(at.at[1], s.size[1], s);
#pragma unroll
    for (int i = 0; i < TAPS; ++i) {
      const int kx = i % K, ky = i / K;
      taps.offset[i] = (x.index[kx] | y.index[ky]) < 0 ? -1 : x.index[kx] * s.stride[0] + y.index[ky] * s.stride[1];
      taps.weight[i] = y.weight[ky] * x.weight[kx];
    }
  }
  return taps;
}

// Calls f with the number of taps as a constant.
template <class F>
cudaError_t dispatch_taps(int mode, int axes, F&& f) {
  switch (mode) {
    case kBilinear: return axes == 2 ? f(std::integral_constant<int, 4>()) : f(std::integral_constant<int, 8>());
    case kNearest: return f(std::integral_constant<int, 1>());
    case kBicubic: return axes == 2 ? f(std::integral_constant<int, 16>()) : cudaErrorNotSupported;
    default: return cudaErrorNotSupported;
  }
}

}  // namespace svexport
