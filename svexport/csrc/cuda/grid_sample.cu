#include "grid_sample.h"

#include <cstdlib>
#include <cstdio>

#include "sampling.cuh"

namespace svexport {
namespace {

constexpr int kThreads = 256;

// Where the results go: image n, channel c, point p at n * image + c * channel + p * point.
template <class T>
struct Output {
  T* data;
  int64_t image, channel, point;
  T* mask;  // (N, points), or null
};

// ------------------------------------------------------------------------------------- any strides: a thread per point

// Blocks of points x chunks of channels x images.
template <class T, int TAPS>
__global__ void __launch_bounds__(kThreads) direct_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          int64_t channel, Output<T> output, int batch, int channels,
                                                          int chunk) {
  constexpr int U = TAPS == 1 ? 8 : TAPS == 4 ? 4 : TAPS == 8 ? 2 : 1;
  const int p = blockIdx.x * kThreads + threadIdx.x, first = blockIdx.y * chunk;
  if (p >= s.points) return;
  const int count = min(chunk, channels - first);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    const Taps<TAPS> taps(locate<TAPS>(s, n, p), s.stride);
    const T* source = input + n * image + first * channel;
    T* target = output.data + n * output.image + first * output.channel + p * output.point;
    auto step = [&](auto width) {
      constexpr int W = decltype(width)::value;
      float v[W][TAPS];
#pragma unroll
      for (int u = 0; u < W; ++u) {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          v[u][i] = taps.offset[i] < 0 ? 0.0f : to_float(source[u * channel + taps.offset[i]]);
        }
      }
#pragma unroll
      for (int u = 0; u < W; ++u) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) sum = fmaf(taps.weight[i], v[u][i], sum);
        target[u * output.channel] = from_float<T>(sum);
      }
      source += W * channel;
      target += W * output.channel;
    };
    int c = 0;
    for (; c + U <= count; c += U) step(std::integral_constant<int, U>());
    for (; c < count; ++c) step(std::integral_constant<int, 1>());
    if (output.mask && blockIdx.y == 0) {
      output.mask[static_cast<int64_t>(n) * s.points + p] = from_float<T>(taps.offset[0] < 0 ? 0.0f : 1.0f);
    }
  }
}

// ----------------------------------------------------------------------------- channels-last: 16 bytes of a point each

// Blocks of POINTS * (256 >> shift) points x (16 bytes << shift) of channels x images.
template <class T, int TAPS>
__global__ void __launch_bounds__(kThreads) vector_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          Output<T> output, int batch, int channels, int shift,
                                                          int width) {
  constexpr int V = 16 / sizeof(T), POINTS = TAPS <= 4 ? 2 : 1;
  __shared__ uint4 tile[POINTS * kThreads];
  const int lanes = 1 << shift, rows = kThreads >> shift;
  const int lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int first = blockIdx.x * (POINTS * rows), block_channel = (blockIdx.y << shift) * V;
  const int c = block_channel + lane * V;
  const bool last = output.channel == 1;  // channels innermost in the output too
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    Taps<TAPS> taps[POINTS];
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const int p = first + row + k * rows;
      if (p < s.points) {
        taps[k] = Taps<TAPS>(locate<TAPS>(s, n, p), s.stride);
        if (output.mask && c == 0) {
          output.mask[static_cast<int64_t>(n) * s.points + p] = from_float<T>(taps[k].offset[0] < 0 ? 0.0f : 1.0f);
        }
      } else {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) taps[k].offset[i] = -1, taps[k].weight[i] = 0;
      }
    }
    constexpr int STEP = TAPS < 4 ? TAPS : 4;  // loads in flight for each point
    float sums[POINTS][V] = {};
    if (c < channels) {
      const T* source = input + n * image + c;
#pragma unroll
      for (int i = 0; i < TAPS; i += STEP) {
        Vec<T, V> v[POINTS][STEP] = {};
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
#pragma unroll
          for (int j = 0; j < STEP; ++j) {
            if (taps[k].offset[i + j] >= 0) v[k][j] = load<T, V>(source + taps[k].offset[i + j]);
          }
        }
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
#pragma unroll
          for (int j = 0; j < STEP; ++j) add_scaled(sums[k], taps[k].weight[i + j], v[k][j]);
        }
      }
    }
    T* target = output.data + n * output.image + first * output.point + block_channel * output.channel;
    if (last) {
#pragma unroll
      for (int k = 0; k < POINTS; ++k) {
        const int p = row + k * rows;
        if (first + p < s.points && c < channels) store(target + p * output.point + lane * V, rounded<T>(sums[k]));
      }
      continue;
    }
    const int bits = tile_bits(shift, width);
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const Vec<T, V> v = rounded<T>(sums[k]);
      memcpy(&tile[swizzled((row + k * rows) * lanes + lane, bits)], &v, 16);
    }
    __syncthreads();
    const int left = s.points - first, left_channels = channels - block_channel;
    auto write = [&](auto w) {
      write_points<decltype(w)::value>(tile, bits, shift, POINTS * rows, target, output.channel, output.point, left,
                                       left_channels);
    };
    if (V == 8 && width == 8) {
      write(std::integral_constant<int, V>());
    } else if (width >= 4) {
      write(std::integral_constant<int, 4>());
    } else {
      write(std::integral_constant<int, 1>());
    }
    __syncthreads();
  }
}

// ------------------------------------------------------------- NCHW: images of K channels gathered from shared memory

// Blocks of (image, K channels, one of `splits` parts of the points).
template <class T, int TAPS, int K>
__global__ void plane_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output,
                             int channels, int pixels, int splits, bool paired) {
  extern __shared__ uint4 shared[];
  constexpr int PAIR = 4 / sizeof(T);  // pixels of one load
  T* plane = reinterpret_cast<T*>(shared);  // (pixels, K)
  const int groups = ceil_div(channels, K);
  const int split = blockIdx.x % splits, block = blockIdx.x / splits, first = block % groups * K, n = block / groups;
  const int count = min(K, channels - first);
  const T* source = input + n * image + first * channel;

  auto fill = [&](auto width) {
    constexpr int W = decltype(width)::value;
#pragma unroll 4
    for (int i = threadIdx.x * W; i < pixels; i += blockDim.x * W) {
      Vec<T, W> v[K];
#pragma unroll
      for (int k = 0; k < K; ++k) v[k] = load<T, W>(source + (k < count ? k * channel : 0) + i);
      constexpr int N = W * K * sizeof(T) > 16 ? 16 / sizeof(T) : W * K;  // elements of one store
#pragma unroll
      for (int j = 0; j < W * K; j += N) {
        Vec<T, N> together;
#pragma unroll
        for (int e = 0; e < N; ++e) together.at[e] = v[(j + e) % K].at[(j + e) / K];
        store(plane + i * K + j, together);
      }
    }
  };
  if (paired) {
    fill(std::integral_constant<int, PAIR>());
  } else {
    fill(std::integral_constant<int, 1>());
  }
  __syncthreads();

  const int part = ceil_div(s.points, splits), begin = split * part, end = min(begin + part, s.points);
  T* target = output.data + n * output.image + first * output.channel;
#pragma unroll 2
  for (int p = begin + threadIdx.x; p < end; p += blockDim.x) {
    const Taps<TAPS> taps(locate<TAPS>(s, n, p), s.stride);
    float sums[K] = {};
#pragma unroll
    for (int i = 0; i < TAPS; ++i) {
      Vec<T, K> v = {};
      if (taps.offset[i] >= 0) v = load<T, K>(plane + taps.offset[i] * K);
      add_scaled(sums, taps.weight[i], v);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k < count) target[k * output.channel + p * output.point] = from_float<T>(sums[k]);
    }
    if (output.mask && first == 0) {
      output.mask[static_cast<int64_t>(n) * s.points + p] = from_float<T>(taps.offset[0] < 0 ? 0.0f : 1.0f);
    }
  }
}

int attribute(cudaDeviceAttr name) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

template <class T, int TAPS>
cudaError_t launch(const Tensor& input, const Space& s, Output<T> output, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  constexpr int V = 16 / sizeof(T);
  const unsigned images = batch < 65535 ? batch : 65535;

  char kind[16] = "";
  int e1 = 0, e2 = 0, e3 = 0;
  if (const char* e = getenv("SV_SAMPLE")) sscanf(e, "%15[a-z]:%d:%d:%d", kind, &e1, &e2, &e3);

  if (channels % V == 0 && channel == 1 && input.aligned(1, 16)) {
    int shift = 0;
    while (shift < 3 && (V << shift) < channels) ++shift;
    constexpr int POINTS = TAPS <= 4 ? 2 : 1;
    const int tile = POINTS * (kThreads >> shift);
    int width = 1;
    if (output.channel == 1) {
      if (reinterpret_cast<uintptr_t>(output.data) % 16 || output.point * sizeof(T) % 16 ||
          output.image * sizeof(T) % 16) {
        return cudaErrorNotSupported;
      }
    } else if (output.point == 1) {
      for (int w : {V, 4}) {
        const int bytes = w * sizeof(T);
        if (width == 1 && 8 * w <= tile && reinterpret_cast<uintptr_t>(output.data) % bytes == 0 &&
            output.image * sizeof(T) % bytes == 0 && output.channel * sizeof(T) % bytes == 0) {
          width = w;
        }
      }
    }
    if (kind[0] == 'v' && e1) width = e1;
    const dim3 grid(ceil_div(s.points, tile), ceil_div(channels, V << shift), images);
    vector_kernel<T, TAPS><<<grid, kThreads, 0, stream>>>(s, data, image, output, batch, channels, shift, width);
    return cudaGetLastError();
  }

  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  int64_t pixels = 1;
  bool dense = true;
  for (int i = 0; i < s.axes; ++i) {
    dense = dense && (s.stride[i] == pixels || s.size[i] == 1);
    pixels *= s.size[i];
  }
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int64_t bytes = pixels * sizeof(T);
  if (kind[0] == 'p' && dense && bytes * e1 <= most) {
    const bool paired = sizeof(T) == 4 || (pixels % 2 == 0 && input.aligned(3, 4) && channel % 2 == 0 && image % 2 == 0);
    auto go = [&](auto k) {
      constexpr int K = decltype(k)::value;
      const int memory = static_cast<int>(ceil_div<int64_t>(bytes * K, 16) * 16);
      const auto kernel = plane_kernel<T, TAPS, K>;
      const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
      if (status != cudaSuccess) return status;
      const int blocks = batch * ceil_div(channels, K) * e2;
      kernel<<<blocks, e3, memory, stream>>>(s, data, image, channel, output, channels, static_cast<int>(pixels), e2, paired);
      return cudaGetLastError();
    };
    switch (e1) {
      case 1: return go(std::integral_constant<int, 1>());
      case 2: return go(std::integral_constant<int, 2>());
      case 4: return go(std::integral_constant<int, 4>());
      default: if constexpr (V == 8) return go(std::integral_constant<int, 8>());
    }
  }

  const int blocks = ceil_div(s.points, kThreads);
  int chunk = 32;
  while (chunk > 4 && static_cast<int64_t>(blocks) * batch * ceil_div(channels, chunk) < 16 * multiprocessors) chunk /= 2;
  if (kind[0] == 'd' && e1) chunk = e1;
  while (ceil_div(channels, chunk) > 65535) chunk *= 2;
  const dim3 grid(blocks, ceil_div(channels, chunk), images);
  direct_kernel<T, TAPS><<<grid, kThreads, 0, stream>>>(s, data, image, channel, output, batch, channels, chunk);
  return cudaGetLastError();
}

}  // namespace

cudaError_t sample(const Tensor& input, const Tensor& grid, const Tensor& output, const Tensor& mask,
                   const Sampling& sampling, cudaStream_t stream) {
  Space s(grid);
  if (output.numel() == 0 && mask.data == nullptr) return cudaSuccess;
  if (output.numel() == 0 || input.sizes[0] > INT32_MAX || input.sizes[1] > INT32_MAX || !is_float(grid) ||
      !Space::of(input, grid, sampling, s)) {
    return cudaErrorNotSupported;
  }
  int64_t point = 1;
  if (!Space::evenly_spaced(output, 2, output.rank - 1, point)) return cudaErrorNotSupported;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Output<T> to{static_cast<T*>(output.data), output.strides[0], output.strides[1], point,
                       static_cast<T*>(mask.data)};
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) { return launch<T, taps()>(input, s, to, stream); });
  });
}

cudaError_t grid_sample(const Tensor& input, const Tensor& grid, const Tensor& output, int mode, int padding,
                        bool align_corners, cudaStream_t stream) {
  return sample(input, grid, output, Tensor{}, Sampling{mode, padding, align_corners}, stream);
}

}  // namespace svexport
