// The decoder for half and bfloat16, 256 channels in 8 heads, on devices with thread block clusters: two kernels a layer.
//
//   rows_kernel       what a query does on its own: from the heads' results to the queries, keys and values of the next
//                     layer (out_proj, norm, camera weights, sampling, output_proj, norm, ffn, norm, in_proj)
//   attention_kernel  the self attention, and beside it, in blocks of their own, what only the sampling needs: the box
//                     branch, which moves the points, and the encoding of their position
//
// Step s = 0 .. num_layers of either runs what lies between the attentions of layers s - 1 and s; the class branch is the
// last attention_kernel's. Sixteen rows at a time go through all of a step in shared memory, on a pair of blocks that
// compute half of the columns each and give them to one another. Every pair reads every weight once, straight into the
// registers that mma wants it in, one matrix product ahead.
//
// A step is a list of linear layers with what lies between them, made on the host, and a loop that executes it: code that
// is run only once is fetched from far away.
//
// Kernels begin as soon as all blocks of the one before have begun (programmatic dependent launch), and wait for what
// they need by counters in global memory, each for its own rows: rows_kernel not for the box branch before it samples.
// A block only ever waits for blocks that have begun. Kernels end in their order.
#include <algorithm>

#include "bilinear.cuh"
#include "gemm.h"
#include "mma.cuh"
#include "overlap.cuh"
#include "permute.h"
#include "transformer_decoder.cuh"

namespace svexport {
namespace {

constexpr int kChannels = 256, kHeads = 8;
[[maybe_unused]] constexpr int kHeadDim = 32;
constexpr int kRows = 16, kPair = 2, kThreads = 256;
constexpr int kPitch = kChannels + 8;  // of a row in shared memory, against bank conflicts
[[maybe_unused]] constexpr int kTile = kRows * kPitch;
constexpr int kNarrow = 64;  // most outputs of a narrow layer: camera weights, box code, classes
constexpr int kMaxFfn = 2048;

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

// Tiles of 16 rows x 256 channels in shared memory; kHidden: the first of ffn / 256.
enum Tile { kSum, kX, kIn, kWhere, kBranchTiles, kQueryPos = kBranchTiles, kPosition, kHidden };

// A layer in a word: what is done before it (the first five, in this order), what it is, and where the products go.
enum Code : uint32_t {
  kMoves = 1,          // the box branch's end: points are moved, boxes written; their position's first layer, to kSum
  kSamples = 2,        // the cameras, by the logits, to kIn
  kNorms = 4,          // tile kNormFrom, to kX
  kNormRelu = 8,       // after the norm
  kAddsQueryPos = 16,  // kWhere = kX + kQueryPos, after the norm
  kEnd = 32,           // no layer: only what is done before
  kIsNarrow = 64,      // at most 64 outputs, in float to the logits
  kWideIn = 128,       // its parts are of inputs, not of outputs
  kRelu = 256,
  kToHeads = 512,      // queries and keys
  kToValues = 1024,
  kAddsX = 2048,
};
// Fields of the word: first bit, 4 bits each. kAdds: one more tile, or 0.
enum Field { kParts = 12, kFrom = 16, kTo = 20, kAdds = 24, kNormFrom = 28 };

[[maybe_unused]] __host__ __device__ constexpr int field(uint32_t code, Field first) { return code >> first & 15; }

// A linear layer, 256 inputs and outputs at a time.
struct Layer {
  const void *weight, *bias;  // (out, in)
  const void *norm_weight, *norm_bias;
  void *store, *store_where;  // where the norm's result, and kWhere in the usual order, goes as well
  int out;
  int pitch, step;  // bytes from a row of the weight to the next, from a part to the next
  uint32_t code;
};
constexpr int kMaxLayers = 8;  // of a launch, ends included

// What a pair of blocks executes: layers from `first` on, after loading kX, kIn, kQueryPos, kPosition (null: not).
enum RoleName { kRowsRole, kBoxRole, kClassRole, kRoles };
struct Role {
  int first;
  int usual_order;  // bits: of which channels are not in the order of tiles
  const void* load[4];
  const void* narrow_bias;  // of its narrow layer
  int narrow_out;
};

// Counters of what has been done, over all steps.
struct Progress {
  unsigned* rows_blocks;  // blocks of rows_kernel
  unsigned* rows;         // of a tile of 16 rows: its blocks of rows_kernel,
  unsigned* box;          // and of the box branch
  unsigned* heads;        // of a tile of queries of a scene: heads
};

struct Fused {
  Layer layer[kMaxLayers];
  Role role[kRoles];
  int64_t rows;
  int queries, keys;  // keys: queries, up to a multiple of 32
  int step, layers;
  Progress progress;
  int counters;        // of progress, from rows_blocks on
  int query_tile;      // queries of a block of attention_kernel
  int64_t heads_size;  // elements of q, of k, of v of a step; steps take turns with two
  bool signals;        // rows_kernel: at its end the step's rows are done
  const void *encoder_weight, *encoder_bias;  // position_encoder.0
  float* points;                              // (rows, 3)
  void *x, *query_pos, *mixed;                // (rows, 256) in the order of tiles
  void *q, *k, *v;                            // (B, heads, keys, 32), and v (B, heads, 32, keys)
  AnyFloat given, boxes, moved;
  void* classes;
  int num_classes, code_size;
  bool sample;
  // sampling
  int cams, levels, activation;
  AnyFloat lidar2img;
  int64_t lidar2img_strides[4];
  float* cameras;  // lidar2img, but for its last row: (B, cams, 3, 4)
  float low[3], size[3], image[2], depth_eps, clamp[2];
  bool in_image;
  FusedLevel level[kMaxCameraLevels];
  int plain_levels = 0;  // of the first four: kAdjacent, not pooled, strides below 2^31

  explicit Fused(const TransformerDecoder& d)
      : given(d.reference_points), boxes(d.boxes), moved(d.points), lidar2img(d.lidar2img) {}
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// With SVEXPORT_STAGES, the clock at the ends of stages, for benchmarks/transformer_decoder.py: of each step, kernel
// (rows, branches, attention), block.
#ifdef SVEXPORT_STAGES
constexpr int kStages = 24, kStageBlocks = 160;
__device__ long long stage_clocks[8][3][kStageBlocks][kStages];

__device__ __forceinline__ void record_stage(int step, int kernel, int block, int stage) {
  if (threadIdx.x != 0 || block >= kStageBlocks || step >= 8) return;
  long long clock, time;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  stage_clocks[step][kernel][block][stage] = clock;
  if (stage == 2) stage_clocks[step][kernel][block][22] = time;
  stage_clocks[step][kernel][block][23] = time;
}
#define STAGE(kernel, block, stage) record_stage(a.step, kernel, block, stage)
#else
#define STAGE(kernel, block, stage) (static_cast<void>(kernel), static_cast<void>(block), static_cast<void>(stage))
#endif

// ---------------------------------------------------------------- pairs of blocks

__device__ __forceinline__ int pair_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// What the blocks of a pair send one another. Every store counts its bytes at a barrier of the block that it goes to: a
// barrier of the whole cluster orders stores by a fence of the whole device, which takes longer than the exchange. Two
// barriers in turn: the other block is never more than one exchange ahead.
class Pair {
 public:
  // received: two in shared memory.
  __device__ __forceinline__ explicit Pair(uint64_t* received) : barrier_(shared_address(received)) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(barrier_), "r"(pair_rank() ^ 1));
    away_ = address - barrier_;
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_ + 8) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  // Until the other block runs; before the first exchange.
  __device__ __forceinline__ void wait_for_other() const { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

  // Into both blocks' shared memory.
  __device__ __forceinline__ void send(void* p, uint2 v) const {
    *static_cast<uint2*>(p) = v;
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(shared_address(p) + away_),
                 "r"(v.x), "r"(v.y), "r"(barrier_ + count_ % 2 * 8 + away_)
                 : "memory");
  }
  __device__ __forceinline__ void send(void* p, uint4 v) const {
    *static_cast<uint4*>(p) = v;
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     shared_address(p) + away_),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier_ + count_ % 2 * 8 + away_)
                 : "memory");
  }

  // The end of an exchange: until all threads have sent, and so many bytes have come.
  __device__ __forceinline__ void receive(int bytes) {
    const uint32_t barrier = barrier_ + count_ % 2 * 8;
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    }
    __syncthreads();
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(done)
          : "r"(barrier), "r"(count_ / 2 % 2)
          : "memory");
    }
    ++count_;
  }

 private:
  uint32_t barrier_, away_, count_ = 0;
};

// ---------------------------------------------------------------- progress

// By one thread, after a barrier of the block and a fence: what the block has done can be read by who sees it counted.
__device__ __forceinline__ void signal(unsigned* counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void await(const unsigned* counter, unsigned count) {
  unsigned seen;
  while (true) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if (seen >= count) break;
    __nanosleep(32);
  }
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// ---------------------------------------------------------------- tiles

// Channels are in the order in which mma takes the inputs of weights that are read 16 bytes at a time: of 32, channels
// 8 p + 2 j and 8 p + 2 j + 1 are at 8 j + 2 p.

// Where a row has an even channel.
__device__ __forceinline__ int place(int channel) {
  return channel / 32 * 32 + channel % 8 / 2 * 8 + channel % 32 / 8 * 2;
}

// The first of the lane's channels of a row: two each from here, and 8, 16, 24 further on.
__device__ __forceinline__ int first_channel(int lane) { return lane / 4 * 32 + lane % 4 * 2; }

// The lane's part of a row, 16 bytes.
template <class T>
__device__ __forceinline__ uint4& part_of(T* row, int lane) {
  return reinterpret_cast<uint4*>(row)[lane];
}

// The lane's 16 bytes of a row in the order of tiles, from those in the usual order, or back: four lanes exchange words.
__device__ __forceinline__ uint4 reorder(uint4 v, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? v.x : v.y, 1), b = __shfl_xor_sync(0xffffffffu, odd ? v.z : v.w, 1);
  (odd ? v.x : v.y) = a, (odd ? v.z : v.w) = b;
  a = __shfl_xor_sync(0xffffffffu, upper ? v.x : v.z, 2), b = __shfl_xor_sync(0xffffffffu, upper ? v.y : v.w, 2);
  (upper ? v.x : v.z) = a, (upper ? v.y : v.w) = b;
  return v;
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

// Two adjacent rows of a tile from global memory, zeros beyond the last.
template <class T>
__device__ __forceinline__ void load_rows(T* to, const void* from, bool usual_order, int64_t row, int64_t rows, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = row + i < rows;
    const uint4* at = static_cast<const uint4*>(from) + (there ? (row + i) * 32 + lane : 0);
    if (!usual_order) {
      copy_async(&part_of(to + i * kPitch, lane), at, there);
    } else {
      part_of(to + i * kPitch, lane) = reorder(there ? *at : uint4{}, lane);
    }
  }
}

// ---------------------------------------------------------------- matrix products

__device__ __forceinline__ uint4 fetch(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Where a lane (4 * group + pair) finds its part of 16 rows of a matrix (out, in): rows `group` and `group` + 8, of every
// 32 columns the 8 from 8 * pair on. Null: nowhere.
struct Lines {
  const uint4 *low, *high;
};

// Weights of 16 outputs and 256 inputs, [2 * i]: those of the row `group`, [2 * i + 1]: of `group` + 8, of 32 inputs from
// 32 * i on. The next take their place as they are used.
struct Chunk {
  uint4 at[16];

  __device__ __forceinline__ void fetch_step(const Lines& from, int i) {
    if (from.low) at[2 * i] = fetch(from.low + i * 4), at[2 * i + 1] = fetch(from.high + i * 4);
  }
  // All at once, from somewhere.
  __device__ __forceinline__ void fetch_from(const Lines& from) {
#pragma unroll
    for (int i = 0; i < 8; ++i) at[2 * i] = fetch(from.low + i * 4), at[2 * i + 1] = fetch(from.high + i * 4);
  }
};

// 16 rows x 16 outputs; [0]: outputs 0 to 7, [1]: 8 to 15.
struct Sum {
  float at[2][4];
};

// sum += a tile * the chunk, 32 inputs at a time, while the next chunk is fetched. from: where the tile has 8 channels of
// row lane % 16, those of the upper lanes after those of the lower.
template <class T>
__device__ __forceinline__ void multiply(Sum& sum, uint32_t from, Chunk& w, const Lines& next) {
  Sum odd{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t first[4], second[4];
    load_matrix(first, from + i * 64);
    load_matrix(second, from + i * 64 + 32);
    const uint4 a = w.at[2 * i], b = w.at[2 * i + 1];
    mma<T>(sum.at[0], first, a.x, a.y);
    mma<T>(sum.at[1], first, b.x, b.y);
    mma<T>(odd.at[0], second, a.z, a.w);
    mma<T>(odd.at[1], second, b.z, b.w);
    w.fetch_step(next, i);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum.at[i / 4][i % 4] += odd.at[i / 4][i % 4];
}

// ---------------------------------------------------------------- norms

// Weight and bias of a norm, of the lane's channels.
struct Affine {
  uint32_t weight[4], bias[4];

  __device__ __forceinline__ void fetch(const Layer& l, int lane) {
    const uint32_t* from_weight = static_cast<const uint32_t*>(l.norm_weight) + first_channel(lane) / 2;
    const uint32_t* from_bias = static_cast<const uint32_t*>(l.norm_bias) + first_channel(lane) / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = __ldg(from_weight + 4 * i), bias[i] = __ldg(from_bias + 4 * i);
  }
};

// Layer norm of 8 channels a lane, Rows rows at once.
template <class T, int Rows>
__device__ __forceinline__ void normalize(float (&x)[Rows][8], const Affine& affine, bool with_relu) {
  float mean[Rows], squares[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    mean[r] = ((x[r][0] + x[r][1]) + (x[r][2] + x[r][3])) + ((x[r][4] + x[r][5]) + (x[r][6] + x[r][7]));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) mean[r] += __shfl_xor_sync(0xffffffffu, mean[r], step);
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    mean[r] *= 1.f / kChannels;
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      x[r][i] -= mean[r], x[r][i + 1] -= mean[r];
      even = fmaf(x[r][i], x[r][i], even), odd = fmaf(x[r][i + 1], x[r][i + 1], odd);
    }
    squares[r] = even + odd;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], step);
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const float scale = rsqrtf(squares[r] * (1.f / kChannels) + kEps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 gamma = unpack<T>(affine.weight[i]), beta = unpack<T>(affine.bias[i]);
      x[r][2 * i] = fmaf(x[r][2 * i] * scale, gamma.x, beta.x);
      x[r][2 * i + 1] = fmaf(x[r][2 * i + 1] * scale, gamma.y, beta.y);
      if (with_relu) x[r][2 * i] = relu(x[r][2 * i]), x[r][2 * i + 1] = relu(x[r][2 * i + 1]);
    }
  }
}

// ---------------------------------------------------------------- sampling

// u and v of camera `lane`; not seen: u = NaN.
__device__ __forceinline__ void project(const Fused& a, int64_t row, int batch, float& u, float& v) {
  const int lane = threadIdx.x % 32;
  u = v = NAN;
  if (row >= a.rows || lane >= a.cams) return;
  float place[3], image[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) place[i] = fmaf(a.points[row * 3 + i], a.size[i], a.low[i]);
  const float4* matrix = reinterpret_cast<const float4*>(a.cameras) + (batch * a.cams + lane) * 3;
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
    at_image[i] = image[i] / depth / a.image[1 - i];
    const float centred = 2 * at_image[i] - 1;
    seen = seen && (a.in_image ? centred > -1 && centred < 1 : !isnan(at_image[i]));
    if (!a.in_image) at_image[i] = fminf(fmaxf(at_image[i], a.clamp[0]), a.clamp[1]);
  }
  if (seen) u = at_image[0], v = at_image[1];
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

// sampled += what one camera sees on one level; of a pooled level pixels are the largest of four of the map's.
template <class T, int Format>
__device__ __forceinline__ void sample_level(const FusedLevel& l, const Place& p, float (&sampled)[8]) {
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

// sum += what all cameras see on all levels, by a warp. weights: of camera and level c * levels + l, in lanes' first and
// second. The pixels of four plain levels are on their way at once; a lane finds the place on one of them.
template <class T>
__device__ __forceinline__ void sample(const Fused& a, int batch, float u, float v, const float (&weights)[2],
                                       float (&sum)[8]) {
  const int lane = threadIdx.x % 32;
  auto weight_of = [&](int which) {
    const float even = __shfl_sync(0xffffffffu, weights[0], which % 32);
    const float odd = __shfl_sync(0xffffffffu, weights[1], which % 32);
    return which < 32 ? even : odd;
  };
  auto add = [&](float weight, const float (&sampled)[8]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] = fmaf(isnan(sampled[c]) ? 0.f : sampled[c], weight, sum[c]);
  };
#pragma unroll 1
  for (unsigned seen = __ballot_sync(0xffffffffu, !isnan(u)); seen; seen &= seen - 1) {
    const int cam = __ffs(seen) - 1;
    const float cam_u = __shfl_sync(0xffffffffu, u, cam), cam_v = __shfl_sync(0xffffffffu, v, cam);
    if (a.plain_levels > 0) {
      const int mine = min(lane % 4, a.plain_levels - 1);
      const FusedLevel& l = a.level[mine];
      const Place p = place_on(l, batch, cam, cam_u, cam_v);
      const uint64_t corner = reinterpret_cast<uint64_t>(static_cast<const T*>(l.data) + p.image + p.y.index[0] * l.y +
                                                         p.x.index[0] * l.x);
      const int right = (p.x.index[1] - p.x.index[0]) * static_cast<int>(l.x);
      const int down = (p.y.index[1] - p.y.index[0]) * static_cast<int>(l.y);
      const float weight = weight_of(cam * a.levels + mine) * l.scale;
      uint4 taps[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < a.plain_levels) {
          const T* from = reinterpret_cast<const T*>(__shfl_sync(0xffffffffu, corner, i)) + lane * 8;
          const int to_right = __shfl_sync(0xffffffffu, right, i), to_below = __shfl_sync(0xffffffffu, down, i);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            taps[i][j] = __ldg(reinterpret_cast<const uint4*>(from + (j % 2 ? to_right : 0) + (j / 2 ? to_below : 0)));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < a.plain_levels) {
          float sampled[8] = {};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float tap = p.y.weight[j / 2] * p.x.weight[j % 2];
            add_tap<T, kAdjacent>(taps[i][j], __shfl_sync(0xffffffffu, tap, i), sampled);
          }
          add(__shfl_sync(0xffffffffu, weight, i), sampled);
        }
      }
    }
#pragma unroll 1
    for (int level = a.plain_levels; level < a.levels; ++level) {
      const FusedLevel& l = a.level[level];
      const Place p = place_on(l, batch, cam, cam_u, cam_v);
      float sampled[8] = {};
      if (l.format == kAdjacent) {
        sample_level<T, kAdjacent>(l, p, sampled);
      } else if (l.format == kBytes) {
        sample_level<T, kBytes>(l, p, sampled);
      } else {
        sample_level<T, kStrided>(l, p, sampled);
      }
      add(weight_of(cam * a.levels + level) * l.scale, sampled);
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

// ---------------------------------------------------------------- a role: layers, one after the other

template <class T>
struct RowsShared {
  uint64_t received[2];
  float logits[kRows * kNarrow];
  float narrow_bias[kNarrow];
  float2 seen[kRows / kPair][32];  // where a camera sees the points of the rows that the block samples; not: NaN
  float points[kRows * 3], encoded[kRows * 3];
  int batch[kRows], index[kRows];          // of a row: the scene, and the query there
  alignas(16) T encoder[4 * kChannels];    // weight (256, 3) and bias of the position's first layer
  alignas(16) T tiles[1];

  static constexpr size_t bytes(int tiles) { return offsetof(RowsShared, tiles) + tiles * kTile * sizeof(T); }
};

// The end of the box branch, and the first layer of the position's encoding: 8 channels of two rows a lane, to kSum.
template <class T>
__device__ __forceinline__ void move_points(const Fused& a, int64_t row0, int rank, RowsShared<T>& s, int warp, int lane) {
  const bool encodes = a.step < a.layers;
  const int thread = warp * 32 + lane;
  auto code = [&](int row, int j) { return s.logits[row * kNarrow + j]; };
  if (thread < kRows * 3) {
    const int row = thread / 3, axis = thread % 3;
    float point = s.points[thread];
    if (a.step > 0) {
      point = sigmoid(code(row, axis + axis / 2 * 2) + inverse_sigmoid(point));
      s.points[thread] = point;
      if (rank == 0 && row0 + row < a.rows) {
        a.points[row0 * 3 + thread] = point;
        if (!encodes) a.moved.set(row0 * 3 + thread, point);
      }
    }
    s.encoded[thread] = to_float(from_float<T>(inverse_sigmoid(point)));
  }
  __syncthreads();
  if (!encodes) {
    for (int i = thread; rank == 0 && i < kRows * a.code_size; i += kThreads) {
      const int row = i / a.code_size, j = i % a.code_size, axis = j < 2 ? j : j == 4 ? 2 : -1;
      if (row0 + row >= a.rows) continue;
      const float value = axis < 0 ? code(row, j) : s.points[row * 3 + axis] * a.size[axis] + a.low[axis];
      a.boxes.set((row0 + row) * a.code_size + j, value);
    }
    return;
  }
  const int row = warp * 2;
  float x[2][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = first_channel(lane) + 8 * i;
    const uint32_t* weight = reinterpret_cast<const uint32_t*>(s.encoder + channel * 3);
    const float2 first = unpack<T>(weight[0]), middle = unpack<T>(weight[1]), last = unpack<T>(weight[2]);
    const float2 bias = unpack<T>(*reinterpret_cast<const uint32_t*>(s.encoder + 3 * kChannels + channel));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* p = s.encoded + (row + r) * 3;
      x[r][2 * i] = fmaf(p[2], middle.x, fmaf(p[1], first.y, fmaf(p[0], first.x, bias.x)));
      x[r][2 * i + 1] = fmaf(p[2], last.y, fmaf(p[1], last.x, fmaf(p[0], middle.y, bias.y)));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) part_of(s.tiles + kSum * kTile + (row + r) * kPitch, lane) = pack8<T>(x[r]);
}

// kRowsRole, or one of the two others.
template <class T, bool Rows>
__device__ __forceinline__ void execute(const Fused& a, const Role& role, int64_t row0, RowsShared<T>& s) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // or it is read from afar again and again
  const int warp = thread / 32, lane = thread % 32, group = lane / 4, pair = lane % 4;
  const int rank = pair_rank();
  const int mine = (rank * 8 + warp) * 16;                  // the warp's 16 of 256 outputs,
  const int at = mine / 32 * 32 + pair * 8 + warp % 2 * 4;  // and where a row has the lane's four
  const int kernel = Rows ? 0 : 1, block = blockIdx.x;
  auto tile = [&](int which) { return s.tiles + which * kTile; };
  T* const product = s.tiles + group * kPitch + at;  // the lane's four of row `group` of the first tile
  const uint32_t operand = shared_address(s.tiles + lane % 16 * kPitch + lane / 16 * 8);

  auto lines_of = [&](const Layer& l, uint32_t code, int part) {
    if (code & kEnd) return Lines{};
    const char* from = static_cast<const char*>(l.weight) + part * l.step + pair * 16;
    int low = mine + group, high = low + 8;
    if (code & kIsNarrow) {
      if (warp * 16 >= l.out) return Lines{};
      low = min(warp * 16 + group, l.out - 1), high = min(warp * 16 + group + 8, l.out - 1);
    }
    return Lines{reinterpret_cast<const uint4*>(from + low * l.pitch), reinterpret_cast<const uint4*>(from + high * l.pitch)};
  };
  auto fetch_bias = [&](uint32_t (&bias)[2], const Layer& l, uint32_t code, int part) {
    if (code & (kEnd | kIsNarrow)) return;
    const int output = mine + pair * 2 + (code & kWideIn ? 0 : part * kChannels);
    const uint32_t* from = static_cast<const uint32_t*>(l.bias) + output / 2;
    bias[0] = __ldg(from), bias[1] = __ldg(from + 4);
  };

  STAGE(kernel, block, 0);
  Pair blocks(s.received);
  int current = role.first, part = 0, stage = 4;
  uint32_t code = a.layer[current].code;
  Chunk weights;
  uint32_t bias[2] = {};
  Affine affine;
  if (!(code & kEnd)) weights.fetch_from(lines_of(a.layer[current], code, 0));
  fetch_bias(bias, a.layer[current], code, 0);
  if (code & kNorms) affine.fetch(a.layer[current], lane);
  if (thread < kNarrow && role.narrow_bias) {
    s.narrow_bias[thread] =
        to_float(load_if<T, 1>(static_cast<const T*>(role.narrow_bias) + thread, thread < role.narrow_out).at[0]);
  }
  if (!Rows && a.encoder_weight && thread < kChannels / 2) {
    const bool is_weight = thread < 3 * kChannels / 8;
    const uint4* from = static_cast<const uint4*>(is_weight ? a.encoder_weight : a.encoder_bias);
    copy_async(s.encoder + thread * 8, from + thread - (is_weight ? 0 : 3 * kChannels / 8), true);
  }
  auto load = [&](int i, int which, int row) {
    if (role.load[i]) load_rows(tile(which) + row * kPitch, role.load[i], role.usual_order >> i & 1, row0 + row, a.rows, lane);
  };
  if (Rows) load(2, kQueryPos, warp * 2);
  STAGE(kernel, block, 1);
  const int64_t this_tile = row0 / kRows;
  if (Rows) {
    if (thread < kRows) {
      const unsigned row = static_cast<unsigned>(min(row0 + thread, a.rows - 1));
      const int scene = row / a.queries, index = row % a.queries;
      s.batch[thread] = scene, s.index[thread] = index;
      if (a.step > 0) {
        await(a.progress.heads + scene * ceil_div(a.queries, a.query_tile) + index / a.query_tile, kHeads * a.step);
      }
    }
  } else if (thread == 0) {
    await(a.progress.rows + this_tile, kPair * a.step);
  }
  __syncthreads();
  STAGE(kernel, block, 2);

  load(0, kX, warp * 2);
  if (Rows) {
    load(1, kIn, warp * 2);
    if (!a.sample) load(3, kPosition, warp * 2);
  } else if (thread < kRows * 3) {
    s.points[thread] = row0 + thread / 3 < a.rows ? a.points[row0 * 3 + thread] : 0.5f;
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  blocks.wait_for_other();
  STAGE(kernel, block, 3);

  if (Rows && a.step == 0) {  // where = query + query_pos, and both in the order of tiles for the steps to come
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 2 + r;
      const uint4 x = part_of(tile(kX) + row * kPitch, lane), position = part_of(tile(kQueryPos) + row * kPitch, lane);
      part_of(tile(kWhere) + row * kPitch, lane) = add8<T>(x, position);
      if (row / (kRows / kPair) == rank && row0 + row < a.rows) {
        part_of(static_cast<T*>(a.x) + (row0 + row) * kChannels, lane) = x;
        part_of(static_cast<T*>(a.query_pos) + (row0 + row) * kChannels, lane) = position;
      }
    }
    __syncthreads();
  }

  Sum sum{};
#pragma unroll 1
  while (true) {
    if (!Rows && (code & kMoves) && part == 0) {
      move_points(a, row0, rank, s, warp, lane);
      STAGE(kernel, block, stage++);
    }
    if (Rows && (code & kSamples) && part == 0) {
      const int row = rank * (kRows / kPair) + warp;
      const int batch = static_cast<unsigned>(min(row0 + row, a.rows - 1)) / a.queries;
      const float2 seen = s.seen[warp][lane];
      float logits[2] = {s.logits[row * kNarrow + lane], s.logits[row * kNarrow + lane + 32]}, sampled[8] = {};
      activate(a.activation, role.narrow_out, logits);
      sample<T>(a, batch, seen.x, seen.y, logits, sampled);
      weights.fetch_from(lines_of(a.layer[current], code, 0));
      STAGE(kernel, block, stage++);
      blocks.send(&part_of(tile(kIn) + row * kPitch, lane), reorder(pack8<T>(sampled), lane));
      copy_async_wait<0>();  // the position
      blocks.receive(kRows / kPair * kChannels * sizeof(T));
      STAGE(kernel, block, stage++);
    }
    if ((code & kNorms) && part == 0) {
      const int row = warp * 2;
      float x[2][8];
#pragma unroll
      for (int r = 0; r < 2; ++r) unpack8<T>(part_of(tile(field(code, kNormFrom)) + (row + r) * kPitch, lane), x[r]);
      normalize<T, 2>(x, affine, code & kNormRelu);
      void* const store = a.layer[current].store;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 y = pack8<T>(x[r]);
        const bool stores = store && row / (kRows / kPair) == rank && row0 + row + r < a.rows;
        part_of(tile(kX) + (row + r) * kPitch, lane) = y;
        if (stores) part_of(static_cast<T*>(store) + (row0 + row + r) * kChannels, lane) = y;
        if (Rows && (code & kAddsQueryPos)) {
          const uint4 where = add8<T>(y, part_of(tile(kQueryPos) + (row + r) * kPitch, lane));
          part_of(tile(kWhere) + (row + r) * kPitch, lane) = where;
          if (a.layer[current].store_where) {
            const uint4 usual = reorder(where, lane);
            if (stores) part_of(static_cast<T*>(a.layer[current].store_where) + (row0 + row + r) * kChannels, lane) = usual;
          }
        }
      }
      __syncthreads();
      STAGE(kernel, block, stage++);
    }
    if (code & kEnd) break;

    const bool done = part + 1 == field(code, kParts);
    const int next_part = done ? 0 : part + 1, input = code & kWideIn ? part : 0, output = code & kWideIn ? 0 : part;
    const Layer& next = a.layer[done ? current + 1 : current];
    const uint32_t next_code = next.code;
    uint32_t next_bias[2] = {};
    if (Rows && (code & kIsNarrow) && warp >= 4) {  // warps without logits: where the cameras see the points
      if (lane == 0) await(a.progress.box + this_tile, kPair * a.step);
      __syncwarp();
      load(3, kPosition, (warp - 4) * 4);
      load(3, kPosition, (warp - 4) * 4 + 2);
      copy_async_commit();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int slot = (warp - 4) * 2 + i;
        const int64_t row = row0 + rank * (kRows / kPair) + slot;
        float u, v;
        project(a, row, static_cast<unsigned>(min(row, a.rows - 1)) / a.queries, u, v);
        s.seen[slot][lane] = make_float2(u, v);
      }
    } else {
      multiply<T>(sum, operand + (field(code, kFrom) + input) * kTile * static_cast<int>(sizeof(T)), weights,
                  Rows && (next_code & kSamples) ? Lines{} : lines_of(next, next_code, next_part));
    }
    fetch_bias(next_bias, next, next_code, next_part);
    if (done && (next_code & kNorms)) affine.fetch(next, lane);

    if (done || !(code & kWideIn)) {  // else there are more inputs
      float y[2][4];
      float2 low = unpack<T>(bias[0]), high = unpack<T>(bias[1]);
      if (code & kIsNarrow) {
        const float* from = s.narrow_bias + (warp * 16 + pair * 2) % kNarrow;
        low = make_float2(from[0], from[1]), high = make_float2(from[8], from[9]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        y[r][0] = sum.at[0][2 * r] + low.x, y[r][1] = sum.at[0][2 * r + 1] + low.y;
        y[r][2] = sum.at[1][2 * r] + high.x, y[r][3] = sum.at[1][2 * r + 1] + high.y;
      }
      sum = Sum{};
      auto add = [&](int which) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint2 more = *reinterpret_cast<const uint2*>(product + which * kTile + 8 * r * kPitch);
          const float2 first = unpack<T>(more.x), second = unpack<T>(more.y);
          y[r][0] += first.x, y[r][1] += first.y, y[r][2] += second.x, y[r][3] += second.y;
        }
      };
      if (code & kAddsX) add(kX);
      if (const int which = field(code, kAdds)) add(which);
      if (code & kRelu) {
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j / 4][j % 4] = relu(y[j / 4][j % 4]);
      }
      if (!(code & (kIsNarrow | kToHeads | kToValues))) {
        T* const to = product + (field(code, kTo) + output) * kTile;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          blocks.send(to + 8 * r * kPitch, make_uint2(pack<T>(y[r][0], y[r][1]), pack<T>(y[r][2], y[r][3])));
        }
        if (done) blocks.receive((output + 1) * kRows * kChannels / kPair * static_cast<int>(sizeof(T)));
      } else if (code & kIsNarrow) {
        if (warp < 4) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float* to = s.logits + (group + 8 * r) * kNarrow + warp * 16 + pair * 2;
            *reinterpret_cast<float2*>(to) = make_float2(y[r][0], y[r][1]);
            *reinterpret_cast<float2*>(to + 8) = make_float2(y[r][2], y[r][3]);
          }
        }
        __syncthreads();
      } else if (Rows) {
        const int64_t which = a.step % 2 * a.heads_size;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = group + 8 * r;
          if (row0 + row >= a.rows) continue;
          if (code & kToHeads) {  // queries scaled for exp2; dimensions in the order of tiles
            const float scale = output == 0 ? 0.17677669529663687f * 1.4426950408889634f : 1.f;  // log2(e) / sqrt(32)
            const int64_t head = s.batch[row] * kHeads + at / kHeadDim;
            T* to = static_cast<T*>(output == 0 ? a.q : a.k) + which + (head * a.keys + s.index[row]) * kHeadDim + at % kHeadDim;
            *reinterpret_cast<uint2*>(to) =
                make_uint2(pack<T>(y[r][0] * scale, y[r][1] * scale), pack<T>(y[r][2] * scale, y[r][3] * scale));
          } else {
            const int64_t line = s.batch[row] * static_cast<int64_t>(kChannels) + mine + pair * 2;
            T* to = static_cast<T*>(a.v) + which + line * a.keys + s.index[row];
#pragma unroll
            for (int j = 0; j < 4; ++j) to[(j % 2 + j / 2 * 8) * static_cast<int64_t>(a.keys)] = from_float<T>(y[r][j]);
          }
        }
      }
    }
    if (done) {
      STAGE(kernel, block, stage++);
      ++current;
    }
    bias[0] = next_bias[0], bias[1] = next_bias[1], code = next_code, part = next_part;
  }

  if (Rows ? a.signals : a.step < a.layers) {
    __syncthreads();
    if (thread == 0) {
      __threadfence();
      signal((Rows ? a.progress.rows : a.progress.box) + this_tile);
      if (Rows) signal(a.progress.rows_blocks);
    }
  }
}

template <class T>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1) rows_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(128) char memory[];
  start_next();
  if (a.step == 0) {  // the only kernel of this step, so what else is to be done in the beginning
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = first; i < a.counters; i += step) a.progress.rows_blocks[i] = 0;
    for (int64_t i = first; i < a.rows * 3; i += step) a.points[i] = a.given.get(i);
    for (int64_t i = first; i < a.rows / a.queries * a.cams * 12; i += step) {
      const int64_t camera = i / 12, part = i % 12;
      a.cameras[i] = a.lidar2img.get(camera / a.cams * a.lidar2img_strides[0] + camera % a.cams * a.lidar2img_strides[1] +
                                     part / 4 * a.lidar2img_strides[2] + part % 4 * a.lidar2img_strides[3]);
    }
    const int padding = a.keys - a.queries;  // keys that are not, and their values: they are multiplied with zero
    for (int64_t i = first; i < 2 * a.rows / a.queries * kChannels * padding; i += step) {
      const int64_t head = i / (padding * kHeadDim), at = i % (padding * kHeadDim);
      static_cast<T*>(a.v)[i / padding * a.keys + a.queries + i % padding] = from_float<T>(0.f);
      static_cast<T*>(a.k)[(head * a.keys + a.queries) * kHeadDim + at] = from_float<T>(0.f);
    }
  }
  execute<T, true>(a, a.role[kRowsRole], blockIdx.x / kPair * static_cast<int64_t>(kRows),
                   *reinterpret_cast<RowsShared<T>*>(memory));
  wait_for_previous();
}

// ---------------------------------------------------------------- attention

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr int kMergePitch = 40;  // floats of a row of partial results
struct AttentionShared {
  float sum[8][32][kMergePitch];
  float largest[8][32], total[8][32];
};

// 32 * Groups queries of a head. The warps share the queries in Groups, and the keys, 32 at a time, among those of a group.
// Dimensions and keys are permuted within a fragment so that each lane has 16 adjacent bytes of them.
template <class T, int Groups>
__device__ __forceinline__ void attend(const Fused& a, int block, AttentionShared& s) {
  constexpr int kShares = 8 / Groups;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % Groups, share = warp / Groups;
  const int tiles = ceil_div(a.queries, 32 * Groups), head = block % kHeads, tile = block / kHeads % tiles;
  const int64_t batch = block / kHeads / tiles;
  if (batch >= a.rows / a.queries) return;
  const int64_t start = a.step % 2 * a.heads_size + (batch * kHeads + head) * a.keys * kHeadDim;
  const uint4* keys = reinterpret_cast<const uint4*>(static_cast<const T*>(a.k) + start) + lane % 4;
  const uint4* values = reinterpret_cast<const uint4*>(static_cast<const T*>(a.v) + start) + lane % 4;
  const int blocks = a.keys / 32, pitch = a.keys / 8;
  STAGE(2, block, 0);
  STAGE(2, block, 2);

  uint32_t query[2][2][4];  // [16 queries][16 dimensions]
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint4 rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = tile * 32 * Groups + group * 32 + m * 16 + i * 8 + lane / 4;
      rows[i] = at < a.queries ? reinterpret_cast<const uint4*>(static_cast<const T*>(a.q) + start)[at * 4 + lane % 4] : uint4{};
    }
    query[m][0][0] = rows[0].x, query[m][0][1] = rows[1].x, query[m][0][2] = rows[0].y, query[m][0][3] = rows[1].y;
    query[m][1][0] = rows[0].z, query[m][1][1] = rows[1].z, query[m][1][2] = rows[0].w, query[m][1][3] = rows[1].w;
  }

  float sum[2][4][4] = {}, largest[2][2], total[2][2] = {};
  for (auto& m : largest) m[0] = m[1] = -INFINITY;
  uint4 key[4], value[4];
  auto fetch_keys = [&](int b) {
#pragma unroll
    for (int t = 0; t < 4; ++t) key[t] = keys[(b * 32 + lane / 8 * 8 + 2 * t + lane / 4 % 2) * 4];
  };
  if (share < blocks) fetch_keys(share);
  STAGE(2, block, 3);
  for (int b = share; b < blocks; b += kShares) {
#pragma unroll
    for (int t = 0; t < 4; ++t) value[t] = values[(t * 8 + lane / 4) * pitch + b * 4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float score[4][4] = {};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        mma<T>(score[t], query[m][0], key[t].x, key[t].y);
        mma<T>(score[t], query[m][1], key[t].z, key[t].w);
      }
      if (m == 1 && b + kShares < blocks) fetch_keys(b + kShares);
      if (b == blocks - 1) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (b * 32 + lane % 4 * 8 + 2 * t + i % 2 >= a.queries) score[t][i] = -INFINITY;
          }
        }
      }
      uint32_t weights[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // rows lane / 4 + 8 * i
        const float higher = row_max(score, i, largest[m][i]), shrink = exp2_approximate(largest[m][i] - higher);
        largest[m][i] = higher;
        total[m][i] *= shrink;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const float p = exp2_approximate(score[t][2 * i] - higher), q = exp2_approximate(score[t][2 * i + 1] - higher);
          total[m][i] += p + q;
          weights[t / 2][t % 2 * 2 + i] = pack<T>(p, q);
          sum[m][t][2 * i] *= shrink, sum[m][t][2 * i + 1] *= shrink;
        }
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        mma<T>(sum[m][t], weights[0], value[t].x, value[t].y);
        mma<T>(sum[m][t], weights[1], value[t].z, value[t].w);
      }
    }
  }

  STAGE(2, block, 4);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float all = quad_sum(total[m][i]);
      const int row = m * 16 + i * 8 + lane / 4;
      if (lane % 4 == 0) s.largest[warp][row] = largest[m][i], s.total[warp][row] = all;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        *reinterpret_cast<float2*>(&s.sum[warp][row][t * 8 + lane % 4 * 2]) = make_float2(sum[m][t][2 * i], sum[m][t][2 * i + 1]);
      }
    }
  }
  __syncthreads();
  STAGE(2, block, 5);

  constexpr int kLanes = 8 / Groups, kEach = kHeadDim / kLanes;  // lanes of a row, dimensions of a lane
  const int row = threadIdx.x / kLanes, dim = threadIdx.x % kLanes * kEach;
  const int at = tile * 32 * Groups + row;
  float highest = -INFINITY, all = 0, result[kEach] = {};
#pragma unroll
  for (int i = 0; i < kShares; ++i) highest = fmaxf(highest, s.largest[i * Groups + row / 32][row % 32]);
#pragma unroll
  for (int i = 0; i < kShares; ++i) {
    const int from = i * Groups + row / 32;
    const float by = exp2_approximate(s.largest[from][row % 32] - highest);
    all += by * s.total[from][row % 32];
#pragma unroll
    for (int j = 0; j < kEach; j += 4) {
      const float4 part = *reinterpret_cast<const float4*>(&s.sum[from][row % 32][dim + j]);
      result[j] += by * part.x, result[j + 1] += by * part.y, result[j + 2] += by * part.z, result[j + 3] += by * part.w;
    }
  }
  if (at < a.queries) {
    T* to = static_cast<T*>(a.mixed) + (batch * a.queries + at) * kChannels + head * kHeadDim;
#pragma unroll
    for (int j = 0; j < kEach; j += 2) {
      *reinterpret_cast<uint32_t*>(to + place(dim + j)) = pack<T>(result[j] / all, result[j + 1] / all);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    signal(a.progress.heads + batch * tiles + tile);
  }
  STAGE(2, block, 6);
}

// ---------------------------------------------------------------- attention_kernel

template <class T, int Groups>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(128) char memory[];
  const int branch_blocks = static_cast<int>(ceil_div<int64_t>(a.rows, kRows)) * kPair, block = blockIdx.x;
  const bool last = a.step == a.layers;
  if (a.step == 0) wait_for_previous();  // which clears the counters
  start_next();
  if (block >= branch_blocks && !last) {
    if (threadIdx.x == 0) await(a.progress.rows_blocks, static_cast<unsigned>(branch_blocks) * a.step);
    __syncthreads();
    attend<T, Groups>(a, block - branch_blocks, *reinterpret_cast<AttentionShared*>(memory));
  } else {
    RowsShared<T>& s = *reinterpret_cast<RowsShared<T>*>(memory);
    const bool box = block < branch_blocks;
    const int64_t row0 = (block - (box ? 0 : branch_blocks)) / kPair * static_cast<int64_t>(kRows);
    execute<T, false>(a, a.role[box ? kBoxRole : kClassRole], row0, s);
    const int half = kRows / kPair;
    for (int i = threadIdx.x; !box && i < half * a.num_classes; i += kThreads) {
      const int row = pair_rank() * half + i / a.num_classes, column = i % a.num_classes;
      if (row0 + row < a.rows) {
        static_cast<T*>(a.classes)[(row0 + row) * a.num_classes + column] = from_float<T>(s.logits[row * kNarrow + column]);
      }
    }
  }
  wait_for_previous();
}

#else  // older devices have neither clusters nor dependent launches: the launcher does not get here

// What the launcher, which is compiled along, speaks of.
struct AttentionShared {};
template <class T>
struct RowsShared {
  static constexpr size_t bytes(int) { return 0; }
};

template <class T>
__global__ void rows_kernel(const __grid_constant__ Fused) {}
template <class T, int Groups>
__global__ void attention_kernel(const __grid_constant__ Fused) {}

#endif

// ---------------------------------------------------------------- launching

cudaError_t start(void (*kernel)(Fused), const Fused& a, int64_t blocks, size_t shared, bool early,
                  cudaStream_t stream) {
  const int memory = static_cast<int>(shared);
  SVEXPORT_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory));
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, memory, stream, early, a);
}

bool fits(const TransformerDecoder& d, const DecoderSizes& n) {
  if ((d.query.dtype != DType::kFloat16 && d.query.dtype != DType::kBFloat16) || n.channels != kChannels ||
      d.num_heads != kHeads || n.ffn % 256 != 0 || n.ffn > kMaxFfn || n.code_size > kNarrow || n.classes > kNarrow ||
      n.rows >= 1 << 30 || of_device(cudaDevAttrComputeCapabilityMajor) < 9) {
    return false;
  }
  uintptr_t bits = reinterpret_cast<uintptr_t>(d.query.data) | reinterpret_cast<uintptr_t>(d.query_pos.data);
  for (int i = 0; i < d.num_weights; ++i) bits |= reinterpret_cast<uintptr_t>(d.weights[i].data);
  return bits % 16 == 0;
}

// Whether rows_kernel samples, too; if not, the small kernels do between two of it.
bool samples_itself(const TransformerDecoder& d, const DecoderSizes& n) {
  return d.num_points == 1 && d.num_groups == 1 && !d.learned_offsets && n.logits <= kNarrow && n.cams <= 32 && !n.widen;
}

// A map whose channels are not adjacent is copied so, if that costs less than reading it as it is in every layer: by
// measurement for up to 14 KB a sample. The most for one and for all of them; neither grows when a size shrinks, so that
// scratch memory for the largest sizes is enough for others.
int64_t copy_limit(const TransformerDecoder& d, const DecoderSizes& n) {
  return n.rows * d.num_layers * d.num_points * (14 << 10);
}
constexpr int64_t kCopyLimit = 256 << 20;

int64_t copy_bytes(const TransformerDecoder& d, int i) {
  const Tensor& map = d.features[i];
  return map.dtype == d.query.dtype && map.strides[2] != 1 ? map.numel() * 2 : 0;
}

struct FusedBuffers {
  float *points, *cameras;
  char* copies;
  int64_t copies_size = 0;
  char *x, *query_pos, *where, *mixed, *position, *q, *k, *v, *logits, *offsets, *sampled;
  Progress progress;
  int64_t counters;

  FusedBuffers(Scratch& scratch, const TransformerDecoder& d, const DecoderSizes& n) {
    const int64_t keys = ceil_div(n.queries, 32) * 32, tensor = n.rows * kChannels * 2, heads = 2 * n.batch * keys * kChannels * 2;
    const bool split = !samples_itself(d, n);
    const int64_t tiles = ceil_div<int64_t>(n.rows, kRows);
    counters = 1 + 2 * tiles + n.batch * static_cast<int64_t>(ceil_div(n.queries, 32));
    progress.rows_blocks = scratch.take<unsigned>(counters);
    progress.rows = progress.rows_blocks + 1, progress.box = progress.rows + tiles, progress.heads = progress.box + tiles;
    points = scratch.take<float>(n.rows * 3);
    cameras = scratch.take<float>(static_cast<int64_t>(n.batch) * n.cams * 12);
    for (char** p : {&x, &query_pos, &mixed, &position}) *p = scratch.take<char>(tensor);
    for (char** p : {&q, &k, &v}) *p = scratch.take<char>(heads);
    where = scratch.take<char>(split ? tensor : 0);
    logits = scratch.take<char>(split ? n.rows * n.logits * 2 : 0);
    offsets = scratch.take<char>(split ? n.rows * n.offsets * 2 : 0);
    sampled = scratch.take<char>(n.widen ? n.rows * kChannels * 4 : 0);
    for (int i = 0; i < d.num_features; ++i) copies_size += std::min(copy_bytes(d, i), copy_limit(d, n));
    copies_size = std::min(copies_size, kCopyLimit);
    copies = scratch.take<char>(copies_size);
  }
};

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

bool plain(const FusedLevel& l) {
  return l.format == kAdjacent && !l.pool && l.height * l.y < 1ll << 31 && l.width * l.x < 1ll << 31;
}

// The lists of layers of a step, behind one another.
struct Lists {
  Fused& a;
  int count = 0;

  Role& begin(RoleName name) {
    a.role[name] = Role{};
    a.role[name].first = count;
    return a.role[name];
  }
  // weight and, after it, its bias; rows from `first` on.
  Layer& add(const Tensor* weight, uint32_t code, Tile from = kX, Tile to = kSum, int first = 0, int out = 0) {
    Layer& l = a.layer[count++] = Layer{};
    const int in = static_cast<int>(weight[0].sizes[1]);
    l.out = out ? out : static_cast<int>(weight[0].sizes[0]), l.pitch = in * 2;
    l.weight = static_cast<const char*>(weight[0].data) + first * l.pitch;
    l.bias = static_cast<const char*>(weight[1].data) + first * 2;
    l.step = in > kChannels ? kChannels * 2 : kChannels * l.pitch;
    if (in > kChannels) code |= kWideIn;
    if (l.out < kChannels) code |= kIsNarrow;
    l.code = code | std::max(1, std::max(l.out, in) / kChannels) << kParts | from << kFrom | to << kTo;
    return l;
  }
  Layer& end() {
    Layer& l = a.layer[count++] = Layer{};
    l.code = kEnd;
    return l;
  }
  static void norm(Layer& l, const Tensor* weight, uint32_t code = 0, void* store = nullptr, Tile from = kSum) {
    l.norm_weight = weight[0].data, l.norm_bias = weight[1].data, l.code |= kNorms | code | from << kNormFrom, l.store = store;
  }
};

template <class T>
cudaError_t run(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream) {
  Scratch scratch{static_cast<char*>(workspace)};
  const FusedBuffers b(scratch, d, n);
  Fused a(d);
  a.rows = n.rows, a.queries = n.queries, a.keys = ceil_div(n.queries, 32) * 32, a.layers = d.num_layers;
  a.classes = d.classes.data, a.points = b.points;
  a.x = b.x, a.query_pos = b.query_pos, a.mixed = b.mixed, a.q = b.q, a.k = b.k, a.v = b.v;
  a.num_classes = n.classes, a.code_size = n.code_size;
  a.cams = n.cams, a.levels = n.levels, a.activation = d.activation;
  for (int i = 0; i < 4; ++i) a.lidar2img_strides[i] = d.lidar2img.strides[i];
  a.cameras = b.cameras;
  a.progress = b.progress, a.counters = static_cast<int>(b.counters);
  a.heads_size = static_cast<int64_t>(n.batch) * a.keys * kChannels;

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
  for (int i = 0; i < d.num_features; ++i) {
    Tensor& map = maps[i] = d.features[i];
    const int64_t bytes = copy_bytes(d, i), *sizes = map.sizes;
    if (bytes == 0 || bytes > copy_limit(d, n) || used + bytes > b.copies_size) continue;
    map.data = b.copies + used;
    map.strides[2] = 1, map.strides[4] = sizes[2], map.strides[3] = sizes[4] * sizes[2];
    map.strides[1] = sizes[3] * map.strides[3], map.strides[0] = sizes[1] * map.strides[1];
    SVEXPORT_TRY(permute(d.features[i], map, stream));
    used += bytes;
  }
  copied.features = maps;
  const bool itself = samples_itself(d, n);
  for (int i = 0; itself && i < n.levels; ++i) {
    a.level[i] = level_of(copied, i);
    if (i < 4 && a.plain_levels == i && plain(a.level[i])) ++a.plain_levels;
  }

  const int64_t pairs = ceil_div<int64_t>(n.rows, kRows) * kPair;
  const size_t rows_shared = RowsShared<T>::bytes(kHidden + n.ffn / kChannels);
  const size_t attention_shared = std::max(RowsShared<T>::bytes(kBranchTiles), sizeof(AttentionShared));
  const int processors = of_device(cudaDevAttrMultiProcessorCount);
  const int groups = static_cast<int64_t>(ceil_div(n.queries, 32)) * kHeads * n.batch + pairs > 2 * processors ? 2 : 1;
  const int64_t attention = ceil_div(n.queries, 32 * groups) * static_cast<int64_t>(kHeads) * n.batch;
  a.query_tile = 32 * groups;

  for (a.step = 0; a.step <= d.num_layers; ++a.step) {
    const bool first = a.step == 0, last = a.step == d.num_layers;
    auto before = [&](DecoderWeight weight) { return weight_of(d, a.step - 1, weight); };
    auto after = [&](DecoderWeight weight) { return weight_of(d, a.step, weight); };

    Lists rows{a};
    auto begin_layer = [&](Role& role) {  // to where the cameras are sampled
      role.load[0] = b.x, role.load[1] = b.mixed, role.load[2] = b.query_pos;
      rows.add(before(kOutProj), kAddsX | (d.residual_query_pos ? kQueryPos << kAdds : 0), kIn);
    };
    if (!first && !itself) {
      begin_layer(rows.begin(kRowsRole));
      Layer& end = rows.end();
      rows.norm(end, before(kMhaNorm), kAddsQueryPos, b.x);
      end.store_where = b.where;
      a.sample = a.signals = false;
      SVEXPORT_TRY(start(rows_kernel<T>, a, pairs, rows_shared, true, stream));
      auto apply = [&](DecoderWeight weight, void* y) {
        const Tensor* w = before(weight);
        Linear layer;
        layer.x = b.where, layer.weight = w[0].data, layer.bias = w[1].data, layer.y = y;
        layer.rows = n.rows, layer.in = kChannels, layer.out = static_cast<int>(w[0].sizes[0]);
        return linear(layer, d.query.dtype, stream);
      };
      SVEXPORT_TRY(apply(kAttentionWeights, b.logits));
      if (d.learned_offsets) SVEXPORT_TRY(apply(kOffsets, b.offsets));
      if (n.widen) {
        SVEXPORT_TRY(svexport::sample(copied, n, b.points, b.logits, b.offsets, b.sampled, DType::kFloat32, stream));
        SVEXPORT_TRY(round_to(reinterpret_cast<const float*>(b.sampled), b.mixed, d.query.dtype, n.rows * kChannels, stream));
      } else {
        SVEXPORT_TRY(svexport::sample(copied, n, b.points, b.logits, b.offsets, b.mixed, d.query.dtype, stream));
      }
    }

    rows.count = 0;
    Role& role = rows.begin(kRowsRole);
    if (first) {
      role.load[0] = d.query.data, role.load[2] = d.query_pos.data, role.usual_order = 5;
    } else {
      role.load[3] = b.position;
      if (itself) {
        begin_layer(role);
        rows.norm(rows.add(before(kAttentionWeights), 0, kWhere), before(kMhaNorm), kAddsQueryPos);
        role.narrow_bias = before(kAttentionWeights)[1].data, role.narrow_out = n.logits;
      } else {
        role.load[0] = b.x, role.load[1] = b.mixed, role.load[2] = b.query_pos, role.usual_order = 2;
      }
      rows.add(before(kOutputProj), kAddsX | kPosition << kAdds | (itself ? kSamples : 0), kIn);
      rows.norm(rows.add(before(kFfn0), kRelu, kX, kHidden), before(kSvcaNorm));
      rows.add(before(kFfn2), kAddsX, kHidden);
    }
    Layer& then = last ? rows.end() : rows.add(after(kInProj), kToHeads, kWhere, kSum, 0, 2 * kChannels);
    if (!first) rows.norm(then, before(kFfnNorm), kAddsQueryPos, b.x);
    if (!last) {
      rows.add(after(kInProj), kToValues, kX, kSum, 2 * kChannels, kChannels);
      rows.end();
    }
    a.sample = !first && itself, a.signals = !first;
    SVEXPORT_TRY(start(rows_kernel<T>, a, pairs, rows_shared, !first && itself, stream));

    Lists branches{a};
    Role& box = branches.begin(kBoxRole);
    if (!first) {
      box.load[0] = b.x, box.narrow_bias = before(kReg4)[1].data, box.narrow_out = n.code_size;
      branches.add(before(kReg0), kRelu, kX, kIn);
      branches.add(before(kReg2), kRelu, kIn, kWhere);
      branches.add(before(kReg4), 0, kWhere);
    }
    a.encoder_weight = last ? nullptr : after(kPosition0)[0].data;
    a.encoder_bias = last ? nullptr : after(kPosition0)[1].data;
    if (last) {
      branches.end().code |= kMoves;
      Role& classes = branches.begin(kClassRole);
      classes.load[0] = b.x, classes.narrow_bias = weight_of(d, kCls6)[1].data, classes.narrow_out = n.classes;
      branches.add(weight_of(d, kCls0), 0);
      branches.norm(branches.add(weight_of(d, kCls3), 0, kX, kWhere), weight_of(d, kClsNorm0), kNormRelu);
      branches.norm(branches.add(weight_of(d, kCls6), 0), weight_of(d, kClsNorm1), kNormRelu, nullptr, kWhere);
      branches.end();
    } else {
      branches.norm(branches.add(after(kPosition3), kMoves, kX, kIn), after(kPositionNorm0), kNormRelu);
      branches.norm(branches.end(), after(kPositionNorm1), kNormRelu, b.position, kIn);
    }
    const auto kernel = groups == 1 ? attention_kernel<T, 1> : attention_kernel<T, 2>;
    SVEXPORT_TRY(start(kernel, a, pairs + (last ? pairs : attention + attention % 2), attention_shared, true, stream));
  }
  return cudaSuccess;
}

}  // namespace

size_t fused_decoder_workspace(const TransformerDecoder& d, const DecoderSizes& n) {
  Scratch scratch{nullptr};
  FusedBuffers buffers(scratch, d, n);
  return scratch.used;
}

cudaError_t fused_decoder(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream) {
  if (!fits(d, n)) return cudaErrorNotSupported;
  return d.query.dtype == DType::kFloat16 ? run<__half>(d, n, workspace, stream)
                                          : run<__nv_bfloat16>(d, n, workspace, stream);
}

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
