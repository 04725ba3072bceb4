// The arguments of a launch of the fused decoder: a list of products, and the data that it refers to.
#pragma once

#include <cuda.h>

#include "transformer_decoder.cuh"

namespace svexport::fused {

constexpr int kChannels = 256, kHeads = 8;
constexpr int kWarps = 8;  // compute warps, in two warp groups; in a third group, one warp fetches weights
constexpr int kComputing = kWarps * 32, kThreads = kComputing + 128;
constexpr int kNarrow = 64;    // most outputs of a narrow layer: camera weights, box code, classes
constexpr int kKeyBlock = 64;  // keys are padded to a multiple of this; a slot of the ring holds two blocks of keys
constexpr int kMaxCams = 32, kMaxFfn = 2048;
constexpr int kPresampled = 2;   // cameras of a row that the box branch's clusters sample during the attention, and
constexpr int kAheadLevels = 4;  // levels of them
constexpr int kMostSplit = 36;   // most clusters that the largest device runs beside as many for the box branch

// A cluster of two blocks has a tile of rows; each block has half of the outputs and heads.
constexpr int kRows = 16, kBlocks = 2;
constexpr int kHalf = kChannels / 2;

// kAdjacent: channels-last, 8 channels per access; kStrided: any strides; kBytes: int8 in CHW32.
enum MapFormat { kAdjacent, kStrided, kBytes };

struct FusedLevel {
  const void* data;
  int64_t batch, cam, channel, y, x;  // strides, elements
  int height, width;                  // of the level: half the map's if it is pooled
  float scale;
  bool pool;
  int format;
};

// Tiles of rows x 256 channels in shared memory. In kQuery, a block has only the channels of its own heads.
enum Tile { kSum, kQueryPos, kPosition, kWhere, kX, kIn, kQuery, kTiles };

// The word of a list entry: the steps before the product (in this order), the product, and where its results go.
enum Code : uint32_t {
  kMoves = 1,          // ends the box branch: moves the points, or writes the boxes
  kEncodes = 2,        // encodes the position by its first layer, to kSum; projects the points into the cameras
  kNorms = 4,          // norms tile kNormFrom, to kNormTo
  kNormRelu = 8,       // applies relu after the norm
  kAddsQueryPos = 16,  // kWhere = norm + kQueryPos
  kAttends = 32,       // self attention instead of a product, to kIn; keys and values come through the ring
  kSamples = 64,       // samples the cameras, weighted by the logits, to kIn
  kNoProduct = 128,    // only the steps before
  kIsNarrow = 256,     // at most 64 outputs, which go to the logits in float
  kRelu = 512,
  kToQueries = 1 << 10,
  kToKeys = 1 << 11,
  kToValues = 1 << 12,
  kKeeps = 1 << 13,     // keeps the sum in registers for a later kGoesOn, which has more inputs of the same outputs
  kGoesOn = 1 << 14,    // begins with the sum that was kept
  kOpen = 1 << 15,      // the next product belongs to the same exchange
  kAddsX = 1 << 16,
  kPasses = 1 << 25,  // passes the normed tile on to the cluster of the other role
  kTakes = 1 << 28,   // waits for the tile that the other role passes on
};
// The first bits of the tiles' fields in the word. kAdds: a tile that is added, or 0. kAdds and kNormFrom have two
// bits, for the first four tiles; the others have three.
enum Field { kFrom = 17, kTo = 20, kAdds = 23, kNormFrom = 26, kNormTo = 29 };

[[maybe_unused]] __host__ __device__ constexpr int field(uint32_t code, Field first) {
  return code >> first & (first == kAdds || first == kNormFrom ? 3 : 7);
}

// The product of 256 inputs and 256 outputs of a linear layer.
struct Product {
  uint32_t code;
  uint8_t weight, norm;  // indices
  uint8_t in, out;       // the first input and output, in units of 256
};

// With one list, a cluster runs all of the decoder. With two, kQueries runs all but the box branch, kBoxes that branch.
enum Role { kQueries, kBoxes };

struct Weight {
  const void* bias;
  int64_t outputs;
};

struct NormWeights {
  const void *weight, *bias;
  const void *encoder, *encoder_bias;  // first layer of the position's encoding, or null
};

constexpr int kMaxLayers = 8, kMaxWeights = 96, kMaxNorms = 48, kMaxProducts = 240;  // per launch
static_assert(kMaxWeights >= 10 * kMaxLayers + 4 && kMaxNorms >= 5 * kMaxLayers + 4 &&
              kMaxProducts >= (13 + 2 * kMaxFfn / kChannels) * kMaxLayers + 8);

struct Fused {
  CUtensorMap map[kMaxWeights];
  Weight weight[kMaxWeights];
  NormWeights norm[kMaxNorms];
  Product product[kMaxProducts] = {};
  int queries, keys, scene_clusters;  // per scene; keys: queries rounded up to a multiple of kKeyBlock
  bool first;                         // whether this is the first launch
  int which;                          // which of two sets of keys and values is written next
  int64_t heads_size;                 // elements of a set of k, or of v
  void *k, *v;                        // 2 x (B, heads, keys, 32), and v 2 x (B, heads, keys / 64, 32, 64), see value_at
  unsigned* done;                     // per scene: how often blocks have written keys and values,
  int signals;                        // and how often a block does so in a launch
  // By role. Per cluster: the tile (kX or kPosition) that it passes on, laid out as in shared memory; how often blocks
  // have passed it on; how often a block does so in a launch.
  int products[2];
  char* passed_tile[2];
  unsigned* passed[2];
  int passes[2];
  float* seen;               // (clusters, kRows, 2, 32): u and v in the cameras; passed on with kPosition, like samples
  void* samples;             // (clusters, kRows, kPresampled, ahead_levels, 256): samples of the first cameras that see
  const void* load[kTiles];  // (rows, 256): tiles loaded at the start, or null
  void* save[kTiles];        // (rows, 256): tiles saved at the end, or null
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
  int first_plain = 0, plain_levels = 0;  // consecutive levels that are kAdjacent, not pooled, with strides below 2^31

  explicit Fused(const TransformerDecoder& d)
      : given(d.reference_points), boxes(d.boxes), moved(d.points), lidar2img(d.lidar2img) {}
};

// SVEXPORT_STAGES records the clock at the parts of each product, for benchmarks/transformer_decoder.py. The entry of
// the last product, which no list reaches, has clock and nanoseconds at the kernel's start and end.
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
