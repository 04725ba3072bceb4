// The gradient of sampling in float32 where points lie close together: neighbours add up before they add to memory.
#pragma once

#include <climits>

#include "grid_sample/backward.cuh"

namespace svexport::backward {

// *p where it is there, 0 elsewhere, of what is not read again: sums stay in the second cache instead.
__device__ __forceinline__ float read_once_if(const float* p, bool there) {
  float x;
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.cs.nc.f32 %0, [%1];}"
      : "=f"(x)
      : "l"(p), "r"(static_cast<int>(there)));
  return x;
}

using sampler::gradient::kCloseAcross, sampler::gradient::kCloseDown;  // points of a tile: a lane takes a column

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
  Close(const Space& s, const Tensor& input, int64_t point, int64_t plane, float* output, int enough)
      : input(static_cast<const float*>(input.data)),
        image(input.strides[0]),
        channel(input.strides[1]),
        output(output),
        down(s.points / s.across.d),
        across(ceil_div<int>(s.across.d, kCloseAcross)),
        tiles(static_cast<int>(across.d) * ceil_div(down, kCloseDown)) {
    const int64_t all = tiles * input.sizes[0];
    while (log_tiles() > 0 && (2 << shift) <= input.sizes[1] && all << shift < enough) ++shift;
    evenly_spaced(input, 2, input.rank - 1, pixel);
    step[0] = channel << shift;
    step[1] = plane << shift;
    step[2] = static_cast<int64_t>(s.size[0]) * s.size[1] << shift;
    row = s.size[0] * pixel;
    below = s.across.d * point;
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

// What is done with an image, by how far apart points that follow each other are, in pixels along columns and rows.
struct Choice {
  float tilted;  // of close points, at most along columns
  bool listed;   // of the others, those for which there are lists:
  float turned;  // less apart along both

  // Of image n, by a sample of as many points as the block has threads: what runs begins with.
  __device__ __forceinline__ int operator()(const Space& s, int n) const {
    const int i = threadIdx.x, p = min(i * (s.points / kThreads) + i, s.points - 2);
    float x[2][3], distance[2];
    coordinates<2>(s, n, {p, p + 1}, x);
#pragma unroll
    for (int a = 0; a < 2; ++a) distance[a] = fabsf(x[1][a] - x[0][a]) * (s.padding == kPixels ? 1.0f : s.slope[a]);
    const auto most = [](bool is) { return 4 * __syncthreads_count(is) >= 3 * kThreads; };
    if (most(distance[0] > 0.5f && distance[0] < 1.5f && distance[1] < tilted)) return Lists::kDone;
    return listed && most(!(distance[0] > 3 * turned || distance[1] > turned)) ? 0 : Lists::kScattered;
  }
};

// Images that are done, and if there is no other kernel for them those that are left. The next kernel begins when the
// one before has ended, and can read what that chose.
template <int PADDING>
__global__ void __launch_bounds__(kThreads, 4)
    close_kernel(Space s, Choice choice, Close close, Gradient<float> grad, AnyFloat grad_grid, int batch, int channels,
                 Left left, bool also_left) {
  for (int n = blockIdx.z; n < batch; n += gridDim.z) {
    if (choice(s, n) != Lists::kDone) {
      if (!also_left) continue;
      wait_for_previous();
      if (!left(n)) continue;
    }
    add_close<PADDING>(s, n, close, grad, grad_grid, channels);
  }
  wait_for_previous();
}

}  // namespace svexport::backward
