// Multi-scale deformable attention, forward and backward. It is bound by the rate of L2 and of its atomic additions.
//
// A row is one (image, query, head). A warp takes 32 / G rows, and G lanes share the D channels of a row. The warp
// works through the L*P samples of its rows in chunks. First, every lane writes the pixels and factors of some samples
// to shared memory; then the lanes of a row read the pixels of all samples, 16 bytes each.
#pragma once

#include "bilinear.cuh"
#include "ms_deform_attn/tactics.h"

namespace svexport {
namespace {

using ms_deform::kWarps;
constexpr int kChunk = 128;  // samples of a warp in shared memory
constexpr int kAhead = 4;    // samples whose pixels a lane has in flight

struct Sizes {
  int images, rows, s;                   // N, Lq*M, S
  int heads, channels, points, samples;  // M, D, P, L*P
  float per_point;                       // 1 / P
  float scale;                           // what one step of an int8 value is worth; else 1
  int64_t value[4], locations[6], weights[5], grad_output[3];  // strides
  unsigned step;  // stride of pixels of value, in vectors

  __device__ __forceinline__ int level(int sample) const {
    return static_cast<int>((static_cast<float>(sample) + 0.5f) * per_point);
  }
};

struct Levels {
  const void *shapes, *starts;
  int64_t shape_strides[2], start_stride;
  bool shapes_are_long, starts_are_long;

  __device__ __forceinline__ int size(int level, int axis) const {
    return get(shapes, level * shape_strides[0] + axis * shape_strides[1], shapes_are_long);
  }
  __device__ __forceinline__ int start(int level) const { return get(starts, level * start_stride, starts_are_long); }

 private:
  // Reads the lower half of an int64, because sizes fit into it.
  static __device__ __forceinline__ int get(const void* data, int64_t i, bool is_long) {
    return static_cast<const int*>(data)[is_long ? 2 * i : i];
  }
};

// The four pixels around a point (top left, top right, bottom left, bottom right): indices along S, or kOutside.
struct alignas(16) Pixels {
  unsigned at[4];
};
constexpr unsigned kOutside = ~0u;

// The fraction by which the point lies beyond its top left pixel; both are 0 if no pixel is inside; never NaN.
struct Point {
  float x, y;
};

__device__ __forceinline__ Point locate(float x, float y, int height, int width, int start, int s, Pixels& pixels) {
  const float high = static_cast<float>(height), wide = static_cast<float>(width);
  x = __fadd_rn(__fmul_rn(x, wide), -0.5f);  // rounds as the reference does, so that both choose the same pixels
  y = __fadd_rn(__fmul_rn(y, high), -0.5f);
  const float left = floorf(x), top = floorf(y);
  const bool near = left >= -1 && left < wide && top >= -1 && top < high;
  const int column = near ? static_cast<int>(left) : -2, row = static_cast<int>(top);
  UNROLL for (int i = 0; i < 4; ++i) {
    const int c = column + i % 2, r = row + i / 2;
    const int64_t pixel = start + static_cast<int64_t>(r) * width + c;
    const bool inside = c >= 0 && c < width && r >= 0 && r < height && pixel >= 0 && pixel < s;
    pixels.at[i] = inside ? static_cast<unsigned>(pixel) : kOutside;
  }
  return near ? Point{x - left, y - top} : Point{0, 0};
}

// A lane's row, one (image, query, head). The last rows of a grid may not exist: real is false.
struct Row {
  int n, q, m, index;
  bool real;

  __device__ __forceinline__ Row(const Sizes& sizes, int g) {
    const unsigned per_block = kWarps * 32 / g, blocks = (sizes.rows + per_block - 1) / per_block;
    n = static_cast<int>(blockIdx.x / blocks);
    index = static_cast<int>(blockIdx.x % blocks * per_block + threadIdx.x / g);
    real = index < sizes.rows;
    if (!real) index = 0;
    q = index / sizes.heads;
    m = index % sizes.heads;
  }

  __device__ __forceinline__ int64_t in(const int64_t (&strides)[4]) const { return n * strides[0] + m * strides[2]; }
  template <int R>
  __device__ __forceinline__ int64_t in(const int64_t (&strides)[R]) const {
    return n * strides[0] + q * strides[1] + m * strides[2];
  }
};

// What a lane reads of one sample; all reads precede their first use.
struct Sample {
  float x, y, weight;
  int height, width, start;

  __device__ __forceinline__ Sample(int k, const Row& row, const Levels& levels, const AnyFloat& locations,
                                    const AnyFloat& weights, const Sizes& sizes) {
    const int level = sizes.level(k), point = k - level * sizes.points;
    const int64_t at = row.in(sizes.locations) + level * sizes.locations[3] + point * sizes.locations[4];
    x = locations.get(at);
    y = locations.get(at + sizes.locations[5]);
    weight = weights.get(row.in(sizes.weights) + level * sizes.weights[3] + point * sizes.weights[4]);
    height = levels.size(level, 0);
    width = levels.size(level, 1);
    start = levels.start(level);
  }
};

// Reads V channels of the pixels of the next samples, all in flight at once.
template <class T, int V, int N>
__device__ __forceinline__ void read(Vec<T, V> (&v)[N][4], const Pixels* pixels, int count, const T* image,
                                     unsigned step, bool used) {
  UNROLL for (int i = 0; i < N; ++i) {
    const Pixels pixel = pixels[i < count ? i : 0];
    UNROLL for (int j = 0; j < 4; ++j) {
      v[i][j] = load_if<T, V>(image + static_cast<uint64_t>(pixel.at[j]) * step * V,
                              used && i < count && pixel.at[j] != kOutside);
    }
  }
}

// g lanes (a power of two) with V channels each share a row. F: type of value, T or int8.
template <class F, int V, class T>
__global__ void __launch_bounds__(kWarps * 32, 5)
    forward_kernel(const F* value, Levels levels, AnyFloat locations, AnyFloat weights, T* output, Sizes sizes, int g) {
  __shared__ Pixels pixels[kWarps][kChunk + 32];
  __shared__ float4 factors[kWarps][kChunk + 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = kChunk * g / 32, slot = lane / g * (chunk + 1);  // + 1: rows use different banks
  const Row row(sizes, g);
  const F* image = value + row.in(sizes.value);
  constexpr bool INTEGERS = kIntegers<F, T, V>;

  for (int d0 = 0; d0 < sizes.channels; d0 += g * V) {
    const int d = d0 + lane % g * V;
    const bool used = row.real && d < sizes.channels;
    float sum[V] = {};
    for (int first = 0; first < sizes.samples; first += chunk) {
      const int count = min(chunk, sizes.samples - first);
      UNROLL for (int j = 0; j < kChunk / 32; ++j) {
        const int k = lane % g + j * g;
        const Sample sample(first + min(k, count - 1), row, levels, locations, weights, sizes);
        Pixels p;
        const Point at = locate(sample.x, sample.y, sample.height, sample.width, sample.start, sizes.s, p);
        const float a = sample.weight * sizes.scale;
        if (k < count) {
          pixels[warp][slot + k] = p;
          const float w[] = {(1 - at.y) * (1 - at.x), (1 - at.y) * at.x, at.y * (1 - at.x), at.y * at.x};
          if constexpr (INTEGERS) {
            const CodeWeights integers(w[0], w[1], w[2], w[3]);
            factors[warp][slot + k] = make_float4(integers.upper, integers.lower, a / CodeWeights::kOne, 0);
          } else {
            factors[warp][slot + k] = make_float4(w[0] * a, w[1] * a, w[2] * a, w[3] * a);
          }
        }
      }
      __syncwarp();
      for (int k = 0; k < count; k += kAhead) {
        Vec<F, V> v[kAhead][4];
        read(v, &pixels[warp][slot + k], count - k, image + d * sizes.value[3], sizes.step, used);
        UNROLL for (int i = 0; i < kAhead; ++i) {
          const float4 factor = k + i < count ? factors[warp][slot + k + i] : make_float4(0, 0, 0, 0);
          if constexpr (INTEGERS) {
            add_scaled(sum, factor.z, CodeWeights(factor.x, factor.y), v[i]);
            continue;
          }
          add_scaled(sum, factor.x, v[i][0]);
          add_scaled(sum, factor.y, v[i][1]);
          add_scaled(sum, factor.z, v[i][2]);
          add_scaled(sum, factor.w, v[i][3]);
        }
      }
      __syncwarp();
    }
    if (used) {
      T* const to = output + (static_cast<int64_t>(row.n) * sizes.rows + row.index) * sizes.channels + d;
      constexpr int kStored = V < 16 / static_cast<int>(sizeof(T)) ? V : 16 / sizeof(T);
      UNROLL for (int k = 0; k < V; k += kStored) {
        Vec<T, kStored> v;
        UNROLL for (int i = 0; i < kStored; ++i) v.at[i] = from_float<T>(sum[k + i]);
        store(to + k, v);
      }
    }
  }
}

struct Gradients {
  Sums value;
  AnyFloat locations, weights;
};

template <class T, int V>
__global__ void __launch_bounds__(kWarps * 32, 4)
    backward_kernel(const T* grad_output, const T* value, Levels levels, AnyFloat locations, AnyFloat weights,
                    Gradients grads, Sizes sizes, Format<T> format, bool vectors, int g) {
  __shared__ Pixels pixels[kWarps][kChunk + 32];
  __shared__ float4 points[kWarps][kChunk + 32];  // x, y, attention weight
  __shared__ float4 slopes[kWarps][kChunk + 32];  // gradients of x, y, weight
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = kChunk * g / 32, slot = lane / g * (chunk + 1);
  const Row row(sizes, g);
  const T* image = value + row.in(sizes.value);
  const T* grad_row = grad_output + row.n * sizes.grad_output[0] + row.q * sizes.grad_output[1] +
                      static_cast<int64_t>(row.m) * sizes.channels * sizes.grad_output[2];
  const int grad_step = sizes.heads * sizes.channels;
  const int64_t grad_image = static_cast<int64_t>(row.n) * sizes.s * grad_step + row.m * sizes.channels;

  for (int first = 0; first < sizes.samples; first += chunk) {
    const int count = min(chunk, sizes.samples - first);
    UNROLL for (int j = 0; j < kChunk / 32; ++j) {
      const int k = lane % g + j * g;
      const Sample sample(first + min(k, count - 1), row, levels, locations, weights, sizes);
      Pixels p;
      const Point at = locate(sample.x, sample.y, sample.height, sample.width, sample.start, sizes.s, p);
      if (k < count) {
        pixels[warp][slot + k] = p;
        points[warp][slot + k] = make_float4(at.x, at.y, sample.weight, 0);
        slopes[warp][slot + k] = make_float4(0, 0, 0, 0);
      }
    }
    __syncwarp();
    for (int d0 = 0; d0 < sizes.channels; d0 += g * V) {
      const int d = d0 + lane % g * V;
      const bool used = row.real && d < sizes.channels;
      float grad[V];
      if (vectors) {  // grad_output can be read by vectors too
        const Vec<T, V> v = load_if<T, V>(grad_row + d, used);
        UNROLL for (int c = 0; c < V; ++c) grad[c] = format.number(v.at[c]);
      } else {
        UNROLL for (int c = 0; c < V; ++c) {
          grad[c] = format.number(load_if<T, 1>(grad_row + (d + c) * sizes.grad_output[2], used).at[0]);
        }
      }
      for (int k0 = 0; k0 < count; k0 += kAhead) {
        Vec<T, V> v[kAhead][4];
        read(v, &pixels[warp][slot + k0], count - k0, image + d * sizes.value[3], sizes.step, used);
        UNROLL for (int i = 0; i < kAhead; ++i) {
          const int k = k0 + i;
          if (k >= count) continue;
          const Pixels pixel = pixels[warp][slot + k];
          const float4 p = points[warp][slot + k];
          float dot[4] = {};
          format.known([&](const auto& format) {
            UNROLL for (int j = 0; j < 4; ++j) {
              UNROLL for (int c = 0; c < V; ++c) dot[j] = fmaf(grad[c], format.number(v[i][j].at[c]), dot[j]);
            }
          });
          if (grads.value.data && used) {
            UNROLL for (int j = 0; j < 4; ++j) {
              if (pixel.at[j] == kOutside) continue;
              const float factor = (j / 2 ? p.y : 1 - p.y) * (j % 2 ? p.x : 1 - p.x) * p.z;
              float share[V];
              UNROLL for (int c = 0; c < V; ++c) share[c] = factor * grad[c];
              grads.value.add(grad_image + static_cast<int64_t>(pixel.at[j]) * grad_step + d, share);
            }
          }
          float x = (1 - p.y) * (dot[1] - dot[0]) + p.y * (dot[3] - dot[2]);
          float y = (1 - p.x) * (dot[2] - dot[0]) + p.x * (dot[3] - dot[1]);
          float a = (1 - p.y) * ((1 - p.x) * dot[0] + p.x * dot[1]) + p.y * ((1 - p.x) * dot[2] + p.x * dot[3]);
          for (int step = g / 2; step; step /= 2) {
            x += __shfl_xor_sync(0xffffffff, x, step);
            y += __shfl_xor_sync(0xffffffff, y, step);
            a += __shfl_xor_sync(0xffffffff, a, step);
          }
          if (k % g == lane % g) {
            float4& slope = slopes[warp][slot + k];
            slope = make_float4(slope.x + x * p.z, slope.y + y * p.z, slope.z + a, 0);
          }
        }
      }
    }
    __syncwarp();
    for (int k = lane % g; k < count && row.real; k += g) {
      const float4 slope = slopes[warp][slot + k];
      const int64_t sample = (static_cast<int64_t>(row.n) * sizes.rows + row.index) * sizes.samples + first + k;
      const int level = sizes.level(first + k);
      if (grads.weights.data) grads.weights.set(sample, slope.z);
      if (grads.locations.data) {
        grads.locations.set(2 * sample, slope.x * static_cast<float>(levels.size(level, 1)));
        grads.locations.set(2 * sample + 1, slope.y * static_cast<float>(levels.size(level, 0)));
      }
    }
    __syncwarp();
  }
}

}  // namespace
}  // namespace svexport
