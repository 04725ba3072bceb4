// The fused decoder's block: its shared memory, and what its warps fetch and pass on besides the products.
#pragma once

#include "overlap.cuh"
#include "transformer_decoder_fused_sampling.cuh"

namespace svexport::fused {

template <class T>
struct Shared {
  char tiles[kTiles][kTileBytes];
  // Rounding errors of tile kX and of the sums that are normed next, as T. Without them, the rounding of every norm and
  // residual connection would accumulate. There are two for the sums, used in turn, because the last exchange's may
  // still be read.
  char rest_of_x[kTileBytes], rest[2][kTileBytes];
  char weights[kSlots][kSlotBytes];
  struct Vectors {
    T bias[kHalf], norm_weight[kChannels], norm_bias[kChannels];
    alignas(16) uint32_t code;
  } vectors[kSlots];
  alignas(16) T encoder[4 * kChannels];  // weight (256, 3) and bias of the position's first layer
  float logits[kRows * kLogitsPitch];
  float cameras[kMaxCams * 12];               // lidar2img without its last row
  float points[kRows * 3], logit[kRows * 3];  // points and their inverse sigmoid
  alignas(16) float seen[kSampled * kSeen];   // u and v of the rows that this block samples
  uint64_t received[2], full[kSlots], empty[kSlots], stored;
  uint64_t passed, taken;  // barriers: tiles passed to, and taken from, the other role's cluster
};
static_assert(sizeof(Shared<__half>) <= 227 << 10, "more shared memory than a block can have");

// The work of a block: half of the outputs of a tile of rows.
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

// Reads a word of the list of products, not by a constant load, because those are done one after the other.
__device__ __forceinline__ uint64_t load_parameter(const void* p) {
  uint64_t v;
  asm("ld.b64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}

// One warp fetches what the products need, in order. Its lanes read the next 32 products ahead.
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
  uint64_t product = 0, bias = 0, outputs = 0, norm[4] = {};  // those of product i / 32 * 32 + lane
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
      UNROLL for (int j = 0; j < 2; ++j) {
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
        UNROLL for (int box = 0; box < 4; ++box) {
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

// Copies what the cluster of the other role passes on, the i-th time, to where it is used. That place is free, because
// the other cluster made it of what this one passed on after its last use.
template <class T>
__device__ __forceinline__ void take(const Fused& a, Shared<T>& s, const Block& self, int i) {
  const uint32_t taken = shared_address(&s.taken);
  const bool queries = self.role == kQueries;
  const Role from = queries ? kBoxes : kQueries;
  // The other cluster already orders this after the reads of what it overwrites, but racecheck sees only the block.
  const int passed = queries ? i - 1 : i;
  if (passed >= 0) wait_for(shared_address(&s.passed), passed % 2);
  await(a.passed[from] + self.tile, (i + 1) * kBlocks);
  expect_bytes(taken, kTileBytes + queries * static_cast<int>(sizeof(s.seen)));
  copy_bulk(s.tiles[queries ? kPosition : kX], a.passed_tile[from] + static_cast<int64_t>(self.tile) * kTileBytes,
            kTileBytes, taken);
  if (queries) copy_bulk(s.seen, a.seen + (self.tile * kRows + self.half * kSampled) * kSeen, sizeof(s.seen), taken);
}

// Ends the box branch, and applies the first layer of the position's encoding, to kSum and `rest`.
template <class T>
__device__ __forceinline__ void move_points(const Fused& a, uint32_t code, int64_t row0, int rows, int half,
                                            Shared<T>& s, uint32_t rest, int warp, int lane) {
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
  UNROLL for (int i = 0; i < 3; ++i) unpack8<T>(reinterpret_cast<const uint4*>(s.encoder + lane * 24)[i], weight[i]);
  unpack8<T>(reinterpret_cast<const uint4*>(s.encoder + 3 * kChannels)[lane], bias);
  UNROLL for (int r = 0; r < kRowsOfWarp; ++r) {
    const int row = warp * kRowsOfWarp + r;
    float p[3], x[8];
    UNROLL for (int i = 0; i < 3; ++i) p[i] = to_float(from_float<T>(s.logit[row * 3 + i]));
    UNROLL for (int c = 0; c < 8; ++c) {
      x[c] = bias[c];
      UNROLL for (int i = 0; i < 3; ++i) x[c] = fmaf(p[i], weight[(c * 3 + i) / 8][(c * 3 + i) % 8], x[c]);
    }
    const int at = chunk_at(row, lane);
    const uint4 y = pack8<T>(x);
    store_shared(shared_address(s.tiles[kSum]) + at, y);
    store_shared(rest + at, rest8<T>(x, y));
  }
  __syncwarp();  // all lanes read the first element of a row next
}

}  // namespace svexport::fused
