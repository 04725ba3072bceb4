#include "bilinear_sample.h"
#include "grid_sample.h"
#include "overlap.cuh"
#include "sampling.cuh"

namespace svexport {
namespace {

constexpr int kThreads = 256;

// The gradient of the output: image n, channel c, point p at n * image + c * channel + p * point.
template <class T>
struct Gradient {
  const T* data;
  int64_t image, channel, point;
};

// Distances between the pixels of a dense image, `unit` elements from one pixel to the next.
struct Dense {
  int stride[3];

  Dense(const Space& s, int unit) : stride{unit, unit * s.size[0], unit * s.size[0] * (s.axes == 3 ? s.size[1] : 1)} {}
};

// The gradient of a point's coordinates, from the sum over channels of the output's gradient times each pixel.
template <int TAPS>
__device__ __forceinline__ void to_coordinates(const Point<TAPS>& point, const float (&dot)[TAPS],
                                               float (&gradient)[3]) {
#pragma unroll
  for (int a = 0; a < Point<TAPS>::AXES; ++a) {
    gradient[a] = 0;
#pragma unroll
    for (int i = 0; i < TAPS; ++i) gradient[a] = fmaf(point.slope(i, a), dot[i], gradient[a]);
  }
}

// ------------------------------------------------------------------------------------- any strides: a thread per point

// Blocks of points x images; 1 << shift threads share the channels of a point, each U at a time. sums: (N, C, pixels),
// contiguous, or null; grad_grid: (N, points, axes), contiguous, or null. Waits for the kernel before, which cleared
// the sums, only when it needs them.
template <class T, int TAPS, int PADDING, int U>
__global__ void __launch_bounds__(kThreads)
    direct_kernel(Space s, Dense dense, const T* __restrict__ input, int64_t image, int64_t channel, Gradient<T> grad,
                  float* __restrict__ sums, AnyFloat grad_grid, int batch, int channels, int64_t pixels, int shift) {
  __shared__ float partial[3][kThreads];
  const int tile = kThreads >> shift, row = threadIdx.x & (tile - 1), part = threadIdx.x / tile, parts = 1 << shift;
  const int p = blockIdx.x * tile + row;
  start_next();
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    float gradient[3] = {};
    if (p < s.points) {
      const Point<TAPS> point = locate<TAPS, PADDING>(s, n, p);
      const Taps<TAPS> from(point, s.stride), to(point, dense.stride);
      float dot[TAPS] = {};
      wait_for_previous();
      const bool read = grad_grid.data && TAPS > 1;
      const T* g = grad.data + n * grad.image + p * grad.point;
      const T* source = input + n * image;
      float* target = sums + static_cast<int64_t>(n) * channels * pixels;
#pragma unroll U
      for (int c = part; c < channels; c += parts) {
        const float scale = to_float(load_if<T, 1>(g + c * grad.channel, true).at[0]);
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          const bool inside = read && from.offset[i] >= 0;
          const float pixel = to_float(load_if<T, 1>(source + c * channel + from.offset[i], inside).at[0]);
          if (inside) dot[i] = fmaf(scale, pixel, dot[i]);
        }
        if (!sums) continue;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          if (to.offset[i] >= 0) atomicAdd(target + c * pixels + to.offset[i], to.weight[i] * scale);
        }
      }
      if (TAPS > 1) to_coordinates(point, dot, gradient);
    }
    if (grad_grid.data == nullptr) continue;
    if (parts == 1) {
#pragma unroll
      for (int a = 0; a < Point<TAPS>::AXES; ++a) {
        if (p < s.points && a < s.axes) {
          grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, gradient[a]);
        }
      }
      continue;
    }
#pragma unroll
    for (int a = 0; a < 3; ++a) partial[a][threadIdx.x] = gradient[a];
    __syncthreads();
    if (part == 0 && p < s.points) {
      for (int a = 0; a < s.axes; ++a) {
        float sum = 0;
        for (int i = 0; i < parts; ++i) sum += partial[a][row + i * tile];
        grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, sum);
      }
    }
    __syncthreads();
  }
}

// The same sums in one order: a thread per channel of an image, one point after the other.
template <class T, int TAPS>
__global__ void __launch_bounds__(kThreads)
    ordered_kernel(Space s, Dense dense, Gradient<T> grad, float* __restrict__ sums, int batch, int channels,
                   int64_t pixels) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= static_cast<int64_t>(batch) * channels) return;
  const int n = static_cast<int>(i / channels), c = static_cast<int>(i % channels);
  float* target = sums + i * pixels;
  for (int p = 0; p < s.points; ++p) {
    const Taps<TAPS> taps(locate<TAPS>(s, n, p), dense.stride);
    const float g = to_float(grad.data[n * grad.image + c * grad.channel + p * grad.point]);
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
      if (taps.offset[k] >= 0) target[taps.offset[k]] += taps.weight[k] * g;
    }
  }
}

// ------------------------------------------------------------- channels-last image and sums: 16 bytes of a point each

// Blocks of 256 >> shift points x images, (16 bytes << shift) of channels at a time. input: (N, pixels, C) with C
// innermost, any strides else; sums: (N, pixels, C), contiguous, or null.
template <class T, int TAPS, int PADDING>
__global__ void __launch_bounds__(kThreads)
    vector_kernel(Space s, Dense dense, const T* __restrict__ input, int64_t image, Gradient<T> grad,
                  float* __restrict__ sums, AnyFloat grad_grid, int batch, int channels, int64_t pixels, int shift,
                  int width) {
  constexpr int V = 16 / sizeof(T);
  __shared__ uint4 tile[kThreads];  // points x granules of the gradient
  const int lanes = 1 << shift, rows = kThreads >> shift, lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int first = blockIdx.x * rows, p = first + row;
  const int bits = tile_bits(shift, width);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    Point<TAPS> point;
    if (p < s.points) point = locate<TAPS, PADDING>(s, n, p);
    const Taps<TAPS> from(point, s.stride), to(point, dense.stride);
    float dot[TAPS] = {};
    for (int block_channel = 0; block_channel < channels; block_channel += V << shift) {
      if (width > 0) {
        const T* source = grad.data + n * grad.image + first * grad.point + block_channel * grad.channel;
        __syncthreads();
        dispatch_width(width, [&](auto w) {
          constexpr int W = decltype(w)::value;
          if constexpr (W <= 4) {
            read_points<W>(tile, bits, shift, rows, source, grad.channel, grad.point, s.points - first,
                             channels - block_channel);
          }
        });
        __syncthreads();
      }
      if (p >= s.points) continue;
      // Four channels of each lane at a time, so that lanes side by side add to memory side by side.
#pragma unroll
      for (int part = 0; part < V / 4; ++part) {
        const int in_block = (part * lanes + lane) * 4, c = block_channel + in_block;
        if (c >= channels) break;
        Vec<T, 4> g;
        if (width > 0) {
          const char* granule = reinterpret_cast<const char*>(&tile[swizzled(row * lanes + in_block / V, bits)]);
          memcpy(&g, granule + in_block % V * sizeof(T), sizeof(g));
        } else {
          g = load<T, 4>(grad.data + n * grad.image + p * grad.point + c);
        }
        const T* source = input + n * image + c;
        float* target = sums + n * pixels * channels + c;
        Vec<T, 4> v[TAPS];
        if (grad_grid.data && TAPS > 1) {
#pragma unroll
          for (int i = 0; i < TAPS; ++i) {
            v[i] = load_if<T, 4>(source + from.offset[i], from.offset[i] >= 0);
          }
        }
        if (sums) {
#pragma unroll
          for (int i = 0; i < TAPS; ++i) {
            float scaled[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) scaled[k] = to.weight[i] * to_float(g.at[k]);
            if (to.offset[i] >= 0) atomic_add(target + to.offset[i], scaled);
          }
        }
        if (grad_grid.data && TAPS > 1) {
#pragma unroll
          for (int i = 0; i < TAPS; ++i) {
            if (from.offset[i] < 0) continue;
#pragma unroll
            for (int k = 0; k < 4; ++k) dot[i] = fmaf(to_float(g.at[k]), to_float(v[i].at[k]), dot[i]);
          }
        }
      }
    }
    if (grad_grid.data == nullptr) continue;
    float gradient[3] = {};
    if (TAPS > 1 && p < s.points) to_coordinates(point, dot, gradient);
#pragma unroll
    for (int a = 0; a < Point<TAPS>::AXES; ++a) {
      for (int mask = lanes / 2; mask > 0; mask /= 2) gradient[a] += __shfl_xor_sync(~0u, gradient[a], mask);
    }
    if (lane == 0 && p < s.points) {
#pragma unroll
      for (int a = 0; a < Point<TAPS>::AXES; ++a) {
        if (a < s.axes) grad_grid.set((static_cast<int64_t>(n) * s.points + p) * s.axes + a, gradient[a]);
      }
    }
  }
}

// ------------------------------------------------------------------ few points: pixels of a channel in shared memory

constexpr int kPlaneThreads = 512, kPlanePixels = 28000;  // two blocks in the shared memory of a multiprocessor

// Blocks of (image, channel, `tile` pixels): each adds up its part of the gradient and writes it once.
// output: (N, C, pixels), contiguous.
template <class T, int TAPS>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_kernel(Space s, Dense dense, Gradient<T> grad, T* __restrict__ output, int channels, int pixels, int tile,
                 int tiles) {
  extern __shared__ float sums[];  // (tile)
  const int block = blockIdx.x / tiles, c = block % channels, n = block / channels;
  const int begin = blockIdx.x % tiles * tile, size = min(tile, pixels - begin);
  for (int i = threadIdx.x; i < size; i += kPlaneThreads) sums[i] = 0;
  __syncthreads();
  const T* source = grad.data + n * grad.image + c * grad.channel;
  for (int p = threadIdx.x; p < s.points; p += kPlaneThreads) {
    const Taps<TAPS> taps(locate<TAPS>(s, n, p), dense.stride);
    const float g = to_float(source[p * grad.point]);
#pragma unroll
    for (int i = 0; i < TAPS; ++i) {
      const int at = taps.offset[i] - begin;
      if (taps.offset[i] >= 0 && at >= 0 && at < size) atomicAdd(sums + at, taps.weight[i] * g);
    }
  }
  __syncthreads();
  T* target = output + static_cast<int64_t>(block) * pixels + begin;
  for (int i = threadIdx.x; i < size; i += kPlaneThreads) target[i] = from_float<T>(sums[i]);
}

// ------------------------------------------------------------------------------------------------------ copies

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    to_channels_last_kernel(const T* __restrict__ from, int64_t image, int64_t channel, T* __restrict__ to, int batch,
                            int channels, int pixels, int width) {
  to_channels_last(from, image, channel, to, batch, channels, pixels, width);
}

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    from_channels_last_kernel(const float* __restrict__ from, T* __restrict__ to, int batch, int channels, int pixels,
                              int width) {
  from_channels_last(from, to, batch, channels, pixels, width);
}

// n floats, 4 at a time from an aligned address on.
__global__ void __launch_bounds__(kThreads) zero_kernel(float* __restrict__ to, int64_t n) {
  start_next();
  for (int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) * 4; i < n;
       i += static_cast<int64_t>(gridDim.x) * kThreads * 4) {
    if (i + 4 <= n) {
      store(to + i, Vec<float, 4>{});
    } else {
      for (int64_t j = i; j < n; ++j) to[j] = 0;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const float* __restrict__ from, T* __restrict__ to, int64_t n) {
  wait_for_previous();
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    to[i] = from_float<T>(from[i]);
  }
}

// ------------------------------------------------------------------------------------------------------ the choice

int64_t pixels_of(const Tensor& input) {
  int64_t pixels = 1;
  for (int i = 2; i < input.rank; ++i) pixels *= input.sizes[i];
  return pixels;
}

size_t padded(size_t bytes) { return ceil_div<size_t>(bytes, 256) * 256; }

// How the gradients are computed, and in how much memory.
struct Plan {
  bool plane;   // the image's by plane_kernel,
  bool vector;  // the others by vector_kernel, else by direct_kernel
  bool copied;  // the image transposed to channels-last first
  int tile;
  size_t sums = 0, copy = 0;  // bytes

  Plan(const Tensor& input, const Tensor& grid, bool input_gradient, bool grid_gradient) {
    const int64_t v = 16 / input.item_size(), pixels = pixels_of(input);
    const int64_t points = grid.numel() / grid.sizes[0] / (grid.rank - 2), channels = input.sizes[1];
    tile = static_cast<int>(pixels < kPlanePixels ? pixels : kPlanePixels);
    plane = input_gradient && 4 * points * ceil_div<int64_t>(pixels, tile) <= pixels &&
            input.sizes[0] * channels * ceil_div<int64_t>(pixels, tile) < INT32_MAX;
    const bool last = input.strides[1] == 1 && input.aligned(1, 16);
    int64_t pixel = 1;
    const bool dense = Space::evenly_spaced(input, 2, input.rank - 1, pixel) && pixel == 1 && 2 * points >= pixels;
    const bool large = input.sizes[0] * points * channels >= (1 << 19);  // worth three or four kernels
    vector = channels % v == 0 && pixels * channels < INT32_MAX &&
             (large ? last || dense : last && !input_gradient);
    copied = vector && !last && grid_gradient;
    if (input_gradient && (vector || input.dtype != DType::kFloat32)) sums = padded(input.numel() * sizeof(float));
    if (copied) copy = padded(input.numel() * input.item_size());
  }
};

unsigned limited(int64_t blocks) { return static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20); }

template <class T, int TAPS>
cudaError_t run(const Tensor& grad, int64_t point, const Tensor& input, const Space& space, const Tensor& grad_input,
                const Tensor& grad_grid, bool deterministic, const Plan& plan, void* workspace, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int pixels = static_cast<int>(pixels_of(input));
  const Gradient<T> gradient{static_cast<const T*>(grad.data), grad.strides[0], grad.strides[1], point};
  const unsigned images = batch < 65535 ? batch : 65535;
  constexpr int V = 16 / sizeof(T), kUsual = TAPS == 4 || TAPS == 8 ? kZeros : kAnyPadding;  // padding
  T* output = static_cast<T*>(grad_input.data);
  float* sums = plan.sums ? static_cast<float*>(workspace) : reinterpret_cast<float*>(output);
  const bool ordered = output && deterministic, plane = output && !ordered && plan.plane;
  const bool add = output && !ordered && !plane;  // by atomics
  const int64_t tiles = ceil_div<int64_t>(pixels, kTilePoints) * ceil_div(channels, 8 * V) * batch;
  const T* data = static_cast<const T*>(input.data);
  int64_t image = input.strides[0];
  Space s = space;
  const int64_t n = input.numel();
  const bool short_chain = add && !plan.vector && n <= (1 << 20);  // of kernels that overlap
  if (short_chain) {
    zero_kernel<<<limited(ceil_div<int64_t>(n, 4 * kThreads)), kThreads, 0, stream>>>(sums, n);
  } else if (ordered || add) {
    const cudaError_t status = cudaMemsetAsync(sums, 0, n * sizeof(float), stream);
    if (status != cudaSuccess) return status;
  }
  if (ordered) {
    const unsigned blocks = ceil_div<int64_t>(static_cast<int64_t>(batch) * channels, kThreads);
    ordered_kernel<T, TAPS><<<blocks, kThreads, 0, stream>>>(s, Dense(s, 1), gradient, sums, batch, channels, pixels);
  }
  if (plane) {
    const int memory = plan.tile * static_cast<int>(sizeof(float)), parts = ceil_div(pixels, plan.tile);
    const auto kernel = plane_kernel<T, TAPS>;
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (status != cudaSuccess) return status;
    kernel<<<batch * channels * parts, kPlaneThreads, memory, stream>>>(s, Dense(s, 1), gradient, output, channels,
                                                                        pixels, plan.tile, parts);
  }
  if (plan.vector && (add || grad_grid.data)) {
    if (plan.copied) {
      T* copy = reinterpret_cast<T*>(static_cast<char*>(workspace) + plan.sums);
      to_channels_last_kernel<<<limited(tiles), kTileThreads, 0, stream>>>(
          data, image, input.strides[1], copy, batch, channels, pixels, pixel_width<T>(data, image, input.strides[1]));
      data = copy;
      image = static_cast<int64_t>(pixels) * channels;
      for (int a = 0; a < 3; ++a) s.stride[a] = Dense(s, channels).stride[a];
    }
    int shift = 0;
    while (shift < 3 && (V << shift) < channels) ++shift;
    const bool last = grad.strides[1] == 1 && (reinterpret_cast<uintptr_t>(grad.data) | point * sizeof(T) |
                                               grad.strides[0] * sizeof(T)) % 16 == 0;
    const int width = last ? 0 : point == 1 ? pixel_width<T>(grad.data, grad.strides[0], grad.strides[1], 4) : 1;
    const auto kernel =
        s.padding == kUsual ? vector_kernel<T, TAPS, kUsual> : vector_kernel<T, TAPS, kAnyPadding>;
    kernel<<<dim3(ceil_div(s.points, kThreads >> shift), 1, images), kThreads, 0, stream>>>(
        s, Dense(s, channels), data, image, gradient, add ? sums : nullptr, AnyFloat(grad_grid), batch, channels,
        pixels, shift, width);
    if (add) {
      from_channels_last_kernel<<<limited(tiles), kTileThreads, 0, stream>>>(
          sums, output, batch, channels, pixels, pixel_width<T>(output, pixels, pixels));
    }
  } else if (add || grad_grid.data) {
    int shift = 0;  // more threads for each point where there are few points, or many channels
    while (shift < 5 && (2 << shift) <= channels &&
           ((16 << shift) <= channels ||
            static_cast<int64_t>(ceil_div(s.points, kThreads >> shift)) * batch < 512)) {
      ++shift;
    }
    // Behind zero_kernel it may begin early: nothing else writes what it reads before it waits.
    const auto with = [&](auto kernel) {
      return launch(kernel, dim3(ceil_div(s.points, kThreads >> shift), 1, images), kThreads, 0, stream, short_chain, s,
                    Dense(s, 1), data, image, input.strides[1], gradient, add ? sums : nullptr, AnyFloat(grad_grid),
                    batch, channels, pixels, shift);
    };
    constexpr int U = TAPS <= 4 ? 4 : 1;
    const bool few = channels >> shift < U;
    const auto choose = [&](auto padding) {
      constexpr int PADDING = padding.value;
      return few ? with(direct_kernel<T, TAPS, PADDING, 1>) : with(direct_kernel<T, TAPS, PADDING, U>);
    };
    const cudaError_t status = s.padding == kUsual ? choose(std::integral_constant<int, kUsual>())
                                                   : choose(std::integral_constant<int, kAnyPadding>());
    if (status != cudaSuccess) return status;
  }
  if ((ordered || (add && !plan.vector)) && sums != reinterpret_cast<float*>(output)) {
    return launch(round_kernel<T>, limited(ceil_div<int64_t>(n, kThreads)), kThreads, 0, stream, short_chain, sums,
                  output, n);
  }
  return cudaGetLastError();
}

}  // namespace

size_t sample_backward_workspace(const Tensor& input, const Tensor& grid, bool input_gradient, bool grid_gradient) {
  if (input.numel() == 0 || grid.numel() == 0) return 0;
  const Plan plan(input, grid, input_gradient, grid_gradient);
  return plan.sums + plan.copy;
}

cudaError_t sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                            const Tensor& grad_grid, const Sampling& sampling, bool deterministic, void* workspace,
                            cudaStream_t stream) {
  if (input.numel() == 0 || grid.numel() == 0) {
    for (const Tensor* t : {&grad_input, &grad_grid}) {
      if (t->data == nullptr || t->numel() == 0) continue;
      const cudaError_t status = cudaMemsetAsync(t->data, 0, t->numel() * t->item_size(), stream);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }
  Space s(grid);
  int64_t point = 1;
  if (grad.dtype != input.dtype || !is_float(input) || !is_float(grid) || input.sizes[0] > INT32_MAX ||
      input.sizes[1] > INT32_MAX || pixels_of(input) > INT32_MAX || !Space::of(input, grid, sampling, s) ||
      !Space::evenly_spaced(grad, 2, grad.rank - 1, point)) {
    return cudaErrorNotSupported;
  }
  const Plan plan(input, grid, grad_input.data, grad_grid.data);
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) {
      return run<T, taps()>(grad, point, input, s, grad_input, grad_grid, deterministic, plan, workspace, stream);
    });
  });
}

size_t grid_sample_backward_workspace(const Tensor& input, const Tensor& grid, bool input_gradient,
                                      bool grid_gradient) {
  return sample_backward_workspace(input, grid, input_gradient, grid_gradient);
}

cudaError_t grid_sample_backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const Tensor& grad_input,
                                 const Tensor& grad_grid, int mode, int padding, bool align_corners, bool deterministic,
                                 void* workspace, cudaStream_t stream) {
  return sample_backward(grad, input, grid, grad_input, grad_grid, Sampling{mode, padding, align_corners},
                         deterministic, workspace, stream);
}

}  // namespace svexport
