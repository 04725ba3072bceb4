// The kernel of kPlanes, for NCHW maps. A sector holds only one or two pixels that a sample needs, and the requests for
// sectors of L2 would dominate the time. So a block reads kPlaneChannels channels for many queries, which then share
// sectors in L1. Every block projects all its queries, which costs less than a separate kernel before it.
// A block works on as many queries as it has threads, or on fewer with several threads each:
// 1. A thread finds the cameras that may see its query.
// 2. These views are listed by camera and by band of the image, from top to bottom, so that adjacent views in the list
//    request the same lines.
// 3. A warp takes 32 views. Each lane does the divisions of one view, which decide where it is and whether it counts.
//    Then two adjacent lanes read the two pixels of a row of one view, other pairs those of other views.
// 4. A thread sums the views of its query.
// The order of the views within a band is arbitrary; no sum depends on it.
#pragma once

#include "camera_sample/sampling.cuh"
#include "camera_sample/tensors.h"

namespace svexport {
namespace {

constexpr int kPlaneWarps = kPlaneThreads / 32;
constexpr int kPlaneBands = 16;  // horizontal bands of an image
constexpr int kMaxViews = 1088;  // of a list: at least as many as one camera can have

struct Planes {
  int queries;
  int at_once;      // queries that a block works on at once
  int lane_shift;   // log2 of the threads per query
  float bounds[2];  // width and height of the image, slightly enlarged
  float bands;      // per pixel of the image
  int vectors;      // 16-byte vectors that the weights of a query fill; 0: the queries' weights are not contiguous
  bool fours;       // one access can read the weights of a view
  bool floats;      // points and offsets are float32
  bool pairs;       // one access can write two channels of the output
};

// What the kernel reads often of a level.
struct alignas(16) PlaneLevel {
  float width, height;
  int to_camera;   // elements
  int to_channel;  // bytes
  const char* data;
};

struct PlanesShared {
  float4 matrices[kPlaneCams][3];
  PlaneLevel levels[kPlaneLevels];
  float places[3][kPlaneThreads];
  float2 values[kMaxViews];                 // results of the views, one per channel
  uint32_t views[kMaxViews];                // query: 10 bits, camera: 4, previous view of the same thread: 11
  int positions[kPlaneCams * kPlaneBands];  // first the number of views, then the index of the next one
  int starts[kPlaneCams + 1];               // index of the first view of a camera
  uint32_t nan[2][kPlaneWarps];             // a bit per query: whether one of its weights is NaN
};
constexpr uint32_t kNoView = 2047;

// Adds 0 to sum, or NaN if an element is not finite.
__device__ __forceinline__ void add_zero(const Vec<__half, 8>& v, float& sum) {
  const __half2* pairs = reinterpret_cast<const __half2*>(&v);
  const __half2 zero = __floats2half2_rn(0, 0);
  __half2 total = zero;
  UNROLL for (int i = 0; i < 4; ++i) total = __hfma2(pairs[i], zero, total);
  sum += __low2float(total) + __high2float(total);
}
template <class T, int N>
__device__ __forceinline__ void add_zero(const Vec<T, N>& v, float& sum) {
  UNROLL for (int i = 0; i < N; ++i) sum = fmaf(to_float(v.at[i]), 0, sum);
}

// Grid: pairs of channels x parts of the queries x images. Weights have the type of the maps.
template <class T>
__global__ void __launch_bounds__(kPlaneThreads, 1)
    camera_sample_planes_kernel(const Params __grid_constant__ p, const Planes __grid_constant__ r) {
  __shared__ PlanesShared s;
  const int b = blockIdx.z, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int lanes = 1 << r.lane_shift, mine = threadIdx.x >> r.lane_shift, part = lane & (lanes - 1);
  const int channel = blockIdx.x * kPlaneChannels, channels = min(p.channels - channel, kPlaneChannels);
  const uint32_t points = p.points_of.d;
  const T* logits = static_cast<const T*>(p.weights.data) + b * p.weights_stride[0] +
                    p.group_channels.divide(channel) * p.weights_stride[3];

  // The first reads, all in flight at once.
  float number = 0;
  if (threadIdx.x < 12 * kPlaneCams) {
    const int camera = threadIdx.x / 12, i = threadIdx.x % 12;
    number = p.lidar2img.get(b * p.lidar2img_stride[0] + camera * p.lidar2img_stride[1] +
                                 i / 4 * p.lidar2img_stride[2] + i % 4 * p.lidar2img_stride[3],
                             camera < p.cams);
  }
  int first = blockIdx.y * r.at_once;
  const int step = gridDim.y * r.at_once;
  const auto own_query = [&] { return static_cast<uint32_t>(min(first + min(mine, r.at_once - 1), r.queries - 1)); };
  float raw[6];  // a point and its offset
  const auto own_point = [&](uint32_t point) {
    const uint32_t from = own_query() * static_cast<uint32_t>(p.points_stride[1]);
    const uint32_t offset =
        own_query() * static_cast<uint32_t>(p.offsets_stride[1]) + point * static_cast<uint32_t>(p.offsets_stride[2]);
    if (r.floats) {  // without conversion, which takes fewer instructions
      const float* points_of = static_cast<const float*>(p.points.data) + b * p.points_stride[0];
      const float* offsets_of = static_cast<const float*>(p.offsets.data) + b * p.offsets_stride[0];
      UNROLL for (int i = 0; i < 3; ++i) {
        raw[i] = load_if<float, 1>(points_of + (from + i * static_cast<uint32_t>(p.points_stride[2])), true).at[0];
        raw[3 + i] = load_if<float, 1>(offsets_of + (offset + i * static_cast<uint32_t>(p.offsets_stride[3])),
                                       p.has_offsets).at[0];
      }
    } else {
      UNROLL for (int i = 0; i < 3; ++i) {
        raw[i] = p.points.get(b * p.points_stride[0] + from + i * p.points_stride[2]);
        raw[3 + i] = p.offsets.get(b * p.offsets_stride[0] + offset + i * p.offsets_stride[3], p.has_offsets);
      }
    }
  };
  own_point(0);
  if (threadIdx.x < 12 * kPlaneCams) reinterpret_cast<float*>(s.matrices)[threadIdx.x] = number;  // 0: sees nothing
  if (threadIdx.x < kPlaneCams * kPlaneBands) s.positions[threadIdx.x] = 0;
  if (threadIdx.x < 2 * kPlaneWarps) (&s.nan[0][0])[threadIdx.x] = 0;
  if (threadIdx.x < kPlaneLevels) {
    const int l = threadIdx.x;
    const Level& map = p.levels[l];
    const bool there = l < p.num_levels;
    const char* const data = map.data + b * map.sb + static_cast<int64_t>(channel) * map.sc;
    s.levels[l] = {static_cast<float>(there ? map.width : 0), static_cast<float>(there ? map.height : 0),
                   static_cast<int>(map.sk / static_cast<int>(sizeof(T))), channels > 1 ? map.sc : 0, data};
  }
  __syncthreads();

  // Finds weights that are NaN before they are activated: they make the sum NaN, whatever is seen.
  constexpr int kVectors = 3;
  Vec<T, kVector<T>> vectors[kVectors];
  const auto load_vector = [&](int i) {
    const T* all = logits + static_cast<uint32_t>(first) * static_cast<uint32_t>(p.weights_stride[1]);
    return load_if<T, kVector<T>>(all + kVector<T> * i, i < min(r.at_once, r.queries - first) * r.vectors);
  };
  const auto check_vector = [&](const Vec<T, kVector<T>>& v, int i, uint32_t* nan) {
    float nothing = 0;
    add_zero(v, nothing);
    if (nothing != 0) {  // an element is infinite or NaN; only NaN counts
      bool any = false;
      UNROLL for (int j = 0; j < kVector<T>; ++j) any |= to_float(v.at[j]) != to_float(v.at[j]);
      if (any) atomicOr(nan + i / r.vectors / 32, 1u << i / r.vectors % 32);
    }
  };

  float sums[kPlaneChannels] = {};
  int chunk = 0;
  for (uint32_t point = 0;;) {
    const bool live = mine < r.at_once && first + mine < r.queries;
    const bool last_point = point + 1 == points, end = last_point && first + step >= r.queries;
    if (point == 0) {
      UNROLL for (int i = 0; i < kVectors; ++i) vectors[i] = load_vector(threadIdx.x + i * kPlaneThreads);
    }
    const Point at(p, raw);
    if (part == 0) {
      UNROLL for (int i = 0; i < 3; ++i) s.places[i][mine] = at.at[i];
    }
    uint32_t cameras = 0;  // those that may see the point
    uint64_t bands = 0;    // the band in each camera, 4 bits each
    const float4(*m)[3] = s.matrices + part;
#pragma unroll 2
    for (int camera = part; camera < p.cams; camera += lanes, m += lanes) {
      const float4 rows[3] = {m[0][0], m[0][1], m[0][2]};
      float image[3];
      UNROLL for (int i = 0; i < 3; ++i) image[i] = along(rows[i].x, rows[i].y, rows[i].z, rows[i].w, at);
      // No view that counts is missed: the bounds are enlarged by more than the rounding of the divisions.
      if (live & (image[2] > p.depth_eps) & (image[0] > 0) & (image[1] > 0) & (image[0] < image[2] * r.bounds[0]) &
          (image[1] < image[2] * r.bounds[1])) {
        const int band = max(0, min(static_cast<int>(__fdividef(image[1], image[2]) * r.bands), kPlaneBands - 1));
        atomicAdd(&s.positions[camera * kPlaneBands + band], 1);
        cameras |= 1u << camera;
        bands |= static_cast<uint64_t>(band) << 4 * camera;
      }
    }
    __syncthreads();

    if (warp == 0) {  // prefix sums: the index of the first view of each camera and band
      constexpr int kOwn = kPlaneCams * kPlaneBands / 32;
      int counts[kOwn], total = 0;
      UNROLL for (int i = 0; i < kOwn; ++i) {
        counts[i] = s.positions[lane * kOwn + i];
        total += counts[i];
      }
      int until = total;
      UNROLL for (int other = 1; other < 32; other *= 2) {
        const int before = __shfl_up_sync(~0u, until, other);
        until += lane >= other ? before : 0;
      }
      int next = until - total;
      if (lane * kOwn % kPlaneBands == 0) s.starts[lane * kOwn / kPlaneBands] = next;
      if (lane == 31) s.starts[kPlaneCams] = until;
      UNROLL for (int i = 0; i < kOwn; ++i) {
        s.positions[lane * kOwn + i] = next;
        next += counts[i];
      }
    }
    if (point == 0) {
      uint32_t* const nan = s.nan[chunk & 1];
      if (r.vectors > 0) {
        UNROLL for (int i = 0; i < kVectors; ++i) check_vector(vectors[i], threadIdx.x + i * kPlaneThreads, nan);
        for (int i = threadIdx.x + kVectors * kPlaneThreads; i < min(r.at_once, r.queries - first) * r.vectors;
             i += kPlaneThreads) {
          check_vector(load_vector(i), i, nan);
        }
      } else if (live) {
        const T* own = logits + own_query() * static_cast<uint32_t>(p.weights_stride[1]);
        bool any = false;
#pragma unroll 4
        for (int i = part; i < p.samples; i += lanes) {
          const float logit = to_float(own[i * static_cast<uint32_t>(p.weights_stride[2])]);
          any |= logit != logit;
        }
        if (any) atomicOr(nan + mine / 32, 1u << mine % 32);
      }
    }
    __syncthreads();

    // Takes as many cameras at once as the list has room for.
    const int until = lane < p.cams ? s.starts[lane + 1] : 0;  // views of the cameras up to this lane's
    for (int from = 0, done = 0; from < p.cams;) {
      const int to = __popc(__ballot_sync(~0u, lane < p.cams && until - done <= kMaxViews));
      const int count = __shfl_sync(~0u, until, to - 1) - done;
      uint32_t last = kNoView;
      for (uint32_t left = cameras & ((1u << to) - 1) & ~((1u << from) - 1); left; left &= left - 1) {
        const int camera = __ffs(left) - 1, band = static_cast<int>(bands >> 4 * camera) & 15;
        const int index = atomicAdd(&s.positions[camera * kPlaneBands + band], 1) - done;
        s.views[index] = mine | camera << 10 | last << 14;
        last = index;
      }
      __syncthreads();

      if (to == p.cams) {
        if (threadIdx.x < kPlaneCams * kPlaneBands) s.positions[threadIdx.x] = 0;
        if (threadIdx.x < kPlaneWarps) s.nan[~chunk & 1][threadIdx.x] = 0;
      }
      const int column = lane & 1;
#pragma unroll 1
      for (int group = warp; 16 * group < count; group += 2 * kPlaneWarps) {
        // Two groups of 16 views, a view per lane: its place in the image and its weights.
        const int own = 16 * (group + lane / 16 * kPlaneWarps) + lane % 16;
        const uint32_t name = s.views[min(own, count - 1)], query = name & 1023, own_camera = name >> 10 & 15;
        const T* of_view =
            logits + ((first + query) * static_cast<uint32_t>(p.weights_stride[1]) +
                      (own_camera * points + point) * p.num_levels * static_cast<uint32_t>(p.weights_stride[2]));
        Vec<T, kPlaneLevels> weights = load_if<T, kPlaneLevels>(of_view, r.fours);
        UNROLL for (int l = 0; l < kPlaneLevels; ++l) {
          const bool there = !r.fours && l < p.num_levels;
          const Vec<T, 1> weight = load_if<T, 1>(of_view + l * static_cast<int>(p.weights_stride[2]), there);
          weights.at[l] = r.fours ? weights.at[l] : weight.at[0];
        }
        Projection seen;
        {
          Point place;
          UNROLL for (int j = 0; j < 3; ++j) place.at[j] = s.places[j][query];
          const float4* rows = s.matrices[own_camera];
          float image[3];
          UNROLL for (int j = 0; j < 3; ++j) image[j] = along(rows[j].x, rows[j].y, rows[j].z, rows[j].w, place);
          seen = divided(p, image[0], image[1], image[2]);
        }
        seen.u = own < count && seen.seen ? seen.u : -16;  // no pixel is near

#pragma unroll 1
        for (int i = 0; i < 2 && 16 * (group + i * kPlaneWarps) < count; ++i) {
          const int of = 16 * i + lane / 2, index = 16 * (group + i * kPlaneWarps) + lane / 2;
          const float u = __shfl_sync(~0u, seen.u, of), v = __shfl_sync(~0u, seen.v, of);
          const int camera = __shfl_sync(~0u, static_cast<int>(own_camera), of);
          T pixels[kPlaneLevels][kPlaneChannels][2];
          float fx[kPlaneLevels], fy[kPlaneLevels];
          UNROLL for (int l = 0; l < kPlaneLevels; ++l) {
            // Rounds down by adding a number so large that the sum has no fractional bits.
            constexpr float kUnits = 12582912;
            const PlaneLevel map = s.levels[l];
            const float x = __fsub_rn(__fmul_rn(u, map.width), 0.5f), y = __fsub_rn(__fmul_rn(v, map.height), 0.5f);
            const float x0 = __fadd_rd(x, kUnits), y0 = __fadd_rd(y, kUnits);
            fx[l] = x - (x0 - kUnits);
            fy[l] = y - (y0 - kUnits);
            const uint32_t px = __float_as_uint(x0) + (column - 0x4b400000), py = __float_as_uint(y0) - 0x4b400000;
            const uint32_t width = p.levels[l].width, height = p.levels[l].height;
            const int at = camera * map.to_camera + py * (p.levels[l].sy / static_cast<int>(sizeof(T))) + px;
            const char* const pixel = map.data + at * static_cast<int64_t>(sizeof(T));
            UNROLL for (int j = 0; j < 2; ++j) {
              const bool inside = px < width && py + j < height;
              UNROLL for (int c = 0; c < kPlaneChannels; ++c) {
                const char* const from = pixel + c * map.to_channel + j * p.levels[l].sy;
                pixels[l][c][j] = load_if<T, 1>(reinterpret_cast<const T*>(from), inside).at[0];
              }
            }
          }
          float total = 0;
          UNROLL for (int l = 0; l < kPlaneLevels; ++l) {
            const float across = column ? fx[l] : 1 - fx[l], down[2] = {(1 - fy[l]) * across, fy[l] * across};
            float sum[kPlaneChannels];
            UNROLL for (int c = 0; c < kPlaneChannels; ++c) {
              sum[c] = fmaf(down[1], to_float(pixels[l][c][1]), down[0] * to_float(pixels[l][c][0]));
            }
            // Each column's lane continues with one channel.
            const float value = (column ? sum[1] : sum[0]) + __shfl_xor_sync(~0u, column ? sum[0] : sum[1], 1);
            const float logit = __shfl_sync(~0u, to_float(weights.at[l]), of);
            total = fmaf(value == value ? value : 0, __fdividef(1, 1 + __expf(-logit)), total);
          }
          if (index < count) (&s.values[index].x)[column] = total;
        }
      }
      __syncthreads();

      while (last != kNoView) {
        const float2 value = s.values[last];
        last = s.views[last] >> 14;
        sums[0] += value.x;
        sums[1] += value.y;
      }
      done += count;
      from = to;
      if (from < p.cams) __syncthreads();
    }

    if (last_point) {
      __syncwarp();
      for (int other = 1; other < lanes; other *= 2) {
        UNROLL for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, other);
      }
      if (live && part == 0) {
        if (s.nan[chunk & 1][mine / 32] >> mine % 32 & 1) sums[0] = sums[1] = NAN;
        T* out = static_cast<T*>(p.output) + b * p.output_stride[0] + own_query() * p.output_stride[1] +
                 channel * p.output_stride[2];
        if (r.pairs) {
          store(out, Vec<T, 2>{from_float<T>(sums[0]), from_float<T>(sums[1])});
        } else {
          out[0] = from_float<T>(sums[0]);
          if (channels > 1) out[p.output_stride[2]] = from_float<T>(sums[1]);
        }
      }
      if (end) break;
      sums[0] = sums[1] = 0;
      first += step;
      ++chunk;
    }
    point = last_point ? 0 : point + 1;
    own_point(point);
  }
}

}  // namespace
}  // namespace svexport
