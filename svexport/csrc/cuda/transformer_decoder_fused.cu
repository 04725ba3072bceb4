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
// registers that mma wants it in, one matrix product ahead, the first before the kernel in front has ended (programmatic
// dependent launch).
//
// A step is a list of linear layers with what lies between them, made on the host, and a loop that executes it: code that
// is run once a step is fetched from far away, and waiting for it took longer than all else.
#include <algorithm>

#include "bilinear.cuh"
#include "gemm.h"
#include "mma.cuh"
#include "overlap.cuh"
#include "permute.h"
#include "transformer_decoder.cuh"

namespace svexport {
namespace {

constexpr int kChannels = 256, kHeads = 8, kHeadDim = 32;
constexpr int kRows = 16, kPair = 2, kThreads = 256;
constexpr int kPitch = kChannels + 8;  // of a row in shared memory, against bank conflicts
constexpr int kTile = kRows * kPitch;
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
enum Tile { kSum, kX, kIn, kWhere, kBranchTiles, kQueryPos = kBranchTiles, kPosition, kHidden, kNoTile = -1 };

// What is done before a layer, in this order.
enum Before {
  kMoves = 1,          // the box branch's end: points are moved, boxes written; their position's first layer, to kSum
  kSamples = 2,        // the cameras, by the logits, to kIn
  kNorms = 4,          // a tile, to kX
  kRelu = 8,           // after the norm
  kAddsQueryPos = 16,  // kWhere = kX + kQueryPos, after the norm
};
// Where the products go.
enum Result { kToTile, kToLogits, kToQueriesKeys, kToValues };

// A linear layer, its end included: the last one of a list has no weight, only what is done before.
struct Layer {
  const void *weight = nullptr, *bias = nullptr;  // rows first .. first + out - 1 of (.., in)
  int first = 0, out = 0, in = kChannels;
  int parts = 0;  // 256 inputs and outputs at a time; narrow layers have one
  const void *norm_weight = nullptr, *norm_bias = nullptr;
  void *store = nullptr, *store_where = nullptr;  // where the norm's result, and kWhere in the usual order, goes as well
  int norm_from = kSum, before = 0;
  int from = kX, result = kToTile, to = kSum;
  int add[2] = {kNoTile, kNoTile};
  bool relu = false;
};
constexpr int kMaxLayers = 17;

// What a pair of blocks executes: layers from `first` on, after loading kX, kIn, kQueryPos, kPosition (null: not).
enum RoleName { kRowsRole, kBoxRole, kClassRole, kRoles };
struct Role {
  int first = 0;
  const void* load[4] = {};
  int usual_order = 0;  // bits: of which channels are not in the order of tiles
};

struct Fused {
  Layer layer[kMaxLayers];
  Role role[kRoles];
  int64_t rows;
  int queries, keys;  // keys: queries, up to a multiple of 32
  int step, layers;
  const void *encoder_weight, *encoder_bias;  // position_encoder.0
  float* points;                              // (rows, 3)
  void *x, *query_pos, *mixed;                // (rows, 256) in the order of tiles
  void *q, *k, *v;                            // (B, heads, keys, 32), and v (B, heads, 32, keys)
  AnyFloat given, boxes, moved;
  void* classes;
  int num_classes, code_size, logits;
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

// ---------------------------------------------------------------- tiles

// Channels are in the order in which mma takes the inputs of weights that are read 16 bytes at a time: of 32, channels
// 8 p + 2 j and 8 p + 2 j + 1 are at 8 j + 2 p.

// Where a row has an even channel.
__device__ __forceinline__ int place(int channel) {
  return channel / 32 * 32 + channel % 8 / 2 * 8 + channel % 32 / 8 * 2;
}

// The first of the lane's channels of a row: two each from here, and 8, 16, 24 further on.
__device__ __forceinline__ int first_channel() { return threadIdx.x % 32 / 4 * 32 + threadIdx.x % 4 * 2; }

// The lane's part of a row, 16 bytes.
template <class T>
__device__ __forceinline__ uint4& part_of(T* row) {
  return reinterpret_cast<uint4*>(row)[threadIdx.x % 32];
}

// The lane's 16 bytes of a row in the order of tiles, from those in the usual order, or back: four lanes exchange words.
__device__ __forceinline__ uint4 reorder(uint4 v) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
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

// 16 rows of 256 from global memory, zeros beyond the last; two a warp.
template <class T>
__device__ __forceinline__ void load_tile(T* tile, const void* from, bool usual_order, int64_t row0, int64_t rows) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = threadIdx.x / 32 * 2 + i;
    const bool there = row0 + row < rows;
    const uint4* at = static_cast<const uint4*>(from) + (there ? (row0 + row) * 32 + threadIdx.x % 32 : 0);
    if (!usual_order) {
      copy_async(&part_of(tile + row * kPitch), at, there);
    } else {
      part_of(tile + row * kPitch) = reorder(there ? *at : uint4{});
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
  __device__ __forceinline__ void fetch_from(const Lines& from) {
#pragma unroll
    for (int i = 0; i < 8; ++i) fetch_step(from, i);
  }
};

// 16 rows x 16 outputs; [0]: outputs 0 to 7, [1]: 8 to 15.
struct Sum {
  float at[2][4];
};

// sum += the tile * the chunk, 32 inputs at a time, while the next chunk is fetched.
template <class T>
__device__ __forceinline__ void multiply(Sum& sum, const T* tile, Chunk& w, const Lines& next) {
  const int lane = threadIdx.x % 32;
  const uint32_t from = shared_address(tile + lane % 16 * kPitch + lane / 16 * 8);
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

  template <class T>
  __device__ __forceinline__ void fetch(const Layer& l) {
    const bool there = l.before & kNorms;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = first_channel() + 8 * i;
      weight[i] = load_if<uint32_t, 1>(static_cast<const uint32_t*>(l.norm_weight) + channel / 2, there).at[0];
      bias[i] = load_if<uint32_t, 1>(static_cast<const uint32_t*>(l.norm_bias) + channel / 2, there).at[0];
    }
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
  float points[kRows * 3], encoded[kRows * 3];
  int batch[kRows], index[kRows];  // of a row: the scene, and the query there
  alignas(16) T encoder[4 * kChannels];  // weight (256, 3) and bias of the position's first layer
  alignas(16) T tiles[1];

  static constexpr size_t bytes(int tiles) { return offsetof(RowsShared, tiles) + tiles * kTile * sizeof(T); }
};

// The end of the box branch, and the first layer of the position's encoding: 8 channels of two rows a lane, to kSum.
template <class T>
__device__ __forceinline__ void move_points(const Fused& a, int64_t row0, int rank, RowsShared<T>& s) {
  const bool encodes = a.step < a.layers;
  auto code = [&](int row, int j) { return s.logits[row * kNarrow + j]; };
  if (threadIdx.x < kRows * 3) {
    const int row = threadIdx.x / 3, axis = threadIdx.x % 3;
    float point = s.points[threadIdx.x];
    if (a.step > 0) {
      point = sigmoid(code(row, axis + axis / 2 * 2) + inverse_sigmoid(point));
      s.points[threadIdx.x] = point;
      if (rank == 0 && row0 + row < a.rows) {
        a.points[row0 * 3 + threadIdx.x] = point;
        if (!encodes) a.moved.set(row0 * 3 + threadIdx.x, point);
      }
    }
    s.encoded[threadIdx.x] = to_float(from_float<T>(inverse_sigmoid(point)));
  }
  __syncthreads();
  if (!encodes) {
    for (int i = threadIdx.x; rank == 0 && i < kRows * a.code_size; i += kThreads) {
      const int row = i / a.code_size, j = i % a.code_size, axis = j < 2 ? j : j == 4 ? 2 : -1;
      if (row0 + row >= a.rows) continue;
      const float value = axis < 0 ? code(row, j) : s.points[row * 3 + axis] * a.size[axis] + a.low[axis];
      a.boxes.set((row0 + row) * a.code_size + j, value);
    }
    return;
  }
  const int row = threadIdx.x / 32 * 2;
  float x[2][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = first_channel() + 8 * i;
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
  for (int r = 0; r < 2; ++r) part_of(s.tiles + kSum * kTile + (row + r) * kPitch) = pack8<T>(x[r]);
}

// kRowsRole, or one of the two others.
template <class T, bool Rows>
__device__ __forceinline__ void execute(const Fused& a, const Role& role, int64_t row0, RowsShared<T>& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int rank = pair_rank();
  const int mine = (rank * 8 + warp) * 16;                      // the warp's 16 of 256 outputs,
  const int at = mine / 32 * 32 + pair * 8 + warp % 2 * 4;      // and where a row has the lane's four
  const int kernel = Rows ? 0 : 1, block = blockIdx.x;
  auto tile = [&](int which) { return s.tiles + which * kTile; };

  // A layer's part of the warp: 16 outputs, of a narrow one for the first warps of both blocks.
  auto first_of = [&](const Layer& l, int part) {
    return l.out < kChannels ? warp * 16 : mine + (l.in == kChannels ? part * kChannels : 0);
  };
  auto lines_of = [&](const Layer& l, int part) {
    const int first = first_of(l, part), last = l.out - 1;
    if (first > last) return Lines{};
    const T* from = static_cast<const T*>(l.weight) + (l.in == kChannels ? 0 : part * kChannels) + pair * 8;
    return Lines{reinterpret_cast<const uint4*>(from + (l.first + min(first + group, last)) * l.in),
                 reinterpret_cast<const uint4*>(from + (l.first + min(first + group + 8, last)) * l.in)};
  };
  auto fetch_bias = [&](T (&bias)[4], const Layer& l, int part) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int output = first_of(l, part) + pair * 2 + j % 2 + j / 2 * 8;
      bias[j] = load_if<T, 1>(static_cast<const T*>(l.bias) + l.first + output, output < l.out).at[0];
    }
  };

  STAGE(kernel, block, 0);
  Pair blocks(s.received);
  int current = role.first, part = 0, stage = 4;
  Chunk weights;
  T bias[4];
  Affine affine;
  weights.fetch_from(lines_of(a.layer[current], 0));
  fetch_bias(bias, a.layer[current], 0);
  affine.fetch<T>(a.layer[current]);
  if (!Rows && a.encoder_weight && threadIdx.x < kChannels / 2) {
    const bool is_weight = threadIdx.x < 3 * kChannels / 8;
    const uint4* from = static_cast<const uint4*>(is_weight ? a.encoder_weight : a.encoder_bias);
    copy_async(s.encoder + threadIdx.x * 8, from + threadIdx.x - (is_weight ? 0 : 3 * kChannels / 8), true);
  }
  STAGE(kernel, block, 1);
  wait_for_previous();
  start_next();
  STAGE(kernel, block, 2);

#pragma unroll
  for (int i = 0; i < (Rows ? 4 : 1); ++i) {
    constexpr int kLoaded[] = {kX, kIn, kQueryPos, kPosition};
    if (role.load[i]) load_tile(tile(kLoaded[i]), role.load[i], role.usual_order >> i & 1, row0, a.rows);
  }
  copy_async_commit();
  const int own = rank * (kRows / kPair) + warp;  // the row this warp samples
  const int batch = static_cast<unsigned>(row0 + own) / a.queries;
  float u = NAN, v = NAN;
  if (Rows) {
    if (threadIdx.x < kRows) {
      const unsigned row = static_cast<unsigned>(row0) + threadIdx.x;
      s.batch[threadIdx.x] = row / a.queries, s.index[threadIdx.x] = row % a.queries;
    }
    if (a.sample) project(a, row0 + own, batch, u, v);
  } else if (threadIdx.x < kRows * 3) {
    s.points[threadIdx.x] = row0 + threadIdx.x / 3 < a.rows ? a.points[row0 * 3 + threadIdx.x] : 0.5f;
  }
  copy_async_wait<0>();
  __syncthreads();
  blocks.wait_for_other();
  STAGE(kernel, block, 3);

  if (Rows && a.step == 0) {  // where = query + query_pos, and both in the order of tiles for the steps to come
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 2 + r;
      const uint4 x = part_of(tile(kX) + row * kPitch), position = part_of(tile(kQueryPos) + row * kPitch);
      part_of(tile(kWhere) + row * kPitch) = add8<T>(x, position);
      if (row / (kRows / kPair) == rank && row0 + row < a.rows) {
        part_of(static_cast<T*>(a.x) + (row0 + row) * kChannels) = x;
        part_of(static_cast<T*>(a.query_pos) + (row0 + row) * kChannels) = position;
      }
    }
    __syncthreads();
  }

  Sum sum{};
#pragma unroll 1
  while (true) {
    const Layer& l = a.layer[current];
    if (part == 0) {
      if (!Rows && (l.before & kMoves)) {
        move_points(a, row0, rank, s);
        STAGE(kernel, block, stage++);
      }
      if (Rows && (l.before & kSamples)) {
        float weights[2] = {s.logits[own * kNarrow + lane], s.logits[own * kNarrow + lane + 32]}, sampled[8] = {};
        activate(a.activation, a.logits, weights);
        sample<T>(a, batch, u, v, weights, sampled);
        STAGE(kernel, block, stage++);
        blocks.send(&part_of(tile(kIn) + own * kPitch), reorder(pack8<T>(sampled)));
        blocks.receive(kRows / kPair * kChannels * sizeof(T));
        STAGE(kernel, block, stage++);
      }
      if (l.before & kNorms) {
        const int row = warp * 2;
        float x[2][8];
#pragma unroll
        for (int r = 0; r < 2; ++r) unpack8<T>(part_of(tile(l.norm_from) + (row + r) * kPitch), x[r]);
        normalize<T, 2>(x, affine, l.before & kRelu);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint4 y = pack8<T>(x[r]);
          const bool stores = row / (kRows / kPair) == rank && row0 + row + r < a.rows;
          part_of(tile(kX) + (row + r) * kPitch) = y;
          if (l.store && stores) part_of(static_cast<T*>(l.store) + (row0 + row + r) * kChannels) = y;
          if (Rows && (l.before & kAddsQueryPos)) {
            const uint4 where = add8<T>(y, part_of(tile(kQueryPos) + (row + r) * kPitch));
            part_of(tile(kWhere) + (row + r) * kPitch) = where;
            if (l.store_where && stores) {
              part_of(static_cast<T*>(l.store_where) + (row0 + row + r) * kChannels) = reorder(where);
            }
          }
        }
        __syncthreads();
        STAGE(kernel, block, stage++);
      }
    }
    if (!l.weight) break;

    const bool done = part + 1 == l.parts;
    const Layer& next = a.layer[done ? current + 1 : current];
    const int next_part = done ? 0 : part + 1, input = l.in == kChannels ? 0 : part, output = l.in == kChannels ? part : 0;
    multiply<T>(sum, tile(l.from + input), weights, lines_of(next, next_part));
    T next_bias[4];
    fetch_bias(next_bias, next, next_part);
    if (done) affine.fetch<T>(next);

    if (done || l.in == kChannels) {  // else there are more inputs
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = group + 8 * r;
        float y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = sum.at[j / 2][2 * r + j % 2] + to_float(bias[j]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (l.add[j] == kNoTile) continue;
          const uint2 more = *reinterpret_cast<const uint2*>(tile(l.add[j]) + row * kPitch + at);
          const float2 low = unpack<T>(more.x), high = unpack<T>(more.y);
          y[0] += low.x, y[1] += low.y, y[2] += high.x, y[3] += high.y;
        }
        if (l.relu) {
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] = relu(y[j]);
        }
        if (l.result == kToTile) {
          blocks.send(tile(l.to + output) + row * kPitch + at, make_uint2(pack<T>(y[0], y[1]), pack<T>(y[2], y[3])));
        } else if (l.result == kToLogits) {
          if (warp * 16 < l.out) {
            float* to = s.logits + row * kNarrow + warp * 16 + pair * 2;
            *reinterpret_cast<float2*>(to) = make_float2(y[0], y[1]);
            *reinterpret_cast<float2*>(to + 8) = make_float2(y[2], y[3]);
          }
        } else if (Rows && row0 + row < a.rows) {
          if (l.result == kToQueriesKeys) {  // queries scaled for exp2; dimensions in the order of tiles
            const float scale = output == 0 ? 0.17677669529663687f * 1.4426950408889634f : 1.f;  // log2(e) / sqrt(32)
            const int64_t head = s.batch[row] * kHeads + at / kHeadDim;
            T* to = static_cast<T*>(output == 0 ? a.q : a.k) + (head * a.keys + s.index[row]) * kHeadDim + at % kHeadDim;
            *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(y[0] * scale, y[1] * scale), pack<T>(y[2] * scale, y[3] * scale));
          } else {
            const int64_t line = s.batch[row] * static_cast<int64_t>(kChannels) + mine + pair * 2;
            T* to = static_cast<T*>(a.v) + line * a.keys + s.index[row];
#pragma unroll
            for (int j = 0; j < 4; ++j) to[(j % 2 + j / 2 * 8) * static_cast<int64_t>(a.keys)] = from_float<T>(y[j]);
          }
        }
      }
      sum = Sum{};
    }
    if (done) {
      if (l.result == kToTile) blocks.receive((output + 1) * kRows * kChannels / kPair * static_cast<int>(sizeof(T)));
      if (l.result == kToLogits) __syncthreads();
      STAGE(kernel, block, stage++);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) bias[j] = next_bias[j];
    if (done) ++current;
    part = next_part;
  }
}

template <class T>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1) rows_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(128) char memory[];
  if (a.step == 0) {  // the only kernel of this step, so what else is to be done in the beginning
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = first; i < a.rows * 3; i += step) a.points[i] = a.given.get(i);
    for (int64_t i = first; i < a.rows / a.queries * a.cams * 12; i += step) {
      const int64_t camera = i / 12, part = i % 12;
      a.cameras[i] = a.lidar2img.get(camera / a.cams * a.lidar2img_strides[0] + camera % a.cams * a.lidar2img_strides[1] +
                                     part / 4 * a.lidar2img_strides[2] + part % 4 * a.lidar2img_strides[3]);
    }
    const int padding = a.keys - a.queries;  // keys that are not, and their values: they are multiplied with zero
    for (int64_t i = first; i < a.rows / a.queries * kChannels * padding; i += step) {
      const int64_t head = i / (padding * kHeadDim), at = i % (padding * kHeadDim);
      static_cast<T*>(a.v)[i / padding * a.keys + a.queries + i % padding] = from_float<T>(0.f);
      static_cast<T*>(a.k)[(head * a.keys + a.queries) * kHeadDim + at] = from_float<T>(0.f);
    }
  }
  execute<T, true>(a, a.role[kRowsRole], blockIdx.x / kPair * static_cast<int64_t>(kRows),
                   *reinterpret_cast<RowsShared<T>*>(memory));
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
  const int64_t start = (batch * kHeads + head) * a.keys * kHeadDim;
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
  STAGE(2, block, 6);
}

// ---------------------------------------------------------------- attention_kernel

template <class T, int Groups>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(128) char memory[];
  const int branch_blocks = static_cast<int>(ceil_div<int64_t>(a.rows, kRows)) * kPair, block = blockIdx.x;
  const bool last = a.step == a.layers;
  if (block >= branch_blocks && !last) {
    wait_for_previous();
    start_next();
    attend<T, Groups>(a, block - branch_blocks, *reinterpret_cast<AttentionShared*>(memory));
    return;
  }
  RowsShared<T>& s = *reinterpret_cast<RowsShared<T>*>(memory);
  const bool box = block < branch_blocks;
  const int64_t row0 = (block - (box ? 0 : branch_blocks)) / kPair * static_cast<int64_t>(kRows);
  execute<T, false>(a, a.role[box ? kBoxRole : kClassRole], row0, s);
  if (box) return;
  const int half = kRows / kPair;
  for (int i = threadIdx.x; i < half * a.num_classes; i += kThreads) {
    const int row = pair_rank() * half + i / a.num_classes, column = i % a.num_classes;
    if (row0 + row < a.rows) {
      static_cast<T*>(a.classes)[(row0 + row) * a.num_classes + column] = from_float<T>(s.logits[row * kNarrow + column]);
    }
  }
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

  FusedBuffers(Scratch& scratch, const TransformerDecoder& d, const DecoderSizes& n) {
    const int64_t keys = ceil_div(n.queries, 32) * 32, tensor = n.rows * kChannels * 2, heads = n.batch * keys * kChannels * 2;
    const bool split = !samples_itself(d, n);
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

  void begin(RoleName role) { a.role[role] = Role{}, a.role[role].first = count; }
  // weight and, after it, its bias; null: the list's end.
  Layer& add(const Tensor* weight = nullptr, int first = 0, int out = 0) {
    Layer& l = a.layer[count++] = Layer{};
    if (!weight) return l;
    l.weight = weight[0].data, l.bias = weight[1].data;
    l.first = first, l.out = out ? out : static_cast<int>(weight[0].sizes[0]), l.in = static_cast<int>(weight[0].sizes[1]);
    l.parts = std::max(1, std::max(l.out, l.in) / kChannels);
    return l;
  }
  static void norm(Layer& l, const Tensor* weight, int flags = 0, void* store = nullptr) {
    l.norm_weight = weight[0].data, l.norm_bias = weight[1].data, l.before |= kNorms | flags, l.store = store;
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
  a.num_classes = n.classes, a.code_size = n.code_size, a.logits = n.logits;
  a.cams = n.cams, a.levels = n.levels, a.activation = d.activation;
  for (int i = 0; i < 4; ++i) a.lidar2img_strides[i] = d.lidar2img.strides[i];
  a.cameras = b.cameras;

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

  for (a.step = 0; a.step <= d.num_layers; ++a.step) {
    const bool first = a.step == 0, last = a.step == d.num_layers;
    auto before = [&](DecoderWeight weight) { return weight_of(d, a.step - 1, weight); };
    auto after = [&](DecoderWeight weight) { return weight_of(d, a.step, weight); };

    Lists rows{a};
    auto begin_layer = [&] {  // to where the cameras are sampled
      Layer& out_proj = rows.add(before(kOutProj));
      out_proj.from = kIn, out_proj.add[0] = kX;
      if (d.residual_query_pos) out_proj.add[1] = kQueryPos;
    };
    if (!first && !itself) {
      rows.begin(kRowsRole);
      begin_layer();
      Layer& end = rows.add();
      rows.norm(end, before(kMhaNorm), kAddsQueryPos, b.x);
      end.store_where = b.where;
      Role& role = a.role[kRowsRole];
      role.load[0] = b.x, role.load[1] = b.mixed, role.load[2] = b.query_pos;
      a.sample = false;
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
    rows.begin(kRowsRole);
    Role& role = a.role[kRowsRole];
    role.load[2] = first ? d.query_pos.data : b.query_pos;
    role.load[0] = first ? d.query.data : b.x;
    if (first) {
      role.usual_order = 5;
    } else {
      role.load[1] = b.mixed, role.load[3] = b.position;
      if (!itself) role.usual_order = 2;
      if (itself) {
        begin_layer();
        Layer& weights = rows.add(before(kAttentionWeights));
        rows.norm(weights, before(kMhaNorm), kAddsQueryPos);
        weights.from = kWhere, weights.result = kToLogits;
      }
      Layer& output_proj = rows.add(before(kOutputProj));
      if (itself) output_proj.before = kSamples;
      output_proj.from = kIn, output_proj.add[0] = kX, output_proj.add[1] = kPosition;
      Layer& ffn0 = rows.add(before(kFfn0));
      rows.norm(ffn0, before(kSvcaNorm));
      ffn0.to = kHidden, ffn0.relu = true;
      Layer& ffn2 = rows.add(before(kFfn2));
      ffn2.from = kHidden, ffn2.add[0] = kX;
    }
    Layer& queries_keys = last ? rows.add() : rows.add(after(kInProj), 0, 2 * kChannels);
    if (!first) rows.norm(queries_keys, before(kFfnNorm), kAddsQueryPos, b.x);
    queries_keys.from = kWhere, queries_keys.result = kToQueriesKeys;
    if (!last) {
      rows.add(after(kInProj), 2 * kChannels, kChannels).result = kToValues;
      rows.add();
    }
    a.sample = !first && itself;
    SVEXPORT_TRY(start(rows_kernel<T>, a, pairs, rows_shared, !first && itself, stream));

    Lists branches{a};
    branches.begin(kBoxRole);
    if (!first) {
      a.role[kBoxRole].load[0] = b.x;
      Layer& reg0 = branches.add(before(kReg0));
      reg0.to = kIn, reg0.relu = true;
      Layer& reg2 = branches.add(before(kReg2));
      reg2.from = kIn, reg2.to = kWhere, reg2.relu = true;
      Layer& reg4 = branches.add(before(kReg4));
      reg4.from = kWhere, reg4.result = kToLogits;
    }
    Layer& position3 = last ? branches.add() : branches.add(after(kPosition3));
    position3.before = kMoves;
    a.encoder_weight = last ? nullptr : after(kPosition0)[0].data;
    a.encoder_bias = last ? nullptr : after(kPosition0)[1].data;
    if (!last) {
      branches.norm(position3, after(kPositionNorm0), kRelu);
      position3.to = kIn;
      Layer& end = branches.add();
      branches.norm(end, after(kPositionNorm1), kRelu, b.position);
      end.norm_from = kIn;
    } else {
      branches.begin(kClassRole);
      a.role[kClassRole].load[0] = b.x;
      branches.add(weight_of(d, kCls0));
      Layer& cls3 = branches.add(weight_of(d, kCls3));
      branches.norm(cls3, weight_of(d, kClsNorm0), kRelu);
      cls3.to = kWhere;
      Layer& cls6 = branches.add(weight_of(d, kCls6));
      branches.norm(cls6, weight_of(d, kClsNorm1), kRelu);
      cls6.norm_from = kWhere, cls6.result = kToLogits;
      branches.add();
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
