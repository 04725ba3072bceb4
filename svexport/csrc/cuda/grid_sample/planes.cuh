// Sampling in NCHW, bilinear, of a dense grid in float32 or of the type of the image: a thread per point, or for two.
#pragma once

#include "grid_sample/output.cuh"

namespace svexport::forward {

// POINTS side by side, from their coordinates.
template <int POINTS>
struct Cells {
  int x[POINTS], y[POINTS];  // the first pixel
  bool inside[POINTS][2][2];
  float weight[POINTS][2][2];

  template <int PADDING, class G>
  __device__ __forceinline__ void find(const Space& s, const Vec<G, 2 * POINTS>& coordinates) {
    UNROLL for (int k = 0; k < POINTS; ++k) {
      Point<4> point;
      UNROLL for (int a = 0; a < 2; ++a) {
        point.axis[a] = pixels<2>(to_float(coordinates.at[2 * k + a]), a, 2, s, PADDING);
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

// The results of `count` channels from memory, TOGETHER of them at a time.
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

// The same, one row of pixels after the other.
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

// Blocks of points x chunks of channels x images; POINTS side by side of a thread.
template <class T, class G, int PADDING, int POINTS>
__global__ void __launch_bounds__(1024)
    planes_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, int channels,
                  int chunk, int pace) {
  const int p = (blockIdx.x * blockDim.x + threadIdx.x) * POINTS, begin = blockIdx.y * chunk, n = blockIdx.z;
  const unsigned lanes = __ballot_sync(~0u, p < s.points);
  if (p >= s.points) return;
  const int64_t index = static_cast<int64_t>(n) * s.points + p;
  Cells<POINTS> cells;
  cells.template find<PADDING>(s, load_if<G, 2 * POINTS>(static_cast<const G*>(s.grid.data) + 2 * index, true));
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

}  // namespace svexport::forward
