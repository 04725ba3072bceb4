// The forward is a matrix product whose one factor, what the taps read, is made as it is needed: a block computes a tile
// of outputs x output pixels. It goes through K = (tap, channel) in steps of 128 bytes; while the tensor cores work on one
// step, the pixels of the next are on their way, and the places that the one after that reads are found.
#include "deform_conv2d.h"

#include <cstdlib>
#include <numeric>

#include "accumulate.cuh"
#include "mma.cuh"

namespace svexport {
namespace {

struct Geometry {
  DeformConv2d conv;
  int height, width, out_height, out_width, taps;
  int channels, per_group, per_offset_group, run;  // packed
  unsigned vectors;                                // of 16 bytes in the channels
  int rows;                                        // N*oH*oW
  int64_t image_size;                              // H*W*C, packed
  int64_t offset[4], mask[4];  // strides
};

// Where a tap of an output pixel reads, and by what it is multiplied.
struct Tap {
  float x, y, mask;
};

struct OutputPixel {
  int n, row, column;
  int64_t offset, mask;  // of its first numbers

  __device__ __forceinline__ OutputPixel(int pixel, const Geometry& g) {
    const int line = pixel / g.out_width;
    column = pixel - line * g.out_width;
    n = line / g.out_height;
    row = line - n * g.out_height;
    offset = n * g.offset[0] + row * g.offset[2] + column * g.offset[3];
    mask = n * g.mask[0] + row * g.mask[2] + column * g.mask[3];
  }

  // Tap i, j of the kernel.
  __device__ __forceinline__ Tap tap(int offset_group, int i, int j, const Geometry& g, const AnyFloat& offsets,
                                     const AnyFloat& masks) const {
    const int number = offset_group * g.taps + i * g.conv.kernel[1] + j;
    const float y = offsets.get(offset + 2 * number * g.offset[1]);
    const float x = offsets.get(offset + (2 * number + 1) * g.offset[1]);
    const float factor = masks.data ? masks.get(mask + number * g.mask[1]) : 1.0f;
    return {x + static_cast<float>(j * g.conv.dilation[1] + column * g.conv.stride[1] - g.conv.padding[1]),
            y + static_cast<float>(i * g.conv.dilation[0] + row * g.conv.stride[0] - g.conv.padding[0]), factor};
  }
};

constexpr unsigned kOutside = ~0u;

// The four pixels around a tap: top left, top right, bottom left, bottom right.
struct alignas(16) Pixels {
  unsigned at[4];  // vectors from the start of the image; kOutside of it
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
  const int column = near ? static_cast<int>(left) : -2, row = static_cast<int>(top);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = column + i % 2, r = row + i / 2;
    const bool inside = c >= 0 && c < g.width && r >= 0 && r < g.height;
    pixels.at[i] = inside ? static_cast<unsigned>(r * g.width + c) * g.vectors : kOutside;
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

// c += a * b for a of 16 rows and b of 8 columns, both of 32 bytes along K, in registers as ldmatrix leaves them and c as
// the tensor cores have it: for architectures whose tensor cores do not have the type.
template <class T>
__device__ __forceinline__ void multiply_by_shuffles(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr int kElements = 4 / sizeof(T);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint32_t words[4] = {__shfl_sync(0xffffffff, a[k / 4 * 2], (lane & ~3) + k % 4),
                               __shfl_sync(0xffffffff, a[k / 4 * 2 + 1], (lane & ~3) + k % 4),
                               __shfl_sync(0xffffffff, b[k / 4], lane % 4 * 8 + k % 4),
                               __shfl_sync(0xffffffff, b[k / 4], lane % 4 * 8 + 4 + k % 4)};
    T values[4][kElements];
    memcpy(values, words, sizeof(words));
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) c[j] = fmaf(to_float(values[j / 2][i]), to_float(values[2 + j % 2][i]), c[j]);
    }
  }
}

// 16 rows and 8 columns of 32 bytes along K, as ldmatrix leaves them; those of float in two parts, x = high + low up to
// 2^-22 of x.
template <class T>
struct Left {
  uint32_t x[4];
  explicit __device__ __forceinline__ Left(const uint32_t (&x)[4]) : x{x[0], x[1], x[2], x[3]} {}
};

template <class T>
struct Right {
  uint32_t x[2];
  Right() = default;
  __device__ __forceinline__ Right(uint32_t x0, uint32_t x1) : x{x0, x1} {}
};

#if __CUDA_ARCH__ >= 800
template <>
struct Left<float> {
  uint32_t high[4], low[4];
  explicit __device__ __forceinline__ Left(const uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(x[i], high[i], low[i]);
  }
};

template <>
struct Right<float> {
  uint32_t high[2], low[2];
  Right() = default;
  __device__ __forceinline__ Right(uint32_t x0, uint32_t x1) {
    split_tf32(x0, high[0], low[0]);
    split_tf32(x1, high[1], low[1]);
  }
};
#endif

// c += a * b, summed in float.
__device__ __forceinline__ void multiply(float (&c)[4], const Left<__half>& a, const Right<__half>& b) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x[2 * i]), "r"(a.x[2 * i + 1]), "r"(b.x[i]));
  }
#endif
}

__device__ __forceinline__ void multiply(float (&c)[4], const Left<__nv_bfloat16>& a, const Right<__nv_bfloat16>& b) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
#else
  multiply_by_shuffles<__nv_bfloat16>(c, a.x, b.x);
#endif
}

__device__ __forceinline__ void multiply(float (&c)[4], const Left<float>& a, const Right<float>& b) {
#if __CUDA_ARCH__ >= 800
  float sum[4] = {};  // tensor cores cut off what does not fit into a long sum, the additions below round
  mma_tf32(sum, a.low, b.high);
  mma_tf32(sum, a.high, b.low);
  mma_tf32(sum, a.high, b.high);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += sum[i];
#else
  multiply_by_shuffles<float>(c, a.x, b.x);
#endif
}

// Waits for what copy_async began.
__device__ __forceinline__ void copies_done() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

constexpr int kStep = 128;  // bytes along K

// Of a tile of rows of 128 bytes, 16 bytes: permuted so that eight rows of one column are in different banks.
__device__ __forceinline__ char* at(char* tile, unsigned row, unsigned column) {
  return tile + row * kStep + (column ^ row % 8) * 16;
}

template <class T>
struct Convolution {
  const T *image, *weight;  // packed
  AnyFloat offset, mask, bias;
  T* output;
  Geometry geometry;
  int64_t bias_stride;
  int outputs;  // O/groups
};

// A step of K: up to 128 bytes of channels, all of one tap and one run.
struct Step {
  int i = 0, j = 0;            // of the tap
  int run = 0, channel = 0;    // first channel of the run in the group, first channel of the step in the run

  __device__ __forceinline__ void advance(const Geometry& g, int elements) {
    channel += elements;
    if (channel < g.run) return;
    channel = 0;
    run += g.run;
    if (run < g.per_group) return;
    run = 0;
    if (++j < g.conv.kernel[1]) return;
    j = 0;
    ++i;
  }
};

constexpr int kPixels = 32;  // output pixels of a warp, and of a block of the kernels for the backward

// M x P warps, each of them for 16 * R outputs of 32 output pixels.
template <class T, int M, int P, int R>
__global__ void __launch_bounds__(M * P * 32, (M == 4 ? 3 : 2) / P) convolution_kernel(const Convolution<T> a) {
  constexpr int kThreads = M * P * 32, kOutputs = M * R * 16, kElements = kStep / sizeof(T);
  constexpr int kPixels = P * svexport::kPixels;
  constexpr int kVectors = kPixels * 8 / kThreads;  // that a thread makes in a step
  constexpr int kRows = kThreads / 8;               // between them
  constexpr int kCopies = kOutputs * 8 / kThreads;
  extern __shared__ __align__(128) char shared[];
  char* const weights = shared;                         // [2][kOutputs * kStep]
  char* const columns = shared + 2 * kOutputs * kStep;  // [2][kPixels * kStep]
  __shared__ Pixels pixels[2][kPixels];
  __shared__ float4 factors[2][kPixels];

  const Geometry& g = a.geometry;
  const int group = blockIdx.z, first_pixel = blockIdx.x * kPixels, first_output = blockIdx.y * kOutputs;
  const unsigned column = threadIdx.x % 8, row = threadIdx.x / 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  const T* images[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int pixel = min(first_pixel + static_cast<int>(row) + i * kRows, g.rows - 1);
    images[i] = a.image + pixel / (g.out_height * g.out_width) * g.image_size + group * g.per_group +
                column * kVector<T>;
  }
  // Rows of weights, in vectors; what is past the last is not stored, so may be any.
  const unsigned k = g.taps * (g.per_group / kVector<T>), last = a.outputs - 1 - first_output;
  const T* const weight =
      a.weight + (group * static_cast<int64_t>(a.outputs) + first_output) * k * kVector<T> + column * kVector<T>;

  // Places are found by the first warps: a lane for every output pixel.
  const bool finder = threadIdx.x < kPixels;
  const OutputPixel mine(min(first_pixel + static_cast<int>(threadIdx.x), g.rows - 1), g);
  const auto find = [&](const Step& s) {
    return mine.tap((group * g.per_group + s.run) / g.per_offset_group, s.i, s.j, g, a.offset, a.mask);
  };
  const auto place = [&](const Tap& tap, int to) {
    const Between b = locate(tap, g, pixels[to][threadIdx.x]);
    factors[to][threadIdx.x] =
        make_float4(b.factor(0) * tap.mask, b.factor(1) * tap.mask, b.factor(2) * tap.mask, b.factor(3) * tap.mask);
  };
  Vector<T> corners[kVectors][4];
  const auto read = [&](const Step& s, int from) {
    const bool real = s.channel + static_cast<int>(column) * kVector<T> < g.run;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Pixels p = pixels[from][row + i * kRows];
      const T* image = opaque(images[i] + s.run + s.channel);
#pragma unroll
      for (int j = 0; j < 4; ++j) corners[i][j] = read_pixel<kVector<T>>(image, p.at[j], real);
    }
  };
  const auto mix = [&](int from, char* to) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 f = factors[from][row + i * kRows];
      float sum[kVector<T>] = {};
      add_scaled(sum, f.x, corners[i][0]);
      add_scaled(sum, f.y, corners[i][1]);
      add_scaled(sum, f.z, corners[i][2]);
      add_scaled(sum, f.w, corners[i][3]);
      *reinterpret_cast<Vector<T>*>(at(to, row, column) + i * kRows * kStep) = rounded<T, kVector<T>>(sum);
    }
  };
  const auto copy = [&](const Step& s, char* to) {
    const bool real = s.channel + static_cast<int>(column) * kVector<T> < g.run;
    const T* from = opaque(weight + (s.i * g.conv.kernel[1] + s.j) * g.per_group + s.run + s.channel);
    char* const first = at(to, row, column);
    unsigned size = k;
    asm volatile("" : "+r"(size));  // or the compiler keeps all the offsets, in registers that it does not have
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const unsigned offset = min(row + i * kRows, last) * size;
      copy_async(first + i * kRows * kStep, past(from, offset), real);
    }
  };

  float sums[R][4][4] = {};
  const int steps = g.taps * (g.per_group / g.run) * ((g.run + kElements - 1) / kElements);
  Step next, found;  // what is read next, whose places are found next
  int from = 0, to = 0;
  if (finder) place(find(found), 0);
  copy(next, weights);
  __syncthreads();
  read(next, 0);
  mix(0, columns);
  next.advance(g, kElements);
  found.advance(g, kElements);
  if (steps > 1 && found.channel == 0) {
    to = 1;
    if (finder) place(find(found), 1);
  }
  found.advance(g, kElements);
  copies_done();
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    const bool reads = step + 1 < steps, finds = step + 2 < steps && found.channel == 0;
    char* const w = weights + step % 2 * kOutputs * kStep;
    char* const c = columns + step % 2 * kPixels * kStep;
    char* const next_w = weights + (step + 1) % 2 * kOutputs * kStep;
    char* const next_c = columns + (step + 1) % 2 * kPixels * kStep;
    if (next.channel == 0) from = 1 - from;
    Tap tap;
    if (reads) {
      read(next, from);
      copy(next, next_w);
      if (finds && finder) tap = find(found);
    }
    const uint32_t left_row = shared_address(at(w, warp % M * R * 16 + lane % 16, lane / 16));
    const uint32_t right_row = shared_address(at(c, warp / M * 32 + lane / 16 * 8 + lane % 8, lane / 8 % 2));
    // 32 bytes further along K is another column of 16 bytes, which `at` permutes by exclusive or.
#pragma unroll
    for (int part = 0; part < kStep; part += 32) {
      Right<T> right[4];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32_t x[4];
        load_matrix(x, (right_row ^ part) + j * 8 * kStep);
        right[j] = Right<T>(x[0], x[1]);
        right[j + 1] = Right<T>(x[2], x[3]);
      }
#pragma unroll
      for (int i = 0; i < R; ++i) {
        uint32_t x[4];
        load_matrix(x, (left_row ^ part) + i * 16 * kStep);
        const Left<T> left(x);
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(sums[i][j], left, right[j]);
      }
    }
    if (reads) mix(from, next_c);
    if (finds) {
      to = 1 - to;
      if (finder) place(tap, to);
    }
    next.advance(g, kElements);
    found.advance(g, kElements);
    copies_done();
    __syncthreads();
  }

  const int plane = g.out_height * g.out_width;
#pragma unroll
  for (int i = 0; i < R * 2; ++i) {
    const int output = first_output + static_cast<int>(warp % M * R * 16 + i * 8 + lane / 4);
    if (output >= a.outputs) continue;
    const int64_t channel = static_cast<int64_t>(group) * a.outputs + output;
    const float bias = a.bias.data ? a.bias.get(channel * a.bias_stride) : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int pixel = first_pixel + static_cast<int>(warp / M * 32 + j * 8 + lane % 4 * 2);
      const float x = sums[i / 2][j][i % 2 * 2] + bias, y = sums[i / 2][j][i % 2 * 2 + 1] + bias;
      if (pixel >= g.rows) continue;
      const int64_t total = static_cast<int64_t>(gridDim.z) * a.outputs;
      T* const to = a.output + (pixel / plane * total + channel) * plane + pixel % plane;
      if (plane % 2 == 0) {
        store(to, Vec<T, 2>{{from_float<T>(x), from_float<T>(y)}});
      } else {
        *to = from_float<T>(x);
        if (pixel + 1 < g.rows) {
          a.output[((pixel + 1) / plane * total + channel) * plane + (pixel + 1) % plane] = from_float<T>(y);
        }
      }
    }
  }
}

constexpr int kThreads = 256;     // of a block
constexpr int kOffsetGroups = 8;  // at most, of a block

// What a block of the kernels below works on: one tap of 32 output pixels in some offset groups. First its threads find
// what every (output pixel, offset group) reads, then `lanes` threads (a power of two) take one of them each.
struct Part {
  Geometry g;
  int first, rows, lanes;

  __device__ __forceinline__ int tap() const { return blockIdx.y % g.taps; }
  __device__ __forceinline__ int offset_group() const { return blockIdx.y / g.taps * kOffsetGroups; }
  __device__ __forceinline__ int offset_groups() const {
    return min(kOffsetGroups, g.conv.offset_groups - offset_group());
  }

  __device__ __forceinline__ void find(Pixels* pixels, float4* taps, const AnyFloat& offset, const AnyFloat& mask) const {
    for (int i = threadIdx.x; i < kPixels * offset_groups(); i += kThreads) {
      const int row = min(static_cast<int>(blockIdx.x * kPixels) + i % kPixels, rows - 1);
      const OutputPixel p(first + row, g);
      const Tap t = p.tap(offset_group() + i / kPixels, tap() / g.conv.kernel[1], tap() % g.conv.kernel[1], g, offset, mask);
      const Between b = locate(t, g, pixels[i]);
      taps[i] = make_float4(b.x, b.y, t.mask, __int_as_float(p.n));
    }
    __syncthreads();
  }

  // Of 16 bytes of channels in the columns of row, tap().
  __device__ __forceinline__ int64_t column(int row, int channel) const {
    const int group = g.conv.groups == 1 ? 0 : channel / g.per_group;
    return ((static_cast<int64_t>(group) * rows + row) * g.taps + tap()) * g.per_group + channel - group * g.per_group;
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
    const T* image = input + __float_as_int(tap.w) * g.image_size;
    for (int c = threadIdx.x % part.lanes * V; c < g.per_offset_group; c += part.lanes * V) {
      const int channel = (part.offset_group() + i / kPixels) * g.per_offset_group + c;
      Vector<T> v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = read_pixel<V>(opaque(image + channel), at.at[k]);
      float sum[V] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) add_scaled(sum, b.factor(k) * tap.z, v[k]);
      if (row < part.rows) store(columns + part.column(row, channel), rounded<T, V>(sum));
    }
  }
}

constexpr int kChannels = 8;  // that a thread of the next kernel takes, at most

// A tap of 256 output pixels in some channels of an offset group, from planes of pixels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    planes_kernel(const T* input, int64_t image_stride, int64_t channel_stride, AnyFloat offset, AnyFloat mask, Geometry g,
                  int first, int rows, T* columns) {
  const int row = blockIdx.x * kThreads + threadIdx.x, tap = blockIdx.y;
  if (row >= rows) return;
  const int chunks = ceil_div(g.per_offset_group, kChannels), group = blockIdx.z / chunks;
  const int channel = group * g.per_offset_group + blockIdx.z % chunks * kChannels;
  const int count = min(kChannels, (group + 1) * g.per_offset_group - channel);
  const OutputPixel p(first + row, g);
  const Tap t = p.tap(group, tap / g.conv.kernel[1], tap % g.conv.kernel[1], g, offset, mask);
  Pixels pixels;
  const Between b = locate(t, g, pixels);
  const T* const plane = input + p.n * image_stride + channel * channel_stride;
  Vec<T, 1> v[kChannels][4];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[c][k] = load_if<T, 1>(plane + c * channel_stride + pixels.at[k], c < count && pixels.at[k] != kOutside);
    }
  }
  const int64_t out_plane = g.out_height * g.out_width;
  T* to = columns + ((static_cast<int64_t>(row / out_plane) * g.channels + channel) * g.taps + tap) * out_plane + row % out_plane;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    float sum[1] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) add_scaled(sum, b.factor(k) * t.mask, v[c][k]);
    if (c < count) to[c * g.taps * out_plane] = from_float<T>(sum[0]);
  }
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
  const int plane = g.out_height * g.out_width;
  for (int i0 = 0; i0 < kPixels * part.offset_groups(); i0 += kThreads / part.lanes) {  // the same for a whole warp
    const int i = min(i0 + static_cast<int>(threadIdx.x) / part.lanes, kPixels * part.offset_groups() - 1);
    const int row = blockIdx.x * kPixels + i % kPixels, group = part.offset_group() + i / kPixels;
    const bool real = i == i0 + threadIdx.x / part.lanes && row < part.rows;
    const Pixels at = pixels[i];
    const float4 tap = taps[i];
    const Between b{tap.x, tap.y};
    const int n = __float_as_int(tap.w);
    float x = 0, y = 0, m = 0;
    for (int c = threadIdx.x % part.lanes * V; c < g.per_offset_group && real; c += part.lanes * V) {
      const int channel = group * g.per_offset_group + c;
      T* const column = columns + part.column(row, channel);
      const Vec<T, V> grads = load<T, V>(column);
      Vec<T, V> v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = read_pixel<V>(input + n * g.image_size + channel, at.at[k]);
      float grad[V], dot[4] = {};
#pragma unroll
      for (int e = 0; e < V; ++e) grad[e] = to_float(grads.at[e]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int e = 0; e < V; ++e) dot[k] = fmaf(grad[e], to_float(v[k].at[e]), dot[k]);
      }
      x += (1 - b.y) * (dot[1] - dot[0]) + b.y * (dot[3] - dot[2]);
      y += (1 - b.x) * (dot[2] - dot[0]) + b.x * (dot[3] - dot[1]);
#pragma unroll
      for (int k = 0; k < 4; ++k) m += b.factor(k) * dot[k];
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
        grad_input.add(n * g.image_size + static_cast<int64_t>(at.at[k]) * kVector<T> + channel, share);
      }
    }
    for (int step = part.lanes / 2; step; step /= 2) {
      x += __shfl_xor_sync(0xffffffff, x, step);
      y += __shfl_xor_sync(0xffffffff, y, step);
      m += __shfl_xor_sync(0xffffffff, m, step);
    }
    if (!real || threadIdx.x % part.lanes != 0) continue;
    const int64_t number = (static_cast<int64_t>(n) * g.conv.offset_groups + group) * g.taps + part.tap();
    const int to = part.first + row - n * plane;
    if (grad_offset.data) {
      grad_offset.set(2 * number * plane + to, y * tap.z);
      grad_offset.set((2 * number + 1) * plane + to, x * tap.z);
    }
    if (grad_mask.data) grad_mask.set(number * plane + to, m);
  }
}

constexpr int kTile = 32;

struct Packing {
  int64_t images, pixels;
  int width, channels, packed_channels, run, packed_run;
  int64_t strides[4];  // of what is not packed

  // The channel that a packed one is, or -1.
  __device__ int channel(int packed) const {
    const int i = packed % packed_run;
    return i < run ? packed / packed_run * run + i : -1;
  }
};

// 32 x 32 elements (channel, pixel) to a block of 32 x 8 threads.
template <class T>
__global__ void pack_kernel(const T* x, T* y, Packing p) {
  __shared__ T tile[kTile][kTile + 1];
  const int64_t across = (p.packed_channels + kTile - 1) / kTile, down = (p.pixels + kTile - 1) / kTile;
  const int64_t pixel0 = blockIdx.x / across % down * kTile, n = blockIdx.x / across / down;
  const int channel0 = static_cast<int>(blockIdx.x % across) * kTile;
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int64_t pixel = pixel0 + threadIdx.x;
    if (channel0 + i < p.packed_channels && pixel < p.pixels) {
      const int channel = p.channel(channel0 + i);
      tile[i][threadIdx.x] = channel < 0 ? from_float<T>(0.0f)
                                         : x[n * p.strides[0] + channel * p.strides[1] + pixel / p.width * p.strides[2] +
                                             pixel % p.width * p.strides[3]];
    }
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int channel = channel0 + threadIdx.x;
    if (channel < p.packed_channels && pixel0 + i < p.pixels) {
      y[(n * p.pixels + pixel0 + i) * p.packed_channels + channel] = tile[threadIdx.x][i];
    }
  }
}

template <class T>
__global__ void unpack_kernel(const float* y, T* x, Packing p) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t across = (p.packed_channels + kTile - 1) / kTile, down = (p.pixels + kTile - 1) / kTile;
  const int64_t pixel0 = blockIdx.x / across % down * kTile, n = blockIdx.x / across / down;
  const int channel0 = static_cast<int>(blockIdx.x % across) * kTile;
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int channel = channel0 + threadIdx.x;
    if (channel < p.packed_channels && pixel0 + i < p.pixels) {
      tile[threadIdx.x][i] = y[(n * p.pixels + pixel0 + i) * p.packed_channels + channel];
    }
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int64_t pixel = pixel0 + threadIdx.x;
    if (channel0 + i < p.packed_channels && pixel < p.pixels) {
      const int channel = p.channel(channel0 + i);
      if (channel >= 0) x[(n * p.channels + channel) * p.pixels + pixel] = from_float<T>(tile[i][threadIdx.x]);
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
  p.width = static_cast<int>(x.sizes[3]);
  p.channels = static_cast<int>(x.sizes[1]);
  p.packed_channels = static_cast<int>(y.sizes[3]);
  p.run = run(conv);
  p.packed_run = p.packed_channels / (p.channels / p.run);
  for (int i = 0; i < 4; ++i) p.strides[i] = x.strides[i];
  return p;
}

int64_t tiles(const Packing& p) {
  return p.images * ceil_div<int64_t>(p.packed_channels, kTile) * ceil_div<int64_t>(p.pixels, kTile);
}

// input: packed.
Geometry geometry(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv) {
  Geometry g{};
  g.conv = conv;
  g.height = static_cast<int>(input.sizes[1]);
  g.width = static_cast<int>(input.sizes[2]);
  g.channels = static_cast<int>(input.sizes[3]);
  g.vectors = static_cast<unsigned>(g.channels * input.item_size() / 16);
  g.per_group = g.channels / conv.groups;
  g.per_offset_group = g.channels / conv.offset_groups;
  g.run = std::gcd(g.per_group, g.per_offset_group);
  g.out_height = static_cast<int>(offset.sizes[2]);
  g.out_width = static_cast<int>(offset.sizes[3]);
  g.taps = conv.kernel[0] * conv.kernel[1];
  g.rows = static_cast<int>(offset.sizes[0] * offset.sizes[2] * offset.sizes[3]);
  g.image_size = input.sizes[1] * input.sizes[2] * input.sizes[3];
  for (int i = 0; i < 4; ++i) {
    g.offset[i] = offset.strides[i];
    g.mask[i] = mask.strides[i];
  }
  return g;
}

// The kernels count pixels, and threads of parts of the output pixels, in int.
bool countable(const Tensor& input, const Tensor& offset) {
  return input.sizes[2] * input.sizes[3] <= INT32_MAX && offset.sizes[0] * offset.sizes[2] * offset.sizes[3] < (1 << 30);
}

template <class T, int M, int P, int R>
cudaError_t convolve(const Convolution<T>& a, cudaStream_t stream) {
  constexpr int kBytes = 2 * (M * R * 16 + P * kPixels) * kStep;
  const dim3 blocks(ceil_div(a.geometry.rows, P * kPixels), ceil_div(a.outputs, M * R * 16), a.geometry.conv.groups);
  if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
  const cudaError_t status =
      cudaFuncSetAttribute(convolution_kernel<T, M, P, R>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  convolution_kernel<T, M, P, R><<<blocks, M * P * 32, kBytes, stream>>>(a);
  return cudaGetLastError();
}

// For threads of v channels each.
Part part_of(const Tensor& input, const Tensor& offset, const Tensor& mask, const DeformConv2d& conv, int64_t first,
             int64_t rows, int v) {
  Part part{geometry(input, offset, mask, conv), static_cast<int>(first), static_cast<int>(rows), 1};
  while (part.lanes < 32 && part.lanes * v < part.g.per_offset_group) part.lanes *= 2;
  return part;
}

dim3 blocks_of(const Part& part) {
  return dim3(ceil_div(part.rows, kPixels), part.g.taps * ceil_div(part.g.conv.offset_groups, kOffsetGroups));
}

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

bool has_planes(const Tensor& x) {
  return (x.sizes[2] <= 1 || x.strides[2] == x.sizes[3] * x.strides[3]) && x.sizes[2] * x.sizes[3] * x.strides[3] < INT32_MAX;
}

size_t deform_conv2d_workspace(const Tensor& input, const Tensor& weight, const DeformConv2d& conv) {
  size_t bytes = 0;
  for (const Tensor* x : {&input, &weight}) {
    Tensor y;
    if (!is_packed(*x, conv, &y)) bytes += ceil_div<int64_t>(y.numel() * y.item_size(), 256) * 256;
  }
  return bytes;
}

cudaError_t deform_conv2d(const Tensor& input, const Tensor& offset, const Tensor& weight, const Tensor& bias,
                          const Tensor& mask, const Tensor& output, const DeformConv2d& conv, void* workspace,
                          cudaStream_t stream) {
  if (!is_float(input) || weight.dtype != input.dtype || !is_float(offset) || (mask.data && !is_float(mask)) ||
      (bias.data && !is_float(bias)) || !countable(input, offset)) {
    return cudaErrorNotSupported;
  }
  if (output.numel() == 0) return cudaSuccess;
  Tensor ready[2];
  for (int i = 0; i < 2; ++i) {
    const Tensor& x = i ? weight : input;
    if (is_packed(x, conv, &ready[i])) continue;
    ready[i] = packed(x, conv);
    ready[i].data = workspace;
    workspace = static_cast<char*>(workspace) + ceil_div<int64_t>(ready[i].numel() * x.item_size(), 256) * 256;
    const cudaError_t status = pack(x, ready[i], conv, stream);
    if (status != cudaSuccess) return status;
  }
  int device = 0, processors = 0, shared = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Convolution<T> a{static_cast<const T*>(ready[0].data), static_cast<const T*>(ready[1].data), AnyFloat(offset),
                           AnyFloat(mask), AnyFloat(bias), static_cast<T*>(output.data),
                           geometry(ready[0], offset, mask, conv), bias.strides[0],
                           static_cast<int>(weight.sizes[0] / conv.groups)};
    // The larger a tile, the less often the same is read; but every processor should have one.
    const auto fills = [&](int outputs) {
      return a.outputs > outputs / 2 && static_cast<int64_t>(ceil_div(a.geometry.rows, kPixels)) *
                                                ceil_div(a.outputs, outputs) * conv.groups >= processors;
    };
    if (const char* e = getenv("SV_TILE")) {  // EXPERIMENT
      if constexpr (sizeof(T) == 2) {
        if (e[0] == '4' && e[1] == '1') return convolve<T, 4, 1, 4>(a, stream);
        if (e[0] == '4' && e[1] == '2') return convolve<T, 4, 2, 4>(a, stream);
        if (e[0] == '4' && e[1] == '3') return convolve<T, 4, 3, 4>(a, stream);
      }
      if (e[0] == '2' && e[1] == '1') return convolve<T, 4, 1, 2>(a, stream);
      if (e[0] == '2' && e[1] == '2') return convolve<T, 4, 2, 2>(a, stream);
      if (e[0] == '2' && e[1] == '3') return convolve<T, 4, 3, 2>(a, stream);
      if (e[0] == '1') return convolve<T, 2, 1, 2>(a, stream);
    }
    if constexpr (sizeof(T) == 2) {  // float, in two parts, has not the registers
      if (fills(256) && shared >= 80 * 1024) return convolve<T, 4, 1, 4>(a, stream);
    }
    return fills(128) ? convolve<T, 4, 1, 2>(a, stream) : convolve<T, 2, 1, 2>(a, stream);
  });
}

cudaError_t deform_conv2d_columns(const Tensor& input, const Tensor& offset, const Tensor& mask,
                                  const DeformConv2d& conv, int64_t first, const Tensor& columns, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Part part = part_of(input, offset, mask, conv, first, columns.sizes[1], kVector<T>);
    columns_kernel<<<blocks_of(part), kThreads, 0, stream>>>(static_cast<const T*>(input.data), AnyFloat(offset),
                                                             AnyFloat(mask), part, static_cast<T*>(columns.data));
    return cudaGetLastError();
  });
}

cudaError_t deform_conv2d_planes(const Tensor& input, const Tensor& offset, const Tensor& mask,
                                 const DeformConv2d& conv, int64_t first, const Tensor& columns, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  if (!has_planes(input)) return cudaErrorNotSupported;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    Geometry g{};
    g.conv = conv;
    g.height = static_cast<int>(input.sizes[2]);
    g.width = static_cast<int>(input.sizes[3]);
    g.channels = conv.channels;
    g.vectors = static_cast<unsigned>(input.strides[3]);
    g.per_offset_group = conv.channels / conv.offset_groups;
    g.out_height = static_cast<int>(offset.sizes[2]);
    g.out_width = static_cast<int>(offset.sizes[3]);
    g.taps = conv.kernel[0] * conv.kernel[1];
    for (int i = 0; i < 4; ++i) {
      g.offset[i] = offset.strides[i];
      g.mask[i] = mask.strides[i];
    }
    const int plane = g.out_height * g.out_width;
    const int rows = static_cast<int>(columns.numel() / (static_cast<int64_t>(conv.channels) * g.taps));
    const dim3 blocks(ceil_div(rows, kThreads), g.taps, conv.offset_groups * ceil_div(g.per_offset_group, kChannels));
    if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
    planes_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(input.data), input.strides[0], input.strides[1],
                                                   AnyFloat(offset), AnyFloat(mask), g, static_cast<int>(first) * plane,
                                                   rows, static_cast<T*>(columns.data));
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
    const Part part = part_of(input, offset, mask, conv, first, columns.sizes[1], 4);
    columns_backward_kernel<<<blocks_of(part), kThreads, 0, stream>>>(
        static_cast<T*>(columns.data), replace, static_cast<const T*>(input.data), AnyFloat(offset), AnyFloat(mask),
        part, Sums{grad_input.data, static_cast<const float*>(scale.data)}, AnyFloat(grad_offset), AnyFloat(grad_mask));
    return cudaGetLastError();
  });
}

}  // namespace svexport
