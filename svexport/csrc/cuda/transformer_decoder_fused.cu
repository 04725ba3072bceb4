// The decoder for half and bfloat16, 256 channels in 8 heads, on devices of compute capability 9.0: all that lies
// between the cameras' maps and the results in one kernel.
//
// Sixteen rows (queries of a scene) stay with a cluster of two blocks, in shared memory, through all layers. The blocks
// compute half of the outputs of every linear layer and give them to one another. A product is outputs x rows, the
// weights being the matrix of which wgmma wants 64 rows; these come through a ring in shared memory, which a warp of
// its own fills some products ahead, by tensor maps. Keys and values take the same way.
//
// What a launch does is a list made on the host, and a loop that executes it: code that is run only once is fetched
// from far away. Between layers queries need the keys and values of all others of their scene. Where all clusters are
// resident (a cooperative launch) there is one launch, and the warp that fetches waits for them by a counter while the
// others compute the box branch. Where twice as many are, the box branch, which the cameras need but not the attention,
// has clusters of its own, beside the next layer's attention. If not all are resident, or something else samples,
// launches end where blocks would wait. Where the box branch has none, and the attention takes long enough, two warps
// that have nothing else to do sample the first cameras meanwhile.
//
// Maps in NCHW are copied to channels-last by a launch before, at the end of which this one begins; but for one whose
// copy would take too much memory, of which such warps fetch what cameras see to shared memory.
#include <cuda.h>

#include <algorithm>

#include "bilinear.cuh"
#include "gemm.h"
#include "overlap.cuh"
#include "transformer_decoder.cuh"
#include "wgmma.cuh"

namespace svexport {

#if CUDART_VERSION < 12010  // no st.async, and no parameters of more than 4 KB

size_t fused_decoder_workspace(const TransformerDecoder&, const DecoderSizes&) { return 0; }

cudaError_t fused_decoder(const TransformerDecoder&, const DecoderSizes&, void*, cudaStream_t) {
  return cudaErrorNotSupported;
}

#else

namespace {

constexpr int kChannels = 256, kHeads = 8;
constexpr int kWarps = 8;  // that compute, in two groups; of a third one warp fetches weights
constexpr int kComputing = kWarps * 32, kThreads = kComputing + 128;
constexpr int kNarrow = 64;    // most outputs of a narrow layer: camera weights, box code, classes
constexpr int kKeyBlock = 64;  // keys are padded to a multiple; a slot of the ring has two blocks of them
constexpr int kMaxCams = 32, kMaxFfn = 2048;
constexpr int kPresampled = 2;   // cameras of a row that are sampled before the layer's attention ends,
constexpr int kAheadLevels = 4;  // and levels
constexpr int kMostSplit = 36;   // clusters beside as many for the box branch, of the largest device

// A cluster of two blocks has a tile of rows; each of them half of the outputs and heads.
constexpr int kRows = 16, kBlocks = 2;
constexpr int kHalf = kChannels / 2;

// ---------------------------------------------------------------- parameters

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

// What samples the first cameras: warps that compute, when they get there; or ahead of that two others of the block, or
// the cluster of the box branch.
enum Sampler { kSameWarps, kOtherWarps, kOtherCluster, kSamplers };

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
  unsigned* looked;          // of a block of the box branch: how often it is known where cameras see
  int presamples;            // how often kOtherWarps do
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
  // Of these: in a row, kAdjacent, not pooled and with strides below 2^31; and one whose planes lie one after the
  // other, or -1.
  int first_plain = 0, plain_levels = 0, staged = -1;

  explicit Fused(const TransformerDecoder& d)
      : given(d.reference_points), boxes(d.boxes), moved(d.points), lidar2img(d.lidar2img) {}
};

// wgmma is of sm_90a alone.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kHeadDim = kChannels / kHeads, kOwnHeads = kHeads / 2;
constexpr int kSlots = 2;                                   // products in the ring
constexpr int kRowsOfWarp = kRows / kWarps;                 // normed by a warp
constexpr int kSampled = kRows / 2;                         // rows that a block samples, one a warp
constexpr int kOthers = 2;                                  // of kOtherWarps; if a level is staged there are
constexpr int kStagers = 3;                                 // so many, and in the cluster of the box branch as well
constexpr int kStaged = kChannels * 16;                     // bytes of a piece of the staged level
constexpr int kAtom = kRows * 128, kTileBytes = 4 * kAtom;  // of 64 channels of a tile, of a tile
constexpr int kBox = kHalf * 128, kSlotBytes = 4 * kBox;    // of the weights of 64 inputs, of a product
constexpr int kHeadBytes = kSlotBytes / kOwnHeads;          // of two blocks of keys and of values of a head
constexpr int kIncoming = kTileBytes / 2;                   // what the other block sends in an exchange
constexpr int kSeen = 2 * kMaxCams;                         // floats of a row: where the cameras see it
constexpr int kLogitsPitch = kNarrow + 4;                   // floats, against bank conflicts
constexpr float kMaxLogit = 11.512915f;                     // the largest inverse sigmoid: log((1 - kEps) / kEps)
static_assert(kSampled == kWarps && kHalf == kWarps * 16 && kHeadBytes == 2 * kKeyBlock * kHeadDim * 2 * 2);

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

// ---------------------------------------------------------------- barriers

// Of the warps that compute.
__device__ __forceinline__ void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kComputing) : "memory"); }

__device__ __forceinline__ int block_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// What the two blocks of a tile send one another. Every store counts its bytes at a barrier of the block that it goes
// to: a barrier of the whole cluster orders stores by a fence of the whole device, which takes longer than the
// exchange. Two barriers in turn: the other block is never more than one exchange ahead.
class Exchange {
 public:
  __device__ __forceinline__ Exchange(uint32_t received, int half) : barrier_(received) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(received), "r"(half ^ 1));
    away_ = there - received;
  }

  // To the same place in the other block; here it has been stored.
  __device__ __forceinline__ void send(uint32_t address, uint4 v) const {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address + away_),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier_ + count_ % 2 * 8 + away_)
                 : "memory");
  }

  // The end of an exchange: until all threads have sent, and so many bytes have come.
  __device__ __forceinline__ void receive(int bytes, int thread) {
    const uint32_t barrier = barrier_ + count_ % 2 * 8;
    if (thread == 0) expect_bytes(barrier, bytes);
    sync();
    wait_for(barrier, count_ / 2 % 2);
    ++count_;
  }

 private:
  uint32_t barrier_, away_, count_ = 0;
};

// What the block has done can be read by who sees it counted.
__device__ __forceinline__ void signal(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Also by bulk copies: for those a fence of global memory alone, as that of all takes as long again as the wait.
__device__ __forceinline__ void await(const unsigned* counter, unsigned count) {
  unsigned seen = 0;
  while (seen < count) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---------------------------------------------------------------- tiles

// A tile is what a tensor map of 128 bytes a row and its swizzle makes of it: 64 channels of all rows, then the next;
// 16 bytes of 8 channels (a chunk) lie 16 * (chunk ^ row) % 128 into their row.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
  return chunk / 8 * kAtom + row * 128 + ((chunk ^ row) & 7) * 16;
}

// Where the values of 64 keys of a head have that of a dimension and a key: rows of 128 bytes, of odd ones the halves
// exchanged, so that two do not meet in the same banks.
__device__ __forceinline__ int value_at(int dim, int key) { return dim * kKeyBlock + (key ^ dim % 2 * 32); }

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// As load_matrix, the other way.
__device__ __forceinline__ void store_matrix(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void store_matrix_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

template <class T>
__device__ __forceinline__ void unpack8(const uint4& v, float (&x)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack<T>(words[i]);
    x[2 * i] = two.x, x[2 * i + 1] = two.y;
  }
}

template <class T>
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}

template <class T>
__device__ __forceinline__ uint32_t max_of(uint32_t a, uint32_t b);  // NaN wins
template <>
__device__ __forceinline__ uint32_t max_of<__half>(uint32_t a, uint32_t b) {
  const __half2 m = __hmax2_nan(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
  return reinterpret_cast<const uint32_t&>(m);
}
template <>
__device__ __forceinline__ uint32_t max_of<__nv_bfloat16>(uint32_t a, uint32_t b) {
  const __nv_bfloat162 m = __hmax2_nan(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(m);
}

// a + b
template <class T>
__device__ __forceinline__ uint4 add8(const uint4& a, const uint4& b) {
  float x[8], y[8];
  unpack8<T>(a, x);
  unpack8<T>(b, y);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] += y[i];
  return pack8<T>(x);
}

// ---------------------------------------------------------------- matrix products

// How wgmma is told of a matrix in shared memory: rows of 128 bytes, swizzled, 1024 bytes from 8 rows to the next. One
// for the warp, which the compiler sees by the shuffle; or it would move it out of lanes' registers for each wgmma.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address) {
  return 0x4000004000010000ull | __shfl_sync(0xffffffffu, address / 16, 0);
}

// sum (64 x 16) += a (64 x 16) b (16 x 16); of all warps of a warp group.
template <class T>
__device__ __forceinline__ void wgmma(float (&sum)[8], uint64_t a, uint64_t b);

#define SVEXPORT_WGMMA(type, name)                                                                          \
  template <>                                                                                               \
  __device__ __forceinline__ void wgmma<type>(float (&sum)[8], uint64_t a, uint64_t b) {                    \
    asm volatile(                                                                                           \
        "{.reg .pred adds; setp.eq.b32 adds, 0, 0;"                                                         \
        " wgmma.mma_async.sync.aligned.m64n16k16.f32." name "." name                                        \
        " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds, 1, 1, 0, 0;}"                                     \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), \
          "+f"(sum[7])                                                                                      \
        : "l"(a), "l"(b));                                                                                  \
  }
SVEXPORT_WGMMA(__half, "f16")
SVEXPORT_WGMMA(__nv_bfloat16, "bf16")
#undef SVEXPORT_WGMMA

// Begins sum + odd += 64 outputs of the weights * 16 rows of a tile: 256 inputs. Two sums, as a wgmma waits for the one
// before that adds to the same.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[8], float (&odd)[8], uint32_t weights, uint32_t rows) {
  const uint64_t a = matrix_at(weights), b = matrix_at(rows);
  hold(sum), hold(odd);
  begin_products();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    wgmma<T>(i % 2 ? odd : sum, a + (i / 4 * kBox + i % 4 * 32) / 16, b + (i / 4 * kAtom + i % 4 * 32) / 16);
  }
  commit_products();
}

// Ends it: all in sum.
__device__ __forceinline__ void finish(float (&sum)[8], float (&odd)[8]) {
  await_products();
  hold(sum), hold(odd);
#pragma unroll
  for (int j = 0; j < 8; ++j) sum[j] += odd[j];
}

// ---------------------------------------------------------------- norms

// Layer norm of 8 channels a lane, Rows rows at once. weight, bias: of the lane's channels. pivot: any number near the
// mean, from which differences are taken, so that their sum and that of their squares can be added up side by side.
template <class T, int Rows>
__device__ __forceinline__ void normalize(float (&x)[Rows][8], const float (&pivot)[Rows], const uint4& weight,
                                          const uint4& bias) {
  float sum[Rows], squares[Rows], gamma[8], beta[8];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    float odd = 0, odd_squares = 0;
    sum[r] = squares[r] = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      x[r][i] -= pivot[r], x[r][i + 1] -= pivot[r];
      sum[r] += x[r][i], odd += x[r][i + 1];
      squares[r] = fmaf(x[r][i], x[r][i], squares[r]), odd_squares = fmaf(x[r][i + 1], x[r][i + 1], odd_squares);
    }
    sum[r] += odd, squares[r] += odd_squares;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step),
          squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], step);
    }
  }
  unpack8<T>(weight, gamma);
  unpack8<T>(bias, beta);
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const float mean = sum[r] * (1.f / kChannels), variance = fmaf(-mean, mean, squares[r] * (1.f / kChannels));
    const float scale = rsqrtf(fmaxf(variance, 0.f) + kEps), shift = -mean * scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[r][i] = fmaf(fmaf(x[r][i], scale, shift), gamma[i], beta[i]);
  }
}

// ---------------------------------------------------------------- sampling

// u and v of the point at camera `lane`; not seen: u = NaN. cameras: 12 floats each.
__device__ __forceinline__ void project(const Fused& a, const float* point, const float* cameras, float& u, float& v) {
  const int lane = threadIdx.x % 32;
  u = v = NAN;
  if (lane >= a.cams) return;
  float place[3], image[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) place[i] = fmaf(point[i], a.size[i], a.low[i]);
  const float4* matrix = reinterpret_cast<const float4*>(cameras) + lane * 3;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const float4 m = matrix[i];
    image[i] = fmaf(m.x, place[0], fmaf(m.y, place[1], m.z * place[2])) + m.w;
  }
  const float depth = fmaxf(image[2], a.depth_eps);
  bool seen = image[2] > a.depth_eps;
  float at_image[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    at_image[i] = __fdividef(image[i], depth * a.image[1 - i]);
    const float centred = 2 * at_image[i] - 1;
    seen = seen && (a.in_image ? centred > -1 && centred < 1 : !isnan(at_image[i]));
    if (!a.in_image) at_image[i] = fminf(fmaxf(at_image[i], a.clamp[0]), a.clamp[1]);
  }
  if (seen) u = at_image[0], v = at_image[1];
}

// The lane's 8 channels of a pixel of the map, as they lie: 16 bytes, or 8 of an int8 map.
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
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = __ldg(p + 2 * i * l.channel) | static_cast<uint32_t>(__ldg(p + (2 * i + 1) * l.channel)) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <class T, int Format>
__device__ __forceinline__ void add_tap(const uint4& v, float weight, float (&sum)[8]) {
  float x[8];
  if constexpr (Format == kBytes) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(static_cast<int8_t>((i < 4 ? v.x : v.y) >> i % 4 * 8));
  } else {
    unpack8<T>(v, x);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
}

// Where a camera sees the point on a level.
struct Place {
  Corners x, y;
  int64_t image;
};

__device__ __forceinline__ Place place_on(const FusedLevel& l, int batch, int cam, float u, float v) {
  return {corners(u * l.width - 0.5f, l.width), corners(v * l.height - 0.5f, l.height), batch * l.batch + cam * l.cam};
}

// sampled += what one camera sees on a level whose channels are not adjacent. Two lanes have 16 channels, each a column
// of pixels, so that one access is of both: of the same sector, mostly.
template <class T>
__device__ __forceinline__ void sample_strided(const FusedLevel& l, const Place& p, float (&sampled)[8]) {
  constexpr int kShared = 16;
  const int lane = threadIdx.x % 32;
  const bool right = lane % 2;
  const uint16_t* column = static_cast<const uint16_t*>(l.data) + p.image + lane / 2 * kShared * l.channel +
                           (right ? p.x.index[1] : p.x.index[0]) * l.x;
  const uint16_t *upper = column + p.y.index[0] * l.y, *lower = column + p.y.index[1] * l.y;
  uint16_t pixels[kShared][2];
#pragma unroll
  for (int i = 0; i < kShared; ++i) {
    pixels[i][0] = __ldg(upper + i * l.channel), pixels[i][1] = __ldg(lower + i * l.channel);
  }
  const float weight = right ? p.x.weight[1] : p.x.weight[0];
  const float weights[2] = {p.y.weight[0] * weight, p.y.weight[1] * weight};
  float sum[kShared];
#pragma unroll
  for (int i = 0; i < kShared; ++i) {
    const float2 two = unpack<T>(pixels[i][0] | static_cast<uint32_t>(pixels[i][1]) << 16);
    sum[i] = fmaf(weights[1], two.y, weights[0] * two.x);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float given = right ? sum[i] : sum[i + 8];
    sampled[i] += (right ? sum[i + 8] : sum[i]) + __shfl_xor_sync(0xffffffffu, given, 1);
  }
}

// sampled += what one camera sees on one level; of a pooled level pixels are the largest of four of the map's.
template <class T, int Format>
__device__ __forceinline__ void sample_level(const FusedLevel& l, const Place& p, float (&sampled)[8]) {
  if (Format == kStrided && !l.pool) {
    sample_strided<T>(l, p, sampled);
    return;
  }
  if (!l.pool) {
    uint4 taps[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) taps[j] = pixel<T, Format>(l, p.image, p.y.index[j / 2], p.x.index[j % 2]);
#pragma unroll
    for (int j = 0; j < 4; ++j) add_tap<T, Format>(taps[j], p.y.weight[j / 2] * p.x.weight[j % 2], sampled);
    return;
  }
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {
    const int y = 2 * (j / 2 ? p.y.index[1] : p.y.index[0]), x = 2 * (j % 2 ? p.x.index[1] : p.x.index[0]);
    const float weight = (j / 2 ? p.y.weight[1] : p.y.weight[0]) * (j % 2 ? p.x.weight[1] : p.x.weight[0]);
    uint4 of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = pixel<T, Format>(l, p.image, y + i / 2, x + i % 2);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
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

// What camera `cam` sees on the plain levels, by a warp: take(level, the lane's channels). The pixels of Together
// levels are on their way at once; a lane finds the place on one of the levels.
template <class T, int Together, class Take>
__device__ __forceinline__ void sample_plain(const Fused& a, int batch, int cam, float cam_u, float cam_v, Take take) {
  const int lane = threadIdx.x % 32;
  const FusedLevel& l = a.level[a.first_plain + min(lane % kAheadLevels, a.plain_levels - 1)];
  const Place p = place_on(l, batch, cam, cam_u, cam_v);
  const uint64_t corner =
      reinterpret_cast<uint64_t>(static_cast<const T*>(l.data) + p.image + p.y.index[0] * l.y + p.x.index[0] * l.x);
  const int right = (p.x.index[1] - p.x.index[0]) * static_cast<int>(l.x);
  const int down = (p.y.index[1] - p.y.index[0]) * static_cast<int>(l.y);
#pragma unroll
  for (int first = 0; first < kAheadLevels; first += Together) {
    uint4 taps[Together][4];
#pragma unroll
    for (int i = 0; i < Together; ++i) {
      const int level = first + i;
      if (level < a.plain_levels) {
        const T* from = reinterpret_cast<const T*>(__shfl_sync(0xffffffffu, corner, level)) + lane * 8;
        const int to_right = __shfl_sync(0xffffffffu, right, level), to_below = __shfl_sync(0xffffffffu, down, level);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          taps[i][j] = __ldg(reinterpret_cast<const uint4*>(from + (j % 2 ? to_right : 0) + (j / 2 ? to_below : 0)));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Together; ++i) {
      const int level = first + i;
      if (level < a.plain_levels) {
        float sampled[8] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float tap = p.y.weight[j / 2] * p.x.weight[j % 2];
          add_tap<T, kAdjacent>(taps[i][j], __shfl_sync(0xffffffffu, tap, level), sampled);
        }
        take(a.first_plain + level, sampled);
      }
    }
  }
}

// What it sees on another level, by a warp.
template <class T>
__device__ __forceinline__ void sample_other(const FusedLevel& l, int batch, int cam, float cam_u, float cam_v,
                                             float (&sampled)[8]) {
  const Place p = place_on(l, batch, cam, cam_u, cam_v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sampled[i] = 0;
  if (l.format == kAdjacent) {
    sample_level<T, kAdjacent>(l, p, sampled);
  } else if (l.format == kBytes) {
    sample_level<T, kBytes>(l, p, sampled);
  } else {
    sample_level<T, kStrided>(l, p, sampled);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sampled[i] *= l.scale;
}

// Samples of rows, from the `row`-th on: chunks.
__device__ __forceinline__ int64_t samples_of(const Fused& a, int row) {
  return static_cast<int64_t>(row) * kPresampled * a.ahead_levels * 32;
}

// What it sees on the first levels but the staged one, by a warp for those that compute.
template <class T, int Together, bool Stages, class Take>
__device__ __forceinline__ void presample(const Fused& a, int batch, int cam, float cam_u, float cam_v, Take take) {
  if (a.plain_levels > 0) sample_plain<T, Together>(a, batch, cam, cam_u, cam_v, take);
#pragma unroll 1
  for (int level = 0; level < a.ahead_levels; ++level) {
    if (is_plain(a, level) || (Stages && level == a.staged)) continue;
    float sampled[8];
    sample_other<T>(a.level[level], batch, cam, cam_u, cam_v, sampled);
    take(level, sampled);
  }
}

// What the first cameras see of a row's point, to its samples.
template <class T, int Together, bool Stages>
__device__ __forceinline__ void presample_row(const Fused& a, int batch, float u, float v, void* samples) {
  uint4* to = static_cast<uint4*>(samples) + threadIdx.x % 32;
  unsigned seen = __ballot_sync(0xffffffffu, !isnan(u));
#pragma unroll 1
  for (int number = 0; number < kPresampled && seen; ++number, seen &= seen - 1, to += a.ahead_levels * 32) {
    const int cam = __ffs(seen) - 1;
    const float cam_u = __shfl_sync(0xffffffffu, u, cam), cam_v = __shfl_sync(0xffffffffu, v, cam);
    presample<T, Together, Stages>(a, batch, cam, cam_u, cam_v,
                                   [&](int level, const float (&sampled)[8]) { to[level * 32] = pack8<T>(sampled); });
  }
}

// A piece of the staged level: of each channel and a row of pixels the 16 bytes that a sample needs, on their way to
// shared memory without registers; or, where its two pixels lie in two such chunks, one of these. A lane has 8 channels,
// 16 * 8 bytes, in an order that keeps lanes out of one another's banks; it alone reads them.
struct Piece {
  const void* image;  // its first channel
  float weight[2];    // of the pixels
  // Of the first channel the left pixel; whether the right one is next to it, else the weight of both is the left one's;
  // and whether the chunk is that of the right one alone.
  int pixel;
  bool pair, right;

  // Of a channel: where planes do not begin at 16 bytes, they differ.
  __device__ __forceinline__ static bool straddles(int pixel) { return pixel % 8 == 7; }
  __device__ __forceinline__ static uint32_t place(uint32_t stage) {
    const int lane = threadIdx.x % 32;
    return stage + lane * 128 | lane % 8 * 16;
  }

  template <class T>
  __device__ __forceinline__ void fetch(uint32_t stage, int plane) const {
    auto copy = [](uint32_t to, const T* from) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    };
    const T* channels = static_cast<const T*>(image) + static_cast<int64_t>(threadIdx.x % 32 * 8) * plane;
    const uint32_t to = place(stage);
    if (plane % 8 == 0) {
      const T* from = channels + ((pixel & ~7) + right * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) copy(to ^ i * 16, from + i * plane);
      return;
    }
#pragma unroll 1
    for (int i = 0, at = pixel; i < 8; ++i, at += plane) {
      if (!right || straddles(at)) copy(to ^ i * 16, channels + ((at & ~7) + right * 8));
    }
  }

  template <class T>
  __device__ __forceinline__ void add(uint32_t stage, int plane, float (&sampled)[8]) const {
    auto load = [](uint32_t from) {
      uint16_t x;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
      return to_float(reinterpret_cast<const T&>(x));
    };
    const uint32_t from = place(stage);
    if (plane % 8 == 0) {
      const uint32_t first = from | (right ? 0 : pixel % 8 * 2);
      const float of_first = right ? weight[1] : weight[0];
#pragma unroll
      for (int i = 0; i < 8; ++i) sampled[i] = fmaf(of_first, load(first ^ i * 16), sampled[i]);
      if (right || !pair || straddles(pixel)) return;
#pragma unroll
      for (int i = 0; i < 8; ++i) sampled[i] = fmaf(weight[1], load((first ^ i * 16) + 2), sampled[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = pixel + i * plane;
      const uint32_t left = from ^ i * 16 | at % 8 * 2;
      if (!right) sampled[i] = fmaf(weight[0], load(left), sampled[i]);
      if (pair && right == straddles(at)) {
        sampled[i] = fmaf(weight[1], load(right ? from ^ i * 16 : left + 2), sampled[i]);
      }
    }
  }
};

// sum += what all cameras see on all levels, by a warp. weights: of camera and level c * levels + l, in lanes' first
// and second. ready: what was presampled, if so.
template <class T, bool Presampled>
__device__ __forceinline__ void sample(const Fused& a, int batch, float u, float v, const float (&weights)[2],
                                       const uint4 (&ready)[kPresampled][kAheadLevels], float (&sum)[8]) {
  const int own_level = min(static_cast<int>(threadIdx.x % kAheadLevels), a.levels - 1);  // whose weight the lane has
  auto weight_of = [&](int which) {
    const float even = __shfl_sync(0xffffffffu, weights[0], which % 32);
    const float odd = __shfl_sync(0xffffffffu, weights[1], which % 32);
    return which < 32 ? even : odd;
  };
  auto add = [&](float weight, const float (&sampled)[8]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] = fmaf(isnan(sampled[c]) ? 0.f : sampled[c], weight, sum[c]);
  };
  unsigned seen = __ballot_sync(0xffffffffu, !isnan(u)), rest = seen;  // the latter: not presampled
  if constexpr (Presampled) {
#pragma unroll
    for (int number = 0; number < kPresampled; ++number) {
      if (!rest) continue;
      const float weight = weight_of((__ffs(rest) - 1) * a.levels + own_level);
#pragma unroll
      for (int i = 0; i < kAheadLevels; ++i) {
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
      sample_plain<T, kAheadLevels>(a, batch, cam, cam_u, cam_v, [&](int level, const float (&sampled)[8]) {
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

// The camera weights of a row, of which the lane has two.
__device__ __forceinline__ void activate(int activation, int count, float (&x)[2]) {
  const int lane = threadIdx.x % 32;
  const bool in[2] = {lane < count, lane + 32 < count};
  if (activation == 0) {
    x[0] = sigmoid(x[0]), x[1] = sigmoid(x[1]);
    return;
  }
  float largest = fmaxf(in[0] ? x[0] : -INFINITY, in[1] ? x[1] : -INFINITY);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
#pragma unroll
  for (int i = 0; i < 2; ++i) x[i] = in[i] ? expf(x[i] - largest) : 0.f;
  const float total = warp_sum(x[0] + x[1]);
  x[0] /= total, x[1] /= total;
}

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
    // Of the rows sampled here; or for the level that is staged.
    alignas(128) char samples[kSampled * kPresampled * kAheadLevels * kChannels * sizeof(T)];
  };
  float logits[kRows * kLogitsPitch];
  float cameras[kMaxCams * 12];               // lidar2img, but for its last row
  float points[kRows * 3], logit[kRows * 3];  // and their inverse sigmoid
  alignas(16) float seen[kSampled * kSeen];   // of the rows that are sampled here
  uint64_t received[2], full[kSlots], empty[kSlots], stored;
  uint64_t looked;         // for the other warps
  uint64_t passed, taken;  // to and from the cluster of the other role; or from the other warps
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
      presample_row<T, 2, false>(a, scene, seen[0], seen[kMaxCams], s.samples + samples_of(a, row) * 16);
    }
    arrive_for_warp(shared_address(&s.taken), lane);
  }
}

// The same where a level is staged, to global memory; where the box branch has clusters of its own that level alone, by
// warps of both clusters, the first, second, ... of which this is. begins(layer): until it is known where cameras see;
// done(layer): by each lane, behind what the others have done.
template <class T, Sampler S, class Begins, class Done>
__device__ __forceinline__ void stage_ahead(const Fused& a, Shared<T>& s, const Block& self, int number, Begins begins,
                                            Done done) {
  constexpr bool kSplit = S == kOtherCluster;
  constexpr int kTurns = kSplit ? 2 * kStagers : kStagers;
  constexpr int kMostViews = (kSampled * kPresampled + kTurns - 1) / kTurns, kStages = 2;
  static_assert(kMostViews * 4 <= 32 && sizeof(s.samples) >= kStagers * kStages * kStaged);
  const bool from_boxes = kSplit && self.role == kQueries;
  const int warp = from_boxes ? number - kStagers : number;
  auto stage = [&](int which) { return shared_address(s.samples) + (warp * kStages + which) * kStaged; };
  const int lane = threadIdx.x % 32, row0 = self.tile * kRows + self.half * kSampled;
  const FusedLevel& level = a.level[a.staged];
  const int plane = level.height * level.width;
  wait_for_previous();
#pragma unroll 1
  for (int i = 0; i < a.presamples; ++i) {
    begins(i);
    // Of row lane / kPresampled the first or second camera that sees its point.
    const float* seen = from_boxes ? a.seen + row0 * kSeen : s.seen;
    auto load = [&](int j) { return from_boxes ? __ldcg(seen + j) : seen[j]; };
    int camera = -1;
    {
      float u[kSampled];
#pragma unroll
      for (int row = 0; row < kSampled; ++row) u[row] = load(row * kSeen + lane);
#pragma unroll
      for (int row = 0; row < kSampled; ++row) {
        unsigned cameras = __ballot_sync(0xffffffffu, !isnan(u[row]));
        if (lane % kPresampled) cameras &= cameras - 1;
        if (lane / kPresampled == row) camera = __ffs(cameras) - 1;
      }
    }
    // Each warp has every kTurns-th of these views, and a lane a piece of one: of the first row of pixels the left and
    // the right, then of the second.
    unsigned views = __ballot_sync(0xffffffffu, camera >= 0);
    int view = -1;
    for (int j = 0; j < number; ++j) views &= views - 1;
#pragma unroll
    for (int own = 0; own < kMostViews; ++own) {
      if (lane / 4 == own) view = __ffs(views) - 1;
#pragma unroll
      for (int j = 0; j < kTurns; ++j) views &= views - 1;
    }
    camera = __shfl_sync(0xffffffffu, camera, max(view, 0));
    float u = NAN, v = NAN;
    if (view >= 0) {
      u = load(view / kPresampled * kSeen + camera), v = load(view / kPresampled * kSeen + kMaxCams + camera);
    }
    const Place at = place_on(level, self.scene, max(camera, 0), u, v);
    const int row = lane / 2 % 2;
    Piece own;
    own.image = static_cast<const T*>(level.data) + at.image;
    own.pixel = (row ? at.y.index[1] : at.y.index[0]) * level.width + at.x.index[0];
    own.pair = at.x.index[1] == at.x.index[0] + 1, own.right = lane % 2;
    const float weight = row ? at.y.weight[1] : at.y.weight[0];
    own.weight[0] = weight * (own.pair ? at.x.weight[0] : at.x.weight[0] + at.x.weight[1]);
    own.weight[1] = weight * at.x.weight[1];
    const bool needed = !own.right || (own.pair && (plane % 8 != 0 || Piece::straddles(own.pixel)));
    auto of = [](auto x, int piece) { return __shfl_sync(0xffffffffu, x, piece); };
    auto where = [&](int piece) {
      Piece p;
      const int code = of(own.pixel * 2 + own.pair, piece);
      p.pixel = code >> 1, p.pair = code & 1, p.right = piece % 2;
      return p;
    };
    unsigned reads = __ballot_sync(0xffffffffu, view >= 0 && needed), fetches = reads;
    float sampled[8] = {};
#pragma unroll 1
    for (int j = -kStages; j < 0 || reads; ++j) {
      const uint32_t memory = stage(j & kStages - 1);
      if (j >= 0) {
        const int piece = __ffs(reads) - 1;
        reads &= reads - 1;
        Piece p = where(piece);
        p.weight[0] = of(own.weight[0], piece), p.weight[1] = of(own.weight[1], piece);
        copy_async_wait<kStages - 1>();
        p.template add<T>(memory, plane, sampled);
        if (((__ffs(reads) - 1) ^ piece) >> 2) {  // the last of its view
          const int from = of(view, piece);
          auto take = [&](int level, const float (&sampled)[8]) {
            const int to = (row0 * kPresampled + from) * a.ahead_levels + level;
            static_cast<uint4*>(a.samples)[to * 32 + lane] = pack8<T>(sampled);
          };
          take(a.staged, sampled);
#pragma unroll
          for (int c = 0; c < 8; ++c) sampled[c] = 0;
          if (!kSplit) presample<T, 1, true>(a, self.scene, of(camera, piece), of(u, piece), of(v, piece), take);
        }
      }
      if (fetches) {
        const int piece = __ffs(fetches) - 1;
        fetches &= fetches - 1;
        Piece p = where(piece);
        p.image = reinterpret_cast<const void*>(of(reinterpret_cast<uint64_t>(own.image), piece));
        p.template fetch<T>(memory, plane);
      }
      copy_async_commit();
    }
    done(i);
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

template <class T, Sampler S, bool Stages>
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
    if constexpr (S == kOtherWarps || Stages) {
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
        presample_row<T, kAheadLevels, Stages>(a, scene, u, v, samples);
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
        constexpr bool kApart = kSplit || Stages;  // in global memory
        const uint4* from = (kApart ? static_cast<uint4*>(a.samples) : reinterpret_cast<uint4*>(s.samples)) +
                            samples_of(a, kApart ? self.tile * kRows + sampled_row : warp) + lane;
        const uint4* second = from + a.ahead_levels * 32;
        const int cameras = __popc(__ballot_sync(0xffffffffu, !isnan(u)));
#pragma unroll
        for (int number = 0; number < kPresampled; ++number) {
#pragma unroll
          for (int i = 0; i < kAheadLevels; ++i) {
            if (number >= cameras || i >= a.ahead_levels) continue;
            const uint4* p = (number ? second : from) + i * 32;
            ready[number][i] = kApart ? __ldcg(p) : *p;
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

template <class T, Sampler S, bool Stages>
__global__ void __launch_bounds__(kThreads, 1) decoder_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(1024) char memory[];
  Shared<T>& s = *reinterpret_cast<Shared<T>*>(memory);
  constexpr bool kSplit = S == kOtherCluster;  // the box branch has clusters of its own
  const Block self(a, kSplit);
  const bool has_boxes = self.role == kBoxes;
  STAGE(kMaxProducts - 1, 0);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : s.received) init_barrier(shared_address(&barrier), 1);
    for (uint64_t& barrier : s.full) init_barrier(shared_address(&barrier), 1);
    for (uint64_t& barrier : s.empty) init_barrier(shared_address(&barrier), kWarps * kArrivals);
    init_barrier(shared_address(&s.stored), kWarps * kArrivals);
    init_barrier(shared_address(&s.looked), kWarps * kArrivals);
    init_barrier(shared_address(&s.passed), (kWarps + (kSplit && Stages && has_boxes ? kStagers : 0)) * kArrivals);
    const int samplers = Stages ? (has_boxes ? 0 : kStagers) : kSplit ? 0 : kOthers;
    init_barrier(shared_address(&s.taken), kSplit + samplers * kArrivals);
    publish_barriers();
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  if (threadIdx.x < kComputing) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Stages ? 200 : 216));
    compute<T, S, Stages>(a, s, self);
    STAGE(kMaxProducts - 1, 2);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Stages ? 104 : 72));
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x < kComputing + 32) {
      fetch_weights<T>(a, s, self);
    } else if constexpr (Stages) {
      const int warp = (threadIdx.x - (kComputing + 32)) / 32, lane = threadIdx.x % 32;
      const bool first = threadIdx.x == kComputing + 32;
      auto counts = [&](int i) {  // of all layers: keys and values are there
        if (i >= a.signals) return;
        wait_for(shared_address(&s.stored), i % 2);
        signal(a.done + self.scene);
      };
      auto passes = [&](int i) {
        wait_for(shared_address(&s.passed), i % 2);
        signal(a.passed[self.role] + self.tile);
      };
      unsigned* looked = a.looked + self.tile * kBlocks + self.half;
      if (!kSplit) {
        auto begins = [&](int i) {
          if (first) counts(i);
          __syncwarp();
          wait_for(shared_address(&s.looked), i % 2);
        };
        stage_ahead<T, S>(a, s, self, warp, begins, [&](int) { arrive_for_warp(shared_address(&s.taken), lane); });
      } else if (has_boxes) {
        auto begins = [&](int i) {
          wait_for(shared_address(&s.looked), i % 2);
          if (first) signal(looked);
        };
        stage_ahead<T, S>(a, s, self, warp, begins, [&](int i) {
          arrive_for_warp(shared_address(&s.passed), lane);
          if (first) passes(i), take(a, s, self, i);
        });
      } else {
        auto begins = [&](int i) {
          if (first && i > 0) passes(i - 1);
          if (first) counts(i);
          if (lane == 0) await(looked, i + 1);
          __syncwarp();
        };
        stage_ahead<T, S>(a, s, self, kStagers + warp, begins, [&](int i) {
          arrive_for_warp(shared_address(&s.taken), lane);
          if (warp == kStagers - 1 && lane == 0) take(a, s, self, i);
        });
        if (first) passes(a.passes[kQueries] - 1);
      }
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

#else  // The launcher does not get here: `compiled` sees that this one takes no more than a warp.

template <class T>
struct Shared {};
template <class T, Sampler S, bool Stages>
__global__ void __launch_bounds__(32, 1) decoder_kernel(const __grid_constant__ Fused) {}

#endif

// ---------------------------------------------------------------- copies of maps

// Maps of 256 channels of 2 bytes, to channels-last.
struct MapCopy {
  const uint16_t* from;
  uint16_t* to;
  int64_t batch, cam, channel, y, x;  // strides of `from`
  int width, pixels;
  unsigned first_block;
  bool pairs;  // pixels lie one after the other, and two can be read at once
};

struct Copies {
  MapCopy map[kMaxCameraLevels];
  int maps = 0, cams;
  unsigned* counters;  // cleared
  int64_t num_counters;
};

constexpr int kCopyThreads = 256, kCopyPixels = 64, kCopyChannels = 128;

__global__ void __launch_bounds__(kCopyThreads) copy_maps(const __grid_constant__ Copies a) {
  start_next();
  __shared__ uint32_t tile[kCopyChannels][kCopyPixels / 2 + 1];
  constexpr int kCopyWarps = kCopyThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x == 0) {
    for (int64_t i = threadIdx.x; i < a.num_counters; i += kCopyThreads) a.counters[i] = 0;
  }
  int which = 0;
  while (which + 1 < a.maps && blockIdx.x >= a.map[which + 1].first_block) ++which;
  const MapCopy& m = a.map[which];
  const unsigned tiles = (m.pixels + kCopyPixels - 1) / kCopyPixels, block = blockIdx.x - m.first_block;
  const int image = block / tiles / (kChannels / kCopyChannels);
  const int channel0 = block / tiles % (kChannels / kCopyChannels) * kCopyChannels;
  const int pixel0 = block % tiles * kCopyPixels, pixel = pixel0 + 2 * lane;
  const uint16_t* from = m.from + image / a.cams * m.batch + image % a.cams * m.cam + (channel0 + warp) * m.channel;
  uint32_t words[kCopyChannels / kCopyWarps];
  if (m.pairs) {
#pragma unroll
    for (int i = 0; i < kCopyChannels / kCopyWarps; ++i) {
      words[i] =
          pixel < m.pixels ? __ldg(reinterpret_cast<const uint32_t*>(from + i * kCopyWarps * m.channel + pixel)) : 0;
    }
  } else {
    const int next = pixel + 1;
    const int64_t at[2] = {pixel / m.width * m.y + pixel % m.width * m.x, next / m.width * m.y + next % m.width * m.x};
#pragma unroll
    for (int i = 0; i < kCopyChannels / kCopyWarps; ++i) {
      const uint16_t* row = from + i * kCopyWarps * m.channel;
      words[i] = (pixel < m.pixels ? __ldg(row + at[0]) : 0) |
                 static_cast<uint32_t>(next < m.pixels ? __ldg(row + at[1]) : 0) << 16;
    }
  }
#pragma unroll
  for (int i = 0; i < kCopyChannels / kCopyWarps; ++i) tile[warp + i * kCopyWarps][lane] = words[i];
  __syncthreads();
  uint16_t* to = m.to + (static_cast<int64_t>(image) * m.pixels + pixel0) * kChannels + channel0 + 2 * lane;
#pragma unroll
  for (int pair = warp; pair < kCopyPixels / 2; pair += kCopyWarps) {
#pragma unroll
    for (int channel = 0; channel < kCopyChannels; channel += 64) {
      const uint32_t low = tile[channel + 2 * lane][pair], high = tile[channel + 2 * lane + 1][pair];
      uint32_t* there = reinterpret_cast<uint32_t*>(to + static_cast<int64_t>(2 * pair) * kChannels + channel);
      if (pixel0 + 2 * pair < m.pixels) there[0] = __byte_perm(low, high, 0x5410);
      if (pixel0 + 2 * pair + 1 < m.pixels) there[kChannels / 2] = __byte_perm(low, high, 0x7632);
    }
  }
}

// ---------------------------------------------------------------- launching

bool fits(const TransformerDecoder& d, const DecoderSizes& n) {
  if (d.query.item_size() != 2 || n.channels != kChannels || d.num_heads != kHeads || n.ffn % 256 != 0 ||
      n.ffn > kMaxFfn || n.code_size > kNarrow || n.classes > kNarrow || n.rows >= 1 << 30 || n.cams > kMaxCams ||
      of_device(cudaDevAttrComputeCapabilityMajor) != 9) {
    return false;
  }
  uintptr_t bits = reinterpret_cast<uintptr_t>(d.query.data) | reinterpret_cast<uintptr_t>(d.query_pos.data);
  for (int i = 0; i < d.num_weights; ++i) bits |= reinterpret_cast<uintptr_t>(d.weights[i].data);
  return bits % 16 == 0;
}

// Whether the kernel samples itself; if not, the small kernels do, between two launches of it.
bool samples_itself(const TransformerDecoder& d, const DecoderSizes& n) {
  return d.num_points == 1 && d.num_groups == 1 && !d.learned_offsets && n.logits <= kNarrow && n.cams <= 32 &&
         !n.widen;
}

// A map whose channels are not adjacent is copied so, if that costs less than reading it as it is in every layer: by
// measurement for up to 40 KB a sample. The most for one and for all of them; neither grows when a size shrinks, so
// that scratch memory for the largest sizes is enough for others.
int64_t copy_limit(const TransformerDecoder& d, const DecoderSizes& n) {
  return n.rows * d.num_layers * d.num_points * (40 << 10);
}
constexpr int64_t kCopyLimit = 256 << 20;

int64_t copy_bytes(const TransformerDecoder& d, int i) {
  const Tensor& map = d.features[i];
  return map.dtype == d.query.dtype && map.strides[2] != 1 ? map.numel() * 2 : 0;
}

FusedLevel level_of(const TransformerDecoder& d, int i) {
  const int given = i < d.num_features ? i : d.num_features - 1;
  const Tensor& map = d.features[given];
  FusedLevel l{};
  l.data = map.data;
  l.pool = i == d.num_features;
  l.scale = 1;
  l.batch = map.strides[0], l.cam = map.strides[1];
  l.channel = map.strides[2], l.y = map.strides[3], l.x = map.strides[4];
  l.height = static_cast<int>(map.sizes[3]), l.width = static_cast<int>(map.sizes[4]);
  if (map.dtype == DType::kInt8) {
    l.format = kBytes, l.scale = d.scales[given];
  } else {
    l.format = map.aligned(2, 16) ? kAdjacent : kStrided;
  }
  if (l.pool) l.height /= 2, l.width /= 2;
  return l;
}

// Whether the channels of a camera are planes one after the other, a multiple of 16 bytes from those of the next.
bool of_planes(const FusedLevel& l) {
  return l.format == kStrided && l.x == 1 && l.y == l.width && l.channel == l.y * l.height && l.channel < 1 << 27 &&
         l.cam % 8 == 0;
}

// Of a single scene the level whose copy would need most memory is read as it lies, if it is of planes, unless that is
// little: warps sample it ahead, however many queries there are. Or -1. Scratch memory is reserved before pointers are
// known, so this does not ask where the map begins.
constexpr int64_t kMostCopied = 2 << 20;

int largest_copy(const TransformerDecoder& d, const DecoderSizes& n) {
  int largest = -1;
  if (n.batch != 1 || !samples_itself(d, n) || d.num_layers > kMaxLayers) return largest;
  for (int i = 0; i < std::min(d.num_features - d.pool, kAheadLevels); ++i) {  // that of which a level is pooled is not
    if (copy_bytes(d, i) > (largest < 0 ? 0 : copy_bytes(d, largest))) largest = i;
  }
  return largest >= 0 && of_planes(level_of(d, largest)) ? largest : -1;
}

int level_in_place(const TransformerDecoder& d, const DecoderSizes& n) {
  const int largest = largest_copy(d, n);
  return largest >= 0 && copy_bytes(d, largest) > kMostCopied ? largest : -1;
}

// With room for such a level, as one of another size may be copied.
int64_t copies_bytes(const TransformerDecoder& d, const DecoderSizes& n) {
  const int largest = largest_copy(d, n);
  int64_t bytes = 0;
  for (int i = 0; i < d.num_features; ++i) {
    bytes += std::min(std::min(copy_bytes(d, i), copy_limit(d, n)), i == largest ? kMostCopied : kCopyLimit);
  }
  return std::min(bytes, kCopyLimit);
}

struct FusedBuffers {
  float* points;
  char* copies;
  int64_t copies_size = 0;
  char *x, *position, *q, *k, *v, *where, *mixed, *logits, *offsets, *sampled;
  char* samples;
  unsigned* done;  // and after it what clusters have passed on
  int64_t counters;
  int keys;

  FusedBuffers(Scratch& scratch, const TransformerDecoder& d, const DecoderSizes& n) {
    keys = ceil_div(n.queries, kKeyBlock) * kKeyBlock;
    const int64_t tiles = static_cast<int64_t>(n.batch) * ceil_div(n.queries, kRows);
    const int64_t tensor = tiles * kRows * kChannels * 2,
                  heads = 2 * static_cast<int64_t>(n.batch) * keys * kChannels * 2;
    const bool apart = !samples_itself(d, n);  // something else samples
    const bool in_place = level_in_place(d, n) >= 0;
    const int64_t sampled_tiles = apart ? 0 : in_place ? tiles : std::min<int64_t>(tiles, kMostSplit);
    const int64_t samples_of_row = kPresampled * std::min(kAheadLevels, n.levels);
    samples = scratch.take<char>(sampled_tiles * kRows * samples_of_row * kChannels * 2);
    counters = n.batch + (2 + kBlocks) * tiles;
    done = scratch.take<unsigned>(counters);
    points = scratch.take<float>(n.rows * 3);
    for (char** p : {&k, &v}) *p = scratch.take<char>(heads);
    for (char** p : {&x, &position, &q}) *p = scratch.take<char>(tensor);
    for (char** p : {&where, &mixed}) *p = scratch.take<char>(apart ? tensor : 0);
    logits = scratch.take<char>(apart ? n.rows * n.logits * 2 : 0);
    offsets = scratch.take<char>(apart ? n.rows * n.offsets * 2 : 0);
    sampled = scratch.take<char>(n.widen ? n.rows * kChannels * 4 : 0);
    copies_size = copies_bytes(d, n);
    copies = scratch.take<char>(copies_size);
  }
};

bool plain(const FusedLevel& l) {
  return l.format == kAdjacent && !l.pool && l.height * l.y < 1ll << 31 && l.width * l.x < 1ll << 31;
}

// Whether what was compiled for this device has the kernel: for sm_90a it does.
template <class T>
bool compiled() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, decoder_kernel<T, kSameWarps, false>) == cudaSuccess) {
    return attributes.maxThreadsPerBlock >= kThreads;
  }
  cudaGetLastError();  // or the next to ask is told of it
  return false;
}

// cuTensorMapEncodeTiled, which belongs to the driver: the kernels are not linked to it.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &p, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
        e == cudaSuccess && found == cudaDriverEntryPointSuccess ? p : nullptr);
  }();
  return encoder;
}

// The list of a launch, and what it refers to.
struct List {
  Fused& a;
  DType dtype;
  int products = 0, weights = 0, norms = 0;
  bool failed = false;
  const Tensor* used[kMaxWeights];

  // A product of 256 inputs and outputs of a layer, `in` and `out` in units of 256. weight: after it, its bias.
  Product& add(const Tensor* weight, uint32_t code, Tile from, Tile to = kSum, int in = 0, int out = 0) {
    Product& p = a.product[products++] = Product{};
    const int rows = static_cast<int>(weight[0].sizes[0]);
    if (rows < kChannels) code |= kIsNarrow;
    p.code = code | from << kFrom | static_cast<uint32_t>(to) << kTo;
    p.in = static_cast<uint8_t>(in), p.out = static_cast<uint8_t>(out);
    for (int i = std::max(0, weights - 3); i < weights; ++i) {
      if (used[i] == weight) {
        p.weight = static_cast<uint8_t>(i);
        return p;
      }
    }
    used[weights] = weight;
    a.weight[weights] = {weight[1].data, rows};
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(weight[0].sizes[1]), static_cast<cuuint64_t>(rows)},
                     pitch[1] = {sizes[0] * 2};
    const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(rows < kChannels ? kNarrow : kHalf)}, steps[2] = {1, 1};
    failed |= tensor_map_encoder()(
                  &a.map[weights],
                  dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                  weight[0].data, sizes, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS;
    p.weight = static_cast<uint8_t>(weights++);
    return p;
  }
  // What is no product.
  Product& add(uint32_t code) {
    Product& p = a.product[products++] = Product{};
    p.code = code;
    return p;
  }
  // Before the product: tile `from` normed, to `to`; encoder: the position's first layer before it.
  void norm(Product& p, const Tensor* weight, Tile from, Tile to, uint32_t code = 0, const Tensor* encoder = nullptr) {
    p.code |= kNorms | code | static_cast<uint32_t>(from) << kNormFrom | static_cast<uint32_t>(to) << kNormTo;
    p.norm = static_cast<uint8_t>(norms);
    a.norm[norms++] = {weight[0].data, weight[1].data, encoder ? encoder[0].data : nullptr,
                       encoder ? encoder[1].data : nullptr};
  }
};

// A launch of some layers, or of a part of one.
template <class T>
class Launch {
 public:
  // split: the box branch has clusters of its own.
  Launch(const TransformerDecoder& d, const DecoderSizes& n, const FusedBuffers& b, Fused& a, bool split = false)
      : d_(d), n_(n), b_(b), a_(a), list_{a, d.query.dtype}, split_(split) {
    std::fill(a.load, a.load + kTiles, nullptr);
    std::fill(a.save, a.save + kTiles, nullptr);
    std::fill(a.products, a.products + 2, 0);
    std::fill(a.passes, a.passes + 2, 0);
    a.load[kQueryPos] = d.query_pos.data;
    a.first = a.save_points = false;
    a.classes = nullptr, a.signals = a.presamples = 0;
  }

  // All layers.
  void all() {
    begin();
    for (int layer = 0; layer < d_.num_layers; ++layer) attend(layer, true), sample(layer, true);
    if (!split_) return;
    a_.products[kQueries] = list_.products;
    encode(0, kEncodes);
    for (int layer = 0; layer < d_.num_layers; ++layer) {
      list_.norm(list_.add(kNoProduct), weight_of(d_, layer, kPositionNorm1), kPosition, kPosition,
                 kNormRelu | kPasses);
      boxes(layer).code |= kTakes;
    }
    list_.add(kNoProduct | kMoves);
    a_.passes[kQueries] = a_.passes[kBoxes] = d_.num_layers;
  }
  // queries, keys and values of the first layer, and its position's encoding
  void begin() {
    a_.first = true;
    a_.load[kX] = d_.query.data;
    heads(0, nullptr);
    if (!split_) encode(0, kEncodes);
  }
  // Layer `layer` from its attention to the camera weights; itself: to the logits, else to kWhere.
  void attend(int layer, bool itself) {
    auto w = [&](DecoderWeight weight) { return weight_of(d_, layer, weight); };
    Product& attention = list_.add(kAttends);
    if (itself && !split_) list_.norm(attention, w(kPositionNorm1), kPosition, kPosition, kNormRelu);
    list_.add(w(kOutProj), kAddsX | (d_.residual_query_pos ? kQueryPos << kAdds : 0u), kIn);
    list_.norm(itself ? list_.add(w(kAttentionWeights), 0, kWhere) : list_.add(kNoProduct), w(kMhaNorm), kSum, kX,
               kAddsQueryPos);
  }
  // From the sampling on, to queries, keys and values of the next layer.
  void sample(int layer, bool itself) {
    auto w = [&](DecoderWeight weight) { return weight_of(d_, layer, weight); };
    a_.presamples += itself;
    Product& out =
        list_.add(w(kOutputProj), kAddsX | kPosition << kAdds | (itself ? kSamples : 0u) | (split_ ? kTakes : 0u), kIn);
    if (!itself) list_.norm(out, w(kPositionNorm1), kPosition, kPosition, kNormRelu);
    // Two parts of 256 hidden channels in one exchange; then other tiles, as these may still be read.
    constexpr Tile kHidden[2][2] = {{kQuery, kIn}, {kWhere, kSum}};
    const int parts = n_.ffn / kChannels;
    for (int first = 0; first < parts; first += 2) {
      const int last = std::min(first + 2, parts) - 1;
      for (int i = first; i <= last; ++i) {
        Product& p = list_.add(w(kFfn0), kRelu | (i < last ? kOpen : 0u), kX, kHidden[first / 2 % 2][i - first], 0, i);
        if (i == 0) list_.norm(p, w(kSvcaNorm), kSum, kX);
      }
      for (int i = first; i <= last; ++i) {
        list_.add(w(kFfn2), (i > 0 ? kGoesOn : 0u) | (i + 1 < parts ? kKeeps : kAddsX),
                  kHidden[first / 2 % 2][i - first], kPosition, i, 0);
      }
    }
    const bool ends = layer + 1 == d_.num_layers;
    if (!ends) heads(layer + 1, w(kFfnNorm));
    if (!split_) {
      Product& reg = boxes(layer);
      if (ends) list_.norm(reg, w(kFfnNorm), kPosition, kX);
    }
    if (!ends) return;
    Product& classes = list_.add(weight_of(d_, kCls0), split_ ? 0 : kMoves, kX, kSum);
    if (split_) list_.norm(classes, w(kFfnNorm), kPosition, kX, kPasses);
    list_.norm(list_.add(weight_of(d_, kCls3), 0, kIn, kWhere), weight_of(d_, kClsNorm0), kSum, kIn, kNormRelu);
    list_.norm(list_.add(weight_of(d_, kCls6), 0, kIn), weight_of(d_, kClsNorm1), kWhere, kIn, kNormRelu);
    a_.classes = d_.classes.data;
  }

  void load(std::initializer_list<Tile> tiles) {
    for (Tile tile : tiles) a_.load[tile] = buffer(tile);
  }
  void save(std::initializer_list<Tile> tiles) {
    for (Tile tile : tiles) a_.save[tile] = buffer(tile);
  }

  // Before the first launch: how many clusters there can be at once.
  static cudaError_t prepare(int& clusters) {
    Config config(1, nullptr, false);
    for (const auto& kernels : kKernels) {
      for (const auto kernel : kernels) {
        SVEXPORT_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(sizeof(Shared<T>))));
      }
    }
    return cudaOccupancyMaxActiveClusters(&clusters, kKernels[0][0], &config.config);
  }

  // together: blocks wait for all others.
  cudaError_t run(bool together, cudaStream_t stream, bool early = false) {
    if (!split_ && (list_.products == 0 || !(a_.product[list_.products - 1].code & kNoProduct))) list_.add(kNoProduct);
    a_.products[split_ ? kBoxes : kQueries] = list_.products - a_.products[kQueries];
    if (list_.failed) return cudaErrorInvalidValue;
    a_.scene_clusters = ceil_div(n_.queries, kRows);
    if (!together) a_.signals = 0;  // the next launch waits for all of this one
    // Two warps take about as long to sample as the attention to 400 keys.
    const bool others = a_.presamples > 0 && n_.queries >= 400;
    const Sampler sampler = split_ ? kOtherCluster : others ? kOtherWarps : kSameWarps;
    const Config config(static_cast<unsigned>(a_.scene_clusters * n_.batch * (split_ ? 2 : 1)), stream, together,
                        early);
    return cudaLaunchKernelEx(&config.config, kKernels[a_.staged >= 0][sampler], a_);
  }

 private:
  static constexpr void (*kKernels[2][kSamplers])(Fused) = {
      {decoder_kernel<T, kSameWarps, false>, decoder_kernel<T, kOtherWarps, false>,
       decoder_kernel<T, kOtherCluster, false>},
      {decoder_kernel<T, kSameWarps, false>, decoder_kernel<T, kOtherWarps, true>,
       decoder_kernel<T, kOtherCluster, true>}};  // with a level that is staged

  struct Config {
    cudaLaunchAttribute attributes[3]{};
    cudaLaunchConfig_t config{};

    Config(unsigned clusters, cudaStream_t stream, bool together, bool early = false) {
      attributes[0].id = cudaLaunchAttributeClusterDimension;
      attributes[0].val.clusterDim.x = kBlocks, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
      attributes[1].id = cudaLaunchAttributeCooperative;
      attributes[1].val.cooperative = 1;
      attributes[2].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[2].val.programmaticStreamSerializationAllowed = 1;
      config.gridDim = dim3(clusters * kBlocks);
      config.blockDim = dim3(kThreads);
      config.dynamicSmemBytes = sizeof(Shared<T>);
      config.stream = stream;
      config.attrs = attributes;
      config.numAttrs = together ? early ? 3 : 2 : 1;
    }
    Config(const Config&) = delete;
  };

  // in_proj of a layer, after the norm that ends the one before. Keys and values first: others wait for them.
  void heads(int layer, const Tensor* norm) {
    const Tensor* weight = weight_of(d_, layer, kInProj);
    Product& keys = list_.add(weight, kToKeys, kWhere, kSum, 0, 1);
    if (norm) list_.norm(keys, norm, kPosition, kX, kAddsQueryPos | (split_ ? kPasses : 0u));
    list_.add(weight, kToValues, kX, kSum, 0, 2);
    list_.add(weight, kToQueries, kWhere, kQuery, 0, 0);
    ++a_.signals;
  }
  // The box branch of a layer, of which this is the first product, and the next one's encoding.
  Product& boxes(int layer) {
    auto w = [&](DecoderWeight weight) { return weight_of(d_, layer, weight); };
    Product& first = list_.add(w(kReg0), kRelu, kX, kIn);
    list_.add(w(kReg2), kRelu, kIn, kWhere);
    list_.add(w(kReg4), 0, kWhere);
    if (layer + 1 < d_.num_layers) encode(layer + 1, kMoves | kEncodes);
    return first;
  }
  void encode(int layer, uint32_t code) {
    auto w = [&](DecoderWeight weight) { return weight_of(d_, layer, weight); };
    list_.norm(list_.add(w(kPosition3), code, kIn, kPosition), w(kPositionNorm0), kSum, kIn, kNormRelu, w(kPosition0));
  }
  char* buffer(Tile tile) const {
    return tile == kX          ? b_.x
           : tile == kPosition ? b_.position
           : tile == kQuery    ? b_.q
           : tile == kWhere    ? b_.where
                               : b_.mixed;
  }

  const TransformerDecoder& d_;
  const DecoderSizes& n_;
  const FusedBuffers& b_;
  Fused& a_;
  List list_;
  bool split_;
};

// copied: with the copies of maps for what samples apart.
template <class T>
cudaError_t launch_all(const TransformerDecoder& d, const DecoderSizes& n, const TransformerDecoder& copied,
                       const FusedBuffers& b, Fused& a, bool cleared, cudaStream_t stream) {
  const bool itself = samples_itself(d, n);
  int resident = 0;
  SVEXPORT_TRY(Launch<T>::prepare(resident));
  const int64_t tiles = ceil_div(n.queries, kRows) * static_cast<int64_t>(n.batch);
  if (itself && d.num_layers <= kMaxLayers && tiles <= resident) {
    if (!cleared) SVEXPORT_TRY(cudaMemsetAsync(b.done, 0, b.counters * sizeof(unsigned), stream));
    Launch<T> launch(d, n, b, a, 2 * tiles <= resident && tiles <= kMostSplit);
    a.which = 0;
    launch.all();
    const cudaError_t status = launch.run(true, stream, cleared);
    if (status != cudaErrorCooperativeLaunchTooLarge) return status;
    cudaGetLastError();  // others have a part of the device for themselves
  }

  auto save = [&](Launch<T>& launch) { launch.save({kX, kPosition, kQuery}), a.save_points = true; };
  {
    Launch<T> launch(d, n, b, a);
    a.which = 0;
    launch.begin();
    save(launch);
    SVEXPORT_TRY(launch.run(false, stream));
  }
  for (int layer = 0; layer < d.num_layers; ++layer) {
    const bool last = layer + 1 == d.num_layers;
    Launch<T> launch(d, n, b, a);
    a.which = (layer + 1) % 2;
    launch.load({kX, kPosition, kQuery});
    launch.attend(layer, itself);
    if (itself) {
      launch.sample(layer, true);
      if (!last) save(launch);
      SVEXPORT_TRY(launch.run(false, stream));
      continue;
    }
    launch.save({kX, kWhere});
    SVEXPORT_TRY(launch.run(false, stream));
    auto apply = [&](DecoderWeight weight, void* y) {
      const Tensor* w = weight_of(d, layer, weight);
      Linear product;
      product.x = b.where, product.weight = w[0].data, product.bias = w[1].data, product.y = y;
      product.rows = n.rows, product.in = kChannels, product.out = static_cast<int>(w[0].sizes[0]);
      return linear(product, d.query.dtype, stream);
    };
    SVEXPORT_TRY(apply(kAttentionWeights, b.logits));
    if (d.learned_offsets) SVEXPORT_TRY(apply(kOffsets, b.offsets));
    if (n.widen) {
      SVEXPORT_TRY(svexport::sample(copied, n, b.points, b.logits, b.offsets, b.sampled, DType::kFloat32, stream));
      SVEXPORT_TRY(
          round_to(reinterpret_cast<const float*>(b.sampled), b.mixed, d.query.dtype, n.rows * kChannels, stream));
    } else {
      SVEXPORT_TRY(svexport::sample(copied, n, b.points, b.logits, b.offsets, b.mixed, d.query.dtype, stream));
    }
    Launch<T> rest(d, n, b, a);
    rest.load({kX, kPosition, kIn});
    rest.sample(layer, false);
    if (!last) save(rest);
    SVEXPORT_TRY(rest.run(false, stream));
  }
  return cudaSuccess;
}

template <class T>
cudaError_t run(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream) {
  Scratch scratch{static_cast<char*>(workspace)};
  const FusedBuffers b(scratch, d, n);
  Fused a(d);
  a.queries = n.queries, a.keys = b.keys;
  a.points = b.points, a.done = b.done;
  a.passed_tile[kQueries] = b.x, a.passed_tile[kBoxes] = b.position, a.seen = reinterpret_cast<float*>(b.q);
  a.samples = b.samples;
  const int64_t tiles = (b.counters - n.batch) / (2 + kBlocks);
  a.passed[kQueries] = b.done + n.batch, a.passed[kBoxes] = a.passed[kQueries] + tiles;
  a.looked = a.passed[kBoxes] + tiles;
  a.k = b.k, a.v = b.v;
  a.heads_size = static_cast<int64_t>(n.batch) * b.keys * kChannels;
  a.num_classes = n.classes, a.code_size = n.code_size;
  a.cams = n.cams, a.levels = n.levels, a.ahead_levels = std::min(kAheadLevels, n.levels), a.logits = n.logits,
  a.activation = d.activation;
  for (int i = 0; i < 4; ++i) a.lidar2img_strides[i] = d.lidar2img.strides[i];
  for (int i = 0; i < 3; ++i) {
    a.low[i] = static_cast<float>(d.pc_range[i]);
    a.size[i] = static_cast<float>(d.pc_range[i + 3] - d.pc_range[i]);
  }
  for (int i = 0; i < 2; ++i) {
    a.image[i] = static_cast<float>(d.image_size[i]);
    a.clamp[i] = static_cast<float>(d.uv_clamp[i]);
  }
  a.depth_eps = static_cast<float>(d.depth_eps), a.in_image = d.in_image;
  TransformerDecoder copied = d;
  Tensor maps[kMaxCameraLevels];
  int64_t used = 0;
  const int in_place = level_in_place(d, n);
  Copies copies;
  copies.cams = n.cams, copies.counters = b.done, copies.num_counters = b.counters;
  unsigned blocks = 0;
  for (int i = 0; i < d.num_features; ++i) {
    Tensor& map = maps[i] = d.features[i];
    const int64_t bytes = copy_bytes(d, i), *sizes = map.sizes;
    if (bytes == 0 || i == in_place || bytes > copy_limit(d, n) || used + bytes > b.copies_size) continue;
    MapCopy& m = copies.map[copies.maps++];
    m.from = static_cast<const uint16_t*>(map.data), m.to = reinterpret_cast<uint16_t*>(b.copies + used);
    m.batch = map.strides[0], m.cam = map.strides[1], m.channel = map.strides[2];
    m.y = map.strides[3], m.x = map.strides[4];
    m.width = static_cast<int>(sizes[4]), m.pixels = static_cast<int>(sizes[3] * sizes[4]);
    m.first_block = blocks;
    m.pairs = m.x == 1 && m.y == m.width && m.pixels % 2 == 0 && (m.batch | m.cam | m.channel) % 2 == 0 &&
              reinterpret_cast<uintptr_t>(m.from) % 4 == 0;
    blocks += static_cast<unsigned>(n.batch * n.cams * (kChannels / kCopyChannels) * ceil_div(m.pixels, kCopyPixels));
    map.data = b.copies + used;
    map.strides[2] = 1, map.strides[4] = sizes[2], map.strides[3] = sizes[4] * sizes[2];
    map.strides[1] = sizes[3] * map.strides[3], map.strides[0] = sizes[1] * map.strides[1];
    used += bytes;
  }
  if (blocks > 0) SVEXPORT_TRY(svexport::launch(copy_maps, dim3(blocks), kCopyThreads, 0, stream, false, copies));
  copied.features = maps;
  for (int i = 0; samples_itself(d, n) && i < n.levels; ++i) {
    a.level[i] = level_of(copied, i);
    if (i >= kAheadLevels || !plain(a.level[i])) continue;
    if (a.plain_levels == 0) a.first_plain = i;
    if (a.first_plain + a.plain_levels == i) ++a.plain_levels;
  }
  if (in_place >= 0 && reinterpret_cast<uintptr_t>(a.level[in_place].data) % 16 == 0) a.staged = in_place;
  return launch_all<T>(d, n, copied, b, a, blocks > 0, stream);
}

}  // namespace

size_t fused_decoder_workspace(const TransformerDecoder& d, const DecoderSizes& n) {
  if (d.query.item_size() != 2) return 0;
  Scratch scratch{nullptr};
  FusedBuffers buffers(scratch, d, n);
  return scratch.used;
}

cudaError_t fused_decoder(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream) {
  if (!fits(d, n) || !tensor_map_encoder()) return cudaErrorNotSupported;
  const bool is_half = d.query.dtype == DType::kFloat16;
  if (!(is_half ? compiled<__half>() : compiled<__nv_bfloat16>())) return cudaErrorNotSupported;
  return is_half ? run<__half>(d, n, workspace, stream) : run<__nv_bfloat16>(d, n, workspace, stream);
}

#endif

}  // namespace svexport

#ifdef SVEXPORT_STAGES
// Clears the clocks (null), or copies them.
extern "C" int svexport_stages(void* clocks) {
  if (clocks) return cudaMemcpyFromSymbol(clocks, svexport::stage_clocks, sizeof(svexport::stage_clocks));
  void* p = nullptr;
  const cudaError_t e = cudaGetSymbolAddress(&p, svexport::stage_clocks);
  return e ? e : cudaMemset(p, 0, sizeof(svexport::stage_clocks));
}
#endif
