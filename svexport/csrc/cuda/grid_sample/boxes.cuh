// Sampling in NCHW of many points: from boxes of pixels in shared memory, or from a channels-last copy (kBoxes).
#pragma once

#include "grid_sample/box.cuh"
#include "grid_sample/output.cuh"
#include "overlap.cuh"

namespace svexport::forward {

// The planner's division of the points into tiles, for the kernel.
struct Tiles {
  int across, down, half, height, count_down;
  Divider count_across;
  bool pairs;  // half types: two adjacent results can be stored at once

  explicit Tiles(const sampler::BoxTiles& t)
      : across(static_cast<int>(t.across)),
        down(static_cast<int>(t.down)),
        half(t.half),
        height(t.height),
        count_down(static_cast<int>(t.count_down())),
        count_across(t.count_across()) {}
};

constexpr int kStages = 3;  // stages of the pipeline in shared memory: one is read while the others are filled

// Grid: tiles x chunks of `chunk` channels x images. A stage holds as many channels as fit into its part of `memory`
// bytes. scattered: (N, tiles), set for a tile whose box is too large; its results are not computed.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    box_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, Tiles tiles,
               int batch, int channels, int chunk, int memory, int unit, bool* __restrict__ scattered) {
  constexpr int TAPS = 4, POINTS = 2, ITEM = sizeof(T);
  constexpr bool kBeside = ITEM == 2;  // the two points of a thread are adjacent; else they are half a tile apart
  extern __shared__ uint4 pixels_of_block[];
  __shared__ int edges[4];
  start_next();
  char* pixels = reinterpret_cast<char*>(pixels_of_block);
  const int half = 1 << tiles.half, line = threadIdx.x >> tiles.half, lane = threadIdx.x & (half - 1);
  const int row = row_of_line(line);
  uint32_t tile_y = blockIdx.x;
  const int tile_x = tiles.count_across.split(tile_y);
  const int x = tile_x * 2 * half + (kBeside ? 2 : 1) * lane, step = kBeside ? 1 : half;
  const int y = tile_y * tiles.height + row, first = y * tiles.across + x;
  const int begin = blockIdx.y * chunk, end = min(begin + chunk, channels);
  const bool valid[POINTS] = {y < tiles.down && x < tiles.across, y < tiles.down && x + step < tiles.across};

  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    Point<TAPS> points[POINTS];
    locate<TAPS>(s, n, {valid[0] ? first : 0, valid[1] ? first + step : 0}, points);
    bounds(points, valid, edges);
    Box box(edges[0], edges[1], -edges[2], -edges[3], s.size[0], ITEM, unit);
    const bool large = box.bytes > kLargestBox<T>;
    if (begin == 0 && threadIdx.x == 0) scattered[static_cast<int64_t>(n) * gridDim.x + blockIdx.x] = large;
    if (large) continue;
    box.widen<T>();
    const int together = memory / kStages / box.bytes, part = together * box.bytes;
    const Share share(box);
    box.clear<kThreads>(pixels, kStages * together);

    int offset[POINTS][TAPS];
    float weight[POINTS][TAPS];
    UNROLL for (int k = 0; k < POINTS; ++k) {
      const Pixels<2>&across = points[k].axis[0], &down = points[k].axis[1];
      const int corner = box.origin + across.first * ITEM + down.first * box.row;
      UNROLL for (int i = 0; i < TAPS; ++i) {
        const bool inside = valid[k] && across.inside[i % 2] && down.inside[i / 2];
        offset[k][i] = inside ? corner + i % 2 * ITEM + i / 2 * box.row : box.zeros();
        weight[k][i] = points[k].weight(i);
      }
      if (output.mask && begin == 0 && valid[k]) {
        const bool seen = across.inside[0] && down.inside[0];
        output.set_mask(static_cast<int64_t>(n) * s.points + first + k * step, seen ? 0 : -1);
      }
    }
    T* target = output.data + n * output.image + begin * output.channel + first * output.point;
    const char* source = reinterpret_cast<const char*>(input + n * image);
    const auto fetch = [&](int c, int stage) {
      share.copy(box, pixels + stage * part, source + c * channel * ITEM, channel * ITEM, min(together, end - c));
    };
    const auto gather = [&](const char* from, int count, auto bytes, auto pairs) {
      const int distance = bytes.value ? bytes.value : box.bytes;
#pragma unroll 4
      for (int i = 0; i < count; ++i, target += output.channel) {
        float sum[POINTS] = {};
        UNROLL for (int k = 0; k < POINTS; ++k) {
          UNROLL for (int j = 0; j < TAPS; ++j) {
            const T pixel = *reinterpret_cast<const T*>(from + i * distance + offset[k][j]);
            sum[k] = fmaf(weight[k][j], to_float(pixel), sum[k]);
          }
        }
        if constexpr (kBeside && pairs.value) {
          if (valid[0]) store(target, rounded<T>(sum));
        } else {
          UNROLL for (int k = 0; k < POINTS; ++k) {
            if (valid[k]) target[k * step * output.point] = from_float<T>(sum[k]);
          }
        }
      }
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) fetch(begin + stage * together, stage);
#pragma unroll 1
    for (int c = begin, stage = 0; c < end; c += together) {
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();
      fetch(c + (kStages - 1) * together, stage == 0 ? kStages - 1 : stage - 1);
      const char* from = pixels + stage * part;
      const int count = min(together, end - c);
      if (tiles.pairs && box.bytes == kSmallBox<T>) {
        gather(from, count, Int<kSmallBox<T>>(), std::true_type());
      } else if (tiles.pairs && box.bytes == kUsualBox<T>) {
        gather(from, count, Int<kUsualBox<T>>(), std::true_type());
      } else {
        gather(from, count, Int<0>(), std::false_type());
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    __pipeline_wait_prior(0);
  }
}

// Calls f for the images that have a scattered tile, and records them in `images`. Grid: any number x images.
struct Scattered {
  const bool* tiles;  // (N, count): whether the points of a tile scatter
  int count;
  bool* images;  // (N)

  template <class F>
  __device__ __forceinline__ void each(int batch, F&& f) const {
    start_next();
    wait_for_previous();
    for (int n = blockIdx.y; n < batch; n += gridDim.y) {
      bool any = false;
      for (int i = threadIdx.x; i < count; i += kThreads) any |= tiles[static_cast<int64_t>(n) * count + i];
      any = __syncthreads_or(any);
      if (blockIdx.x == 0 && threadIdx.x == 0) images[n] = any;
      if (any) f(n, 1);
    }
  }
};

}  // namespace svexport::forward
