// Bilinear sampling in NCHW at a dense grid of float32 or of the image's type: a thread computes one point or two.
#include <cuda_pipeline_primitives.h>

#include "grid_sample/run.cuh"

namespace svexport::forward {
namespace {

// The 2 x 2 pixels and weights of POINTS adjacent points.
template <int POINTS>
struct Cells {
  int x[POINTS], y[POINTS];  // the upper left pixel
  bool inside[POINTS][2][2];
  float weight[POINTS][2][2];

  template <class G>
  __device__ __forceinline__ void find(const Space& s, const Vec<G, 2 * POINTS>& coordinates, int padding) {
    UNROLL for (int k = 0; k < POINTS; ++k) {
      Point<4> point;
      UNROLL for (int a = 0; a < 2; ++a) {
        point.axis[a] = pixels<2>(to_float(coordinates.at[2 * k + a]), a, 2, s, padding);
      }
      x[k] = point.axis[0].first;
      y[k] = point.axis[1].first;
      UNROLL for (int i = 0; i < 4; ++i) {
        inside[k][i / 2][i % 2] = point.axis[0].inside[i % 2] && point.axis[1].inside[i / 2];
        weight[k][i / 2][i % 2] = point.weight(i);
      }
    }
  }
};

// Computes `count` channels from global memory, TOGETHER of them at a time.
template <int TOGETHER, int POINTS, class T>
__device__ __forceinline__ void gather(const Space& s, const Cells<POINTS>& cells, const T* plane, int64_t channel,
                                       T* target, int64_t target_channel, int count) {
  int offset[POINTS];
  UNROLL for (int k = 0; k < POINTS; ++k) offset[k] = static_cast<uint32_t>(cells.y[k]) * s.stride[1] + cells.x[k];
#pragma unroll TOGETHER
  for (int c = 0; c < count; ++c, plane += channel, target += target_channel) {
    float sum[POINTS] = {};
    UNROLL for (int k = 0; k < POINTS; ++k) {
      T v[2][2];
      UNROLL for (int y = 0; y < 2; ++y) {
        const T* row = plane + (offset[k] + y * s.stride[1]);
        UNROLL for (int x = 0; x < 2; ++x) v[y][x] = load_if<T, 1>(row + x, cells.inside[k][y][x]).at[0];
      }
      UNROLL for (int y = 0; y < 2; ++y) {
        UNROLL for (int x = 0; x < 2; ++x) sum[k] = fmaf(cells.weight[k][y][x], to_float(v[y][x]), sum[k]);
      }
    }
    store(target, rounded<T>(sum));
  }
}

// The same, but it loads one row of pixels after the other.
template <int POINTS, class T>
__device__ __forceinline__ void gather_by_rows(const Space& s, const Cells<POINTS>& cells, const T* plane,
                                               int64_t channel, T* target, int64_t target_channel, int count) {
  int offset[POINTS];
  UNROLL for (int k = 0; k < POINTS; ++k) offset[k] = static_cast<uint32_t>(cells.y[k]) * s.stride[1] + cells.x[k];
#pragma unroll 1
  for (int c = 0; c < count; ++c, plane += channel, target += target_channel) {
    float sum[POINTS] = {};
#pragma unroll 1
    for (int y = 0; y < 2; ++y) {
      T v[POINTS][2];
      UNROLL for (int k = 0; k < POINTS; ++k) {
        const T* row = plane + (offset[k] + y * s.stride[1]);
        UNROLL for (int x = 0; x < 2; ++x) {
          v[k][x] = load_if<T, 1>(row + x, y ? cells.inside[k][1][x] : cells.inside[k][0][x]).at[0];
        }
      }
      UNROLL for (int k = 0; k < POINTS; ++k) {
        UNROLL for (int x = 0; x < 2; ++x) {
          sum[k] = fmaf(y ? cells.weight[k][1][x] : cells.weight[k][0][x], to_float(v[k][x]), sum[k]);
        }
      }
    }
    store(target, rounded<T>(sum));
  }
}

// Grid: points x chunks of channels x images; a thread computes POINTS adjacent points.
template <class T, class G, int PADDING, int POINTS>
__global__ void __launch_bounds__(1024)
    planes_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, int channels,
                  int chunk, int pace) {
  const int p = (blockIdx.x * blockDim.x + threadIdx.x) * POINTS, begin = blockIdx.y * chunk, n = blockIdx.z;
  const unsigned lanes = __ballot_sync(~0u, p < s.points);
  if (p >= s.points) return;
  const int64_t index = static_cast<int64_t>(n) * s.points + p;
  Cells<POINTS> cells;
  cells.find(s, load_if<G, 2 * POINTS>(static_cast<const G*>(s.grid.data) + 2 * index, true), PADDING);
  const T* plane = input + n * image + begin * channel;
  T* target = output.data + n * output.image + begin * output.channel + p;
  const int count = POINTS > 1 ? 1 : min(chunk, channels - begin);
  const bool far = abs(cells.y[0] - __shfl_sync(lanes, cells.y[0], 0)) > 16;
  if (pace == sampler::kSome || 2 * __popc(__ballot_sync(lanes, far)) <= __popc(lanes)) {
    gather<4>(s, cells, plane, channel, target, output.channel, count);
  } else if (pace == sampler::kChannel) {
    gather<1>(s, cells, plane, channel, target, output.channel, count);
  } else {
    gather_by_rows(s, cells, plane, channel, target, output.channel, count);
  }
  if (output.mask && begin == 0) {
    UNROLL for (int k = 0; k < POINTS; ++k) output.set_mask(index + k, cells.inside[k][0][0] ? 0 : -1);
  }
}

// N coordinates from element `at` of the grid on, stored as float32 or as T; 0 if not `there`.
template <int N, class T>
__device__ __forceinline__ Vec<float, N> coordinates_at(const AnyFloat& grid, int64_t at, bool there) {
  if (sizeof(T) == 4 || grid.dtype == DType::kFloat32) {
    return load_if<float, N>(static_cast<const float*>(grid.data) + at, there);
  }
  Vec<float, N> result;
  to_floats(load_if<T, N>(static_cast<const T*>(grid.data) + at, there), result.at);
  return result;
}

// How sampled_kernel divides its work among blocks, and within a block.
struct Work : sampler::Shares {
  int batch;
  float tilted = 0.1f;  // distance in rows between adjacent points from which a warp reads as few rows as it can
  Divider rows;         // divides by the rows of a plane in shared memory

  Work(const sampler::Problem& p, int points, const Gpu& gpu)
      : Shares(p, gpu), batch(static_cast<int>(p.images)), rows(copied) {
    divide(p, points, gpu);
  }
};

using sampler::kSampledThreads;
constexpr int kSamples = 256;

// Gathers points that lie close together from global memory, and points far apart from planes in shared memory. All
// blocks decide alike, from the same sample. A thread has POINTS adjacent points; there is a block per multiprocessor.
template <class T, int PADDING, int POINTS>
__global__ void __launch_bounds__(kSampledThreads)
    sampled_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, int channels,
                   Work work) {
  extern __shared__ uint4 planes_of_block[];
  const int padding = PADDING == kAnyPadding ? s.padding : PADDING;
  bool tilted = false, far = false;
  if (threadIdx.x < kSamples) {
    const int64_t all = static_cast<int64_t>(work.batch) * s.points, at = threadIdx.x * all / kSamples;
    const bool two = at + 1 < all;
    const auto a = coordinates_at<2, T>(s.grid, 2 * at, two), b = coordinates_at<2, T>(s.grid, 2 * at + 2, two);
    const float rows = fabsf(a.at[1] - b.at[1]) * (padding == kPixels ? 1.0f : s.slope[1]);
    tilted = rows > work.tilted;
    const float spread = threadIdx.x * 0.618034f;  // its fraction is uniform: twice the share of `far` is the mean
    far = rows > 2 * (spread - floorf(spread));
  }
  const auto read = [&](int n, int p, auto points) {
    return coordinates_at<2 * points.value, T>(s.grid, 2 * (static_cast<int64_t>(n) * s.points + p), p < s.points);
  };
  const auto set_mask = [&](const auto& cells, int n, int p, auto points) {
    UNROLL for (int k = 0; k < points.value; ++k) {
      output.set_mask(static_cast<int64_t>(n) * s.points + p + k, cells.inside[k][0][0] ? 0 : -1);
    }
  };
  const auto from_memory = [&](auto points) {
    constexpr int W = points.value;
    const int blocks = work.blocks * (POINTS / W);
    for (int i = blockIdx.x; i < blocks * work.chunks * work.batch; i += gridDim.x) {
      const int rest = i / blocks, n = rest / work.chunks, begin = (rest - n * work.chunks) * work.chunk;
      const int p = ((i - rest * blocks) * kSampledThreads + threadIdx.x) * W;
      if (p >= s.points) continue;
      Cells<W> cells;
      cells.find(s, read(n, p, points), padding);
      gather<4>(s, cells, input + n * image + begin * channel, channel,
                output.data + n * output.image + begin * output.channel + p, output.channel,
                min(work.chunk, channels - begin));
      if (output.mask && begin == 0) set_mask(cells, n, p, points);
    }
  };
  if (2 * __syncthreads_count(far) <= work.far * kSamples) {
    if (POINTS > 1 && 2 * __syncthreads_count(tilted) <= kSamples) {
      from_memory(Int<POINTS>());
    } else {  // so that a warp reads as few rows as it can
      from_memory(Int<1>());
    }
    return;
  }
  char* const planes = reinterpret_cast<char*>(planes_of_block);
  for (int i = threadIdx.x; i < work.group; i += kSampledThreads) {
    *reinterpret_cast<uint4*>(planes + i * work.bytes + work.zeros) = uint4{};
  }
  for (int i = blockIdx.x; i < work.parts * work.groups * work.bands * work.batch; i += gridDim.x) {
    const int rest = i / work.parts, of_image = work.groups * work.bands, n = rest / of_image;
    const int band = (rest - n * of_image) / work.groups, begin = (rest - n * of_image) % work.groups * work.group;
    const int top = band * work.band, low = band == 0 ? INT32_MIN : top;
    const int high = band == work.bands - 1 ? INT32_MAX : top + work.band - 1;  // INT32_MAX: includes infinity
    const int first = (i - rest * work.parts) * work.part, last = min(first + work.part, s.points);
    const int count = min(work.group, channels - begin);
    const char* source = reinterpret_cast<const char*>(input + n * image + begin * channel);
    const auto copy = [&](auto unit) {
      const int across = s.size[0] * static_cast<int>(sizeof(T));
      for (int row = threadIdx.x / 32; row < count * static_cast<int>(work.rows.d); row += kSampledThreads / 32) {
        uint32_t c = row;
        const int y = work.rows.split(c);
        if (top + y >= s.size[1]) continue;
        const char* from = source + (c * channel + static_cast<int64_t>(top + y) * s.stride[1]) * sizeof(T);
        char* to = planes + c * work.bytes + y * work.pitch;
        for (int x = threadIdx.x % 32 * unit.value; x < across; x += 32 * unit.value) {
          if constexpr (unit.value >= 4) {
            __pipeline_memcpy_async(to + x, from + x, unit.value);
          } else {
            *reinterpret_cast<uint16_t*>(to + x) = *reinterpret_cast<const uint16_t*>(from + x);
          }
        }
      }
    };
    __syncthreads();
    with_constant<8, 4, 2>(work.unit, copy);
    __pipeline_commit();
    constexpr Int<POINTS> points;
    constexpr int kStep = kSampledThreads * POINTS;
    int p = first + threadIdx.x * POINTS;
    auto next = read(n, p, points);
    T* target = output.data + n * output.image + begin * output.channel + p;
    __pipeline_wait_prior(0);
    __syncthreads();
#pragma unroll 1
    for (; p < last; p += kStep, target += kStep) {
      Cells<POINTS> cells;
      cells.find(s, next, padding);
      next = read(n, p + kStep, points);
      if (output.mask && begin == 0 && band == 0) set_mask(cells, n, p, points);
      int offset[POINTS][2][2];
      bool here[POINTS], all = true;
      UNROLL for (int k = 0; k < POINTS; ++k) {
        here[k] = cells.y[k] >= low && cells.y[k] <= high;
        all = all && here[k];
        const int corner = (cells.y[k] - top) * work.pitch + cells.x[k] * static_cast<int>(sizeof(T));
        UNROLL for (int j = 0; j < 4; ++j) {
          const int inner = corner + j / 2 * work.pitch + j % 2 * static_cast<int>(sizeof(T));
          offset[k][j / 2][j % 2] = here[k] && cells.inside[k][j / 2][j % 2] ? inner : work.zeros;
        }
      }
      const char* plane = planes;
      T* to = target;
#pragma unroll 2
      for (int c = 0; c < count; ++c, plane += work.bytes, to += output.channel) {
        float sum[POINTS] = {};
        UNROLL for (int k = 0; k < POINTS; ++k) {
          UNROLL for (int j = 0; j < 4; ++j) {
            const T pixel = *reinterpret_cast<const T*>(plane + offset[k][j / 2][j % 2]);
            sum[k] = fmaf(cells.weight[k][j / 2][j % 2], to_float(pixel), sum[k]);
          }
        }
        if (all) {
          store(to, rounded<T>(sum));
        } else {
          UNROLL for (int k = 0; k < POINTS; ++k) {
            if (here[k]) to[k] = from_float<T>(sum[k]);
          }
        }
      }
    }
  }
}

template <class T, class G>
cudaError_t run_points_of_planes(const Call<T>& call) {
  const auto kernel = with_constant<kZeros, kBorder, kReflection, kPixels>(call.s.padding, [&](auto padding) {
    return call.tactic.width == 2 ? planes_kernel<T, G, padding.value, 2> : planes_kernel<T, G, padding.value, 1>;
  });
  return call.run(kernel, call.s, call.data(), call.image(), call.channel(), call.output, call.channels(),
                  call.tactic.chunk, call.tactic.pace);
}

template <class T>
cudaError_t run_sampled(const Call<T>& call) {
  const Work work(call.problem, call.tactic.width, call.gpu);
  const auto kernel = with_constant<kZeros, kPixels, kAnyPadding>(call.s.padding, [&](auto padding) {
    return call.tactic.width == 2 ? sampled_kernel<T, padding.value, 2> : sampled_kernel<T, padding.value, 1>;
  });
  return launch_planned(kernel, sampler::launch(work, call.gpu), false, call.stream, call.s, call.data(), call.image(),
                        call.channel(), call.output, call.channels(), work);
}

}  // namespace

template <class T>
cudaError_t run_planes(const Call<T>& call) {
  if (call.tactic.kernel == sampler::Kernel::kSampled) return run_sampled(call);
  return call.s.grid.dtype == call.input.dtype ? run_points_of_planes<T, T>(call) : run_points_of_planes<T, float>(call);
}

template cudaError_t run_planes(const Call<float>&);
template cudaError_t run_planes(const Call<__half>&);
template cudaError_t run_planes(const Call<__nv_bfloat16>&);

}  // namespace svexport::forward
