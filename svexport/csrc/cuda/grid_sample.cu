#include "grid_sample.h"

#include <algorithm>

#include "box.cuh"
#include "overlap.cuh"

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

// Blocks of points x chunks of channels x images; U channels at a time.
template <class T, int TAPS, int PADDING = kAnyPadding, int U = TAPS == 1 ? 8 : TAPS == 4 ? 4 : TAPS == 8 ? 2 : 1>
__global__ void __launch_bounds__(kThreads) direct_kernel(Space s, const T* __restrict__ input, int64_t image,
                                                          int64_t channel, Output<T> output, int batch, int channels,
                                                          int chunk) {
  const int p = blockIdx.x * kThreads + threadIdx.x, first = blockIdx.y * chunk;
  if (p >= s.points) return;
  const int count = min(chunk, channels - first);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    const Taps<TAPS> taps(locate<TAPS, PADDING>(s, n, p), s.stride);
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
          const T* pixel = reinterpret_cast<const T*>(source + taps.offset[i] * uint32_t{sizeof(T)});
          v[u][i] = load_if<T, 1>(pixel, taps.offset[i] >= 0).at[0];
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
    if constexpr (U > 1) {
      for (; c < count; ++c) step(std::integral_constant<int, 1>());
    }
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
template <class T, int TAPS, int PADDING>
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
    points[i] = Taps<TAPS>(locate<TAPS, PADDING>(s, n, p), s.stride);
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
        Vec<T, V> v[POINTS][AT_ONCE];
        float weight[POINTS][AT_ONCE];
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
          const bool there = row + k * rows < left;
          const Taps<TAPS>& taps = points[row + k * rows];
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            weight[k][j] = taps.weight[i + j];
            v[k][j] = load_if<T, V>(source + taps.offset[i + j], there && taps.offset[i + j] >= 0);
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

// Blocks of points x channels x images: all, or those marked in `only`.
template <class T, int TAPS, int PADDING = kAnyPadding>
__global__ void __launch_bounds__(kThreads, TAPS == 4 ? 4 : 1)
    vector_kernel(Space s, const T* __restrict__ input, int64_t image, Output<T> output, int batch, int channels,
                  int shift, int steps, int width, const bool* __restrict__ only) {
  constexpr int V = 16 / sizeof(T);
  wait_for_previous();
  const int first = blockIdx.x * steps * kTogether<TAPS> * (kThreads >> shift);
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (only && !only[n]) continue;
    vector<T, TAPS, PADDING>(s, input, image, output, n, first, (blockIdx.y << shift) * V, channels, shift, steps,
                             width);
  }
}

// ------------------------------------------------------------ channels-last: a thread for 16 bytes of a point, or more

// Blocks of (chunks of channels x points) x images. Each thread finds its own pixels, and nothing waits for another.
template <class T, int TAPS, int PADDING>
__global__ void __launch_bounds__(kThreads, TAPS <= 4 ? 4 : TAPS == 8 ? 2 : 1)
    point_kernel(Space s, const T* __restrict__ input, int64_t image, Output<T> output, int batch, int channels,
                 int chunk, Divider points) {
  constexpr int V = 16 / sizeof(T), AT_ONCE = TAPS < 4 ? TAPS : 4;
  uint32_t rest = blockIdx.x * kThreads + threadIdx.x;
  const int p = points.split(rest), first = rest * chunk, last = min(first + chunk, channels);
  if (first >= channels) return;
  for (int n = blockIdx.y; n < batch; n += gridDim.y) {
    const Taps<TAPS> taps(locate<TAPS, PADDING>(s, n, p), s.stride);
    if (output.mask && first == 0) output.set_mask(static_cast<int64_t>(n) * s.points + p, taps.offset[0]);
    const T* source = input + n * image;
    T* target = output.data + n * output.image + p * output.point;
    for (int c = first; c < last; c += V) {
      float sum[V] = {};
#pragma unroll
      for (int i = 0; i < TAPS; i += AT_ONCE) {
        Vec<T, V> v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          const int offset = taps.offset[i + j];
          v[j] = load_if<T, V>(source + (static_cast<uint32_t>(offset) + c), offset >= 0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) add_scaled(sum, taps.weight[i + j], v[j]);
      }
#pragma unroll
      for (int k = 0; k < V; ++k) target[(c + k) * output.channel] = from_float<T>(sum[k]);
    }
  }
}

// -------------------------------------------------------------- channels-last: lanes side by side read W channels each

constexpr int kParts = 2;  // of the channels of a point that lanes side by side read one after the other

// Blocks of points x chunks of channels x images; 1 << shift lanes for each point. The results go by way of a tile in
// shared memory, channels `pitch` apart.
template <class T, int TAPS, int W>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(Space s, const T* __restrict__ input, int64_t image, Output<T> output, int batch, int channels,
                  int shift, int chunk, int tile_shift, int pitch) {
  extern __shared__ uint4 memory[];
  const int tile_points = 1 << tile_shift, first = blockIdx.x << tile_shift, left = min(tile_points, s.points - first);
  Taps<TAPS>* points = reinterpret_cast<Taps<TAPS>*>(memory);
  T* tile = reinterpret_cast<T*>(points + tile_points);
  const int lanes = 1 << shift, rows = kThreads >> shift, lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> shift;
  const int part = lanes * W, start = blockIdx.y * chunk, end = min(start + chunk, channels);
  const int p = threadIdx.x & (tile_points - 1), line = threadIdx.x >> tile_shift, lines = kThreads >> tile_shift;
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    __syncthreads();
    for (int i = threadIdx.x; i < left; i += kThreads) {
      points[i] = Taps<TAPS>(locate<TAPS>(s, n, first + i), s.stride);
      if (output.mask && start == 0) {
        output.set_mask(static_cast<int64_t>(n) * s.points + first + i, points[i].offset[0]);
      }
    }
    __syncthreads();
    for (int begin = start; begin < end; begin += kParts * part) {
      const int c = begin + lane * W;
      const bool more = c + part < end;
      const T* source = input + n * image + c;
#pragma unroll 1
      for (int r = row; r < left && c < end; r += rows) {
        const Taps<TAPS>& taps = points[r];
        Vec<T, W> v[kParts][TAPS];
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          const T* pixel = source + taps.offset[i];
          const bool inside = taps.offset[i] >= 0;
          v[0][i] = load_if<T, W>(pixel, inside);
          v[1][i] = load_if<T, W>(pixel + part, inside && more);
        }
        float sum[kParts][W] = {};
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          const float weight = taps.weight[i];
#pragma unroll
          for (int k = 0; k < kParts; ++k) add_scaled(sum[k], weight, v[k][i]);
        }
        T* to = tile + lane * W * pitch + r;
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
#pragma unroll
          for (int w = 0; w < W; ++w) to[(k * part + w) * pitch] = from_float<T>(sum[k][w]);
        }
      }
      __syncthreads();
      const int count = p < left ? min(kParts * part, end - begin) : 0;
      const T* from = tile + line * pitch + p;
      T* target = output.data + n * output.image + (begin + line) * output.channel + (first + p) * output.point;
#pragma unroll 4
      for (int i = line; i < count; i += lines, from += lines * pitch, target += lines * output.channel) {
        *target = *from;
      }
      __syncthreads();
    }
  }
}

// ------------------------------------------------------ NCHW: the pixels of a tile of points in shared memory

// Points as rows of `across`, and the tile of a block: 1 << half threads across for twice as many points, the others
// down.
struct Tiles {
  int across, down, half, height, count_down;
  Divider count_across;
  bool pairs;  // two halves, neighbours, can be stored at once
};

constexpr int kStages = 3;  // parts of the shared memory of a block: one is used, the others are on their way

// Blocks of tiles x `chunk` channels x images, as many channels at a time as fit into a part of `memory`. scattered:
// (N, tiles), set where the box is too large, and nothing computed.
template <class T, int PADDING>
__global__ void __launch_bounds__(kThreads, 4)
    box_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, Tiles tiles,
               int batch, int channels, int chunk, int memory, int unit, bool* __restrict__ scattered) {
  constexpr int TAPS = 4, POINTS = 2, ITEM = sizeof(T);
  constexpr bool kBeside = ITEM == 2;  // the points of a thread: side by side, or half a tile apart
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
    locate<TAPS, PADDING>(s, n, {valid[0] ? first : 0, valid[1] ? first + step : 0}, points);
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
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      const Pixels<2>&across = points[k].axis[0], &down = points[k].axis[1];
      const int corner = box.origin + across.first * ITEM + down.first * box.row;
#pragma unroll
      for (int i = 0; i < TAPS; ++i) {
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
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
#pragma unroll
          for (int j = 0; j < TAPS; ++j) {
            const T pixel = *reinterpret_cast<const T*>(from + i * distance + offset[k][j]);
            sum[k] = fmaf(weight[k][j], to_float(pixel), sum[k]);
          }
        }
        if constexpr (kBeside && pairs.value) {
          if (valid[0]) store(target, rounded<T>(sum));
        } else {
#pragma unroll
          for (int k = 0; k < POINTS; ++k) {
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
        gather(from, count, std::integral_constant<int, kSmallBox<T>>(), std::true_type());
      } else if (tiles.pairs && box.bytes == kUsualBox<T>) {
        gather(from, count, std::integral_constant<int, kUsualBox<T>>(), std::true_type());
      } else {
        gather(from, count, std::integral_constant<int, 0>(), std::false_type());
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    __pipeline_wait_prior(0);
  }
}

// -------------------------------------------------- NCHW, bilinear, a dense grid, float32 or of the type of the image

// POINTS side by side, from their coordinates.
template <int POINTS>
struct Cells {
  int x[POINTS], y[POINTS];  // the first pixel
  bool inside[POINTS][2][2];
  float weight[POINTS][2][2];

  template <int PADDING, class G>
  __device__ __forceinline__ void find(const Space& s, const Vec<G, 2 * POINTS>& coordinates) {
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      Point<4> point;
#pragma unroll
      for (int a = 0; a < 2; ++a) point.axis[a] = pixels<2>(to_float(coordinates.at[2 * k + a]), a, 2, s, PADDING);
      x[k] = point.axis[0].first;
      y[k] = point.axis[1].first;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
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
#pragma unroll
  for (int k = 0; k < POINTS; ++k) offset[k] = static_cast<uint32_t>(cells.y[k]) * s.stride[1] + cells.x[k];
#pragma unroll TOGETHER
  for (int c = 0; c < count; ++c, plane += channel, target += target_channel) {
    float sum[POINTS] = {};
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
      T v[2][2];
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const T* row = plane + (offset[k] + y * s.stride[1]);
#pragma unroll
        for (int x = 0; x < 2; ++x) v[y][x] = load_if<T, 1>(row + x, cells.inside[k][y][x]).at[0];
      }
#pragma unroll
      for (int y = 0; y < 2; ++y) {
#pragma unroll
        for (int x = 0; x < 2; ++x) sum[k] = fmaf(cells.weight[k][y][x], to_float(v[y][x]), sum[k]);
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
#pragma unroll
  for (int k = 0; k < POINTS; ++k) offset[k] = static_cast<uint32_t>(cells.y[k]) * s.stride[1] + cells.x[k];
#pragma unroll 1
  for (int c = 0; c < count; ++c, plane += channel, target += target_channel) {
    float sum[POINTS] = {};
#pragma unroll 1
    for (int y = 0; y < 2; ++y) {
      T v[POINTS][2];
#pragma unroll
      for (int k = 0; k < POINTS; ++k) {
        const T* row = plane + (offset[k] + y * s.stride[1]);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          v[k][x] = load_if<T, 1>(row + x, y ? cells.inside[k][1][x] : cells.inside[k][0][x]).at[0];
        }
      }
#pragma unroll
      for (int k = 0; k < POINTS; ++k) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          sum[k] = fmaf(y ? cells.weight[k][1][x] : cells.weight[k][0][x], to_float(v[k][x]), sum[k]);
        }
      }
    }
    store(target, rounded<T>(sum));
  }
}

// How much of points that scatter a thread has under way: where threads are many, L2 delivers more if that is less.
enum Pace { kSome, kChannel, kRow };

// Blocks of points x chunks of channels x images; POINTS side by side of a thread.
template <class T, class G, int PADDING, int POINTS>
__global__ void __launch_bounds__(1024)
    planes_kernel(Space s, const T* __restrict__ input, int64_t image, int64_t channel, Output<T> output, int channels,
                  int chunk, Pace pace) {
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
  if (pace == kSome || 2 * __popc(__ballot_sync(lanes, far)) <= __popc(lanes)) {
    gather<4>(s, cells, plane, channel, target, output.channel, count);
  } else if (pace == kChannel) {
    gather<1>(s, cells, plane, channel, target, output.channel, count);
  } else {
    gather_by_rows(s, cells, plane, channel, target, output.channel, count);
  }
  if (output.mask && begin == 0) {
#pragma unroll
    for (int k = 0; k < POINTS; ++k) output.set_mask(index + k, cells.inside[k][0][0] ? 0 : -1);
  }
}

// How sampled_kernel divides its work: what is done one after the other, and what a block does of it.
struct Work {
  int batch;
  float tilted, far;               // rows between points side by side from which on they are
  int blocks, chunk, chunks;       // from memory: blocks of points x chunks of channels x images
  int parts, part, groups, group;  // from planes: parts of `part` points x groups of `group` planes x bands x images
  int bands, band;                 // of so many rows: points belong to that of their first pixel
  int pitch, zeros, bytes, unit;   // of a plane in shared memory: between rows, to 16 of zeros, in all; copied at once
  Divider rows;                    // of them in shared memory
};

constexpr int kSampledThreads = 1024, kSamples = 256;

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
#pragma unroll
    for (int k = 0; k < points.value; ++k) {
      output.set_mask(static_cast<int64_t>(n) * s.points + p + k, cells.inside[k][0][0] ? 0 : -1);
    }
  };
  const auto from_memory = [&](auto points) {
    constexpr int W = decltype(points)::value;
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
      from_memory(std::integral_constant<int, POINTS>());
    } else {  // then a warp reads as few rows as it can
      from_memory(std::integral_constant<int, 1>());
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
    if (work.unit == 8) {
      copy(std::integral_constant<int, 8>());
    } else if (work.unit == 4) {
      copy(std::integral_constant<int, 4>());
    } else {
      copy(std::integral_constant<int, 2>());
    }
    __pipeline_commit();
    constexpr std::integral_constant<int, POINTS> points;
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
#pragma unroll
      for (int k = 0; k < POINTS; ++k) {
        here[k] = cells.y[k] >= low && cells.y[k] <= high;
        all = all && here[k];
        const int corner = (cells.y[k] - top) * work.pitch + cells.x[k] * static_cast<int>(sizeof(T));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int inner = corner + j / 2 * work.pitch + j % 2 * static_cast<int>(sizeof(T));
          offset[k][j / 2][j % 2] = here[k] && cells.inside[k][j / 2][j % 2] ? inner : work.zeros;
        }
      }
      const char* plane = planes;
      T* to = target;
#pragma unroll 2
      for (int c = 0; c < count; ++c, plane += work.bytes, to += output.channel) {
        float sum[POINTS] = {};
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const T pixel = *reinterpret_cast<const T*>(plane + offset[k][j / 2][j % 2]);
            sum[k] = fmaf(cells.weight[k][j / 2][j % 2], to_float(pixel), sum[k]);
          }
        }
        if (all) {
          store(to, rounded<T>(sum));
        } else {
#pragma unroll
          for (int k = 0; k < POINTS; ++k) {
            if (here[k]) to[k] = from_float<T>(sum[k]);
          }
        }
      }
    }
  }
}

// Copies the images that have scattered points from (N, C, pixels) to (N, pixels, C), and says which these are.
template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_scattered_kernel(const T* __restrict__ input, int64_t image, int64_t channel, T* __restrict__ copy,
                          const bool* __restrict__ scattered, int tiles, bool* __restrict__ copied, int batch,
                          int channels, int pixels, int width) {
  start_next();
  wait_for_previous();
  for (int n = blockIdx.y; n < batch; n += gridDim.y) {
    bool any = false;
    for (int i = threadIdx.x; i < tiles; i += kThreads) any |= scattered[static_cast<int64_t>(n) * tiles + i];
    any = __syncthreads_or(any);
    if (blockIdx.x == 0 && threadIdx.x == 0) copied[n] = any;
    if (!any) continue;
    to_channels_last(input + n * image, image, channel, copy + static_cast<int64_t>(n) * pixels * channels, 1, channels,
                     pixels, width);
  }
}

}  // namespace
}  // namespace svexport

#ifndef SVEXPORT_AOT  // csrc/aot takes the kernels only
namespace svexport {
namespace {

// ------------------------------------------------------------------------------------------------------ the choice

// Whether an image is read by planes: NCHW, with rows that need not be aligned.
bool dense_planes(const Tensor& input) {
  int64_t pixel = 1;
  return input.rank == 4 && Space::evenly_spaced(input, 2, 3, pixel) && pixel == 1;
}

// Whether an NCHW image has so many points that they are gathered from boxes, or from a copy in channels-last.
bool many_points(const Tensor& input, int64_t points, int mode) {
  const int64_t channels = input.sizes[1], pixels = input.sizes[2] * input.sizes[3];
  return mode == kBilinear && dense_planes(input) && channels * input.item_size() % 16 == 0 &&
         channels >= 32 && 2 * points >= pixels && points < (1 << 30) &&
         input.sizes[0] * channels * points >= (1 << 22) && pixels * channels < INT32_MAX;
}

// Tiles of 32 x 16 points, or 512 after each other.
Tiles tiles_of(int64_t across, int64_t down) {
  if (across < 16) across *= down, down = 1;
  const int half = down == 1 ? 8 : 4, height = kThreads >> half;
  return {static_cast<int>(across), static_cast<int>(down), half, height,
          static_cast<int>(ceil_div<int64_t>(down, height)), Divider(ceil_div<int64_t>(across, 2 << half)), false};
}

template <class T, int TAPS, int PADDING>
cudaError_t launch_vector(const Space& s, const T* data, int64_t image, int batch, int channels,
                          const Output<T>& output, int enough, const bool* only, cudaStream_t stream) {
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
  if (only) steps *= 4;  // most often there is nothing to do: few blocks
  while (steps > 1 && static_cast<int64_t>(ceil_div(s.points, steps * tile)) * across * images < enough) steps /= 2;
  return launch(vector_kernel<T, TAPS, PADDING>, dim3(ceil_div(s.points, steps * tile), across, images), kThreads,
                vector_memory<TAPS>(shift, steps), stream, only != nullptr, s, data, image, output, batch, channels,
                shift, steps, width, only);
}

// Whether point_kernel is faster than vector_kernel: where threads are few and would wait for each other, and where the
// first cache keeps what points side by side have in common. parts: of 16 bytes, of a point and of all points.
template <int TAPS>
bool each_by_itself(int parts_of_point, int64_t parts, int64_t bytes_of_image, bool crowded) {
  const bool cached = bytes_of_image <= 192 << 10;
  if (parts_of_point == 1 || TAPS == 1) return true;
  if (TAPS == 4) return parts_of_point == 2 || parts <= 1 << 15 || (cached && crowded);
  return TAPS == 8 && cached && parts >= 1 << 15;
}

// Whether narrow_kernel is faster than direct_kernel, which reads a point's pixels again and again where these are
// large and far apart. bytes: of an image.
template <int TAPS>
bool side_by_side(int channels, int64_t bytes, int64_t results, int64_t pixels, int64_t points) {
  if (bytes <= 1 << 16 || results < 1 << 14) return false;
  if (TAPS == 4) return channels >= 24 ? points <= 4 * pixels : channels >= 12 && 4 * points <= pixels;
  return TAPS == 8 && (channels >= 24 || (channels >= 12 && points <= pixels));
}

constexpr int64_t kManyThreads = 3 << 15;  // then each does more

template <class T, int TAPS, int PADDING>
cudaError_t launch_points(const Space& s, const T* data, int64_t image, int batch, int channels,
                          const Output<T>& output, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  const int64_t parts = static_cast<int64_t>(s.points) * (channels / V);
  int chunk = V;
  while (chunk < 4 * V && chunk < channels && batch * parts * V >= kManyThreads * chunk) chunk *= 2;
  const int64_t blocks = ceil_div<int64_t>(static_cast<int64_t>(s.points) * ceil_div(channels, chunk), kThreads);
  return launch(point_kernel<T, TAPS, PADDING>, dim3(blocks, batch < 65535 ? batch : 65535), kThreads, 0, stream, false,
                s, data, image, output, batch, channels, chunk, Divider(s.points));
}

template <class T, int TAPS, int W>
cudaError_t launch_narrow(const Space& s, const T* data, int64_t image, int batch, int channels,
                          const Output<T>& output, int enough, cudaStream_t stream) {
  const int widest = W == 1 && channels >= 128 ? 5 : 4;
  int shift = 1, tile = 6;
  while (shift < widest && (kParts * W << shift) < channels) ++shift;
  const int together = kParts * W << shift, images = batch < 65535 ? batch : 65535;
  const auto blocks = [&](int chunk) {
    return static_cast<int64_t>(ceil_div(s.points, 1 << tile)) * ceil_div(channels, chunk) * images;
  };
  while (tile > 4 && blocks(together) < enough / 4) --tile;
  int chunk = together;
  while (chunk < 4 * together && blocks(2 * chunk) >= enough) chunk *= 2;
  while (ceil_div(channels, chunk) > 65535) chunk *= 2;
  // Lanes side by side write into different banks.
  const int pitch = (1 << tile) + std::max<int>(std::max<int>(1, 4 / sizeof(T) / W), (32 >> shift) / W);
  const int bytes = (sizeof(Taps<TAPS>) << tile) + together * pitch * sizeof(T);
  return launch(narrow_kernel<T, TAPS, W>, dim3(ceil_div(s.points, 1 << tile), ceil_div(channels, chunk), images),
                kThreads, bytes, stream, false, s, data, image, output, batch, channels, shift, chunk, tile, pitch);
}

// Gathers from boxes; where points scatter, from a copy in channels-last.
template <class T, int PADDING>
cudaError_t launch_boxes(const Tensor& input, const Space& s, const Output<T>& output, int enough, void* workspace,
                         cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const int pixels = s.size[0] * s.size[1], images = batch < 65535 ? batch : 65535;
  const T* data = static_cast<const T*>(input.data);
  Tiles tiles = tiles_of(s.across.d, s.points / s.across.d);
  tiles.pairs = output.point == 1 &&
                (sizeof(T) == 4 || ((reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image |
                                     output.channel | tiles.across) % 2 == 0));
  const int count = tiles.count_across.d * tiles.count_down;
  constexpr int kChannels = 64, kMemory = 48 << 10;  // of a block: the more channels in it the better
  T* copy = static_cast<T*>(workspace);
  bool* copied = reinterpret_cast<bool*>(copy + input.numel());
  bool* scattered = copied + batch;

  const auto kernel = box_kernel<T, PADDING>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory);
  if (status != cudaSuccess) return status;
  status = launch(kernel, dim3(count, ceil_div(channels, kChannels), images), kThreads, kMemory, stream, false, s, data,
                  image, channel, output, tiles, batch, channels, kChannels, kMemory,
                  unit_of(data, image, channel, pixels), scattered);
  if (status != cudaSuccess) return status;
  status = launch(copy_scattered_kernel<T>, dim3(ceil_div(enough, images), images), kThreads, 0, stream, true, data,
                  image, channel, copy, scattered, count, copied, batch, channels, pixels,
                  pixel_width<T>(data, image, channel));
  if (status != cudaSuccess) return status;
  Space last = s;
  last.stride[0] = channels;
  last.stride[1] = channels * s.size[0];
  return launch_vector<T, 4, PADDING>(last, copy, static_cast<int64_t>(pixels) * channels, batch, channels, output,
                                      enough, copied, stream);
}

constexpr int kSmallPlane = 4096;  // bytes of a plane that the first cache keeps, whatever the points
constexpr int kTinyPlane = 2048;   // then also beside many others
// Results for which sampled_kernel is worth its sample; with more of them boxes are faster.
constexpr int kLeastSampled = 1 << 20, kMostSampled = 3 << 22;

// A thread for each point, or for two of one channel.
template <class T, class G, int PADDING>
cudaError_t launch_planes(const Tensor& input, const Space& s, const Output<T>& output, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const uint64_t pairs = reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image | s.points |
                         reinterpret_cast<uintptr_t>(s.grid.data) / (2 * sizeof(G));
  const int points = channels == 1 && pairs % 2 == 0 ? 2 : 1, all = ceil_div(s.points, points);
  const int processors = std::max(1, of_device(cudaDevAttrMultiProcessorCount));
  // All points of a plane in a block, many only where there are blocks enough.
  const int most = static_cast<int64_t>(batch) * ceil_div(channels, 4) < processors ? 640 : 1024;
  const int threads = all <= most ? ceil_div(all, 32) * 32 : kThreads, blocks = ceil_div(all, threads);
  const int of_processor = std::max(1, of_device(cudaDevAttrMaxThreadsPerMultiProcessor) / threads);  // blocks
  const int64_t of_channel = static_cast<int64_t>(blocks) * batch;
  const int64_t plane = static_cast<int64_t>(s.size[0]) * s.size[1] * sizeof(T);
  const int cache = of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor);  // in the same memory
  const int64_t second_cache = of_device(cudaDevAttrL2CacheSize);
  int chunk = ceil_div<int64_t>(channels, std::max<int64_t>(1, processors * of_processor / of_channel));
  chunk = std::max(chunk, 4);  // each has to find its pixels
  if (blocks == 1) {           // the points of a plane meet in the first cache, if it has room for all planes in use
    const int64_t used = std::min<int64_t>(of_processor, ceil_div<int64_t>(batch * ceil_div(channels, 4), processors));
    chunk = std::min<int64_t>(chunk, cache / (used * plane));
    chunk = std::max(chunk, 1);
  }
  const dim3 grid(blocks, ceil_div(channels, chunk), batch);
  if (grid.y > 65535 || grid.z > 65535) return cudaErrorNotSupported;
  const bool crowded = blocks > 1 && 2 * of_channel * grid.y >= processors * of_processor;
  // Planes that are read at the same time stay in a cache.
  const bool single = sizeof(T) == 4 && points == 1;
  const bool stays = 10 * plane <= 7 * cache || (single && 4 * plane * batch * channels <= 3 * second_cache);
  const Pace pace = !crowded ? kSome : stays ? kChannel : kRow;
  const auto kernel = points == 2 ? planes_kernel<T, G, PADDING, 2> : planes_kernel<T, G, PADDING, 1>;
  return launch(kernel, grid, threads, 0, stream, false, s, static_cast<const T*>(input.data), input.strides[0],
                input.strides[1], output, channels, chunk, pace);
}

// By planes in shared memory, or from memory. Not for planes that do not fit in there.
template <class T, class G, int PADDING>
cudaError_t launch_sampled(const Tensor& input, const Space& s, const Output<T>& output, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const int across = s.size[0] * static_cast<int>(sizeof(T));
  const int memory = of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const uint64_t odd = reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image | output.channel | s.points |
                       reinterpret_cast<uintptr_t>(s.grid.data) / (2 * sizeof(G));
  const int points = odd % 2 == 0 ? 2 : 1;
  const uint64_t all = reinterpret_cast<uintptr_t>(input.data) | image * sizeof(T) | channel * sizeof(T) |
                       s.stride[1] * sizeof(T) | across;
  Work work;
  work.batch = batch;
  work.unit = all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 2;
  work.pitch = across + (across / work.unit % 2 == 0 ? work.unit : 0);  // rows begin in different banks
  const int fit = std::max(0, memory - 32) / work.pitch;  // rows; a band has one of the next
  work.bands = s.size[1] <= fit ? 1 : 2;
  work.band = ceil_div(s.size[1], work.bands);
  work.rows = Divider(work.band + work.bands - 1);
  if (static_cast<int>(work.rows.d) > fit) return cudaErrorNotSupported;
  work.zeros = ceil_div(work.pitch * static_cast<int>(work.rows.d), 16) * 16;
  work.bytes = work.zeros + 16;
  work.blocks = ceil_div(s.points, kSampledThreads * points);

  // The least time, in clocks as measured on an H200. Waves: of blocks, one for each multiprocessor.
  const int slots = std::max(1, of_device(cudaDevAttrMultiProcessorCount));
  const auto waves = [&](int64_t items) { return static_cast<float>(ceil_div<int64_t>(items, slots)); };
  constexpr int kWaves = 4, kMostPlanes = 64;
  float near = 1e30f, far = 1e30f;
  for (int i = 1; i <= kWaves; ++i) {
    const int most = std::max(1, std::min(ceil_div(channels, 4), i * slots / (work.blocks * batch)));
    const int chunk = ceil_div(channels, most), chunks = ceil_div(channels, chunk);
    const float time = waves(static_cast<int64_t>(work.blocks) * chunks * batch) * points * (1500 + 350.0f * chunk);
    if (time < near) near = time, work.chunk = chunk, work.chunks = chunks;
  }
  for (int group = 1; group <= std::min(channels, kMostPlanes) && group * work.bytes <= memory; ++group) {
    const int groups = ceil_div(channels, group), others = groups * work.bands * batch;
    for (int i = 1; i <= kWaves; ++i) {
      const int part = ceil_div(ceil_div(s.points, std::max(1, i * slots / others)), 64) * 64;
      const int parts = ceil_div(s.points, part);
      const float time = waves(static_cast<int64_t>(others) * parts) *
                         (500 + group * work.bytes / 24.0f + part * std::max(1.05f, 0.55f * group));
      if (time < far) far = time, work.group = group, work.groups = groups, work.part = part, work.parts = parts;
    }
  }
  const float results = static_cast<float>(batch) * channels * s.points;
  work.tilted = 0.1f;
  work.far = std::min(0.8f, std::max(0.15f, (far - near) * slots / (1.6f * results)));

  const auto kernel = points == 2 ? sampled_kernel<T, G, PADDING, 2> : sampled_kernel<T, G, PADDING, 1>;
  const int dynamic = work.group * work.bytes;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
  if (status != cudaSuccess) return status;
  return launch(kernel, slots, kSampledThreads, dynamic, stream, false, s, static_cast<const T*>(input.data), image,
                channel, output, channels, work);
}

template <class T, int TAPS, int PADDING>
cudaError_t run(const Tensor& input, const Space& s, const Output<T>& output, void* workspace, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  const int enough = 8 * of_device(cudaDevAttrMultiProcessorCount);  // blocks
  constexpr int V = 16 / sizeof(T);
  const int64_t results = static_cast<int64_t>(batch) * channels * s.points;
  int64_t pixels = 1;
  for (int a = 0; a < s.axes; ++a) pixels *= s.size[a];
  const int64_t bytes = pixels * channels * sizeof(T);
  const bool transposed = output.channel != 1;
  if (channels % V == 0 && input.aligned(1, 16)) {
    if (transposed && results / V <= INT32_MAX &&
        each_by_itself<TAPS>(channels / V, results / V, bytes, s.points >= 2 * pixels)) {
      return launch_points<T, TAPS, PADDING>(s, data, image, batch, channels, output, stream);
    }
    return launch_vector<T, TAPS, PADDING>(s, data, image, batch, channels, output, enough, nullptr, stream);
  }
  if constexpr (TAPS == 4 || TAPS == 8) {
    if (transposed && channel == 1 && side_by_side<TAPS>(channels, bytes, results, pixels, s.points)) {
      const bool pairs = channels % 2 == 0 && input.aligned(1, 2 * sizeof(T));
      const auto narrow = pairs ? launch_narrow<T, TAPS, 2> : launch_narrow<T, TAPS, 1>;
      return narrow(s, data, image, batch, channels, output, enough, stream);
    }
  }

  if constexpr (TAPS == 4) {
    const bool many = workspace && many_points(input, s.points, kBilinear);
    const int64_t plane = pixels;
    const bool small = plane * sizeof(T) <= kSmallPlane;
    const bool sampled = channels >= 8 && s.points >= 4 * kSampledThreads && 2LL * s.points >= plane &&
                         plane * sizeof(T) > kTinyPlane && results >= kLeastSampled && results <= kMostSampled;
    if (s.stride[0] == 1 && output.point == 1 && s.grid_dense && s.grid_pairs) {
      const auto of = [&](auto* g, auto padding) {
        using G = element_t<decltype(g)>;
        if (sampled) {
          const cudaError_t status = launch_sampled<T, G, padding.value>(input, s, output, stream);
          if (status != cudaErrorNotSupported) return status;
        }
        if (many && !small) return cudaErrorNotSupported;
        return launch_planes<T, G, padding.value>(input, s, output, stream);
      };
      const auto with = [&](auto padding) {
        if (s.grid.dtype == input.dtype) return of(static_cast<T*>(nullptr), padding);
        if (s.grid.dtype == DType::kFloat32) return of(static_cast<float*>(nullptr), padding);
        return cudaErrorNotSupported;
      };
      cudaError_t status;
      if constexpr (PADDING != kAnyPadding) {
        status = with(std::integral_constant<int, PADDING>());
      } else {
        status = s.padding == kBorder ? with(std::integral_constant<int, kBorder>())
                                      : with(std::integral_constant<int, kReflection>());
      }
      if (status != cudaErrorNotSupported) return status;
    }
    if (many) return launch_boxes<T, PADDING>(input, s, output, enough, workspace, stream);
  }
  int64_t extent = 1;
  for (int a = 0; a < s.axes; ++a) extent += static_cast<int64_t>(s.size[a] - 1) * s.stride[a];
  if (extent * sizeof(T) > UINT32_MAX) return cudaErrorNotSupported;
  const int blocks = ceil_div(s.points, kThreads);
  int chunk = 32;
  const int least = static_cast<int64_t>(batch) * s.points < (1 << 15) ? 4 : 8;  // each has to find its pixels
  while (chunk > least && static_cast<int64_t>(blocks) * batch * ceil_div(channels, chunk) < enough) chunk /= 2;
  while (ceil_div(channels, chunk) > 65535) chunk *= 2;
  const dim3 grid(blocks, ceil_div(channels, chunk), batch < 65535 ? batch : 65535);
  const auto with = [&](auto kernel) {
    return launch(kernel, grid, kThreads, 0, stream, false, s, data, image, channel, output, batch, channels, chunk);
  };
  if constexpr (TAPS <= 4) {
    if (channels == 3 && channel == 1) return with(direct_kernel<T, TAPS, PADDING, 3>);
    if (channels <= 3) return with(direct_kernel<T, TAPS, PADDING, 1>);
  }
  return with(direct_kernel<T, TAPS, PADDING>);
}

}  // namespace

size_t sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  if (grid.numel() == 0 || !many_points(input, grid.numel() / grid.sizes[0] / 2, mode)) return 0;
  if (input.sizes[1] % (16 / input.item_size()) == 0 && input.aligned(1, 16)) return 0;
  const Tiles tiles = tiles_of(grid.sizes[2], grid.sizes[1]);
  return input.numel() * input.item_size() + input.sizes[0] * (1 + int64_t{tiles.count_across.d} * tiles.count_down);
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
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) {
      if constexpr (taps.value == 4) {
        if (s.padding == kZeros) return run<T, 4, kZeros>(input, s, to, workspace, stream);
        if (s.padding == kPixels) return run<T, 4, kPixels>(input, s, to, workspace, stream);
      }
      return run<T, taps.value, kAnyPadding>(input, s, to, workspace, stream);
    });
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
#endif
