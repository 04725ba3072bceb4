// The fused decoder's sampling of the cameras.
#pragma once

#include "bilinear.cuh"
#include "transformer_decoder_fused_tiles.cuh"

namespace svexport::fused {

// Projects the point into camera `lane`, to u and v; u = NaN: not seen. cameras: 12 floats each.
__device__ __forceinline__ void project(const Fused& a, const float* point, const float* cameras, float& u, float& v) {
  const int lane = threadIdx.x % 32;
  u = v = NAN;
  if (lane >= a.cams) return;
  float place[3], image[3];
  UNROLL for (int i = 0; i < 3; ++i) place[i] = fmaf(point[i], a.size[i], a.low[i]);
  const float4* matrix = reinterpret_cast<const float4*>(cameras) + lane * 3;
  UNROLL for (int i = 0; i < 3; ++i) {
    const float4 m = matrix[i];
    image[i] = fmaf(m.x, place[0], fmaf(m.y, place[1], m.z * place[2])) + m.w;
  }
  const float depth = fmaxf(image[2], a.depth_eps);
  bool seen = image[2] > a.depth_eps;
  float at_image[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    at_image[i] = __fdividef(image[i], depth * a.image[1 - i]);
    const float centred = 2 * at_image[i] - 1;
    seen = seen && (a.in_image ? centred > -1 && centred < 1 : !isnan(at_image[i]));
    if (!a.in_image) at_image[i] = fminf(fmaxf(at_image[i], a.clamp[0]), a.clamp[1]);
  }
  if (seen) u = at_image[0], v = at_image[1];
}

// Reads the lane's 8 channels of a pixel of the map, unconverted: 16 bytes, or 8 of an int8 map.
template <class T, int Format>
__device__ __forceinline__ uint4 pixel(const FusedLevel& l, int64_t image, int y, int x) {
  const int lane = threadIdx.x % 32;
  const int64_t at = image + y * l.y + x * l.x;
  if constexpr (Format == kBytes) {
    const int8_t* p = static_cast<const int8_t*>(l.data) + at + lane / 4 * l.channel + lane % 4 * 8;
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
    return make_uint4(v.x, v.y, 0, 0);
  } else if constexpr (Format == kAdjacent) {
    return __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(l.data) + at + lane * 8));
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(l.data) + at + lane * 8 * l.channel;
    uint32_t words[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      words[i] = __ldg(p + 2 * i * l.channel) | static_cast<uint32_t>(__ldg(p + (2 * i + 1) * l.channel)) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <class T, int Format>
__device__ __forceinline__ void add_tap(const uint4& v, float weight, float (&sum)[8]) {
  float x[8];
  if constexpr (Format == kBytes) {
    UNROLL for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(static_cast<int8_t>((i < 4 ? v.x : v.y) >> i % 4 * 8));
  } else {
    unpack8<T>(v, x);
  }
  UNROLL for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
}

// The pixels of a level around a projected point, and the offset of the camera's image.
struct Place {
  Corners x, y;
  int64_t image;
};

__device__ __forceinline__ Place place_on(const FusedLevel& l, int batch, int cam, float u, float v) {
  return {corners(u * l.width - 0.5f, l.width), corners(v * l.height - 0.5f, l.height), batch * l.batch + cam * l.cam};
}

// sampled += the sample of one camera on a level whose channels are not adjacent. Two lanes share 16 channels; each
// reads one column of pixels, so that one access reads both columns, mostly from the same sector.
template <class T>
__device__ __forceinline__ void sample_strided(const FusedLevel& l, const Place& p, float (&sampled)[8]) {
  constexpr int kShared = 16;
  const int lane = threadIdx.x % 32;
  const bool right = lane % 2;
  const uint16_t* column = static_cast<const uint16_t*>(l.data) + p.image + lane / 2 * kShared * l.channel +
                           (right ? p.x.index[1] : p.x.index[0]) * l.x;
  const uint16_t *upper = column + p.y.index[0] * l.y, *lower = column + p.y.index[1] * l.y;
  uint16_t pixels[kShared][2];
  UNROLL for (int i = 0; i < kShared; ++i) {
    pixels[i][0] = __ldg(upper + i * l.channel), pixels[i][1] = __ldg(lower + i * l.channel);
  }
  const float weight = right ? p.x.weight[1] : p.x.weight[0];
  const float weights[2] = {p.y.weight[0] * weight, p.y.weight[1] * weight};
  float sum[kShared];
  UNROLL for (int i = 0; i < kShared; ++i) {
    const float2 two = unpack<T>(pixels[i][0] | static_cast<uint32_t>(pixels[i][1]) << 16);
    sum[i] = fmaf(weights[1], two.y, weights[0] * two.x);
  }
  UNROLL for (int i = 0; i < 8; ++i) {
    const float given = right ? sum[i] : sum[i + 8];
    sampled[i] += (right ? sum[i + 8] : sum[i]) + __shfl_xor_sync(0xffffffffu, given, 1);
  }
}

// sampled += the sample of one camera on one level. A pixel of a pooled level is the maximum of four of the map's.
template <class T, int Format>
__device__ __forceinline__ void sample_level(const FusedLevel& l, const Place& p, float (&sampled)[8]) {
  if (Format == kStrided && !l.pool) {
    sample_strided<T>(l, p, sampled);
    return;
  }
  if (!l.pool) {
    uint4 taps[4];
    UNROLL for (int j = 0; j < 4; ++j) taps[j] = pixel<T, Format>(l, p.image, p.y.index[j / 2], p.x.index[j % 2]);
    UNROLL for (int j = 0; j < 4; ++j) add_tap<T, Format>(taps[j], p.y.weight[j / 2] * p.x.weight[j % 2], sampled);
    return;
  }
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {
    const int y = 2 * (j / 2 ? p.y.index[1] : p.y.index[0]), x = 2 * (j % 2 ? p.x.index[1] : p.x.index[0]);
    const float weight = (j / 2 ? p.y.weight[1] : p.y.weight[0]) * (j % 2 ? p.x.weight[1] : p.x.weight[0]);
    uint4 of[4];
    UNROLL for (int i = 0; i < 4; ++i) of[i] = pixel<T, Format>(l, p.image, y + i / 2, x + i % 2);
    UNROLL for (int i = 1; i < 4; ++i) {
      if constexpr (Format == kBytes) {
        of[0].x = __vmaxs4(of[0].x, of[i].x), of[0].y = __vmaxs4(of[0].y, of[i].y);
      } else {
        of[0].x = max_of<T>(of[0].x, of[i].x), of[0].y = max_of<T>(of[0].y, of[i].y);
        of[0].z = max_of<T>(of[0].z, of[i].z), of[0].w = max_of<T>(of[0].w, of[i].w);
      }
    }
    add_tap<T, Format>(of[0], weight, sampled);
  }
}

__device__ __forceinline__ bool is_plain(const Fused& a, int level) {
  return level >= a.first_plain && level < a.first_plain + a.plain_levels;
}

// A warp samples camera `cam` on the plain levels, and calls take(level, the lane's channels). The pixels of all levels
// are in flight at once; each lane locates the point on one of the levels.
template <class T, class Take>
__device__ __forceinline__ void sample_plain(const Fused& a, int batch, int cam, float cam_u, float cam_v, Take take) {
  const int lane = threadIdx.x % 32;
  const FusedLevel& l = a.level[a.first_plain + min(lane % kAheadLevels, a.plain_levels - 1)];
  const Place p = place_on(l, batch, cam, cam_u, cam_v);
  const uint64_t corner =
      reinterpret_cast<uint64_t>(static_cast<const T*>(l.data) + p.image + p.y.index[0] * l.y + p.x.index[0] * l.x);
  const int right = (p.x.index[1] - p.x.index[0]) * static_cast<int>(l.x);
  const int down = (p.y.index[1] - p.y.index[0]) * static_cast<int>(l.y);
  uint4 taps[kAheadLevels][4];
  UNROLL for (int level = 0; level < kAheadLevels; ++level) {
    if (level < a.plain_levels) {
      const T* from = reinterpret_cast<const T*>(__shfl_sync(0xffffffffu, corner, level)) + lane * 8;
      const int to_right = __shfl_sync(0xffffffffu, right, level), to_below = __shfl_sync(0xffffffffu, down, level);
      UNROLL for (int j = 0; j < 4; ++j) {
        taps[level][j] = __ldg(reinterpret_cast<const uint4*>(from + (j % 2 ? to_right : 0) + (j / 2 ? to_below : 0)));
      }
    }
  }
  UNROLL for (int level = 0; level < kAheadLevels; ++level) {
    if (level < a.plain_levels) {
      float sampled[8] = {};
      UNROLL for (int j = 0; j < 4; ++j) {
        const float tap = p.y.weight[j / 2] * p.x.weight[j % 2];
        add_tap<T, kAdjacent>(taps[level][j], __shfl_sync(0xffffffffu, tap, level), sampled);
      }
      take(a.first_plain + level, sampled);
    }
  }
}

// A warp samples a camera on a level that is not plain.
template <class T>
__device__ __forceinline__ void sample_other(const FusedLevel& l, int batch, int cam, float cam_u, float cam_v,
                                             float (&sampled)[8]) {
  const Place p = place_on(l, batch, cam, cam_u, cam_v);
  UNROLL for (int i = 0; i < 8; ++i) sampled[i] = 0;
  with_constant<kAdjacent, kBytes, kStrided>(
      l.format, [&](auto format) { sample_level<T, format.value>(l, p, sampled); });
  UNROLL for (int i = 0; i < 8; ++i) sampled[i] *= l.scale;
}

// Index of the first chunk of the samples of row `row`.
__device__ __forceinline__ int64_t samples_of(const Fused& a, int row) {
  return static_cast<int64_t>(row) * kPresampled * a.ahead_levels * 32;
}

// A warp samples the first cameras that see a row's point, on the first levels, for the cluster of kQueries.
template <class T>
__device__ __forceinline__ void presample_row(const Fused& a, int batch, float u, float v, void* samples) {
  uint4* to = static_cast<uint4*>(samples) + threadIdx.x % 32;
  unsigned seen = __ballot_sync(0xffffffffu, !isnan(u));
#pragma unroll 1
  for (int number = 0; number < kPresampled && seen; ++number, seen &= seen - 1, to += a.ahead_levels * 32) {
    const int cam = __ffs(seen) - 1;
    const float cam_u = __shfl_sync(0xffffffffu, u, cam), cam_v = __shfl_sync(0xffffffffu, v, cam);
    const auto take = [&](int level, const float (&sampled)[8]) { to[level * 32] = pack8<T>(sampled); };
    if (a.plain_levels > 0) sample_plain<T>(a, batch, cam, cam_u, cam_v, take);
#pragma unroll 1
    for (int level = 0; level < a.ahead_levels; ++level) {
      if (is_plain(a, level)) continue;
      float sampled[8];
      sample_other<T>(a.level[level], batch, cam, cam_u, cam_v, sampled);
      take(level, sampled);
    }
  }
}

// A warp adds the samples of all cameras on all levels to sum. weights: those of camera c and level l are number
// c * levels + l; a lane holds numbers lane and lane + 32. ready: the presampled ones, if any.
template <class T, bool Presampled>
__device__ __forceinline__ void sample(const Fused& a, int batch, float u, float v, const float (&weights)[2],
                                       const uint4 (&ready)[kPresampled][kAheadLevels], float (&sum)[8]) {
  const int own_level = min(static_cast<int>(threadIdx.x % kAheadLevels), a.levels - 1);  // the lane reads its weight
  auto weight_of = [&](int which) {
    const float even = __shfl_sync(0xffffffffu, weights[0], which % 32);
    const float odd = __shfl_sync(0xffffffffu, weights[1], which % 32);
    return which < 32 ? even : odd;
  };
  auto add = [&](float weight, const float (&sampled)[8]) {
    UNROLL for (int c = 0; c < 8; ++c) sum[c] = fmaf(isnan(sampled[c]) ? 0.f : sampled[c], weight, sum[c]);
  };
  unsigned seen = __ballot_sync(0xffffffffu, !isnan(u)), rest = seen;  // rest: not presampled
  if constexpr (Presampled) {
    UNROLL for (int number = 0; number < kPresampled; ++number) {
      if (!rest) continue;
      const float weight = weight_of((__ffs(rest) - 1) * a.levels + own_level);
      UNROLL for (int i = 0; i < kAheadLevels; ++i) {
        if (i < a.ahead_levels) {
          float sampled[8];
          unpack8<T>(ready[number][i], sampled);
          add(__shfl_sync(0xffffffffu, weight, i), sampled);
        }
      }
      rest &= rest - 1;
    }
    if (a.ahead_levels == a.levels) seen = rest;
  }
#pragma unroll 1
  for (; seen; seen &= seen - 1) {
    const int cam = __ffs(seen) - 1;
    const float cam_u = __shfl_sync(0xffffffffu, u, cam), cam_v = __shfl_sync(0xffffffffu, v, cam);
    const bool all = rest >> cam & 1;
    if (all && a.plain_levels > 0) {
      const float weight = weight_of(cam * a.levels + own_level);
      sample_plain<T>(a, batch, cam, cam_u, cam_v, [&](int level, const float (&sampled)[8]) {
        add(__shfl_sync(0xffffffffu, weight, level), sampled);
      });
    }
#pragma unroll 1
    for (int level = all ? 0 : a.ahead_levels; level < a.levels; ++level) {
      if (is_plain(a, level)) continue;
      float sampled[8];
      sample_other<T>(a.level[level], batch, cam, cam_u, cam_v, sampled);
      add(weight_of(cam * a.levels + level), sampled);
    }
  }
}

// Activates the camera weights of a row; the lane has two of them.
__device__ __forceinline__ void activate(int activation, int count, float (&x)[2]) {
  const int lane = threadIdx.x % 32;
  const bool in[2] = {lane < count, lane + 32 < count};
  if (activation == 0) {
    x[0] = sigmoid(x[0]), x[1] = sigmoid(x[1]);
    return;
  }
  float largest = fmaxf(in[0] ? x[0] : -INFINITY, in[1] ? x[1] : -INFINITY);
  UNROLL for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  UNROLL for (int i = 0; i < 2; ++i) x[i] = in[i] ? expf(x[i] - largest) : 0.f;
  const float total = warp_sum(x[0] + x[1]);
  x[0] /= total, x[1] /= total;
}

}  // namespace svexport::fused
