// The grid's gradient in NCHW where points lie close together: a block copies the pixels of a tile to shared memory.
#pragma once

#include "grid_sample/box.cuh"
#include "grid_sample/backward.cuh"

namespace svexport::backward {

// Tiles of 32 x 16 points: a thread has two of them, adjacent or half a tile apart.
using sampler::gradient::kTileAcross, sampler::gradient::kTileDown;
constexpr int kBoxMemory = 56 << 10;
// Bytes of a row, and of a channel, of a tile's output gradient in shared memory. Rows four apart use different banks.
template <class T>
constexpr int kGradientRow = kTileAcross * sizeof(T) + 16;
template <class T>
constexpr int kGradientTile = kTileDown * kGradientRow<T>;

// The grid's gradient of bilinear points, for the images that are not left. Grid: tiles x images. The shared memory is
// double buffered: half of it is read while the next channels are copied to the other half. unit: that of Box. copied:
// the output's gradient is read through shared memory, 16 bytes at a time.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    box_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Gradient<T> grad,
               AnyFloat grad_grid, int batch, int channels, int across, int down, bool copied, int unit, Left left) {
  constexpr int TAPS = 4, POINTS = 2, ITEM = sizeof(T);
  constexpr bool kBeside = ITEM == 2;
  extern __shared__ uint4 box_of_block[];
  __shared__ int edges[4];
  start_next();
  char* const memory = reinterpret_cast<char*>(box_of_block);
  const int line = threadIdx.x / 16, lane = threadIdx.x % 16;
  const int row = row_of_line(line);
  const int tiles_across = ceil_div(across, kTileAcross), tile_y = blockIdx.x / tiles_across;
  const int tile_x = blockIdx.x - tile_y * tiles_across;
  const int x = tile_x * kTileAcross + (kBeside ? 2 : 1) * lane, y = tile_y * kTileDown + row;
  const int step = kBeside ? 1 : kTileAcross / 2, first = y * across + x;
  const bool valid[POINTS] = {y < down && x < across, y < down && x + step < across};
  // A thread copies one 16-byte chunk of the output's gradient, of every kStep-th channel.
  constexpr int kChunks = kTileAcross * ITEM / 16, kSlots = kTileDown * kChunks, kStep = kThreads / kSlots;
  const int chunk = threadIdx.x % kSlots, chunk_row = chunk / kChunks, chunk_x = chunk % kChunks * (16 / ITEM);
  const int from_y = tile_y * kTileDown + chunk_row, from_x = tile_x * kTileAcross + chunk_x;
  const bool any_chunk = copied && from_y < down && from_x < across;
  wait_for_previous();
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (left(n)) continue;
    Point<TAPS> points[POINTS];
    UNROLL for (int k = 0; k < POINTS; ++k) points[k] = locate<TAPS>(s, n, valid[k] ? first + k * step : 0);
    bounds(points, valid, edges);
    Box box(edges[0], edges[1], -edges[2], -edges[3], s.size[0], ITEM, unit);
    const bool large = box.bytes > kLargestBox<T>;
    int offset[POINTS][TAPS];
    UNROLL for (int k = 0; k < POINTS; ++k) {
      const int stride[3] = {ITEM, large ? s.stride[1] * ITEM : box.row, 0};
      UNROLL for (int i = 0; i < TAPS; ++i) offset[k][i] = valid[k] ? points[k].offset(i, stride) : -1;
    }
    const T* source = grad.data + n * grad.image + first * grad.point;
    float dot[POINTS][TAPS] = {};
    if (large) {  // rare
      for (int c = 0; c < channels; ++c, source += grad.channel) {
        UNROLL for (int k = 0; k < POINTS; ++k) {
          const float g = grad.format.number(load_if<T, 1>(source + k * step * grad.point, valid[k]).at[0]);
          UNROLL for (int i = 0; i < TAPS; ++i) {
            const char* from = reinterpret_cast<const char*>(input + n * image + c * channel) + offset[k][i];
            const T pixel = load_if<T, 1>(reinterpret_cast<const T*>(from), offset[k][i] >= 0).at[0];
            dot[k][i] = fmaf(g, grad.format.number(pixel), dot[k][i]);
          }
        }
      }
    } else {
      box.widen<T>();
      const int together = kBoxMemory / 2 / (box.bytes + kGradientTile<T>);
      char* const gradients = memory + 2 * together * box.bytes;
      const Share share(box);
      box.clear<kThreads>(memory, 2 * together);
      UNROLL for (int k = 0; k < POINTS; ++k) {
        UNROLL for (int i = 0; i < TAPS; ++i) {
          offset[k][i] = offset[k][i] >= 0 ? box.origin + offset[k][i] : box.zeros();
        }
      }
      const auto gather = [&](const char* from, const char* g_from, int count, auto bytes, auto copied) {
        const int distance = bytes.value ? bytes.value : box.bytes;
#pragma unroll 4
        for (int c = 0; c < count; ++c) {
          T g[POINTS];
          UNROLL for (int k = 0; k < POINTS; ++k) {
            if constexpr (copied.value) {
              g[k] = *reinterpret_cast<const T*>(g_from + c * kGradientTile<T> + k * step * ITEM);
            } else {
              g[k] = load_if<T, 1>(source + k * step * grad.point, valid[k]).at[0];
            }
          }
          source += grad.channel;
          T pixels[POINTS][TAPS];
          UNROLL for (int k = 0; k < POINTS; ++k) {
            UNROLL for (int i = 0; i < TAPS; ++i) {
              pixels[k][i] = *reinterpret_cast<const T*>(from + c * distance + offset[k][i]);
            }
          }
          grad.format.known([&](const auto& format) {
            UNROLL for (int k = 0; k < POINTS; ++k) {
              UNROLL for (int i = 0; i < TAPS; ++i) {
                dot[k][i] = fmaf(format.number(g[k]), format.number(pixels[k][i]), dot[k][i]);
              }
            }
          });
        }
      };
      for (int c = -2 * together, buffer = 0; c < channels; c += together, buffer ^= 1) {
        char* const at = memory + buffer * together * box.bytes;
        char* const g_at = gradients + buffer * together * kGradientTile<T>;
        if (c >= 0) {
          __pipeline_wait_prior(1);
          __syncthreads();
          const int count = min(together, channels - c);
          const char* g_from = g_at + row * kGradientRow<T> + (kBeside ? 2 : 1) * lane * ITEM;
          if (copied && box.bytes == kSmallBox<T>) {
            gather(at, g_from, count, Int<kSmallBox<T>>(), std::true_type());
          } else if (copied && box.bytes == kUsualBox<T>) {
            gather(at, g_from, count, Int<kUsualBox<T>>(), std::true_type());
          } else if (copied) {
            gather(at, g_from, count, Int<0>(), std::true_type());
          } else {
            gather(at, g_from, count, Int<0>(), std::false_type());
          }
          __syncthreads();
        }
        const int next = c + 2 * together, count = min(together, channels - next);
        if (any_chunk) {
          const T* chunk_of = grad.data + n * grad.image + from_y * across + from_x;
          for (int i = threadIdx.x / kSlots; i < count; i += kStep) {
            __pipeline_memcpy_async(g_at + i * kGradientTile<T> + chunk_row * kGradientRow<T> + chunk_x * ITEM,
                                    chunk_of + (next + i) * grad.channel, 16);
          }
        }
        share.copy(box, at, reinterpret_cast<const char*>(input + n * image + next * channel), channel * ITEM, count);
      }
      __pipeline_wait_prior(0);
    }
    UNROLL for (int k = 0; k < POINTS; ++k) {
      if (!valid[k]) continue;
      const int p = first + k * step;
      const Point<TAPS> point = locate<TAPS>(s, n, p);
      float gradient[3];
      UNROLL for (int i = 0; i < TAPS; ++i) {
        if (point.offset(i, s.stride) < 0) dot[k][i] = 0;
      }
      to_coordinates(point, dot[k], gradient);
      UNROLL for (int a = 0; a < 2; ++a) grad_grid.set((static_cast<int64_t>(n) * s.points + p) * 2 + a, gradient[a]);
    }
  }
}

}  // namespace svexport::backward
