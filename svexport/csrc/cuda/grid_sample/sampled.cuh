// The same, points far apart from whole planes in shared memory.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "grid_sample/planes.cuh"

namespace svexport::forward {

// How sampled_kernel divides its work: what is done one after the other, and what a block does of it.
struct Work : sampler::Shares {
  int batch;
  float tilted = 0.1f;  // rows between points side by side from which on a warp reads as few rows as it can
  Divider rows;         // of a plane in shared memory

  Work(const sampler::Problem& p, int points, const Gpu& gpu)
      : Shares(p, gpu), batch(static_cast<int>(p.images)), rows(copied) {
    divide(p, points, gpu);
  }
};

using sampler::kSampledThreads;
constexpr int kSamples = 256;

// Points that lie close together gather from memory, far apart from whole planes in shared memory, POINTS side by side
// of a thread. Which they are all blocks find out alike, from a sample. As many blocks as there are multiprocessors.
template <class T, class G, int PADDING, int POINTS>
__global__ void __launch_bounds__(kSampledThreads)
    sampled_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, int channels,
                   Work work) {
  extern __shared__ uint4 planes_of_block[];
  const G* grid = static_cast<const G*>(s.grid.data);
  bool tilted = false, far = false;
  if (threadIdx.x < kSamples) {
    const int64_t all = static_cast<int64_t>(work.batch) * s.points, at = threadIdx.x * all / kSamples;
    const bool two = at + 1 < all;
    const auto a = load_if<G, 2>(grid + 2 * at, two), b = load_if<G, 2>(grid + 2 * at + 2, two);
    const float rows = fabsf(to_float(a.at[1]) - to_float(b.at[1])) * (PADDING == kPixels ? 1.0f : s.slope[1]);
    tilted = rows > work.tilted;
    const float spread = threadIdx.x * 0.618034f;  // to all between 0 and 2: twice those that are far is the mean
    far = rows > 2 * (spread - floorf(spread));
  }
  const auto read = [&](int n, int p, auto points) {
    return load_if<G, 2 * points.value>(grid + 2 * (static_cast<int64_t>(n) * s.points + p), p < s.points);
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
      cells.template find<PADDING>(s, read(n, p, points));
      gather<4>(s, cells, input + n * image + begin * channel, channel,
                output.data + n * output.image + begin * output.channel + p, output.channel,
                min(work.chunk, channels - begin));
      if (output.mask && begin == 0) set_mask(cells, n, p, points);
    }
  };
  if (2 * __syncthreads_count(far) <= work.far * kSamples) {
    if (POINTS > 1 && 2 * __syncthreads_count(tilted) <= kSamples) {
      from_memory(Int<POINTS>());
    } else {  // then a warp reads as few rows as it can
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
    const int high = band == work.bands - 1 ? INT32_MAX : top + work.band - 1;  // INT32_MAX: infinity too
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
      cells.template find<PADDING>(s, next);
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

}  // namespace svexport::forward
