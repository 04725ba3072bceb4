// The kernel of the fused decoder, and what each of its warps does.
#pragma once

#include "transformer_decoder_fused.cuh"

// Only sm_90a has wgmma.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

#include "transformer_decoder_fused_attention.cuh"

namespace svexport::fused {

// What the compute warps do. kSplit: the box branch has clusters of its own.
template <class T, bool kSplit>
__device__ __forceinline__ void compute(const Fused& a, Shared<T>& s, const Block& self) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // or the compiler reads the special register again and again
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32, group = lane / 4, quarter = lane % 4;
  const int products = a.products[self.role];
  const int half = self.half, scene = self.scene;
  const int index0 = (self.tile - scene * a.scene_clusters) * kRows;      // first row, in the scene
  const int rows = min(kRows, a.queries - index0);                        // number of rows
  const int64_t row0 = static_cast<int64_t>(scene) * a.queries + index0;  // first row, in all scenes
  const int own = warp * 16, output0 = half * kHalf + own;  // the warp's 16 outputs, in the block's and in all 256
  auto tile = [&](int which) { return shared_address(s.tiles[0]) + which * kTileBytes; };
  // The offset in a tile of the lane's chunk of these, in the order of four 8 x 8 matrices.
  const int fragment = chunk_at(lane / 16 * 8 + lane % 8, output0 / 8 + lane / 8 % 2);
  // The rows that the warp norms, loads and stores; a lane has 8 channels.
  const int first_row = warp * kRowsOfWarp;
  const int sampled_row = half * kSampled + warp;

  Exchange blocks(shared_address(s.received), half);
  UNROLL for (int which = 0; which < kTiles; ++which) {
    if (!a.load[which] || self.role != kQueries) continue;
    const uint4* from = static_cast<const uint4*>(a.load[which]) + (row0 + first_row) * 32 + lane;
    UNROLL for (int r = 0; r < kRowsOfWarp; ++r) {
      store_shared(tile(which) + chunk_at(first_row + r, lane), first_row + r < rows ? __ldcg(from + r * 32) : uint4{});
    }
  }
  const uint32_t rest_of_x = shared_address(s.rest_of_x);
  uint32_t rest = shared_address(s.rest[0]), other_rest = shared_address(s.rest[1]);
  UNROLL for (int r = 0; r < kRowsOfWarp; ++r) {
    const int at = chunk_at(first_row + r, lane);
    store_shared(rest_of_x + at, uint4{}), store_shared(rest + at, uint4{});
  }
  if (a.first && self.role == kQueries) {
    UNROLL for (int r = 0; r < kRowsOfWarp; ++r) {
      const int at = chunk_at(first_row + r, lane);
      store_shared(tile(kWhere) + at, add8<T>(load_shared(tile(kX) + at), load_shared(tile(kQueryPos) + at)));
    }
    // Zeroes the padding of keys and values, which weights of 0 multiply.
    const int covered = a.scene_clusters * kRows, padding = a.keys - covered;
    for (int i = thread; index0 + kRows == covered && half == 0 && i < padding * kChannels; i += kComputing) {
      for (int64_t set = 0; set < 2; ++set) {
        const int64_t begin = set * a.heads_size + static_cast<int64_t>(scene) * kChannels * a.keys;
        const int key = covered + i % padding, head = i / padding / kHeadDim, dim = i / padding % kHeadDim;
        const int64_t block = begin + static_cast<int64_t>(head) * a.keys * kHeadDim;
        static_cast<T*>(a.k)[block + static_cast<int64_t>(key) * kHeadDim + dim] = from_float<T>(0.f);
        static_cast<T*>(a.v)[block + key / kKeyBlock * (kKeyBlock * kHeadDim) + value_at(dim, key % kKeyBlock)] =
            from_float<T>(0.f);
      }
    }
  }
  for (int i = thread; i < a.cams * 12; i += kComputing) {
    const int part = i % 12;
    s.cameras[i] = a.lidar2img.get(scene * a.lidar2img_strides[0] + i / 12 * a.lidar2img_strides[1] +
                                   part / 4 * a.lidar2img_strides[2] + part % 4 * a.lidar2img_strides[3]);
  }
  if (thread < kRows * 3) {
    const float point = thread >= rows * 3 ? 0.5f
                        : a.first          ? a.given.get(row0 * 3 + thread)
                                           : a.points[row0 * 3 + thread];
    s.points[thread] = point, s.logit[thread] = inverse_sigmoid(point);
  }
  sync();
  float u = NAN, v = NAN;  // the point of the row that the warp samples, as seen by camera `lane`
  auto look = [&] {
    u = v = NAN;
    if (sampled_row < rows) project(a, s.points + sampled_row * 3, s.cameras, u, v);
    if constexpr (kSplit) {
      float* seen = a.seen + (self.tile * kRows + sampled_row) * kSeen + lane;
      seen[0] = u, seen[kMaxCams] = v;
    }
  };
  if (!a.first) look();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");

  float kept[8] = {};
  int slot = 0, which = a.which, incoming = 0;
  uint32_t parity = 0, taken = 0;
#pragma unroll 1
  for (int i = 0; i < products; ++i) {
    STAGE(i, 0);
    wait_for(shared_address(&s.full[slot]), parity);
    const typename Shared<T>::Vectors& vectors = s.vectors[slot];
    const uint32_t code = vectors.code;
    if (kSplit && code & kTakes) wait_for(shared_address(&s.taken), taken++ % 2);
    STAGE(i, 1);
    if (code & (kMoves | kEncodes)) {
      move_points(a, code, row0, rows, half, s, rest, warp, lane);
      if (code & kEncodes) look();
      if (kSplit && code & kEncodes) {
        wait_for_previous();
        uint4* samples = static_cast<uint4*>(a.samples) + samples_of(a, self.tile * kRows + sampled_row);
        presample_row<T>(a, scene, u, v, samples);
      }
    }
    if (code & kNorms) {
      const uint32_t from = tile(field(code, kNormFrom)), to = tile(field(code, kNormTo));
      const uint4 weight = reinterpret_cast<const uint4*>(vectors.norm_weight)[lane];
      const uint4 bias = reinterpret_cast<const uint4*>(vectors.norm_bias)[lane];
      float x[kRowsOfWarp][8], pivot[kRowsOfWarp];
      UNROLL for (int r = 0; r < kRowsOfWarp; ++r) {
        const uint32_t row = from + (first_row + r) * 128;
        uint32_t first;  // the first two elements of the row's memory
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(first) : "r"(row) : "memory");
        pivot[r] = unpack<T>(first).x;
        const int at = chunk_at(first_row + r, lane);
        float lost[8];
        unpack8<T>(load_shared(from + at), x[r]);
        unpack8<T>(load_shared(rest + at), lost);
        UNROLL for (int i = 0; i < 8; ++i) x[r][i] += lost[i];
      }
      __syncwarp();  // all lanes have read the rows, which are overwritten next
      normalize<T, kRowsOfWarp>(x, pivot, weight, bias);
      UNROLL for (int r = 0; r < kRowsOfWarp; ++r) {
        const int at = chunk_at(first_row + r, lane);
        uint4 y = pack8<T>(x[r]);
        if (code & kNormRelu) {
          y = make_uint4(max_of<T>(y.x, 0), max_of<T>(y.y, 0), max_of<T>(y.z, 0), max_of<T>(y.w, 0));
        }
        store_shared(to + at, y);
        if (field(code, kNormTo) == kX) store_shared(rest_of_x + at, rest8<T>(x[r], y));
        if (code & kAddsQueryPos) {
          float where[8];
          unpack8<T>(load_shared(tile(kQueryPos) + at), where);
          UNROLL for (int i = 0; i < 8; ++i) where[i] += x[r][i];
          store_shared(tile(kWhere) + at, pack8<T>(where));
        }
      }
      sync();
      if (kSplit && code & kPasses) {
        const int at = chunk_at(sampled_row, lane);
        char* tile_passed = a.passed_tile[self.role] + static_cast<int64_t>(self.tile) * kTileBytes;
        *reinterpret_cast<uint4*>(tile_passed + at) = load_shared(to + at);
        arrive_for_warp(shared_address(&s.passed), lane);
      }
    }
    STAGE(i, 2);
    if (code & kAttends) {
      attend<T>(a, s, half, warp, lane, blocks, slot, parity);
      STAGE(i, 3);
      blocks.receive(kIncoming, thread);
      STAGE(i, 4);
      continue;
    }
    if (code & kSamples) {
      uint4 ready[kPresampled][kAheadLevels] = {};
      wait_for_previous();
      if constexpr (kSplit) {
        u = s.seen[warp * kSeen + lane], v = s.seen[warp * kSeen + kMaxCams + lane];
        const uint4* from = static_cast<uint4*>(a.samples) + samples_of(a, self.tile * kRows + sampled_row) + lane;
        const uint4* second = from + a.ahead_levels * 32;
        const int cameras = __popc(__ballot_sync(0xffffffffu, !isnan(u)));
        UNROLL for (int number = 0; number < kPresampled; ++number) {
          UNROLL for (int i = 0; i < kAheadLevels; ++i) {
            if (number >= cameras || i >= a.ahead_levels) continue;
            ready[number][i] = __ldcg((number ? second : from) + i * 32);
          }
        }
      }
      const float* row = s.logits + sampled_row * kLogitsPitch;
      float logits[2] = {row[lane], row[lane + 32]}, sampled[8] = {};
      activate(a.activation, a.logits, logits);
      sample<T, kSplit>(a, scene, u, v, logits, ready, sampled);
      const uint32_t at = tile(kIn) + chunk_at(sampled_row, lane);
      const uint4 y = pack8<T>(sampled);
      store_shared(at, y);
      STAGE(i, 3);
      blocks.send(at, y);
      blocks.receive(kIncoming, thread);
    }
    if (code & kNoProduct) {
      arrive_for_warp(shared_address(&s.empty[slot]), lane);
      if (++slot == kSlots) slot = 0, parity ^= 1;
      continue;
    }
    STAGE(i, 4);

    const bool narrow = code & kIsNarrow, heads = code & (kToQueries | kToKeys | kToValues);
    float sum[8], odd[8] = {}, more[8];
    UNROLL for (int j = 0; j < 8; ++j) sum[j] = code & kGoesOn ? kept[j] : 0.f;
    publish();  // the rows that this block's threads stored, or that the other block sent
    const uint32_t from = tile(field(code, kFrom));
    const uint32_t weights = shared_address(s.weights[0]) + slot * kSlotBytes + warp / (kWarps / 2) * (kBox / 2);
    if (!narrow || warp < kWarps / 2) multiply<T>(sum, odd, weights, from);
    // Meanwhile, reads what is added. [4 * n + 2 * h + j]: to output group + 8 * h, row 8 * n + 2 * quarter + j.
    {
      const int at = narrow ? own % kNarrow : own;
      const float bias[2] = {to_float(vectors.bias[at + group]), to_float(vectors.bias[at + group + 8])};
      UNROLL for (int j = 0; j < 8; ++j) more[j] = bias[j / 2 % 2];
      auto add = [&](uint32_t rows) {
        uint32_t x[4];
        load_matrix_transposed(x, rows + fragment);
        UNROLL for (int j = 0; j < 4; ++j) {
          const float2 two = unpack<T>(x[j]);
          more[2 * j] += two.x, more[2 * j + 1] += two.y;
        }
      };
      if (code & kAddsX) add(tile(kX)), add(rest_of_x);
      if (const int which_tile = field(code, kAdds)) add(tile(which_tile));
    }
    finish(sum, odd);
    arrive_for_warp(shared_address(&s.empty[slot]), lane);
    STAGE(i, 5);
    if (++slot == kSlots) slot = 0, parity ^= 1;
    if (code & kKeeps) {
      UNROLL for (int j = 0; j < 8; ++j) kept[j] = sum[j];
      continue;
    }
    UNROLL for (int j = 0; j < 8; ++j) sum[j] += more[j];
    if (narrow) {
      if (own < kNarrow) {
        UNROLL for (int j = 0; j < 8; ++j) {
          s.logits[(j / 4 * 8 + quarter * 2 + j % 2) * kLogitsPitch + own + group + j / 2 % 2 * 8] = sum[j];
        }
      }
      sync();
      continue;
    }
    if (!heads) {
      uint32_t y[4];
      UNROLL for (int j = 0; j < 4; ++j) y[j] = pack<T>(sum[2 * j], sum[2 * j + 1]);
      auto exchange = [&](uint32_t to) {
        store_matrix_transposed(to, y);
        __syncwarp();
        blocks.send(to, load_shared(to));
        incoming += kIncoming;
      };
      if (code & kRelu) {
        UNROLL for (int j = 0; j < 4; ++j) y[j] = max_of<T>(y[j], 0);
      }
      exchange(tile(field(code, kTo)) + fragment);
      if (!(code & kRelu)) {  // a norm follows, which needs the rounding errors
        UNROLL for (int j = 0; j < 4; ++j) y[j] = rest2<T>(sum[2 * j], sum[2 * j + 1], y[j]);
        const uint32_t next = other_rest;
        other_rest = rest, rest = next;
        exchange(rest + fragment);
      }
      STAGE(i, 6);
      if (!(code & kOpen)) blocks.receive(incoming, thread), incoming = 0;
      continue;
    }

    const float scale =
        code & kToQueries ? 0.17677669529663687f * 1.4426950408889634f : 1.f;  // log2(e) / sqrt(32), for exp2
    uint32_t y[4];
    UNROLL for (int j = 0; j < 4; ++j) y[j] = pack<T>(sum[2 * j] * scale, sum[2 * j + 1] * scale);
    const int64_t set = which * a.heads_size + static_cast<int64_t>(scene) * kChannels * a.keys;
    if (code & kToValues) {
      UNROLL for (int j = 0; j < 4; ++j) {
        const int index = index0 + j / 2 * 8 + quarter * 2;
        const uint32_t there = index + 1 < a.queries ? 0xffffffffu : index < a.queries ? 0xffffu : 0u;
        const int channel = output0 + group + j % 2 * 8;
        T* to = static_cast<T*>(a.v) + set +
                (static_cast<int64_t>(channel / kHeadDim) * a.keys + index / kKeyBlock * kKeyBlock) * kHeadDim;
        *reinterpret_cast<uint32_t*>(to + value_at(channel % kHeadDim, index % kKeyBlock)) = y[j] & there;
      }
      arrive_for_warp(shared_address(&s.stored), lane);
      which ^= 1;
      continue;
    }
    const uint32_t to = tile(code & kToKeys ? kSum : kQuery) + fragment;
    store_matrix_transposed(to, y);
    if (code & kToQueries) {
      sync();
      continue;
    }
    __syncwarp();
    const uint4 chunk = load_shared(to);
    const int index = index0 + lane / 16 * 8 + lane % 8, channel = output0 + lane / 8 % 2 * 8;
    T* key = static_cast<T*>(a.k) + set + (channel / kHeadDim * static_cast<int64_t>(a.keys) + index) * kHeadDim +
             channel % kHeadDim;
    *reinterpret_cast<uint4*>(key) = index < a.queries ? chunk : uint4{};
  }

  UNROLL for (int which_tile = 0; which_tile < kTiles; ++which_tile) {
    if (!a.save[which_tile]) continue;
    if (which_tile == kQuery) sync();
    // A block saves all rows of its own heads of kQuery, and half of the rows of the other tiles.
    UNROLL for (int r = 0; r < kRowsOfWarp; ++r) {
      const int row = first_row + r;
      const bool mine = which_tile == kQuery ? lane / 16 == half : row / kSampled == half;
      if (mine && row < rows) {
        static_cast<uint4*>(a.save[which_tile])[(row0 + row) * 32 + lane] =
            load_shared(tile(which_tile) + chunk_at(row, lane));
      }
    }
  }
  if (a.save_points && half == 0 && thread < rows * 3) a.points[row0 * 3 + thread] = s.points[thread];
  for (int i = thread; a.classes && self.role == kQueries && i < kSampled * a.num_classes; i += kComputing) {
    const int row = half * kSampled + i / a.num_classes, column = i % a.num_classes;
    if (row < rows)
      static_cast<T*>(a.classes)[(row0 + row) * a.num_classes + column] =
          from_float<T>(s.logits[row * kLogitsPitch + column]);
  }
}

template <class T, bool kSplit>
__device__ __forceinline__ void decode(const Fused& a) {
  extern __shared__ __align__(1024) char memory[];
  Shared<T>& s = *reinterpret_cast<Shared<T>*>(memory);
  const Block self(a, kSplit);
  STAGE(kMaxProducts - 1, 0);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : s.received) init_barrier(shared_address(&barrier), 1);
    for (uint64_t& barrier : s.full) init_barrier(shared_address(&barrier), 1);
    for (uint64_t& barrier : s.empty) init_barrier(shared_address(&barrier), kWarps * kArrivals);
    init_barrier(shared_address(&s.stored), kWarps * kArrivals);
    init_barrier(shared_address(&s.passed), kWarps * kArrivals);
    init_barrier(shared_address(&s.taken), 1);
    publish_barriers();
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  if (threadIdx.x < kComputing) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(216));
    compute<T, kSplit>(a, s, self);
    STAGE(kMaxProducts - 1, 2);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(72));
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x < kComputing + 32) {
      fetch_weights<T>(a, s, self);
    } else if (threadIdx.x == kComputing + 32) {  // signals that keys and values are written
      wait_for_previous();
      for (int i = 0; self.role == kQueries && i < a.signals; ++i) {
        wait_for(shared_address(&s.stored), i % 2);
        signal(a.done + self.scene);
      }
    } else if (kSplit && threadIdx.x == kComputing + 64) {
      wait_for_previous();
      for (int i = 0; i < a.passes[self.role]; ++i) {
        wait_for(shared_address(&s.passed), i % 2);
        signal(a.passed[self.role] + self.tile);
      }
    } else if (kSplit && threadIdx.x == kComputing + 96) {
      wait_for_previous();
      for (int i = 0; i < a.passes[kQueries + kBoxes - self.role]; ++i) take(a, s, self, i);
    }
  }
}

constexpr int kLaunched = kThreads;

}  // namespace svexport::fused

#else  // Never launched: the launcher sees that this kernel takes no more than a warp.

namespace svexport::fused {

template <class T>
struct Shared {};
template <class T, bool kSplit>
__device__ void decode(const Fused&) {}
constexpr int kLaunched = 32;

}  // namespace svexport::fused

#endif

namespace svexport::fused {

template <class T, bool kSplit>
__global__ void __launch_bounds__(kLaunched, 1) decoder_kernel(const __grid_constant__ Fused a) {
  decode<T, kSplit>(a);
}

}  // namespace svexport::fused
