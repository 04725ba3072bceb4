// A small tensor from two large ones of which it has many: a warp for each sum.
#pragma once

#include "einsum_small.cuh"

namespace svexport::einsum {

constexpr int kManyWarps = 4;  // of a block: one for each scheduler
constexpr int kMostRuns = 4;   // of rows of a tile
constexpr int kMostParts = 16;  // of a sum

// Of y: what a warp adds up at once, `size` of K times V and all W, over some tiles.
struct Part {
  uint32_t s;
  int of_k, kv0, k0, count;  // kv0, k0: of the first, and how many of K they are of
  int64_t first;             // of the partial sums: their first row

  __device__ __forceinline__ Part(const Einsum& a, int at, int size) : s(at) {
    const uint32_t part = a.per_part.split(s);
    kv0 = static_cast<int>(a.per_group.split(s)) * size;
    const int kv = a.x.count * a.x.width;
    first = (static_cast<int64_t>(part) * a.shared + s) * kv + kv0;
    of_k = static_cast<int>(a.apart.split(s));
    k0 = a.per_k.divide(kv0);
    count = static_cast<int>(a.per_k.divide(min(kv, kv0 + size) - 1)) - k0 + 1;
  }
};

__device__ __forceinline__ Range tiles_of(const Einsum& a, int at) {
  uint32_t rest = at;
  return Range(a.tiles, static_cast<int>(a.per_part.split(rest)), a.parts);
}

// Parts of y, or y, of 16 * I of K times V and all W, at most 8 * J. A warp adds up one after the other: while it does,
// what follows is on its way, also for the next one. A tile has several runs of few rows.
template <class T, int I, int J, bool kWhole>
__global__ void __launch_bounds__(kManyWarps * 32) many_kernel(const __grid_constant__ Einsum a) {
  constexpr int kSize = sizeof(T), kSums = I * J * 4;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int warp = threadIdx.x / 32;
  const int V = a.x.width, W = a.z.width, kv = a.x.count * V;
  char* const memory = shared + a.before + warp * a.warp;
  Stages<kWhole> stages(memory, memory + a.stages * a.stage, a.stages, a.stage, 1);
  start_next();
  const Range parts(a.shared * a.groups * a.parts, blockIdx.x * kManyWarps + warp, gridDim.x * kManyWarps);

  int next = parts.begin;
  Range next_tiles = tiles_of(a, next);
  const auto fetch_next = [&](int stage) {
    if (next < parts.end) {
      const Part part(a, next, 16 * I);
      const Place place(a, next_tiles.begin);
      const int64_t outer = place.outer * a.runs;
      const int runs = static_cast<int>(min(static_cast<int64_t>(a.runs), a.outer - outer));
      char* const to = stages.at(stage);
      const auto* z = reinterpret_cast<const char*>(a.z.at<const T>(part.s, outer, 0, place.first));
      const auto* x = reinterpret_cast<const char*>(a.x.at<const T>(part.s, outer, part.of_k + part.k0, place.first));
      if constexpr (kWhole) {
        const uint32_t barrier = stages.barrier(stage);
        if (lane == 0) expect_bytes(barrier, runs * place.rows * (W + part.count * V) * kSize);
        for (int i = lane; i < runs * (part.count + 1); i += 32) {
          int run = 0, k = i;
          for (; k > part.count; k -= part.count + 1) ++run;
          if (k == part.count) {
            copy_bulk(to + run * a.z.pitch, z + run * a.z.strides[1], place.rows * W * kSize, barrier);
          } else {
            copy_bulk(to + a.x_begin + run * a.x_run + k * a.x.pitch, x + run * a.x.strides[1] + k * a.x.strides[2],
                      place.rows * V * kSize, barrier);
          }
        }
      } else {
#pragma unroll 1
        for (int run = 0; run < runs; ++run, z += a.z.strides[1], x += a.x.strides[1]) {
          fetch<false>(to + run * a.z.pitch, a.z, 1, reinterpret_cast<const T*>(z), place.rows, place.rows, 0);
          fetch<false>(to + a.x_begin + run * a.x_run, a.x, part.count, reinterpret_cast<const T*>(x), place.rows,
                       place.rows, 0);
        }
      }
      if (++next_tiles.begin == next_tiles.end) next_tiles = tiles_of(a, ++next);
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < a.stages; ++i) fetch_next(i);
  for (int i = threadIdx.x * 4; i < a.before; i += kManyWarps * 128) *reinterpret_cast<uint32_t*>(shared + i) = 0;
  __syncthreads();

  int stage = 0;
#pragma unroll 1
  for (int at = parts.begin; at < parts.end; ++at) {
    const Part part(a, at, 16 * I);
    int offsets[2 * I];  // of this lane's K and V
#pragma unroll
    for (int i = 0; i < 2 * I; ++i) {
      uint32_t k = min(part.kv0 + group + 8 * i, kv - 1);
      const uint32_t v = a.per_k.split(k);
      offsets[i] = a.x.begin(k - part.k0) + v * kSize;
    }
    const Range range = tiles_of(a, at);
    float sums[I][J][4] = {};
#pragma unroll 1
    for (int tile = range.begin; tile < range.end; ++tile, stage = stage + 1 < a.stages ? stage + 1 : 0) {
      const Place place(a, tile);
      const int64_t outer = place.outer * a.runs;
      char* const tiles = stages.at(stage);
      const char* const z = tiles + begin_of<kWhole>(a.z.at<const T>(part.s, outer, 0, place.first));
      const char* const x =
          tiles + a.x_begin + begin_of<kWhole>(a.x.at<const T>(part.s, outer, part.of_k + part.k0, place.first));
      // Rows that are not there are zeros of z, whatever they meet: what is finite, or makes the sum what it is not.
      const auto nothing = static_cast<int>(shared - z);
      int of_x[8], of_z[8];
      if (a.runs == 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const bool there = pair * 8 + i < place.rows;
          of_x[i] = there ? (pair * 8 + i) * V * kSize : 0;
          of_z[i] = there ? (pair * 8 + i) * W * kSize : nothing;
        }
      } else {
        const auto runs = static_cast<int>(min(static_cast<int64_t>(a.runs), a.outer - outer));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          uint32_t run = pair * 8 + i;
          const auto row = static_cast<int>(a.per_row.split(run));
          const bool there = static_cast<int>(run) < runs;
          const auto begin = [&](const Large& t, const char* first) {
            const auto at = static_cast<int>(first - tiles) & 15;
            return kWhole ? 0 : ((at + static_cast<int>(run * t.strides[1])) & 15) - at;
          };
          of_x[i] = there ? static_cast<int>(run) * a.x_run + begin(a.x, x) + row * V * kSize : 0;
          of_z[i] = there ? static_cast<int>(run) * a.z.pitch + begin(a.z, z) + row * W * kSize : nothing;
        }
      }
      stages.wait(stage);
      add_tile<T>(sums, x, z, offsets, [&](int i) { return of_x[i]; }, [&](int i) { return of_z[i]; });
      __syncwarp();  // until all have read the tile
      fetch_next(stage);
    }

    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (i / 4 % J * 8 + pair * 2 + i % 2 < W) zero = fmaf(sums[i / 4 / J][i / 4 % J][i % 4], 0.0f, zero);
    }
    const auto put = [&](int i, const float (&row)[2 * J]) {
      uint32_t k = part.kv0 + i * 8 + group;
      if (static_cast<int>(k) >= kv) return;
      const auto store_row = [&](auto* to, int stride) {
#pragma unroll
        for (int j = 0; j < 2 * J; ++j) {
          const int w = j / 2 * 8 + pair * 2 + j % 2;
          if (w < W) to[w * stride] = from_float<element_t<decltype(to)>>(row[j]);
        }
      };
      if (a.parts == 1) {
        const uint32_t v = a.per_k.split(k);
        store_row(reinterpret_cast<T*>(a.y) + part.s * a.y_shared +
                      ((part.of_k + static_cast<int>(k)) * a.y_k + static_cast<int>(v) * a.y_v),
                  a.y_w);
      } else {
        store_row(a.partials + (part.first + i * 8 + group) * W, 1);
      }
    };
    if (__builtin_expect(__any_sync(0xffffffffu, !(zero == 0.0f)), 0)) {
      const auto for_rows = [&](auto&& f) {
        for (int tile = range.begin; tile < range.end; ++tile) {
          const Place place(a, tile);
          const int64_t outer = place.outer * a.runs, end = min(outer + a.runs, a.outer);
          for (int64_t i = outer; i < end; ++i) f(i, place.first, place.rows);
        }
      };
      exact<T, I, J>(a, part.s, part.of_k, part.kv0, for_rows, put);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * I; ++i) {
        float row[2 * J];
#pragma unroll
        for (int j = 0; j < 2 * J; ++j) row[j] = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
        put(i, row);
      }
    }
  }
  wait_for_previous();  // also where there was no need: what comes next waits for this kernel alone
}

// How many_kernel divides its work.
struct Many {
  int tiles, columns;        // of 16 of K times V, and of 8 columns, that a warp adds up
  int shared, count;         // S and K or, where each of K is apart, their product and 1
  int groups, runs, of_one;  // of y; of rows of a tile; tiles of one of S
  int parts = 1;             // of the sum over rows
  int x_pitch, z_pitch, x_run, stage, stages = 0, warp = 0;
  double time = INFINITY;  // as of Sums

  Many(const Tensor& x, const Tensor& z, int tiles, bool apart)
      : tiles(tiles),
        columns(std::max(2, ceil_div<int>(z.sizes[4], 8))),
        shared(static_cast<int>(x.sizes[0] * (apart ? x.sizes[2] : 1))),
        count(apart ? 1 : static_cast<int>(x.sizes[2])) {
    const int V = static_cast<int>(x.sizes[4]), size = 16 * tiles, all = count * V;
    groups = ceil_div(all, size);
    const int64_t outer = x.sizes[1], rows = std::min<int64_t>(kRows, x.sizes[3]);
    runs = static_cast<int>(std::min({int64_t{kMostRuns}, outer, kRows / rows}));
    of_one = static_cast<int>(ceil_div(outer, int64_t{runs}) * ceil_div<int64_t>(x.sizes[3], kRows));
    const auto pitch = [&](const Tensor& t) {
      return ceil_div(static_cast<int>(rows * t.sizes[4] * t.item_size()), 16) * 16 + 32;
    };
    x_pitch = pitch(x);
    z_pitch = pitch(z);
    x_run = std::min(count, (size - 2) / V + 2) * x_pitch;
    stage = runs * (x_run + z_pitch);
    const bool single = x.item_size() == 4;
    const int processors_ = processors(), memory_ = shared_memory();  // the driver takes its time
    const double products = tiles * columns;
    const auto registers = static_cast<int>(std::min(255.0, single ? 60 + 10 * products : 65 + 7 * products));
    int fetched = 0;  // of K, by all groups
    for (int i = 0; i < groups; ++i) fetched += (std::min(all, (i + 1) * size) - 1) / V - i * size / V + 1;
    const double bytes = static_cast<double>(fetched) / groups * x_pitch + z_pitch;  // of a run
    const bool whole = (x.sizes[3] * V * x.item_size()) % 16 == 0 && (z.sizes[3] * z.sizes[4] * z.item_size()) % 16 == 0;
    const double pieces = whole ? 0 : runs * (static_cast<double>(fetched) / groups + 1);
    for (int n = 1; n <= kMostStages; ++n) {
      const int memory = n * stage + ceil_div(n * 8, 16) * 16;
      const int fit = std::min((memory_ + 1024) / (zeros() + kManyWarps * memory + 1024),
                               65536 / (ceil_div(registers, 8) * 256 * kManyWarps));
      if (fit == 0) break;
      for (int i = 1; i <= std::min(of_one, kMostParts); ++i) {
        const int64_t all = int64_t{shared} * groups * i;
        if (all > INT32_MAX / 2) break;
        const auto rounds = static_cast<double>(ceil_div<int64_t>(all, int64_t{fit} * kManyWarps * processors_));
        const double beside = all / rounds / processors_;
        const double tile = (n > 1 ? 1.0 : 1.04) *
                            (0.28 + (runs > 1 ? 0.38 : 0.0) + (single ? 0.08 : 0.046) * products + 0.01 * pieces +
                             beside * (0.052 + 0.022 * pieces + (single ? 0.0052 * products : 0.0) + 6.6e-6 * runs * bytes));
        double other = 6 + rounds * (3 + ceil_div(of_one, i) * tile);
        if (i > 1) other += 2 + 3e-6 * i * x.sizes[0] * x.sizes[2] * V * z.sizes[4];
        if (other >= time) continue;
        time = other;
        stages = n;
        warp = memory;
        parts = i;
      }
    }
  }
  int zeros() const { return 32 * columns + 32; }  // bytes in front of what the warps have
};

// Tiles of 16 of K times V that a warp adds up at most, with so many of 8 columns: of floats no more than registers hold.
constexpr int most_of_many(int columns, int item_size) {
  return item_size == 4 ? (columns > 6 ? 2 : kFewSums) : most_sums(columns);
}

// The division that takes the least time.
inline Many many_of(const Tensor& x, const Tensor& z) {
  const int most = most_of_many(std::max(2, ceil_div<int>(z.sizes[4], 8)), static_cast<int>(x.item_size()));
  Many best(x, z, 2, false);
  for (const int tiles : {2, std::min(most, kFewSums), most}) {
    for (const bool apart : {false, true}) {
      if (const Many other(x, z, tiles, apart); other.time < best.time) best = other;
    }
  }
  return best;
}

template <class T, int I, int J>
cudaError_t launch_many(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early, const Many& many,
                        cudaStream_t stream) {
  Einsum a{};
  if (!describe(x, y, z, &a) || a.z.count != 1) return cudaErrorNotSupported;
  a.per_k = Divider(a.x.width);
  a.per_part = Divider(many.parts);
  a.per_group = Divider(many.groups);
  a.apart = Divider(a.x.count / many.count);
  a.shared = many.shared;
  a.x.count = many.count;
  a.groups = many.groups;
  a.parts = many.parts;
  a.partials = static_cast<float*>(workspace);
  a.outer = x.sizes[1];
  a.runs = many.runs;
  a.tiles = many.of_one;
  if (many.runs > 1) {
    a.per_outer = Divider(1);
    a.per_row = Divider(a.rows);
  }
  a.x.pitch = many.x_pitch;
  a.z.pitch = many.z_pitch;
  a.x_run = many.x_run;
  a.x_begin = many.runs * many.z_pitch;
  a.stage = many.stage;
  a.stages = many.stages;
  a.warp = many.warp;
  a.before = many.zeros();
  const int bytes = a.before + kManyWarps * a.warp;
  const auto kernel = whole(a) ? many_kernel<T, I, J, true> : many_kernel<T, I, J, false>;
  cudaError_t status = allow(kernel, bytes);
  int blocks = 1;
  if (status == cudaSuccess) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kManyWarps * 32, bytes);
  }
  if (status != cudaSuccess) return status;
  // As many for each warp.
  const int64_t all = static_cast<int64_t>(a.shared) * a.groups * a.parts;
  const int64_t rounds = ceil_div<int64_t>(all, int64_t{kManyWarps} * blocks * processors());
  const auto grid = static_cast<unsigned>(ceil_div<int64_t>(ceil_div(all, rounds), kManyWarps));
  status = launch(kernel, grid, kManyWarps * 32, bytes, stream, early, a);
  return a.parts == 1 || status != cudaSuccess ? status : launch_sum<T>(a, stream);
}

// With kernels of one type, which are compiled apart: einsum_many.cu, einsum_half.cu and einsum_bfloat16.cu.
template <class T>
cudaError_t run_many(const Tensor& x, const Tensor& z, const Tensor& y, void* workspace, bool early, const Many& many,
                     cudaStream_t stream) {
  return dispatch_columns(many.columns, [&](auto columns) {
    return dispatch_sums<columns.value>(many.tiles, [&](auto tiles) {
      if constexpr (tiles.value <= most_of_many(columns.value, sizeof(T))) {
        return launch_many<T, tiles.value, columns.value>(x, z, y, workspace, early, many, stream);
      }
      return cudaErrorNotSupported;
    });
  });
}

extern template cudaError_t run_many<float>(const Tensor&, const Tensor&, const Tensor&, void*, bool, const Many&,
                                            cudaStream_t);
extern template cudaError_t run_many<__half>(const Tensor&, const Tensor&, const Tensor&, void*, bool, const Many&,
                                             cudaStream_t);
extern template cudaError_t run_many<__nv_bfloat16>(const Tensor&, const Tensor&, const Tensor&, void*, bool,
                                                    const Many&, cudaStream_t);

}  // namespace svexport::einsum
