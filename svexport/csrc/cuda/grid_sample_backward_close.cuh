// The gradient of sampling in float32 where points lie close together: neighbours add up before they add to memory.
#pragma once

#include <climits>

#include "grid_sample_backward.cuh"

namespace svexport::backward {

// *p where it is there, 0 elsewhere, of what is not read again: sums stay in the second cache instead.
__device__ __forceinline__ float read_once_if(const float* p, bool there) {
  float x;
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.cs.nc.f32 %0, [%1];}"
      : "=f"(x)
      : "l"(p), "r"(static_cast<int>(there)));
  return x;
}

// Points of a tile: a lane takes a column, or where an image is enlarged 2 x 2.
constexpr int kCloseAcross = 32, kCloseDown = 2, kEnlargedAcross = 64;

// The image, of which n, channel c, pixel p lie at n * image + c * channel + p * pixel, and how the work is divided.
struct Close {
  const float* input;
  int64_t image, channel, pixel = 1;
  float* output;   // (N, C, pixels), contiguous
  int down;        // points along y
  Divider across;  // by the number of tiles along x
  int tiles;
  int shift = 0;       // 1 << shift warps share the channels of a tile
  int64_t step[3];     // from a channel of a warp to its next: of the image, the gradient and the output
  int64_t row, below;  // from pixels and points to those below

  // point, plane: from a point and a channel of the output's gradient to the next; enough: tiles that are not shared.
  Close(const Space& s, const Tensor& input, int64_t point, int64_t plane, float* output, int tile_across, int enough)
      : input(static_cast<const float*>(input.data)),
        image(input.strides[0]),
        channel(input.strides[1]),
        output(output),
        down(s.points / s.across.d),
        across(ceil_div<int>(s.across.d, tile_across)),
        tiles(tiles_of(s, tile_across)) {
    const int64_t all = tiles * input.sizes[0];
    while (log_tiles() > 0 && (2 << shift) <= input.sizes[1] && all << shift < enough) ++shift;
    Space::evenly_spaced(input, 2, input.rank - 1, pixel);
    step[0] = channel << shift;
    step[1] = plane << shift;
    step[2] = static_cast<int64_t>(s.size[0]) * s.size[1] << shift;
    row = s.size[0] * pixel;
    below = s.across.d * point;
  }
  static int tiles_of(const Space& s, int tile_across) {
    const int across = s.across.d;
    return ceil_div(across, tile_across) * ceil_div<int>(s.points / across, kCloseDown);
  }
  // A block has 1 << log_tiles() of them.
  __host__ __device__ int log_tiles() const { return 3 - shift; }
  __host__ __device__ int blocks() const { return (tiles + (1 << log_tiles()) - 1) >> log_tiles(); }
  __device__ __forceinline__ int parts() const { return 1 << shift; }
  __device__ __forceinline__ int part() const { return threadIdx.x / 32 >> log_tiles(); }
  __device__ __forceinline__ int tile(int block) const {
    return (block << log_tiles()) + (threadIdx.x / 32 & ((1 << log_tiles()) - 1));
  }
};

// What a point, at `position` between its four pixels, adds to the gradient of this.
__device__ __forceinline__ void add_slopes(float (&sum)[2], const float (&position)[2], float g, float left,
                                           float right, float lower_left, float lower_right) {
  const float difference = (lower_right - lower_left) - (right - left);
  sum[0] = fmaf(g, fmaf(position[1], difference, right - left), sum[0]);
  sum[1] = fmaf(g, fmaf(position[0], difference, lower_left - left), sum[1]);
}

// Writes the gradients of a lane's points, which the warps that share the channels of a tile add up first.
// index(k): of a point of the image; valid(k): whether it is there.
template <int PADDING, int POINTS, class Valid, class Index>
__device__ __forceinline__ void set_gradients(const Space& s, int n, const Close& close, const AnyFloat& grad_grid,
                                              const float (&sum)[POINTS][2], Valid&& valid, Index&& index) {
  __shared__ float partial[POINTS][2][kThreads];
  const int tile = kThreads >> close.shift, row = threadIdx.x & (tile - 1), parts = close.parts();
  const auto set = [&](int k, int a, float gradient) {
    grad_grid.set((static_cast<int64_t>(n) * s.points + index(k)) * 2 + a, gradient);
  };
#pragma unroll
  for (int k = 0; k < POINTS; ++k) {
    const auto slope = [&](int a) {
      return PADDING == kZeros ? s.slope[a] : locate<4, PADDING>(s, n, valid(k) ? index(k) : 0).axis[a].slope[1];
    };
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const float gradient = slope(a) * sum[k][a];
      if (parts > 1) {
        partial[k][a][threadIdx.x] = gradient;
      } else if (valid(k)) {
        set(k, a, gradient);
      }
    }
  }
  if (parts == 1) return;
  __syncthreads();
#pragma unroll 1
  for (int i = close.part(); i < POINTS * 2; i += parts) {
    const int k = i / 2, a = i % 2;
    if (!valid(k)) continue;
    float gradient = 0;
#pragma unroll 1
    for (int j = 0; j < parts; ++j) gradient += partial[k][a][row + j * tile];
    set(k, a, gradient);
  }
  __syncthreads();
}

// Adds to the gradient of image n and writes that of its bilinear points; grad_grid: (N, points, 2), contiguous, or
// null. What falls to the same pixel the points below each other and side by side add up first: one atomic is left of a
// point instead of four, and L2 takes no more than 42 sectors a clock. All blocks of blockIdx.x together.
template <int PADDING>
__device__ __forceinline__ void add_close(const Space& s, int n, const Close& close, const Gradient<float>& grad,
                                          const AnyFloat& grad_grid, int channels) {
  constexpr int kDown = kCloseDown, kNowhere = INT_MIN / 2;
  const int parts = close.parts(), part = close.part(), lane = threadIdx.x % 32, width = s.size[0];
  const int across = s.across.d, down = close.down, blocks = close.blocks();
  const int64_t pixels = static_cast<int64_t>(width) * s.size[1];
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    uint32_t tile_y = close.tile(block);
    const int x = close.across.split(tile_y) * kCloseAcross + lane, y = tile_y * kDown, first = y * across + x;
    const auto valid = [&](int k) { return x < across && y + k < down; };
    // Of each point the upper left pixel, by a number that no pixel to the left of a row shares; then whether that and
    // the other three are inside.
    int to[kDown], pixel_of[kDown];
    bool inside[kDown][2][2];
    float position[kDown][2], sum[kDown][2] = {};  // of the point between its pixels; of its gradient
    bool idle = true, even = true;
    {
      int64_t offset[kDown];
      float coordinate[kDown][3];
#pragma unroll
      for (int k = 0; k < kDown; ++k) {
        offset[k] = n * s.grid_image + (valid(k) ? x * s.grid_stride[0] + (y + k) * s.grid_stride[1] : 0);
      }
      read_coordinates<2>(s, offset, coordinate);
#pragma unroll
      for (int k = 0; k < kDown; ++k) {
        Pixels<2> axis[2];
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          axis[a] = ::svexport::pixels<2>(coordinate[k][a], a, 2, s, PADDING == kAnyPadding ? s.padding : PADDING);
          position[k][a] = axis[a].weight[1];
          for (int i = 0; i < 2; ++i) inside[k][a][i] = valid(k) && axis[a].inside[i];
        }
        const bool any = (inside[k][0][0] || inside[k][0][1]) && (inside[k][1][0] || inside[k][1][1]);
        to[k] = axis[1].first * width + axis[0].first;
        pixel_of[k] = any ? to[k] + 2 * axis[1].first : kNowhere;
        idle = idle && !any;
        even = even && (k == 0 ? axis[1].first >= 0 && axis[1].first + kDown < s.size[1]
                               : pixel_of[k] == pixel_of[k - 1] + width + 2);
      }
    }
    even = __all_sync(~0u, idle || even);
    // Whether its right pixels belong to the next lane; whether its left ones come with those of the lane before.
    const auto share = [&](int k, bool& hands, bool& takes) {
      hands = __shfl_down_sync(~0u, pixel_of[k], 1) == pixel_of[k] + 1 && lane < 31;
      takes = __shfl_up_sync(~0u, static_cast<int>(hands), 1) && lane > 0;
    };
    const float* g_at = grad.data + n * grad.image + part * grad.channel + first * grad.point;
    const float* source = close.input + n * close.image + part * close.channel;
    float* target = close.output + (static_cast<int64_t>(n) * channels + part) * pixels;
    // Two pixels of a row, the right one unless it belongs to the next lane.
    const auto add = [&](float* pixel, float x, float y, bool takes, bool stores, bool stores_right) {
      const float taken = __shfl_up_sync(~0u, y, 1);
      if (takes) x += taken;
      add_if(pixel, x, stores);
      add_if(pixel + 1, y, stores_right);
    };
    if (even) {
      bool hands, takes;
      share(0, hands, takes);
      const bool stores = inside[0][0][0] && !idle, stores_right = inside[0][0][1] && !idle && !hands;
      const bool reads[2] = {stores && grad_grid.data, inside[0][0][1] && !idle && grad_grid.data};
      source += to[0] * close.pixel;
      target += to[0];
      float g_of[kDown], next[kDown + 1][2];
      const auto fetch = [&](bool there) {
#pragma unroll
        for (int k = 0; k < kDown; ++k) g_of[k] = read_once_if(g_at + k * close.below, there && !idle);
        const float* from = source;
#pragma unroll
        for (int k = 0; k <= kDown; ++k, from += close.row) {
#pragma unroll
          for (int i = 0; i < 2; ++i) next[k][i] = read_once_if(from + i * close.pixel, there && reads[i]);
        }
        source += close.step[0];
        g_at += close.step[1];
      };
      fetch(true);
#pragma unroll
      for (int k = 0; k <= kDown; ++k) {  // or the compiler puts the reads behind
        asm volatile("" ::"f"(g_of[k % kDown]), "f"(next[k][0]), "f"(next[k][1]) : "memory");
      }
      wait_for_previous();
      start_next();
#pragma unroll 1
      for (int c = part; c < channels; c += parts) {
        float g[kDown], pixel[kDown + 1][2];
#pragma unroll
        for (int k = 0; k < kDown; ++k) g[k] = g_of[k];
#pragma unroll
        for (int k = 0; k <= kDown; ++k) pixel[k][0] = next[k][0], pixel[k][1] = next[k][1];
        fetch(c + parts < channels);  // while these are added
        float below[2] = {}, *to_row = target, one = 1;
        asm volatile("" : "+f"(one));  // or the compiler keeps all differences to it
#pragma unroll
        for (int k = 0; k < kDown; ++k, to_row += width) {
          add_slopes(sum[k], position[k], g[k], pixel[k][0], pixel[k][1], pixel[k + 1][0], pixel[k + 1][1]);
          const float left = one - position[k][0], right = position[k][0];
          const float upper = g[k] * (one - position[k][1]), lower = g[k] * position[k][1];
          add(to_row, fmaf(upper, left, below[0]), fmaf(upper, right, below[1]), takes, stores, stores_right);
          below[0] = lower * left;
          below[1] = lower * right;
        }
        add(to_row, below[0], below[1], takes, stores, stores_right);
        target += close.step[2];
      }
    } else {
      // Of each corner whether it is inside, then whether the right ones belong to the next lane, whether the left ones
      // come with those of the lane before, and whether the lower ones are the upper ones of the next point.
      constexpr int kHands = 16, kTakes = 32, kCarries = 64, kBits = 7;
      static_assert(kDown * kBits <= 32);
      uint32_t flags = 0, stored = 0;  // stored: points of which some lane has to store the lower corners
#pragma unroll
      for (int k = 0; k < kDown; ++k) {
        bool hands, takes;
        share(k, hands, takes);
        const bool carries = k + 1 < kDown && (idle || pixel_of[k + 1 < kDown ? k + 1 : k] == pixel_of[k] + width + 2);
        uint32_t bits = (hands ? kHands : 0) | (takes ? kTakes : 0) | (carries ? kCarries : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) bits |= inside[k][0][i % 2] && inside[k][1][i / 2] ? 1 << i : 0;
        flags |= bits << (k * kBits);
        stored |= __any_sync(~0u, !carries) ? 1 << k : 0;
      }
      const auto is = [&](int k, int bit) { return (flags & bit << (k * kBits)) != 0; };
      wait_for_previous();
      start_next();
#pragma unroll 1
      for (int c = part; c < channels; c += parts) {
        float below[2] = {}, g[kDown], pixel[kDown][4];
#pragma unroll
        for (int k = 0; k < kDown; ++k) g[k] = read_once_if(g_at + k * close.below, valid(k));
#pragma unroll
        for (int k = 0; k < kDown; ++k) {
          const float* const corner = source + to[k] * close.pixel;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* const from = corner + (i % 2 + i / 2 * width) * close.pixel;
            const bool known = i < 2 && k > 0 && is(k - 1, kCarries);
            pixel[k][i] = read_once_if(from, is(k, 1 << i) && !known && grad_grid.data);
          }
        }
#pragma unroll
        for (int k = 0; k < kDown; ++k) {
          if (k > 0 && is(k - 1, kCarries)) pixel[k][0] = pixel[k - 1][2], pixel[k][1] = pixel[k - 1][3];
          add_slopes(sum[k], position[k], g[k], pixel[k][0], pixel[k][1], pixel[k][2], pixel[k][3]);
          const float upper = g[k] * (1 - position[k][1]), lower = g[k] * position[k][1];
          float* const corner = target + to[k];
          const bool carries = is(k, kCarries), takes = is(k, kTakes), hands = is(k, kHands);
          add(corner, fmaf(upper, 1 - position[k][0], below[0]), fmaf(upper, position[k][0], below[1]), takes, is(k, 1),
              is(k, 2) && !hands);
          below[0] = lower * (1 - position[k][0]);
          below[1] = lower * position[k][0];
          if (stored >> k & 1) {
            const float taken = __shfl_up_sync(~0u, carries ? 0.0f : below[1], 1);
            if (takes) below[0] += taken;
            add_if(corner + width, below[0], is(k, 4) && !carries);
            add_if(corner + width + 1, below[1], is(k, 8) && !carries && !hands);
            if (!carries) below[0] = below[1] = 0;
          }
        }
        source += close.step[0];
        g_at += close.step[1];
        target += close.step[2];
      }
    }
    if (grad_grid.data == nullptr) continue;
    set_gradients<PADDING>(s, n, close, grad_grid, sum, valid, [&](int k) { return first + k * across; });
  }
}

// The same of an image that is enlarged, about two points a pixel along both axes: 2 x 2 of a lane are in the same
// pixels, or in those beside. If rows of points are rows of pixels, an atomic is left of every pixel that they add to.
template <int PADDING>
__device__ __forceinline__ void add_enlarged(const Space& s, int n, const Close& close, const Gradient<float>& grad,
                                             const AnyFloat& grad_grid, int channels) {
  constexpr int kPoints = 4, kNowhere = INT_MIN / 2;  // row by row
  const int parts = close.parts(), part = close.part(), lane = threadIdx.x % 32;
  const int width = s.size[0], height = s.size[1], across = s.across.d, down = close.down, blocks = close.blocks();
  const int64_t pixels = static_cast<int64_t>(width) * height;
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    uint32_t tile_y = close.tile(block);
    const int x = close.across.split(tile_y) * kEnlargedAcross + 2 * lane, y = tile_y * kCloseDown;
    const auto valid = [&](int k) { return x + k % 2 < across && y + k / 2 < down; };
    int column[kPoints], line[kPoints];  // of the upper left pixel
    float position[kPoints][2], sum[kPoints][2] = {};
    bool any[kPoints], idle = true, regular = true;
    {
      int64_t offset[kPoints];
      float coordinate[kPoints][3];
#pragma unroll
      for (int k = 0; k < kPoints; ++k) {  // of points that are not there, those beside them
        offset[k] = n * s.grid_image + min(x + k % 2, across - 1) * s.grid_stride[0] +
                    min(y + k / 2, down - 1) * s.grid_stride[1];
      }
      read_coordinates<2>(s, offset, coordinate);
#pragma unroll
      for (int k = 0; k < kPoints; ++k) {
        Pixels<2> axis[2];
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          axis[a] = ::svexport::pixels<2>(coordinate[k][a], a, 2, s, PADDING == kAnyPadding ? s.padding : PADDING);
        }
        any[k] = valid(0) && (axis[0].inside[0] || axis[0].inside[1]) && (axis[1].inside[0] || axis[1].inside[1]);
        column[k] = axis[0].first;
        line[k] = axis[1].first;
        for (int a = 0; a < 2; ++a) position[k][a] = any[k] ? axis[a].weight[1] : 0.0f;
        idle = idle && !any[k];
        regular = regular && any[k];
      }
    }
    const bool shifted = column[1] != column[0];
    regular = regular && column[2] == column[0] && column[3] == column[1] && line[1] == line[0] && line[3] == line[2] &&
              column[1] - column[0] == static_cast<int>(shifted);
    const int leader = max(__ffs(__ballot_sync(~0u, !idle)) - 1, 0);
    const int top = __shfl_sync(~0u, line[0], leader), lower = __shfl_sync(~0u, line[2], leader);
    const bool stepped = lower != top;
    const bool even = __all_sync(~0u, idle || (regular && line[0] == top && line[2] == lower &&
                                               lower - top == static_cast<int>(stepped)));
    const int64_t first = static_cast<int64_t>(y) * across + x;
    const float* g_at = grad.data + n * grad.image + part * grad.channel + first * grad.point;
    const float* source = close.input + n * close.image + part * close.channel;
    float* target = close.output + (static_cast<int64_t>(n) * channels + part) * pixels;
    if (even) {
      const int left = idle ? kNowhere : column[0];
      const bool hands = __shfl_down_sync(~0u, left, 1) == left + 1 && lane < 31;  // all but its first column
      const bool takes = __shfl_up_sync(~0u, static_cast<int>(hands), 1) && lane > 0;
      bool inside[3], rows[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        inside[i] = !idle && static_cast<uint32_t>(column[0] + i) < static_cast<uint32_t>(width) && (i < 2 || shifted);
        rows[i] = static_cast<uint32_t>(top + i) < static_cast<uint32_t>(height) && (i < 2 || stepped);
      }
      source += (top * width + column[0]) * close.pixel;
      target += top * width + column[0];
#pragma unroll 1
      for (int c = part; c < channels; c += parts) {
        float g[kPoints], pixel[3][3], sums[3][3] = {};
#pragma unroll
        for (int k = 0; k < kPoints; ++k) {
          g[k] = read_once_if(g_at + k / 2 * close.below + k % 2 * grad.point, !idle && valid(k));
        }
        const float* from = source;
#pragma unroll
        for (int i = 0; i < 3; ++i, from += close.row) {
#pragma unroll
          for (int j = 0; j < 3; ++j) {
            pixel[i][j] = read_once_if(from + j * close.pixel, rows[i] && inside[j] && grad_grid.data);
          }
        }
        wait_for_previous();  // which the reads need not
        start_next();
        const auto add_point = [&](auto index, auto first) {
          constexpr int k = index.value, i = first.value;
          const bool right = k % 2 && shifted;
          add_slopes(sum[k], position[k], g[k], right ? pixel[i][1] : pixel[i][0], right ? pixel[i][2] : pixel[i][1],
                     right ? pixel[i + 1][1] : pixel[i + 1][0], right ? pixel[i + 1][2] : pixel[i + 1][1]);
#pragma unroll
          for (int below = 0; below < 2; ++below) {
            const float scaled = g[k] * (below ? position[k][1] : 1 - position[k][1]);
            const float from_left = scaled * (1 - position[k][0]), from_right = scaled * position[k][0];
            float(&to)[3] = sums[i + below];
            to[0] += right ? 0.0f : from_left;
            to[1] += right ? from_left : from_right;
            to[2] += right ? from_right : 0.0f;
          }
        };
        add_point(std::integral_constant<int, 0>(), std::integral_constant<int, 0>());
        add_point(std::integral_constant<int, 1>(), std::integral_constant<int, 0>());
        if (stepped) {
          add_point(std::integral_constant<int, 2>(), std::integral_constant<int, 1>());
          add_point(std::integral_constant<int, 3>(), std::integral_constant<int, 1>());
        } else {
          add_point(std::integral_constant<int, 2>(), std::integral_constant<int, 0>());
          add_point(std::integral_constant<int, 3>(), std::integral_constant<int, 0>());
        }
        float* to_row = target;
#pragma unroll
        for (int i = 0; i < 3; ++i, to_row += width) {
          if (!rows[i]) continue;
          float(&of)[3] = sums[i];
          const float right = __shfl_up_sync(~0u, of[2], 1);
          if (takes) of[1] += right;
          const float middle = __shfl_up_sync(~0u, of[1], 1);
          if (takes) of[0] += middle;
#pragma unroll
          for (int j = 0; j < 3; ++j) add_if(to_row + j, of[j], inside[j] && (j == 0 || !hands));
        }
        source += close.step[0];
        g_at += close.step[1];
        target += close.step[2];
      }
    } else {
      wait_for_previous();
      start_next();
#pragma unroll 1
      for (int k = 0; k < kPoints; ++k) {
        if (!valid(k)) continue;
        const Point<4> point = locate<4, PADDING>(s, n, (y + k / 2) * across + x + k % 2);
        const int stride[3] = {1, width, 0};
        const Taps<4> taps(point, stride);
        const float* g_from = g_at + k / 2 * close.below + k % 2 * grad.point;
        const float* from = source;
        float dot[4] = {}, *to = target;
#pragma unroll 1
        for (int c = part; c < channels; c += parts) {
          const float g = read_once_if(g_from, true);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool inside = taps.offset[i] >= 0;
            const float pixel = read_once_if(from + taps.offset[i] * close.pixel, inside && grad_grid.data);
            if (inside) dot[i] = fmaf(g, pixel, dot[i]);
            add_if(to + taps.offset[i], taps.weight[i] * g, inside);
          }
          from += close.step[0];
          g_from += close.step[1];
          to += close.step[2];
        }
        const float beside = point.axis[0].weight[1], below = point.axis[1].weight[1];
        const float gradient[2] = {fmaf(below, dot[3] - dot[2], (1 - below) * (dot[1] - dot[0])),
                                   fmaf(beside, dot[3] - dot[1], (1 - beside) * (dot[2] - dot[0]))};
#pragma unroll
        for (int i = 0; i < kPoints * 2; ++i) sum[i / 2][i % 2] = i / 2 == k ? gradient[i % 2] : sum[i / 2][i % 2];
      }
    }
    if (grad_grid.data == nullptr) continue;
    set_gradients<PADDING>(s, n, close, grad_grid, sum, valid,
                           [&](int k) { return (y + k / 2) * across + x + k % 2; });
  }
}

// What is done with an image, by how far apart points that follow each other are, in pixels along columns and rows.
struct Choice {
  float narrow, wide, tilted;  // of close points
  bool listed;                 // of the others, those for which there are lists:
  float turned;                // less apart along both

  // Of image n, by a sample of as many points as the block has threads: what runs begins with.
  __device__ __forceinline__ int operator()(const Space& s, int n) const {
    const int i = threadIdx.x, p = min(i * (s.points / kThreads) + i, s.points - 2);
    float x[2][3], distance[2];
    coordinates<2>(s, n, {p, p + 1}, x);
#pragma unroll
    for (int a = 0; a < 2; ++a) distance[a] = fabsf(x[1][a] - x[0][a]) * (s.padding == kPixels ? 1.0f : s.slope[a]);
    const auto most = [](bool is) { return 4 * __syncthreads_count(is) >= 3 * kThreads; };
    if (most(distance[0] > narrow && distance[0] < wide && distance[1] < tilted)) return Lists::kDone;
    return listed && most(!(distance[0] > 3 * turned || distance[1] > turned)) ? 0 : Lists::kScattered;
  }
};

// Images that are done, and if there is no other kernel for them those that are left. The next kernel begins when the
// one before has ended, and can read what that chose.
template <int PADDING, bool ENLARGED>
__global__ void __launch_bounds__(kThreads, ENLARGED ? 3 : 4)
    close_kernel(Space s, Choice choice, Close close, Gradient<float> grad, AnyFloat grad_grid, int batch, int channels,
                 Left left, bool also_left) {
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (choice(s, n) != Lists::kDone) {
      if (!also_left) continue;
      wait_for_previous();
      if (!left(n)) continue;
    }
    if constexpr (ENLARGED) {
      add_enlarged<PADDING>(s, n, close, grad, grad_grid, channels);
    } else {
      add_close<PADDING>(s, n, close, grad, grad_grid, channels);
    }
  }
  wait_for_previous();
}

}  // namespace svexport::backward
