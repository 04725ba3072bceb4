// What the fused decoder is told: the list of a launch and all it refers to.
#pragma once

#include <cuda.h>

#include "transformer_decoder.cuh"

namespace svexport::fused {

constexpr int kChannels = 256, kHeads = 8;
constexpr int kWarps = 8;  // that compute, in two groups; of a third one warp fetches weights
constexpr int kComputing = kWarps * 32, kThreads = kComputing + 128;
constexpr int kNarrow = 64;    // most outputs of a narrow layer: camera weights, box code, classes
constexpr int kKeyBlock = 64;  // keys are padded to a multiple; a slot of the ring has two blocks of them
constexpr int kMaxCams = 32, kMaxFfn = 2048;
constexpr int kPresampled = 2;   // cameras of a row that clusters of the box branch sample beside the attention,
constexpr int kAheadLevels = 4;  // and levels
constexpr int kMostSplit = 36;   // clusters beside as many for the box branch, of the largest device

// A cluster of two blocks has a tile of rows; each of them half of the outputs and heads.
constexpr int kRows = 16, kBlocks = 2;
constexpr int kHalf = kChannels / 2;

// kAdjacent: channels-last, 8 channels in one access; kBytes: int8 in CHW32.
enum MapFormat { kAdjacent, kStrided, kBytes };

struct FusedLevel {
  const void* data;
  int64_t batch, cam, channel, y, x;  // strides, elements
  int height, width;                  // of the level, which is half the map's where it is pooled
  float scale;
  bool pool;
  int format;
};

// Tiles of rows x 256 channels in shared memory. Of kQuery a block has the channels of its own heads.
enum Tile { kSum, kQueryPos, kPosition, kWhere, kX, kIn, kQuery, kTiles };

// An entry of the list in a word: what is done before (in this order), what the product is, where its results go.
enum Code : uint32_t {
  kMoves = 1,          // the box branch's end: points are moved, or boxes written
  kEncodes = 2,        // their position's first layer, to kSum; and where the cameras see them
  kNorms = 4,          // tile kNormFrom, to kNormTo
  kNormRelu = 8,       // after the norm
  kAddsQueryPos = 16,  // kWhere = norm + kQueryPos
  kAttends = 32,       // no product but the self attention, to kIn: keys and values come through the ring
  kSamples = 64,       // the cameras, by the logits, to kIn
  kNoProduct = 128,    // only what is done before
  kIsNarrow = 256,     // at most 64 outputs, in float to the logits
  kRelu = 512,
  kToQueries = 1 << 10,
  kToKeys = 1 << 11,
  kToValues = 1 << 12,  // the last of the three
  kKeeps = 1 << 13,     // the sum goes on in the next of this kind: more inputs
  kGoesOn = 1 << 14,    // the sum of those before is added
  kOpen = 1 << 15,      // the next product belongs to the same exchange
  kAddsX = 1 << 16,
  kPasses = 1 << 25,  // what was normed, to the cluster of the other role
  kTakes = 1 << 28,   // what that passes on
};
// Tiles in the word: their first bit. kAdds: one more tile, or 0. This and kNormFrom are of the first four, two bits;
// the others have three.
enum Field { kFrom = 17, kTo = 20, kAdds = 23, kNormFrom = 26, kNormTo = 29 };

[[maybe_unused]] __host__ __device__ constexpr int field(uint32_t code, Field first) {
  return code >> first & (first == kAdds || first == kNormFrom ? 3 : 7);
}

// 256 inputs and outputs of a linear layer.
struct Product {
  uint32_t code;
  uint8_t weight, norm;  // indices
  uint8_t in, out;       // the first, in units of 256
};

// A cluster has all of the decoder, or, with the first of two lists, all but the box branch.
enum Role { kQueries, kBoxes };

struct Weight {
  const void* bias;
  int64_t outputs;
};

struct NormWeights {
  const void *weight, *bias;
  const void *encoder, *encoder_bias;  // of the position's first layer, or null
};

constexpr int kMaxLayers = 8, kMaxWeights = 96, kMaxNorms = 48, kMaxProducts = 240;  // of a launch
static_assert(kMaxWeights >= 10 * kMaxLayers + 4 && kMaxNorms >= 5 * kMaxLayers + 4 &&
              kMaxProducts >= (13 + 2 * kMaxFfn / kChannels) * kMaxLayers + 8);

struct Fused {
  CUtensorMap map[kMaxWeights];
  Weight weight[kMaxWeights];
  NormWeights norm[kMaxNorms];
  Product product[kMaxProducts] = {};
  int queries, keys, scene_clusters;  // of a scene; keys: up to a multiple of kKeyBlock
  bool first;                         // of all launches
  int which;                          // of two sets of keys and values: the one written next
  int64_t heads_size;                 // elements of a set of k, of v
  void *k, *v;                        // 2 x (B, heads, keys, 32), and v 2 x (B, heads, keys / 64, 32, 64), see value_at
  unsigned* done;                     // of a scene: how many blocks have written keys and values,
  int signals;                        // and how often a block does in a launch
  // By role. Of a cluster: tile kX, or kPosition, that it passes on, as in shared memory; how many blocks have passed
  // it on, and how often a block does.
  int products[2];
  char* passed_tile[2];
  unsigned* passed[2];
  int passes[2];
  float* seen;               // (clusters, kRows, 2, 32) u and v at the cameras, passed on with kPosition, as are
  void* samples;             // (clusters, kRows, kPresampled, ahead_levels, 256) what the first of these cameras see
  const void* load[kTiles];  // (rows, 256) before, or null
  void* save[kTiles];        // and after
  float* points;             // (rows, 3)
  bool save_points;
  AnyFloat given, boxes, moved;
  void* classes;  // or null
  int num_classes, code_size;
  // sampling
  int logits, cams, levels, activation;
  AnyFloat lidar2img;
  int64_t lidar2img_strides[4];
  float low[3], size[3], image[2], depth_eps, clamp[2];
  bool in_image;
  FusedLevel level[kMaxCameraLevels];
  int ahead_levels;
  int first_plain = 0, plain_levels = 0;  // of these: in a row, kAdjacent, not pooled and with strides below 2^31

  explicit Fused(const TransformerDecoder& d)
      : given(d.reference_points), boxes(d.boxes), moved(d.points), lidar2img(d.lidar2img) {}
};

// With SVEXPORT_STAGES, the clock at the parts of each product, for benchmarks/transformer_decoder.py; for the last
// product, which no list reaches, clock and nanoseconds at the kernel's begin and end.
#ifdef SVEXPORT_STAGES
constexpr int kStageBlocks = 132, kStageParts = 7;
__device__ long long stage_clocks[kStageBlocks][kMaxProducts][kStageParts];

__device__ __forceinline__ void record_stage(int product, int part) {
  if (threadIdx.x != 0 || blockIdx.x >= kStageBlocks) return;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(stage_clocks[blockIdx.x][product][part])::"memory");
  if (product == kMaxProducts - 1) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(stage_clocks[blockIdx.x][product][part + 1])::"memory");
  }
}
#define STAGE(product, part) record_stage(product, part)
#else
#define STAGE(product, part) static_cast<void>(product)
#endif

}  // namespace svexport::fused
