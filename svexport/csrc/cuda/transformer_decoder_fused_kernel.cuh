// The kernel of the fused decoder, and what each of its warps does.
#pragma once

#include "transformer_decoder_fused.cuh"

// wgmma is of sm_90a alone.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

#include "overlap.cuh"
#include "transformer_decoder_fused_sampling.cuh"

namespace svexport::fused {

// ---------------------------------------------------------------- what a block has

template <class T>
struct Shared {
  char tiles[kTiles][kTileBytes];
  char weights[kSlots][kSlotBytes];
  struct Vectors {
    T bias[kHalf], norm_weight[kChannels], norm_bias[kChannels];
    alignas(16) uint32_t code;
  } vectors[kSlots];
  // The first has been read when the other is written, and the other way round.
  union {
    T encoder[4 * kChannels];  // weight (256, 3) and bias of the position's first layer
    alignas(16) char samples[kSampled * kPresampled * kAheadLevels * kChannels * sizeof(T)];  // of the rows sampled here
  };
  float logits[kRows * kLogitsPitch];
  float cameras[kMaxCams * 12];               // lidar2img, but for its last row
  float points[kRows * 3], logit[kRows * 3];  // and their inverse sigmoid
  alignas(16) float seen[kSampled * kSeen];   // of the rows that are sampled here
  uint64_t received[2], full[kSlots], empty[kSlots], stored;
  uint64_t looked;         // for the other warps
  uint64_t passed, taken;  // to and from the cluster of the other role; or the latter from the other warps
};
static_assert(sizeof(Shared<__half>) <= 227 << 10, "more shared memory than a block can have");

// What a block works at: a half of a tile of rows.
struct Block {
  int tile, scene, half;
  Role role;

  __device__ __forceinline__ Block(const Fused& a, bool split) : half(block_rank()) {
    const int cluster = blockIdx.x / kBlocks, tiles = gridDim.x / kBlocks / 2;
    role = split && cluster >= tiles ? kBoxes : kQueries;
    tile = cluster - role * tiles;
    scene = tile / a.scene_clusters;
  }
};

// A word of the list of products; not as a constant, as those come one after the other.
__device__ __forceinline__ uint64_t load_parameter(const void* p) {
  uint64_t v;
  asm("ld.b64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}

// Fetches what the products need, in order: by one warp, the lanes of which have read the next 32 products ahead.
template <class T>
__device__ __forceinline__ void fetch_weights(const Fused& a, Shared<T>& s, const Block& self) {
  constexpr int kVector = kChannels * sizeof(T), kAhead = 4;
  constexpr int kKeyBytes = kKeyBlock * kHeadDim * sizeof(T);
  const int lane = threadIdx.x % 32, half = self.half, scene = self.scene, key_blocks = a.keys / kKeyBlock;
  const Product* list = a.product + (self.role == kQueries ? 0 : a.products[kQueries]);
  const int products = a.products[self.role];
  const uint32_t full = shared_address(s.full), empty = shared_address(s.empty);
  int slot = 0, which = a.which;
  uint32_t parity = 1;
  unsigned signals = 0;
  auto copy = [&](const void* to, uint64_t from, int bytes) {
    copy_bulk(to, reinterpret_cast<const void*>(from), bytes, full + slot * 8);
  };
  auto next = [&] {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  };
  uint64_t product = 0, bias = 0, outputs = 0, norm[4] = {};  // of product i / 32 * 32 + lane
#pragma unroll 1
  for (int i = 0; i < products; ++i) {
    if (i % 32 == 0) {
      product = i + lane < products ? load_parameter(list + i + lane) : 0;
      const Weight* weight = &a.weight[product >> 32 & 0xff];
      bias = load_parameter(&weight->bias), outputs = load_parameter(&weight->outputs);
      const NormWeights* from = &a.norm[product >> 40 & 0xff];
      norm[0] = load_parameter(&from->weight), norm[1] = load_parameter(&from->bias);
      norm[2] = load_parameter(&from->encoder), norm[3] = load_parameter(&from->encoder_bias);
    }
    auto of_this = [&](uint64_t x) { return __shfl_sync(0xffffffffu, x, i % 32); };
    const uint64_t p = of_this(product);
    const uint32_t code = static_cast<uint32_t>(p);
    const bool multiplies = !(code & (kNoProduct | kAttends)), attends = code & kAttends, narrow = code & kIsNarrow,
               norms = code & kNorms, encodes = code & kEncodes;
    const int x = static_cast<int>(p >> 48 & 0xff) * kChannels,
              y = narrow ? 0 : static_cast<int>(p >> 56) * kChannels + half * kHalf;
    const CUtensorMap* map = &a.map[p >> 32 & 0xff];
    const CUtensorMap* ahead = &a.map[__shfl_sync(0xffffffffu, product, (i + kAhead) % 32) >> 32 & 0xff];
    const uint64_t bias_from = of_this(bias) + y * sizeof(T), norm_weight = of_this(norm[0]),
                   norm_bias = of_this(norm[1]);
    const uint64_t encoder = of_this(norm[2]), encoder_bias = of_this(norm[3]);
    T narrow_bias[2] = {};
    if (narrow) {
      const int count = static_cast<int>(of_this(outputs));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        narrow_bias[j] =
            load_if<T, 1>(reinterpret_cast<const T*>(bias_from) + lane + 32 * j, lane + 32 * j < count).at[0];
      }
    }
    if (code & kToValues) which ^= 1, ++signals;

    wait_for(empty + slot * 8, parity);
    typename Shared<T>::Vectors& vectors = s.vectors[slot];
    if (narrow) vectors.bias[lane] = narrow_bias[0], vectors.bias[lane + 32] = narrow_bias[1];
    if (lane == 0) vectors.code = code;
    __syncwarp();
    if (lane == 0) {
      const int weights = !multiplies ? 0
                          : narrow    ? kNarrow * kVector
                                      : kHalf * (kVector + static_cast<int>(sizeof(T)));
      const int keys = attends ? 2 * min(key_blocks, 2) * kOwnHeads * kKeyBytes : 0;
      expect_bytes(full + slot * 8, weights + keys + (2 * norms + 4 * encodes) * kVector);
      if (multiplies) {
#pragma unroll
        for (int box = 0; box < 4; ++box) {
          asm volatile(
              "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
              "[%4];" ::"r"(shared_address(s.weights[0]) + slot * kSlotBytes + box * kBox),
              "l"(map), "r"(x + box * 64), "r"(y), "r"(full + slot * 8)
              : "memory");
        }
        if (!narrow) copy(vectors.bias, bias_from, kHalf * sizeof(T));
      }
      if (norms) copy(vectors.norm_weight, norm_weight, kVector), copy(vectors.norm_bias, norm_bias, kVector);
      if (encodes) copy(s.encoder, encoder, 3 * kVector), copy(s.encoder + 3 * kChannels, encoder_bias, kVector);
      if (i % 32 + kAhead < 32) asm volatile("prefetch.tensormap [%0];" ::"l"(ahead) : "memory");
      if (attends) {
        if (signals) wait_for_previous(), await(a.done + scene, signals * a.scene_clusters * kBlocks);
        const int64_t start =
            (which ^ 1) * a.heads_size + (static_cast<int64_t>(scene) * kHeads + half * kOwnHeads) * a.keys * kHeadDim;
        for (int block = 0;;) {
          const int bytes = min(key_blocks - block, 2) * kKeyBytes;
          for (int head = 0; head < kOwnHeads; ++head) {
            const int64_t from =
                sizeof(T) * (start + (static_cast<int64_t>(head) * a.keys + block * kKeyBlock) * kHeadDim);
            const char* to = s.weights[slot] + head * kHeadBytes;
            copy(to, reinterpret_cast<uint64_t>(a.k) + from, bytes);
            copy(to + kHeadBytes / 2, reinterpret_cast<uint64_t>(a.v) + from, bytes);
          }
          if ((block += 2) >= key_blocks) break;
          next();
          wait_for(empty + slot * 8, parity);
          expect_bytes(full + slot * 8, 2 * min(key_blocks - block, 2) * kOwnHeads * kKeyBytes);
        }
      }
    }
    if (attends) slot = __shfl_sync(0xffffffffu, slot, 0), parity = __shfl_sync(0xffffffffu, parity, 0);
    next();
  }
}

// Copies what the cluster of the other role passes on, the i-th time, to where it is used, which is free: it was made
// of what this one has passed on since.
template <class T>
__device__ __forceinline__ void take(const Fused& a, Shared<T>& s, const Block& self, int i) {
  const uint32_t taken = shared_address(&s.taken);
  const bool queries = self.role == kQueries;
  const Role from = queries ? kBoxes : kQueries;
  // By way of the other cluster this is after the reads of what is overwritten; racecheck sees only the block.
  const int passed = queries ? i - 1 : i;
  if (passed >= 0) wait_for(shared_address(&s.passed), passed % 2);
  await(a.passed[from] + self.tile, (i + 1) * kBlocks);
  expect_bytes(taken, kTileBytes + queries * static_cast<int>(sizeof(s.seen)));
  copy_bulk(s.tiles[queries ? kPosition : kX], a.passed_tile[from] + static_cast<int64_t>(self.tile) * kTileBytes,
            kTileBytes, taken);
  if (queries) copy_bulk(s.seen, a.seen + (self.tile * kRows + self.half * kSampled) * kSeen, sizeof(s.seen), taken);
}

// Samples ahead, by one of kOtherWarps.
template <class T>
__device__ __forceinline__ void sample_ahead(const Fused& a, Shared<T>& s, int scene, int warp) {
  const int lane = threadIdx.x % 32;
  wait_for_previous();
#pragma unroll 1
  for (int i = 0; i < a.presamples; ++i) {
    wait_for(shared_address(&s.looked), i % 2);
#pragma unroll 1
    for (int row = warp; row < kSampled; row += kOthers) {
      const float* seen = s.seen + row * kSeen + lane;
      presample_row<T, 2>(a, scene, seen[0], seen[kMaxCams], s.samples + samples_of(a, row) * 16);
    }
    arrive_for_warp(shared_address(&s.taken), lane);
  }
}

// The end of the box branch, and the first layer of the position's encoding, to kSum.
template <class T>
__device__ __forceinline__ void move_points(const Fused& a, uint32_t code, int64_t row0, int rows, int half,
                                            Shared<T>& s, int warp, int lane) {
  const int thread = warp * 32 + lane;
  auto box_code = [&](int row, int j) { return s.logits[row * kLogitsPitch + j]; };
  if (thread < kRows * 3 && code & kMoves) {
    const int row = thread / 3, axis = thread % 3;
    const float logit = box_code(row, axis + axis / 2 * 2) + s.logit[thread],
                point = __fdividef(1.f, 1.f + __expf(-logit));
    s.points[thread] = point, s.logit[thread] = logit < -kMaxLogit ? -kMaxLogit : logit > kMaxLogit ? kMaxLogit : logit;
    if (!(code & kEncodes) && half == 0 && row < rows) a.moved.set(row0 * 3 + thread, point);
  }
  sync();
  if (!(code & kEncodes)) {
    for (int i = thread; half == 0 && i < rows * a.code_size; i += kComputing) {
      const int row = i / a.code_size, j = i % a.code_size, axis = j < 2 ? j : j == 4 ? 2 : -1;
      a.boxes.set(row0 * a.code_size + i,
                  axis < 0 ? box_code(row, j) : s.points[row * 3 + axis] * a.size[axis] + a.low[axis]);
    }
    return;
  }
  float weight[3][8], bias[8];
#pragma unroll
  for (int i = 0; i < 3; ++i) unpack8<T>(reinterpret_cast<const uint4*>(s.encoder + lane * 24)[i], weight[i]);
  unpack8<T>(reinterpret_cast<const uint4*>(s.encoder + 3 * kChannels)[lane], bias);
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int row = warp * kRowsOfWarp + r;
    float p[3], x[8];
#pragma unroll
    for (int i = 0; i < 3; ++i) p[i] = to_float(from_float<T>(s.logit[row * 3 + i]));
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      x[c] = bias[c];
#pragma unroll
      for (int i = 0; i < 3; ++i) x[c] = fmaf(p[i], weight[(c * 3 + i) / 8][(c * 3 + i) % 8], x[c]);
    }
    store_shared(shared_address(s.tiles[kSum]) + chunk_at(row, lane), pack8<T>(x));
  }
  __syncwarp();  // the first of a row is read by all
}

// ---------------------------------------------------------------- attention

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 rows of a head a warp, of which another has every other block of 64 keys. To kIn, here and in the other blocks.
// Keys, and dimensions, are permuted within a fragment so that each lane has 16 adjacent bytes of them.
template <class T>
__device__ __forceinline__ void attend(const Fused& a, Shared<T>& s, int half, int warp, int lane,
                                       const Exchange& blocks, int& slot, uint32_t& parity) {
  asm volatile("" : "+r"(warp), "+r"(lane));  // or what follows from them is kept in registers throughout the kernel
  const int share = warp % 2, own_head = warp / 2, head = half * kOwnHeads + own_head;
  const int group = lane / 4, quarter = lane % 4, key_blocks = a.keys / kKeyBlock;
  constexpr int kBlockBytes = kKeyBlock * kHeadDim * 2;
  const uint32_t keys =
      own_head * kHeadBytes + share * kBlockBytes + (lane / 8 * 8 + group % 2) * (kHeadDim * 2) + quarter * 16;
  const uint32_t values =
      own_head * kHeadBytes + kHeadBytes / 2 + share * kBlockBytes + 2 * value_at(group, quarter * 8);

  uint32_t query[2][4];
  {
    const uint32_t tile = shared_address(s.tiles[kQuery]);
    const uint4 low = load_shared(tile + chunk_at(group, head * 4 + quarter));
    const uint4 high = load_shared(tile + chunk_at(group + 8, head * 4 + quarter));
    query[0][0] = low.x, query[0][1] = high.x, query[0][2] = low.y, query[0][3] = high.y;
    query[1][0] = low.z, query[1][1] = high.z, query[1][2] = low.w, query[1][3] = high.w;
  }
  const uint32_t one = pack<T>(1.f, 1.f);
  float sum[4][4] = {}, totals[4] = {},
        largest[2] = {-INFINITY, -INFINITY};  // totals: sums of weights, by products with ones
#pragma unroll 1
  for (int b = share;; b += 2) {
    const uint32_t memory = shared_address(s.weights[0]) + slot * kSlotBytes;
    if (b < key_blocks) {
      uint4 key[8], value[2][4];
#pragma unroll
      for (int t = 0; t < 8; ++t) key[t] = load_shared(memory + keys + (t / 4 * 32 + t % 4 * 2) * (kHeadDim * 2));
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        value[t / 4][t % 4] = load_shared(memory + (values + t % 4 * (8 * kKeyBlock * 2) ^ t / 4 * 64));
      }
      float score[8][4] = {};
#pragma unroll
      for (int t = 0; t < 8; ++t) mma<T>(score[t], query[0], key[t].x, key[t].y);
#pragma unroll
      for (int t = 0; t < 8; ++t) mma<T>(score[t], query[1], key[t].z, key[t].w);
      if (b == key_blocks - 1) {
#pragma unroll
        for (int t = 0; t < 8; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (b * kKeyBlock + t / 4 * 32 + quarter * 8 + t % 4 * 2 + i % 2 >= a.queries) score[t][i] = -INFINITY;
          }
        }
      }
      float higher[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) higher[i] = row_max(score, i, largest[i]);  // rows group + 8 * i
      if (__any_sync(0xffffffffu, higher[0] != largest[0] || higher[1] != largest[1])) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float shrink = exp2_approximate(largest[i] - higher[i]);
          largest[i] = higher[i];
#pragma unroll
          for (int t = 0; t < 4; ++t) sum[t][2 * i] *= shrink, sum[t][2 * i + 1] *= shrink;
          totals[2 * i] *= shrink, totals[2 * i + 1] *= shrink;
        }
      }
      // Sixteen keys at a time: while these are multiplied, weights of the next are found.
      uint32_t weights[2][4];
      auto weigh = [&](int k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float (&of)[4] = score[2 * k + j / 2];
          const int i = j % 2;
          weights[k % 2][j] =
              pack<T>(exp2_approximate(of[2 * i] - largest[i]), exp2_approximate(of[2 * i + 1] - largest[i]));
        }
      };
      weigh(0);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k < 3) weigh(k + 1);
        mma<T>(totals, weights[k % 2], one, one);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const uint4& v = value[k / 2][t];
          mma<T>(sum[t], weights[k % 2], k % 2 ? v.z : v.x, k % 2 ? v.w : v.y);
        }
      }
    }
    arrive_for_warp(shared_address(&s.empty[slot]), lane);
    if (++slot == kSlots) slot = 0, parity ^= 1;
    if (b - share + 2 >= key_blocks) break;
    wait_for(shared_address(&s.full[slot]), parity);
  }

  // Each of the two warps ends with half of the dimensions; kSum and the logits are free.
  float* const given = reinterpret_cast<float*>(s.tiles[kSum]) + warp * 256 + lane;
  const float* const taken = reinterpret_cast<const float*>(s.tiles[kSum]) + (warp ^ 1) * 256 + lane;
  float* const ends = s.logits;  // [warp][row][largest, total]
#pragma unroll
  for (int j = 0; j < 8; ++j) given[j * 32] = share ? sum[j / 4][j % 4] : sum[2 + j / 4][j % 4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (quarter == 0) {
      reinterpret_cast<float2*>(ends)[warp * 16 + i * 8 + group] = make_float2(largest[i], totals[2 * i]);
    }
  }
  sync();
  uint32_t result[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 other = reinterpret_cast<const float2*>(ends)[(warp ^ 1) * 16 + i * 8 + group];
    const float highest = fmaxf(largest[i], other.x);
    float mine = exp2_approximate(largest[i] - highest), theirs = exp2_approximate(other.x - highest);
    const float scale = 1.f / (mine * totals[2 * i] + theirs * other.y);
    mine *= scale, theirs *= scale;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float own = share ? sum[2 + t][2 * i + j] : sum[t][2 * i + j];
        x[j] = mine * own + theirs * taken[(t * 4 + 2 * i + j) * 32];
      }
      result[t * 2 + i] = pack<T>(x[0], x[1]);
    }
  }
  const uint32_t at =
      shared_address(s.tiles[kIn]) + chunk_at(lane / 8 % 2 * 8 + lane % 8, head * 4 + share * 2 + lane / 16);
  store_matrix(at, result);
  __syncwarp();
  blocks.send(at, load_shared(at));
}

// ---------------------------------------------------------------- the kernel

template <class T, Sampler S>
__device__ __forceinline__ void compute(const Fused& a, Shared<T>& s, const Block& self) {
  constexpr bool kSplit = S == kOtherCluster;
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // or it is read from afar again and again
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32, group = lane / 4, quarter = lane % 4;
  const int products = a.products[self.role];
  const int half = self.half, scene = self.scene;
  const int index0 = (self.tile - scene * a.scene_clusters) * kRows;      // of the rows, in the scene,
  const int rows = min(kRows, a.queries - index0);                        // how many there are,
  const int64_t row0 = static_cast<int64_t>(scene) * a.queries + index0;  // of all
  const int own = warp * 16, output0 = half * kHalf + own;  // the warp's 16 outputs, of the block's and of 256
  auto tile = [&](int which) { return shared_address(s.tiles[0]) + which * kTileBytes; };
  // The lane's chunk of these, in the order of four matrices of 8 x 8; as a part of a tile.
  const int fragment = chunk_at(lane / 16 * 8 + lane % 8, output0 / 8 + lane / 8 % 2);
  // The rows that the warp norms, loads and stores, a lane 8 channels.
  const int first_row = warp * kRowsOfWarp;
  const int sampled_row = half * kSampled + warp;

  Exchange blocks(shared_address(s.received), half);
#pragma unroll
  for (int which = 0; which < kTiles; ++which) {
    if (!a.load[which] || self.role != kQueries) continue;
    const uint4* from = static_cast<const uint4*>(a.load[which]) + (row0 + first_row) * 32 + lane;
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      store_shared(tile(which) + chunk_at(first_row + r, lane), first_row + r < rows ? __ldcg(from + r * 32) : uint4{});
    }
  }
  if (a.first && self.role == kQueries) {
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int at = chunk_at(first_row + r, lane);
      store_shared(tile(kWhere) + at, add8<T>(load_shared(tile(kX) + at), load_shared(tile(kQueryPos) + at)));
    }
    // Keys that are not, and their values, are multiplied with zero.
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
  float u = NAN, v = NAN;  // where camera `lane` sees the point of the row that the warp samples
  auto look = [&] {
    u = v = NAN;
    if (sampled_row < rows) project(a, s.points + sampled_row * 3, s.cameras, u, v);
    if constexpr (kSplit) {
      float* seen = a.seen + (self.tile * kRows + sampled_row) * kSeen + lane;
      seen[0] = u, seen[kMaxCams] = v;
    }
    if constexpr (S == kOtherWarps) {
      s.seen[warp * kSeen + lane] = u, s.seen[warp * kSeen + kMaxCams + lane] = v;
      arrive_for_warp(shared_address(&s.looked), lane);
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
      move_points(a, code, row0, rows, half, s, warp, lane);
      if (code & kEncodes) look();
      if (kSplit && code & kEncodes) {
        wait_for_previous();
        uint4* samples = static_cast<uint4*>(a.samples) + samples_of(a, self.tile * kRows + sampled_row);
        presample_row<T, kAheadLevels>(a, scene, u, v, samples);
      }
    }
    if (code & kNorms) {
      const uint32_t from = tile(field(code, kNormFrom)), to = tile(field(code, kNormTo));
      const uint4 weight = reinterpret_cast<const uint4*>(vectors.norm_weight)[lane];
      const uint4 bias = reinterpret_cast<const uint4*>(vectors.norm_bias)[lane];
      float x[kRowsOfWarp][8], pivot[kRowsOfWarp];
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const uint32_t row = from + (first_row + r) * 128;
        uint32_t first;  // of the 8 channels that a row begins with
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(first) : "r"(row) : "memory");
        pivot[r] = unpack<T>(first).x;
        unpack8<T>(load_shared(from + chunk_at(first_row + r, lane)), x[r]);
      }
      __syncwarp();  // before the rows are overwritten
      normalize<T, kRowsOfWarp>(x, pivot, weight, bias);
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const int at = chunk_at(first_row + r, lane);
        uint4 y = pack8<T>(x[r]);
        if (code & kNormRelu) {
          y = make_uint4(max_of<T>(y.x, 0), max_of<T>(y.y, 0), max_of<T>(y.z, 0), max_of<T>(y.w, 0));
        }
        store_shared(to + at, y);
        if (code & kAddsQueryPos) store_shared(tile(kWhere) + at, add8<T>(y, load_shared(tile(kQueryPos) + at)));
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
      if constexpr (kSplit) u = s.seen[warp * kSeen + lane], v = s.seen[warp * kSeen + kMaxCams + lane];
      if constexpr (S == kOtherWarps) wait_for(shared_address(&s.taken), taken++ % 2);
      if constexpr (S != kSameWarps) {
        const uint4* from = (kSplit ? static_cast<uint4*>(a.samples) : reinterpret_cast<uint4*>(s.samples)) +
                            samples_of(a, kSplit ? self.tile * kRows + sampled_row : warp) + lane;
        const uint4* second = from + a.ahead_levels * 32;
        const int cameras = __popc(__ballot_sync(0xffffffffu, !isnan(u)));
#pragma unroll
        for (int number = 0; number < kPresampled; ++number) {
#pragma unroll
          for (int i = 0; i < kAheadLevels; ++i) {
            if (number >= cameras || i >= a.ahead_levels) continue;
            const uint4* p = (number ? second : from) + i * 32;
            ready[number][i] = kSplit ? __ldcg(p) : *p;
          }
        }
      }
      const float* row = s.logits + sampled_row * kLogitsPitch;
      float logits[2] = {row[lane], row[lane + 32]}, sampled[8] = {};
      activate(a.activation, a.logits, logits);
      sample<T, S != kSameWarps>(a, scene, u, v, logits, ready, sampled);
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
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = code & kGoesOn ? kept[j] : 0.f;
    publish();  // the rows, which all have stored since, or other blocks sent
    const uint32_t from = tile(field(code, kFrom));
    const uint32_t weights = shared_address(s.weights[0]) + slot * kSlotBytes + warp / (kWarps / 2) * (kBox / 2);
    if (!narrow || warp < kWarps / 2) multiply<T>(sum, odd, weights, from);
    // Meanwhile, what is added. [4 * n + 2 * h + j]: to output group + 8 * h, row 8 * n + 2 * quarter + j.
    {
      const int at = narrow ? own % kNarrow : own;
      const float bias[2] = {to_float(vectors.bias[at + group]), to_float(vectors.bias[at + group + 8])};
#pragma unroll
      for (int j = 0; j < 8; ++j) more[j] = bias[j / 2 % 2];
      auto add = [&](int which_tile) {
        uint32_t x[4];
        load_matrix_transposed(x, tile(which_tile) + fragment);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = unpack<T>(x[j]);
          more[2 * j] += two.x, more[2 * j + 1] += two.y;
        }
      };
      if (code & kAddsX) add(kX);
      if (const int which_tile = field(code, kAdds)) add(which_tile);
    }
    finish(sum, odd);
    arrive_for_warp(shared_address(&s.empty[slot]), lane);
    STAGE(i, 5);
    if (++slot == kSlots) slot = 0, parity ^= 1;
    if (code & kKeeps) {
#pragma unroll
      for (int j = 0; j < 8; ++j) kept[j] = sum[j];
      continue;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += more[j];
    if (narrow) {
      if (own < kNarrow) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          s.logits[(j / 4 * 8 + quarter * 2 + j % 2) * kLogitsPitch + own + group + j / 2 % 2 * 8] = sum[j];
        }
      }
      sync();
      continue;
    }
    if (!heads) {
      uint32_t y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = pack<T>(sum[2 * j], sum[2 * j + 1]);
      if (code & kRelu) {
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = max_of<T>(y[j], 0);
      }
      const uint32_t to = tile(field(code, kTo)) + fragment;
      store_matrix_transposed(to, y);
      __syncwarp();
      blocks.send(to, load_shared(to));
      incoming += kIncoming;
      STAGE(i, 6);
      if (!(code & kOpen)) blocks.receive(incoming, thread), incoming = 0;
      continue;
    }

    const float scale =
        code & kToQueries ? 0.17677669529663687f * 1.4426950408889634f : 1.f;  // log2(e) / sqrt(32), for exp2
    uint32_t y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = pack<T>(sum[2 * j] * scale, sum[2 * j + 1] * scale);
    const int64_t set = which * a.heads_size + static_cast<int64_t>(scene) * kChannels * a.keys;
    if (code & kToValues) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
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

#pragma unroll
  for (int which_tile = 0; which_tile < kTiles; ++which_tile) {
    if (!a.save[which_tile]) continue;
    if (which_tile == kQuery) sync();
    // Of the queries all rows of the block's own heads; else some of the rows.
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
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

template <class T, Sampler S>
__global__ void __launch_bounds__(kThreads, 1) decoder_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(1024) char memory[];
  Shared<T>& s = *reinterpret_cast<Shared<T>*>(memory);
  constexpr bool kSplit = S == kOtherCluster;  // the box branch has clusters of its own
  const Block self(a, kSplit);
  STAGE(kMaxProducts - 1, 0);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : s.received) init_barrier(shared_address(&barrier), 1);
    for (uint64_t& barrier : s.full) init_barrier(shared_address(&barrier), 1);
    for (uint64_t& barrier : s.empty) init_barrier(shared_address(&barrier), kWarps * kArrivals);
    init_barrier(shared_address(&s.stored), kWarps * kArrivals);
    init_barrier(shared_address(&s.looked), kWarps * kArrivals);
    init_barrier(shared_address(&s.passed), kWarps * kArrivals);
    init_barrier(shared_address(&s.taken), kSplit ? 1 : kOthers * kArrivals);
    publish_barriers();
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  if (threadIdx.x < kComputing) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(216));
    compute<T, S>(a, s, self);
    STAGE(kMaxProducts - 1, 2);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(72));
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x < kComputing + 32) {
      fetch_weights<T>(a, s, self);
    } else if (threadIdx.x == kComputing + 32) {  // keys and values are there
      wait_for_previous();
      for (int i = 0; self.role == kQueries && i < a.signals; ++i) {
        wait_for(shared_address(&s.stored), i % 2);
        signal(a.done + self.scene);
      }
    } else if (S == kOtherWarps && threadIdx.x >= kThreads - kOthers * 32) {
      sample_ahead<T>(a, s, self.scene, (threadIdx.x - (kThreads - kOthers * 32)) / 32);
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

}  // namespace svexport::fused

#else  // The launcher does not get here: `compiled` sees that this one takes no more than a warp.

namespace svexport::fused {

template <class T>
struct Shared {};
template <class T, Sampler S>
__global__ void __launch_bounds__(32, 1) decoder_kernel(const __grid_constant__ Fused) {}

}  // namespace svexport::fused

#endif
