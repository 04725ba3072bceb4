#include "grid_sample.h"

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

  __device__ __forceinline__ void set_mask(int64_t i, int offset) const {
    mask[i] = from_float<T>(offset < 0 ? 0.0f : 1.0f);
  }
};

// ------------------------------------------------------------------------------------- any strides: a thread per point

// Blocks of points x chunks of channels x images. Not if *unless is not zero.
template <class T, int TAPS>
__global__ void __launch_bounds__(kThreads) direct_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          int64_t channel, Output<T> output, int batch, int channels,
                                                          int chunk, const int* __restrict__ unless) {
  constexpr int U = TAPS == 1 ? 8 : TAPS == 4 ? 4 : TAPS == 8 ? 2 : 1;
  const int p = blockIdx.x * kThreads + threadIdx.x, first = blockIdx.y * chunk;
  if (p >= s.points || (unless && *unless)) return;
  const int count = min(chunk, channels - first);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    const Taps<TAPS> taps(locate<TAPS>(s, n, p), s.stride);
    const char* source = reinterpret_cast<const char*>(input + n * image + first * channel);
    T* target = output.data + n * output.image + first * output.channel + p * output.point;
    if (output.mask && first == 0) output.set_mask(static_cast<int64_t>(n) * s.points + p, taps.offset[0]);
    auto step = [&](auto width) {
      constexpr int W = decltype(width)::value;
      T v[W][TAPS];
#pragma unroll
      for (int u = 0; u < W; ++u) {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          v[u][i] = from_float<T>(0.0f);
          if (taps.offset[i] >= 0) {
            v[u][i] = *reinterpret_cast<const T*>(source + taps.offset[i] * uint32_t{sizeof(T)});
          }
        }
        source += channel * sizeof(T);
      }
#pragma unroll
      for (int u = 0; u < W; ++u) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) sum = fmaf(taps.weight[i], to_float(v[u][i]), sum);
        *target = from_float<T>(sum);
        target += output.channel;
      }
    };
    int c = 0;
    for (; c + U <= count; c += U) step(std::integral_constant<int, U>());
    for (; c < count; ++c) step(std::integral_constant<int, 1>());
  }
}

// ----------------------------------------------------------------------------- channels-last: 16 bytes of a point each

template <int TAPS>
constexpr int kTogether = TAPS <= 4 ? 2 : 1;  // points that a thread has in flight

// The dynamic shared memory of vector(): a tile of results and the points of a block.
template <int TAPS>
constexpr int vector_memory(int shift, int steps) {
  return kTogether<TAPS> * (kThreads * 16 + steps * (kThreads >> shift) * static_cast<int>(sizeof(Taps<TAPS>)));
}

// `steps` times kTogether * (256 >> shift) points of image n, from point `first` on, in (16 bytes << shift) of channels
// from `block_channel` on. width: points per access to an output with points innermost, 0 if it has channels innermost.
template <class T, int TAPS>
__device__ __forceinline__ void vector(const Space& s, const T* __restrict__ input, int64_t image,
                                       const Output<T>& output, int n, int first, int block_channel, int channels,
                                       int shift, int steps, int width) {
  constexpr int V = 16 / sizeof(T), POINTS = kTogether<TAPS>;
  extern __shared__ uint4 tile[];
  Taps<TAPS>* points = reinterpret_cast<Taps<TAPS>*>(tile + POINTS * kThreads);
  const int lanes = 1 << shift, rows = kThreads >> shift, lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int c = block_channel + lane * V, bits = tile_bits(shift, width);
  __syncthreads();
  for (int i = threadIdx.x; i < steps * POINTS * rows; i += kThreads) {
    const int p = first + i;
    if (p >= s.points) continue;
    points[i] = Taps<TAPS>(locate<TAPS>(s, n, p), s.stride);
    if (output.mask && block_channel == 0) {
      output.set_mask(static_cast<int64_t>(n) * s.points + p, points[i].offset[0]);
    }
  }
  __syncthreads();
  const T* source = input + n * image + c;
  for (int step = 0; step < steps && first < s.points; ++step, first += POINTS * rows, points += POINTS * rows) {
    constexpr int AT_ONCE = TAPS < 4 ? TAPS : 4;  // loads in flight for each point
    float sums[POINTS][V] = {};
    const int left = s.points - first;
    if (c < channels) {
#pragma unroll
      for (int i = 0; i < TAPS; i += AT_ONCE) {
        Vec<T, V> v[POINTS][AT_ONCE] = {};
        float weight[POINTS][AT_ONCE] = {};
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
          if (row + k * rows >= left) continue;
          const Taps<TAPS>& taps = points[row + k * rows];
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            weight[k][j] = taps.weight[i + j];
            if (taps.offset[i + j] >= 0) v[k][j] = load<T, V>(source + taps.offset[i + j]);
          }
        }
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) add_scaled(sums[k], weight[k][j], v[k][j]);
        }
      }
    }
    T* target = output.data + n * output.image + first * output.point + block_channel * output.channel;
    if (width == 0) {
#pragma unroll
      for (int k = 0; k < POINTS; ++k) {
        const int p = row + k * rows;
        if (p < left && c < channels) store(target + p * output.point + lane * V, rounded<T>(sums[k]));
      }
      continue;
    }
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const Vec<T, V> v = rounded<T>(sums[k]);
      memcpy(&tile[swizzled((row + k * rows) * lanes + lane, bits)], &v, 16);
    }
    __syncthreads();
    dispatch_width(width, [&](auto w) {
      constexpr int W = decltype(w)::value;
      if constexpr (W <= V) {
        write_points<W>(tile, bits, shift, POINTS * rows, target, output.channel, output.point, left,
                          channels - block_channel);
      }
    });
    __syncthreads();
  }
}

// Blocks of points x channels x images. Only if *only_if is not zero.
template <class T, int TAPS>
__global__ void __launch_bounds__(kThreads) vector_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          Output<T> output, int batch, int channels, int shift,
                                                          int steps, int width, const int* __restrict__ only_if) {
  constexpr int V = 16 / sizeof(T);
  if (only_if && !*only_if) return;
  const int first = blockIdx.x * steps * kTogether<TAPS> * (kThreads >> shift);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    vector<T, TAPS>(s, input, image, output, n, first, (blockIdx.y << shift) * V, channels, shift, steps, width);
  }
}

// ------------------------------------------------------------------------- NCHW with many points: one way or the other
//
// Gathering from NCHW is bound by the 32-byte sectors that a warp touches: as few as in a copy where neighbouring
// points have neighbouring pixels, but two for each number where they scatter. Then it is several times faster to
// transpose the image to channels-last first, though that is slower for the others. Only the points can tell, so the
// kernels look.

constexpr int kScattered = 14;  // sectors that 32 points touch, from which on transposing is faster

// Whether the points scatter, by a sample of them; the same in every block. `scratch`: shared.
template <class T>
__device__ bool scattered(const Space& s, int batch, int* scratch) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t groups = static_cast<int64_t>(batch) * ((s.points + 31) / 32);
  int sectors = 0;
  for (int i = warp; i < 32; i += warps) {
    const int64_t group = groups * i / 32;
    const int n = static_cast<int>(group / ((s.points + 31) / 32));
    const int p = static_cast<int>(group % ((s.points + 31) / 32)) * 32 + threadIdx.x % 32;
    int sector = -1;
    if (p < s.points) {
      const int offset = locate<4>(s, n, p).offset(3, s.stride);
      if (offset >= 0) sector = offset * static_cast<int>(sizeof(T)) / 32;
    }
    const bool first = __ffs(__match_any_sync(~0u, sector)) - 1 == threadIdx.x % 32;
    sectors += __popc(__ballot_sync(~0u, first));
  }
  if (threadIdx.x == 0) *scratch = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(scratch, sectors);
  __syncthreads();
  return *scratch >= 32 * kScattered;
}

// Copies (N, C, pixels) to (N, pixels, C), or does not; says which in `flag`.
template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_if_scattered_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, T* __restrict__ copy,
                             int* __restrict__ flag, int batch, int channels, int pixels, int width) {
  __shared__ int scratch;
  const bool yes = scattered<T>(s, batch, &scratch);
  if (blockIdx.x == 0 && threadIdx.x == 0) *flag = yes;
  if (yes) to_channels_last(input, image, channel, copy, batch, channels, pixels, width);
}

// ------------------------------------------------------------------------------------------------------ the choice

int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Whether an NCHW image and its points may be worth a copy in channels-last.
bool may_copy(const Tensor& input, int64_t points, int mode) {
  if (mode != kBilinear || input.rank != 4) return false;
  const int64_t channels = input.sizes[1], pixels = input.sizes[2] * input.sizes[3];
  int64_t pixel = 0;
  return channels * input.item_size() % 16 == 0 && channels * input.item_size() >= 64 && 2 * points >= pixels &&
         input.sizes[0] * channels * points >= (1 << 22) && pixels * channels < INT32_MAX &&
         Space::evenly_spaced(input, 2, 3, pixel) && pixel == 1;
}

template <class T, int TAPS>
cudaError_t launch_vector(const Space& s, const T* data, int64_t image, int batch, int channels,
                          const Output<T>& output, int enough, const int* only_if, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  int shift = 0;
  while (shift < 3 && (V << shift) < channels) ++shift;
  const int tile = kTogether<TAPS> * (kThreads >> shift), across = ceil_div(channels, V << shift);
  const unsigned images = batch < 65535 ? batch : 65535;
  int width = 0;
  if (output.channel != 1) {
    width = output.point == 1 ? pixel_width<T>(output.data, output.image, output.channel, tile / 8) : 1;
  } else if ((reinterpret_cast<uintptr_t>(output.data) | (s.points > 1 ? output.point * sizeof(T) : 0) |
              (batch > 1 ? output.image * sizeof(T) : 0)) % 16) {
    return cudaErrorNotSupported;
  }
  int steps = kThreads / tile > 1 ? kThreads / tile : 1;
  while (steps > 1 && static_cast<int64_t>(ceil_div(s.points, steps * tile)) * across * images < enough) steps /= 2;
  vector_kernel<T, TAPS><<<dim3(ceil_div(s.points, steps * tile), across, images), kThreads,
                           vector_memory<TAPS>(shift, steps), stream>>>(s, data, image, output, batch, channels, shift,
                                                                        steps, width, only_if);
  return cudaGetLastError();
}

template <class T, int TAPS>
cudaError_t launch(const Tensor& input, const Space& s, const Output<T>& output, void* workspace, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  const int enough = 8 * multiprocessors();  // blocks
  if (channels % (16 / static_cast<int>(sizeof(T))) == 0 && input.aligned(1, 16)) {
    return launch_vector<T, TAPS>(s, data, image, batch, channels, output, enough, nullptr, stream);
  }

  int* flag = nullptr;
  if constexpr (TAPS == 4) {
    if (workspace && may_copy(input, s.points, kBilinear)) {
      const int pixels = s.size[0] * s.size[1];
      T* copy = static_cast<T*>(workspace);
      flag = reinterpret_cast<int*>(copy + input.numel());
      copy_if_scattered_kernel<<<enough, kThreads, 0, stream>>>(s, data, image, channel, copy, flag, batch, channels,
                                                               pixels, pixel_width<T>(data, image, channel));
      Space last = s;
      last.stride[0] = channels;
      last.stride[1] = channels * s.size[0];
      const cudaError_t status = launch_vector<T, TAPS>(last, copy, static_cast<int64_t>(pixels) * channels, batch,
                                                        channels, output, enough, flag, stream);
      if (status != cudaSuccess) return status;
    }
  }
  int64_t extent = 1;
  for (int a = 0; a < s.axes; ++a) extent += static_cast<int64_t>(s.size[a] - 1) * s.stride[a];
  if (extent * sizeof(T) > UINT32_MAX) return cudaErrorNotSupported;
  const int blocks = ceil_div(s.points, kThreads);
  int chunk = 32;
  while (chunk > 4 && static_cast<int64_t>(blocks) * batch * ceil_div(channels, chunk) < enough) chunk /= 2;
  while (ceil_div(channels, chunk) > 65535) chunk *= 2;
  const dim3 grid(blocks, ceil_div(channels, chunk), batch < 65535 ? batch : 65535);
  direct_kernel<T, TAPS><<<grid, kThreads, 0, stream>>>(s, data, image, channel, output, batch, channels, chunk, flag);
  return cudaGetLastError();
}

}  // namespace

size_t sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  if (grid.numel() == 0 || !may_copy(input, grid.numel() / grid.sizes[0] / 2, mode)) return 0;
  if (input.sizes[1] % (16 / input.item_size()) == 0 && input.aligned(1, 16)) return 0;
  return input.numel() * input.item_size() + sizeof(int);
}

cudaError_t sample(const Tensor& input, const Tensor& grid, const Tensor& output, const Tensor& mask,
                   const Sampling& sampling, cudaStream_t stream, void* workspace) {
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
    return dispatch_taps(sampling.mode, s.axes,
                         [&](auto taps) { return launch<T, taps()>(input, s, to, workspace, stream); });
  });
}

size_t grid_sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  return sample_workspace(input, grid, mode);
}

cudaError_t grid_sample(const Tensor& input, const Tensor& grid, const Tensor& output, int mode, int padding,
                        bool align_corners, cudaStream_t stream, void* workspace) {
  return sample(input, grid, output, Tensor{}, Sampling{mode, padding, align_corners}, stream, workspace);
}

}  // namespace svexport
