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
// dependent launch). Shared memory for two products ahead and the copy engine were slower, bulk copies or not.
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
constexpr int kPitch = kChannels + 32;  // of a row in shared memory, against bank conflicts
[[maybe_unused]] constexpr int kTile = kRows * kPitch;
constexpr int kNarrow = 64;  // most outputs of a narrow layer: camera weights, box code, classes
constexpr int kMaxFfn = 2048;

// Vectors of a step in shared memory, and where they begin.
enum RowsVector {
  kOutProjBias = 0, kNorm1 = 256, kLogitsBias = 768, kOutputProjBias = 832, kNorm2 = 1088, kFfn2Bias = 1600, kNorm3 = 1856,
  kInProjBias = 2368, kFfn0Bias = 3136,  // of ffn elements
};
enum BranchVector {
  kReg0Bias = 0, kReg2Bias = 256, kReg4Bias = 512, kPosition0Weight = 576, kPosition0Bias = 1344, kEncodingNorm0 = 1600,
  kPosition3Bias = 2112, kEncodingNorm1 = 2368, kBranchVectors = 2880,
};
enum ClassVector {
  kCls0Bias = 0, kScoreNorm0 = 256, kCls3Bias = 768, kScoreNorm1 = 1024, kCls6Bias = 1536,
};

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

struct Parameters {
  const void *weight, *bias;
};

struct Fused {
  Parameters last_layer[kOffsets / 2], next_layer[kOffsets / 2];  // step - 1 and step: [DecoderWeight / 2]
  Parameters cls[kClassWeights / 2];
  int64_t rows;
  int queries, keys;  // keys: queries, up to a multiple of 32
  int ffn, step, layers;
  const void *query, *query_pos;
  float* points;                       // (rows, 3)
  void *x, *where, *mixed, *position;  // (rows, 256)
  void *q, *k, *v;                     // (B, heads, keys, 32), and v (B, heads, 32, keys)
  AnyFloat given, boxes, moved;
  void* classes;
  int num_classes, code_size, logits;
  bool residual_query_pos, before, sample, after;
  // sampling
  int cams, levels, activation;
  AnyFloat lidar2img;
  int64_t lidar2img_strides[4];
  float* cameras;  // lidar2img, but for its last row: (B, cams, 3, 4)
  float low[3], size[3], image[2], depth_eps, clamp[2];
  bool in_image;
  FusedLevel level[kMaxCameraLevels];
  int plain_levels = 0;  // of the first four: kAdjacent, not pooled

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
#define STAGE(kernel, block, stage)
#endif

// ---------------------------------------------------------------- pairs of blocks

__device__ __forceinline__ uint32_t pair_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void pair_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void pair_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void pair_sync() {
  pair_arrive();
  pair_wait();
}

// The address in the other block's shared memory.
__device__ __forceinline__ uint32_t other(const void* p, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank ^ 1));
  return address;
}

// Into both blocks' shared memory.
__device__ __forceinline__ void store_both(void* p, uint32_t v, uint32_t rank) {
  *static_cast<uint32_t*>(p) = v;
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(other(p, rank)), "r"(v) : "memory");
}
__device__ __forceinline__ void store_both(void* p, uint4 v, uint32_t rank) {
  *static_cast<uint4*>(p) = v;
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(other(p, rank)), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
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
  int steps;  // of 32 columns

  __device__ __forceinline__ Lines columns(int skip, int count) const {
    return {low + skip / 8, high + skip / 8, count / 32};
  }
  __device__ __forceinline__ explicit operator bool() const { return low != nullptr; }
};

__device__ __forceinline__ Lines lines(const void* matrix, int row, int in, int last = 1 << 30) {
  const int lane = threadIdx.x % 32, low = row + lane / 4;
  const uint4* from = static_cast<const uint4*>(matrix) + lane % 4;
  return {from + min(low, last) * static_cast<int64_t>(in / 8), from + min(low + 8, last) * static_cast<int64_t>(in / 8), 8};
}

// Weights of 16 outputs and 256 inputs, [2 * i]: those of the row `group`, [2 * i + 1]: of `group` + 8, of 32 inputs from
// 32 * i on. The next take their place as they are used.
struct Chunk {
  uint4 at[16];

  __device__ __forceinline__ void fetch_step(const Lines& from, int i) {
    if (from && i < from.steps) at[2 * i] = fetch(from.low + i * 4), at[2 * i + 1] = fetch(from.high + i * 4);
  }
  __device__ __forceinline__ void fetch_from(const Lines& from, int first = 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= first) fetch_step(from, i);
    }
  }
};

// 16 rows x 16 outputs; [0]: outputs 0 to 7, [1]: 8 to 15. Transposed: [0]: rows 0 to 7 (of outputs g, g + 8), [1]: 8 to 15.
struct Sum {
  float at[2][4];
};

// sum += 16 rows of `tile` * the chunk, 32 inputs at a time, while the next chunk is fetched. Inputs are in the same order
// on both sides, though not in that of mma's.
template <class T, bool kTransposed, int Steps>
__device__ __forceinline__ void multiply(Sum& sum, const T* tile, int pitch, Chunk& w, const Lines& next) {
  const int lane = threadIdx.x % 32;
  const uint4* low = reinterpret_cast<const uint4*>(tile + lane / 4 * pitch) + lane % 4;
  const uint4* high = reinterpret_cast<const uint4*>(tile + (lane / 4 + 8) * pitch) + lane % 4;
  Sum odd{};
#pragma unroll
  for (int i = 0; i < Steps; ++i) {
    const uint4 p = low[i * 4], q = high[i * 4], a = w.at[2 * i], b = w.at[2 * i + 1];
    if (kTransposed) {
      const uint32_t first[4] = {a.x, b.x, a.y, b.y}, second[4] = {a.z, b.z, a.w, b.w};
      mma<T>(sum.at[0], first, p.x, p.y);
      mma<T>(sum.at[1], first, q.x, q.y);
      mma<T>(odd.at[0], second, p.z, p.w);
      mma<T>(odd.at[1], second, q.z, q.w);
    } else {
      const uint32_t first[4] = {p.x, q.x, p.y, q.y}, second[4] = {p.z, q.z, p.w, q.w};
      mma<T>(sum.at[0], first, a.x, a.y);
      mma<T>(sum.at[1], first, b.x, b.y);
      mma<T>(odd.at[0], second, a.z, a.w);
      mma<T>(odd.at[1], second, b.z, b.w);
    }
    w.fetch_step(next, i);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum.at[i / 4][i % 4] += odd.at[i / 4][i % 4];
}

// f(row, column, two values) for what the lane holds of a sum (rows x outputs); column: of the first of the chunk.
template <class F>
__device__ __forceinline__ void each_pair(const Sum& sum, int column, F&& f) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f(lane / 4 + i % 2 * 8, column + i / 2 * 8 + lane % 4 * 2, sum.at[i / 2][i % 2 * 2], sum.at[i / 2][i % 2 * 2 + 1]);
  }
}

// A narrow layer: 16 outputs and half of the inputs a warp, into partial[2][16 rows][64], to be added by who reads them.
__device__ __forceinline__ Lines narrow(const void* matrix, int out) {
  const int warp = threadIdx.x / 32;
  return lines(matrix, warp % 4 * 16, kChannels, out - 1).columns(warp / 4 * 128, 128);
}

template <class T>
__device__ __forceinline__ void multiply_narrow(float* partial, const T* tile, Chunk& w, const Lines& next) {
  const int warp = threadIdx.x / 32;
  Sum sum{};
  multiply<T, false, 4>(sum, tile + warp / 4 * 128, kPitch, w, next);
  w.fetch_from(next, 4);
  each_pair(sum, warp % 4 * 16, [&](int row, int column, float a, float b) {
    *reinterpret_cast<float2*>(partial + (warp / 4 * kRows + row) * kNarrow + column) = make_float2(a, b);
  });
}

__device__ __forceinline__ float narrow_sum(const float* partial, int row, int column) {
  return partial[row * kNarrow + column] + partial[(kRows + row) * kNarrow + column];
}

// ---------------------------------------------------------------- rows in shared memory

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

// Layer norm of 8 channels a lane, Rows rows at once.
template <class T, int Rows>
__device__ __forceinline__ void normalize(float (&x)[Rows][8], const T* affine, bool with_relu) {
  const int lane = threadIdx.x % 32;
  float mean[Rows], squares[Rows], gamma[8], beta[8];
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
  unpack8<T>(reinterpret_cast<const uint4*>(affine)[lane], gamma);
  unpack8<T>(reinterpret_cast<const uint4*>(affine + kChannels)[lane], beta);
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const float scale = rsqrtf(squares[r] * (1.f / kChannels) + kEps);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[r][i] = fmaf(x[r][i] * scale, gamma[i], beta[i]);
      if (with_relu) x[r][i] = relu(x[r][i]);
    }
  }
}

// to = norm(from) of all 16 rows, two a warp; where = to + query_pos if asked for.
template <class T>
__device__ __forceinline__ void normalize_tile(const T* from, const T* affine, bool with_relu, T* to,
                                               const T* query_pos = nullptr, T* where = nullptr) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 2;
  float x[2][8];
#pragma unroll
  for (int r = 0; r < 2; ++r) unpack8<T>(*reinterpret_cast<const uint4*>(from + (row + r) * kPitch + lane * 8), x[r]);
  normalize<T, 2>(x, affine, with_relu);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = (row + r) * kPitch + lane * 8;
    const uint4 y = pack8<T>(x[r]);
    *reinterpret_cast<uint4*>(to + at) = y;
    if (where) {
      float sum[8], position[8];
      unpack8<T>(y, sum);  // the rounded one, as in the reference
      unpack8<T>(*reinterpret_cast<const uint4*>(query_pos + at), position);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += position[i];
      *reinterpret_cast<uint4*>(where + at) = pack8<T>(sum);
    }
  }
}

// 16 rows of 256 from global memory, zeros beyond the last.
template <class T>
__device__ __forceinline__ void load_tile(T* tile, const void* from, int64_t row0, int64_t rows) {
#pragma unroll
  for (int i = threadIdx.x; i < kRows * 32; i += kThreads) {
    const int r = i / 32, piece = i % 32;
    const T* at = static_cast<const T*>(from) + (row0 + r) * kChannels + piece * 8;
    copy_async(tile + r * kPitch + piece * 8, row0 + r < rows ? at : from, row0 + r < rows);
  }
}

// The rows of this block's half to global memory.
template <class T>
__device__ __forceinline__ void store_half(void* to, const T* tile, int64_t row0, int64_t rows, uint32_t rank) {
  const int r = rank * (kRows / kPair) + threadIdx.x / 32, piece = threadIdx.x % 32;
  if (row0 + r < rows) {
    reinterpret_cast<uint4*>(to)[(row0 + r) * 32 + piece] = *reinterpret_cast<const uint4*>(tile + r * kPitch + piece * 8);
  }
}

// Until copy_async_wait, and but for the last few of a count that is no multiple of 8.
template <class T>
__device__ __forceinline__ void load_vector(T* to, const void* from, int count) {
  for (int i = threadIdx.x; i < count / 8; i += kThreads) copy_async(to + i * 8, static_cast<const uint4*>(from) + i, true);
  const int i = count / 8 * 8 + threadIdx.x;
  if (i < count) to[i] = static_cast<const T*>(from)[i];
}

// Weight and bias of a norm.
template <class T>
__device__ __forceinline__ void load_norm(T* to, const Parameters& from) {
  load_vector(to, from.weight, kChannels);
  load_vector(to + kChannels, from.bias, kChannels);
}

template <class T>
__device__ __forceinline__ float2 two(const T* p) {
  return unpack<T>(*reinterpret_cast<const uint32_t*>(p));
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
// second. The pixels of four plain levels are on their way at once.
template <class T>
__device__ __forceinline__ void sample(const Fused& a, int batch, float u, float v, const float (&weights)[2],
                                       float (&sum)[8]) {
  auto add = [&](int cam, int level, const float (&sampled)[8]) {
    const int which = cam * a.levels + level;
    const float even = __shfl_sync(0xffffffffu, weights[0], which % 32);
    const float odd = __shfl_sync(0xffffffffu, weights[1], which % 32);
    const float weight = (which < 32 ? even : odd) * a.level[level].scale;
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] = fmaf(isnan(sampled[c]) ? 0.f : sampled[c], weight, sum[c]);
  };
  for (unsigned seen = __ballot_sync(0xffffffffu, !isnan(u)); seen; seen &= seen - 1) {
    const int cam = __ffs(seen) - 1;
    const float cam_u = __shfl_sync(0xffffffffu, u, cam), cam_v = __shfl_sync(0xffffffffu, v, cam);
    int level = 0;
    if (a.plain_levels > 0) {
      uint4 taps[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < a.plain_levels) {
          const FusedLevel& l = a.level[i];
          const Place p = place_on(l, batch, cam, cam_u, cam_v);
#pragma unroll
          for (int j = 0; j < 4; ++j) taps[i][j] = pixel<T, kAdjacent>(l, p.image, p.y.index[j / 2], p.x.index[j % 2]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < a.plain_levels) {
          const Place p = place_on(a.level[i], batch, cam, cam_u, cam_v);
          float sampled[8] = {};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            add_tap<T, kAdjacent>(taps[i][j], p.y.weight[j / 2] * p.x.weight[j % 2], sampled);
          }
          add(cam, i, sampled);
        }
      }
      level = a.plain_levels;
    }
#pragma unroll 1
    for (; level < a.levels; ++level) {
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
      add(cam, level, sampled);
    }
  }
}

// Brings what will be sampled near, once it is known where.
template <class T>
__device__ __forceinline__ void prefetch(const Fused& a, int batch, float u, float v) {
  const int lane = threadIdx.x % 32;
  for (unsigned seen = __ballot_sync(0xffffffffu, !isnan(u)); seen; seen &= seen - 1) {
    const int cam = __ffs(seen) - 1;
    const float cam_u = __shfl_sync(0xffffffffu, u, cam), cam_v = __shfl_sync(0xffffffffu, v, cam);
    for (int i = 0; i < a.levels; ++i) {
      const FusedLevel& l = a.level[i];
      if (l.format != kAdjacent || l.pool) continue;
      const Place p = place_on(l, batch, cam, cam_u, cam_v);
      const int j = lane / 8;  // a corner for 8 lanes, 64 bytes each
      const T* at = static_cast<const T*>(l.data) + p.image + p.y.index[j / 2] * l.y + p.x.index[j % 2] * l.x + lane % 8 * 32;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
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

// ---------------------------------------------------------------- rows_kernel

template <class T>
struct RowsShared {
  T in[kTile], x[kTile], sum[kTile], where[kTile], query_pos[kTile], position[kTile];
  int batch[kRows], index[kRows];  // of a row: the scene, and the query there
  float partial[2 * kRows * kNarrow];
  T rest[1];  // hidden: 16 rows of ffn; vectors

  static constexpr size_t bytes(int ffn) {
    return offsetof(RowsShared, rest) + (kRows * (ffn + kPitch - kChannels) + kFfn0Bias + ffn) * sizeof(T);
  }
};

template <class T>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1) rows_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(128) char memory[];
  RowsShared<T>& s = *reinterpret_cast<RowsShared<T>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hidden_pitch = a.ffn + kPitch - kChannels;
  T* hidden = s.rest;
  T* vectors = hidden + kRows * hidden_pitch;
  const uint32_t rank = pair_rank();
  const int64_t row0 = blockIdx.x / kPair * static_cast<int64_t>(kRows);

  const Lines nothing{};
  const int mine = (rank * 8 + warp) * 16;  // the warp's 16 of 256 columns
  auto before = [&](DecoderWeight weight) -> const Parameters& { return a.last_layer[weight / 2]; };
  const Parameters& in_proj = a.next_layer[kInProj / 2];
  const bool goes_on = a.step < a.layers;

  // What the warp multiplies with, in turn.
  auto chunk = [&](int i) {
    const int each = a.ffn / 256;
    if (a.before) {
      if (i-- == 0) return lines(before(kOutProj).weight, mine, kChannels);
      if (!a.sample) return nothing;
      if (i-- == 0) return narrow(before(kAttentionWeights).weight, a.logits);
    }
    if (!a.after) i += 2 * each + 1;
    if (i == 0) return lines(before(kOutputProj).weight, mine, kChannels);
    if (i <= each) return lines(before(kFfn0).weight, rank * a.ffn / 2 + (i - 1) * 128 + warp * 16, kChannels);
    if (i <= 2 * each) return lines(before(kFfn2).weight, mine, a.ffn).columns((i - each - 1) * 256, 256);
    i -= 2 * each + 1;
    return goes_on && i < 3 ? lines(in_proj.weight, i * kChannels + mine, kChannels) : nothing;
  };
  int used = 0;
  Chunk weights;
  // f(weights, next) with the next chunk, and the one after it to be fetched meanwhile.
  auto with_next = [&](auto&& f) { f(weights, chunk(++used)); };

  STAGE(0, blockIdx.x, 0);
  pair_arrive();
  weights.fetch_from(chunk(0));
  if (a.before) {
    load_vector(vectors + kOutProjBias, before(kOutProj).bias, kChannels);
    load_norm(vectors + kNorm1, before(kMhaNorm));
    if (a.sample) load_vector(vectors + kLogitsBias, before(kAttentionWeights).bias, a.logits);
  }
  if (a.after) {
    load_vector(vectors + kOutputProjBias, before(kOutputProj).bias, kChannels);
    load_norm(vectors + kNorm2, before(kSvcaNorm));
    load_vector(vectors + kFfn0Bias, before(kFfn0).bias, a.ffn);
    load_vector(vectors + kFfn2Bias, before(kFfn2).bias, kChannels);
    load_norm(vectors + kNorm3, before(kFfnNorm));
  }
  if (goes_on) load_vector(vectors + kInProjBias, in_proj.bias, 3 * kChannels);
  STAGE(0, blockIdx.x, 1);
  wait_for_previous();
  start_next();
  STAGE(0, blockIdx.x, 2);

  const void* x_from = a.step <= 1 ? a.query : a.x;  // what the layer began with, or its out_proj and norm left
  if (a.after && !a.before) x_from = a.x;
  load_tile(s.x, x_from, row0, a.rows);
  load_tile(s.query_pos, a.query_pos, row0, a.rows);
  if (a.before || a.after) load_tile(s.in, a.mixed, row0, a.rows);
  if (a.after) load_tile(s.position, a.position, row0, a.rows);
  if (threadIdx.x < kRows) {
    const unsigned row = static_cast<unsigned>(row0) + threadIdx.x;
    s.batch[threadIdx.x] = row / a.queries, s.index[threadIdx.x] = row % a.queries;
  }
  copy_async_commit();

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

  const int own = rank * (kRows / kPair) + warp;  // the row this warp samples
  const int batch = static_cast<unsigned>(row0 + own) / a.queries;
  float u = NAN, v = NAN;
  if (a.sample) {
    project(a, row0 + own, batch, u, v);
    prefetch<T>(a, batch, u, v);
  }
  copy_async_wait<0>();
  __syncthreads();
  pair_wait();  // the other block runs
  STAGE(0, blockIdx.x, 3);

  if (a.before) {
    Sum sum{};
    with_next([&](Chunk& w, const Lines& next) { multiply<T, false, 8>(sum, s.in, kPitch, w, next); });
    each_pair(sum, mine, [&](int row, int column, float p, float q) {
      const float2 bias = two(vectors + kOutProjBias + column), x = two(s.x + row * kPitch + column);
      p += bias.x + x.x, q += bias.y + x.y;
      if (a.residual_query_pos) {
        const float2 position = two(s.query_pos + row * kPitch + column);
        p += position.x, q += position.y;
      }
      store_both(s.sum + row * kPitch + column, pack<T>(p, q), rank);
    });
    pair_sync();
    STAGE(0, blockIdx.x, 4);
    normalize_tile(s.sum, vectors + kNorm1, false, s.x, s.query_pos, s.where);
    __syncthreads();
    STAGE(0, blockIdx.x, 5);
  }

  if (a.sample) {
    with_next([&](Chunk& w, const Lines& next) { multiply_narrow(s.partial, s.where, w, next); });
    __syncthreads();
    STAGE(0, blockIdx.x, 6);
    float weights[2], sampled[8] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int logit = lane + i * 32;
      weights[i] = narrow_sum(s.partial, own, logit) + (logit < a.logits ? to_float(vectors[kLogitsBias + logit]) : 0.f);
    }
    activate(a.activation, a.logits, weights);
    sample<T>(a, batch, u, v, weights, sampled);
    STAGE(0, blockIdx.x, 7);
    store_both(s.in + own * kPitch + lane * 8, pack8<T>(sampled), rank);
    pair_sync();
    STAGE(0, blockIdx.x, 8);
  }

  if (a.before && !a.after) {  // the sampling is not ours
    store_half(a.x, s.x, row0, a.rows, rank);
    store_half(a.where, s.where, row0, a.rows, rank);
    return;
  }

  if (a.after) {
    Sum sum{};
    with_next([&](Chunk& w, const Lines& next) { multiply<T, false, 8>(sum, s.in, kPitch, w, next); });
    each_pair(sum, mine, [&](int row, int column, float p, float q) {
      const float2 bias = two(vectors + kOutputProjBias + column), x = two(s.x + row * kPitch + column);
      const float2 extra = two(s.position + row * kPitch + column);
      store_both(s.sum + row * kPitch + column, pack<T>(p + bias.x + x.x + extra.x, q + bias.y + x.y + extra.y), rank);
    });
    pair_sync();
    STAGE(0, blockIdx.x, 9);
    normalize_tile(s.sum, vectors + kNorm2, false, s.x);
    __syncthreads();
    STAGE(0, blockIdx.x, 10);

    for (int j = 0; j < a.ffn / 256; ++j) {  // half of the hidden columns, 128 at a time
      const int column = rank * a.ffn / 2 + j * 128 + warp * 16;
      Sum sum{};
      with_next([&](Chunk& w, const Lines& next) { multiply<T, false, 8>(sum, s.x, kPitch, w, next); });
      each_pair(sum, column, [&](int row, int column, float p, float q) {
        const float2 bias = two(vectors + kFfn0Bias + column);
        store_both(hidden + row * hidden_pitch + column, pack<T>(relu(p + bias.x), relu(q + bias.y)), rank);
      });
    }
    pair_sync();
    STAGE(0, blockIdx.x, 11);
    sum = Sum{};
    for (int j = 0; j < a.ffn / 256; ++j) {
      with_next([&](Chunk& w, const Lines& next) { multiply<T, false, 8>(sum, hidden + j * 256, hidden_pitch, w, next); });
    }
    each_pair(sum, mine, [&](int row, int column, float p, float q) {
      const float2 bias = two(vectors + kFfn2Bias + column), x = two(s.x + row * kPitch + column);
      store_both(s.sum + row * kPitch + column, pack<T>(p + bias.x + x.x, q + bias.y + x.y), rank);
    });
    pair_sync();
    STAGE(0, blockIdx.x, 12);
    normalize_tile(s.sum, vectors + kNorm3, false, s.x, s.query_pos, s.where);
    __syncthreads();
    STAGE(0, blockIdx.x, 13);
    store_half(a.x, s.x, row0, a.rows, rank);
  } else {
    for (int i = threadIdx.x; i < kRows * 32; i += kThreads) {
      const int at = i / 32 * kPitch + i % 32 * 8;
      float x[8], position[8];
      unpack8<T>(*reinterpret_cast<const uint4*>(s.x + at), x);
      unpack8<T>(*reinterpret_cast<const uint4*>(s.query_pos + at), position);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] += position[j];
      *reinterpret_cast<uint4*>(s.where + at) = pack8<T>(x);
    }
    __syncthreads();
  }
  if (!goes_on) return;

  // Queries, scaled for exp2, and keys by rows; values by columns.
  const float scale = 0.17677669529663687f * 1.4426950408889634f;  // log2(e) / sqrt(32)
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    Sum sum{};
    if (j < 2) {
      with_next([&](Chunk& w, const Lines& next) { multiply<T, false, 8>(sum, s.where, kPitch, w, next); });
      each_pair(sum, mine, [&](int row, int column, float p, float q) {
        const float2 bias = two(vectors + kInProjBias + j * kChannels + column);
        if (row0 + row >= a.rows) return;
        const int64_t head = s.batch[row] * kHeads + column / kHeadDim;
        T* to = static_cast<T*>(j == 0 ? a.q : a.k) + (head * a.keys + s.index[row]) * kHeadDim + column % kHeadDim;
        const float by = j == 0 ? scale : 1.f;
        *reinterpret_cast<uint32_t*>(to) = pack<T>((p + bias.x) * by, (q + bias.y) * by);
      });
    } else {
      with_next([&](Chunk& w, const Lines& next) { multiply<T, true, 8>(sum, s.x, kPitch, w, next); });
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = mine + lane / 4 + i / 2 % 2 * 8, row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row0 + row >= a.rows) continue;
        const int64_t line = s.batch[row] * kChannels + column;
        static_cast<T*>(a.v)[line * a.keys + s.index[row]] =
            from_float<T>(sum.at[i / 4][i % 4] + to_float(vectors[kInProjBias + 2 * kChannels + column]));
      }
    }
  }
  STAGE(0, blockIdx.x, 14);
}

// ---------------------------------------------------------------- attention_kernel: attention

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
    T* to = static_cast<T*>(a.mixed) + (batch * a.queries + at) * kChannels + head * kHeadDim + dim;
#pragma unroll
    for (int j = 0; j < kEach; j += 4) {
      *reinterpret_cast<uint2*>(to + j) = make_uint2(pack<T>(result[j] / all, result[j + 1] / all),
                                                     pack<T>(result[j + 2] / all, result[j + 3] / all));
    }
  }
  STAGE(2, block, 6);
}

// ---------------------------------------------------------------- attention_kernel: box, position and class branches

template <class T>
struct BranchShared {
  T in[kTile], x[kTile], middle[kTile], last[kTile];
  float partial[2 * kRows * kNarrow];
  float points[kRows * 3], encoded[kRows * 3];
  T vectors[kBranchVectors];
};

// to (both blocks) = relu?(tile weight^T + bias), this warp's 16 columns.
template <class T>
__device__ __forceinline__ void linear_both(const T* tile, Chunk& w, const Lines& next, const T* bias, bool with_relu, T* to,
                                            uint32_t rank) {
  Sum sum{};
  multiply<T, false, 8>(sum, tile, kPitch, w, next);
  each_pair(sum, (rank * 8 + threadIdx.x / 32) * 16, [&](int row, int column, float p, float q) {
    const float2 b = two(bias + column);
    p += b.x, q += b.y;
    if (with_relu) p = relu(p), q = relu(q);
    store_both(to + row * kPitch + column, pack<T>(p, q), rank);
  });
  pair_sync();
}

template <class T>
__device__ __forceinline__ void class_branch(const Fused& a, int64_t row0, BranchShared<T>& s) {
  const uint32_t rank = pair_rank();
  const int mine = (rank * 8 + threadIdx.x / 32) * 16;
  auto cls = [&](ClassWeight weight) -> const Parameters& { return a.cls[weight / 2]; };
  pair_arrive();
  Chunk w;
  w.fetch_from(lines(cls(kCls0).weight, mine, kChannels));
  load_vector(s.vectors + kCls0Bias, cls(kCls0).bias, kChannels);
  load_norm(s.vectors + kScoreNorm0, cls(kClsNorm0));
  load_vector(s.vectors + kCls3Bias, cls(kCls3).bias, kChannels);
  load_norm(s.vectors + kScoreNorm1, cls(kClsNorm1));
  load_vector(s.vectors + kCls6Bias, cls(kCls6).bias, a.num_classes);
  wait_for_previous();
  start_next();
  load_tile(s.in, a.x, row0, a.rows);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  pair_wait();

  linear_both(s.in, w, lines(cls(kCls3).weight, mine, kChannels), s.vectors + kCls0Bias, false, s.middle, rank);
  normalize_tile(s.middle, s.vectors + kScoreNorm0, true, s.x);
  __syncthreads();
  linear_both(s.x, w, narrow(cls(kCls6).weight, a.num_classes), s.vectors + kCls3Bias, false, s.last, rank);
  normalize_tile(s.last, s.vectors + kScoreNorm1, true, s.x);
  __syncthreads();
  multiply_narrow(s.partial, s.x, w, Lines{});
  __syncthreads();
  const int half = kRows / kPair;
  for (int i = threadIdx.x; i < half * a.num_classes; i += kThreads) {
    const int row = rank * half + i / a.num_classes, column = i % a.num_classes;
    if (row0 + row < a.rows) {
      static_cast<T*>(a.classes)[(row0 + row) * a.num_classes + column] =
          from_float<T>(narrow_sum(s.partial, row, column) + to_float(s.vectors[kCls6Bias + column]));
    }
  }
}

template <class T>
__device__ __forceinline__ void box_branch(const Fused& a, int64_t row0, BranchShared<T>& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t rank = pair_rank();
  const bool moves = a.step > 0, encodes = a.step < a.layers;
  const int mine = (rank * 8 + warp) * 16;
  auto before = [&](DecoderWeight weight) -> const Parameters& { return a.last_layer[weight / 2]; };
  auto after = [&](DecoderWeight weight) -> const Parameters& { return a.next_layer[weight / 2]; };
  const Lines position3 = encodes ? lines(after(kPosition3).weight, mine, kChannels) : Lines{};

  STAGE(1, blockIdx.x, 0);
  pair_arrive();
  Chunk w;
  w.fetch_from(moves ? lines(before(kReg0).weight, mine, kChannels) : position3);
  if (moves) {
    load_vector(s.vectors + kReg0Bias, before(kReg0).bias, kChannels);
    load_vector(s.vectors + kReg2Bias, before(kReg2).bias, kChannels);
    load_vector(s.vectors + kReg4Bias, before(kReg4).bias, a.code_size);
  }
  if (encodes) {
    load_vector(s.vectors + kPosition0Weight, after(kPosition0).weight, 3 * kChannels);
    load_vector(s.vectors + kPosition0Bias, after(kPosition0).bias, kChannels);
    load_norm(s.vectors + kEncodingNorm0, after(kPositionNorm0));
    load_vector(s.vectors + kPosition3Bias, after(kPosition3).bias, kChannels);
    load_norm(s.vectors + kEncodingNorm1, after(kPositionNorm1));
  }
  STAGE(1, blockIdx.x, 1);
  wait_for_previous();
  start_next();
  STAGE(1, blockIdx.x, 2);
  if (moves) load_tile(s.in, a.x, row0, a.rows);
  copy_async_commit();
  if (threadIdx.x < kRows * 3) {
    s.points[threadIdx.x] = row0 + threadIdx.x / 3 < a.rows ? a.points[row0 * 3 + threadIdx.x] : 0.5f;
  }
  copy_async_wait<0>();
  __syncthreads();
  pair_wait();
  STAGE(1, blockIdx.x, 3);

  if (moves) {
    linear_both(s.in, w, lines(before(kReg2).weight, mine, kChannels), s.vectors + kReg0Bias, true, s.middle, rank);
    STAGE(1, blockIdx.x, 4);
    linear_both(s.middle, w, narrow(before(kReg4).weight, a.code_size), s.vectors + kReg2Bias, true, s.last, rank);
    STAGE(1, blockIdx.x, 5);
    multiply_narrow(s.partial, s.last, w, position3);
    __syncthreads();
    auto code = [&](int row, int j) { return narrow_sum(s.partial, row, j) + to_float(s.vectors[kReg4Bias + j]); };
    if (threadIdx.x < kRows * 3) {
      const int row = threadIdx.x / 3, axis = threadIdx.x % 3;
      const float point = sigmoid(code(row, axis + axis / 2 * 2) + inverse_sigmoid(s.points[threadIdx.x]));
      s.points[threadIdx.x] = point;
      if (rank == 0 && row0 + row < a.rows) {
        a.points[row0 * 3 + threadIdx.x] = point;
        if (!encodes) a.moved.set(row0 * 3 + threadIdx.x, point);
      }
    }
    if (!encodes && rank == 0) {
      __syncthreads();
      for (int i = threadIdx.x; i < kRows * a.code_size; i += kThreads) {
        const int row = i / a.code_size, j = i % a.code_size, axis = j < 2 ? j : j == 4 ? 2 : -1;
        if (row0 + row >= a.rows) continue;
        const float value = axis < 0 ? code(row, j) : s.points[row * 3 + axis] * a.size[axis] + a.low[axis];
        a.boxes.set((row0 + row) * a.code_size + j, value);
      }
    }
  }
  STAGE(1, blockIdx.x, 6);
  if (!encodes) return;

  if (threadIdx.x < kRows * 3) {
    s.encoded[threadIdx.x] = to_float(from_float<T>(inverse_sigmoid(s.points[threadIdx.x])));
  }
  __syncthreads();
  float x[2][8], point_weight[3][8], bias[8];
#pragma unroll
  for (int j = 0; j < 3; ++j) {  // 24 adjacent numbers: 3 for each of the lane's 8 channels
    unpack8<T>(reinterpret_cast<const uint4*>(s.vectors + kPosition0Weight)[lane * 3 + j], point_weight[j]);
  }
  unpack8<T>(reinterpret_cast<const uint4*>(s.vectors + kPosition0Bias)[lane], bias);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[r][i] = bias[i];
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        x[r][i] = fmaf(s.encoded[(warp * 2 + r) * 3 + j], point_weight[(i * 3 + j) / 8][(i * 3 + j) % 8], x[r][i]);
      }
    }
  }
  normalize<T, 2>(x, s.vectors + kEncodingNorm0, true);
#pragma unroll
  for (int r = 0; r < 2; ++r) *reinterpret_cast<uint4*>(s.x + (warp * 2 + r) * kPitch + lane * 8) = pack8<T>(x[r]);
  __syncthreads();
  STAGE(1, blockIdx.x, 7);
  linear_both(s.x, w, Lines{}, s.vectors + kPosition3Bias, false, s.middle, rank);
  STAGE(1, blockIdx.x, 8);
  const int row = rank * (kRows / kPair) + warp;
  float y[1][8];
  unpack8<T>(*reinterpret_cast<const uint4*>(s.middle + row * kPitch + lane * 8), y[0]);
  normalize<T, 1>(y, s.vectors + kEncodingNorm1, true);
  if (row0 + row < a.rows) reinterpret_cast<uint4*>(a.position)[(row0 + row) * 32 + lane] = pack8<T>(y[0]);
  STAGE(1, blockIdx.x, 9);
}

template <class T, int Groups>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(128) char memory[];
  const int branch_blocks = static_cast<int>(ceil_div<int64_t>(a.rows, kRows)) * kPair, block = blockIdx.x;
  if (block < branch_blocks) {
    box_branch(a, block / kPair * static_cast<int64_t>(kRows), *reinterpret_cast<BranchShared<T>*>(memory));
  } else if (a.step == a.layers) {
    class_branch(a, (block - branch_blocks) / kPair * static_cast<int64_t>(kRows), *reinterpret_cast<BranchShared<T>*>(memory));
  } else {
    wait_for_previous();
    start_next();
    attend<T, Groups>(a, block - branch_blocks, *reinterpret_cast<AttentionShared*>(memory));
  }
}

#else  // older devices have neither clusters nor dependent launches: the launcher does not get here

// What the launcher, which is compiled along, speaks of.
struct AttentionShared {};
template <class T>
struct BranchShared {};
template <class T>
struct RowsShared {
  static size_t bytes(int) { return 0; }
};

template <class T>
__global__ void rows_kernel(const __grid_constant__ Fused) {}
template <class T, int Groups>
__global__ void attention_kernel(const __grid_constant__ Fused) {}

#endif

// ---------------------------------------------------------------- launching

constexpr size_t kAttentionShared = sizeof(BranchShared<__half>) > sizeof(AttentionShared) ? sizeof(BranchShared<__half>)
                                                                                           : sizeof(AttentionShared);

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
  char *x, *where, *mixed, *position, *q, *k, *v, *logits, *offsets, *sampled;

  FusedBuffers(Scratch& scratch, const TransformerDecoder& d, const DecoderSizes& n) {
    const int64_t keys = ceil_div(n.queries, 32) * 32, tensor = n.rows * kChannels * 2, heads = n.batch * keys * kChannels * 2;
    const bool split = !samples_itself(d, n);
    points = scratch.take<float>(n.rows * 3);
    cameras = scratch.take<float>(static_cast<int64_t>(n.batch) * n.cams * 12);
    for (char** p : {&x, &where, &mixed, &position}) *p = scratch.take<char>(tensor);
    for (char** p : {&q, &k, &v}) *p = scratch.take<char>(heads);
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
  if (map.dtype == DType::kInt8) {
    l.format = kBytes, l.scale = d.scales[given];
    l.channel = map.strides[2], l.y = map.strides[3], l.x = map.strides[4];
    l.height = static_cast<int>(map.sizes[3]), l.width = static_cast<int>(map.sizes[4]);
  } else {
    l.format = map.aligned(2, 16) ? kAdjacent : kStrided;
    l.channel = map.strides[2], l.y = map.strides[3], l.x = map.strides[4];
    l.height = static_cast<int>(map.sizes[3]), l.width = static_cast<int>(map.sizes[4]);
  }
  if (l.pool) l.height /= 2, l.width /= 2;
  return l;
}

template <class T>
cudaError_t run(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream) {
  Scratch scratch{static_cast<char*>(workspace)};
  const FusedBuffers b(scratch, d, n);
  Fused a(d);
  a.rows = n.rows, a.queries = n.queries, a.keys = ceil_div(n.queries, 32) * 32, a.ffn = n.ffn, a.layers = d.num_layers;
  a.query = d.query.data, a.query_pos = d.query_pos.data, a.classes = d.classes.data, a.points = b.points;
  a.x = b.x, a.where = b.where, a.mixed = b.mixed, a.position = b.position, a.q = b.q, a.k = b.k, a.v = b.v;
  a.num_classes = n.classes, a.code_size = n.code_size, a.logits = n.logits;
  a.residual_query_pos = d.residual_query_pos, a.cams = n.cams, a.levels = n.levels, a.activation = d.activation;
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
  for (int i = 0; i < kClassWeights; i += 2) {
    const Tensor* w = weight_of(d, static_cast<ClassWeight>(i));
    a.cls[i / 2] = {w[0].data, w[1].data};
  }
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
    if (i < 4 && a.plain_levels == i && a.level[i].format == kAdjacent && !a.level[i].pool) ++a.plain_levels;
  }

  const int64_t pairs = ceil_div<int64_t>(n.rows, kRows) * kPair;
  const size_t rows_shared = RowsShared<T>::bytes(n.ffn);
  const int processors = of_device(cudaDevAttrMultiProcessorCount);
  const int groups = static_cast<int64_t>(ceil_div(n.queries, 32)) * kHeads * n.batch + pairs > 2 * processors ? 2 : 1;
  const int64_t attention = ceil_div(n.queries, 32 * groups) * static_cast<int64_t>(kHeads) * n.batch;

  for (a.step = 0; a.step <= d.num_layers; ++a.step) {
    const bool first = a.step == 0, last = a.step == d.num_layers;
    for (int i = 0; i < kOffsets; i += 2) {
      auto parameters = [&](int layer) {
        const Tensor* w = weight_of(d, layer, static_cast<DecoderWeight>(i));
        return Parameters{w[0].data, w[1].data};
      };
      a.last_layer[i / 2] = first ? Parameters{} : parameters(a.step - 1);
      a.next_layer[i / 2] = last ? Parameters{} : parameters(a.step);
    }
    if (!first && !itself) {
      a.before = true, a.sample = a.after = false;
      SVEXPORT_TRY(start(rows_kernel<T>, a, pairs, rows_shared, true, stream));
      auto apply = [&](DecoderWeight weight, void* y) {
        const Tensor* w = weight_of(d, a.step - 1, weight);
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
    a.before = a.sample = !first && itself;
    a.after = !first;
    SVEXPORT_TRY(start(rows_kernel<T>, a, pairs, rows_shared, !first && itself, stream));
    const auto kernel = groups == 1 ? attention_kernel<T, 1> : attention_kernel<T, 2>;
    SVEXPORT_TRY(start(kernel, a, pairs + (last ? pairs : attention + attention % 2), kAttentionShared, true, stream));
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
