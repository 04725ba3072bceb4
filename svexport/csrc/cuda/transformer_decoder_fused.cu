// The decoder for half and bfloat16, 256 channels in 8 heads, on devices with thread block clusters: two kernels a layer.
//
//   rows_kernel       what a query does on its own: from the heads' results to the queries, keys and values of the next
//                     layer (out_proj, norm, camera weights, sampling, output_proj, norm, ffn, norm, in_proj)
//   attention_kernel  the self attention, and beside it, in blocks of their own, what only the sampling needs: the box
//                     branch, which moves the points, and the encoding of their position
//
// Step s = 0 .. num_layers of either runs what lies between the attentions of layers s - 1 and s; the class branch is the
// last attention_kernel's. Sixteen rows at a time go through all of a step in shared memory, on a pair of blocks that
// compute half of the columns each and give them to one another. Every weight is read once by every pair, straight into
// the registers that mma wants it in, one matrix product ahead: the copy made by fused_decoder_pack lies in that order.
// The first are read before the kernel in front has ended (programmatic dependent launch).
#include "bilinear.cuh"
#include "gemm.h"
#include "mma.cuh"
#include "transformer_decoder.cuh"

namespace svexport {
namespace {

constexpr int kChannels = 256, kHeads = 8, kHeadDim = 32;
constexpr int kRows = 16, kPair = 2, kThreads = 256;
constexpr int kPitch = kChannels + 8;  // of a row in shared memory, against bank conflicts
constexpr int kTile = kRows * kPitch;
constexpr int kNarrow = 64;            // most outputs of a narrow layer: camera weights, box code, classes
constexpr int kMaxFfn = 2048;

// ---------------------------------------------------------------- packed weights

// A matrix (out, in) lies in chunks of 16 outputs x 256 inputs, the inputs' chunks of an output one after the other. A
// chunk is what a warp multiplies 16 rows with: for each 16 inputs, 16 bytes a lane, those of outputs g and g + 8.
constexpr int kChunk = 16 * 32;  // pieces of 16 bytes

__host__ __device__ constexpr int chunks(int out, int in) { return ceil_div(out, 16) * (in / 256); }

// Vectors first, as elements; then the matrices, as chunks.
enum RowsVector {
  kOutProjBias = 0, kNorm1 = 256, kLogitsBias = 768, kOutputProjBias = 832, kNorm2 = 1088, kFfn2Bias = 1600, kNorm3 = 1856,
  kInProjBias = 2368, kFfn0Bias = 3136,  // of ffn elements
};
enum BranchVector {
  kReg0Bias = 0, kReg2Bias = 256, kReg4Bias = 512, kPosition0Weight = 576, kPosition0Bias = 1344, kPositionNorm0_ = 1600,
  kPosition3Bias = 2112, kPositionNorm1_ = 2368, kBranchVectors = 2880,
};
enum ClassVector {
  kCls0Bias = 0, kClsNorm0_ = 256, kCls3Bias = 768, kClsNorm1_ = 1024, kCls6Bias = 1536, kClassVectors = 1600,
};

struct Packed {
  int ffn, layers;

  // Of step s, in pieces of 16 bytes.
  __host__ __device__ int vectors() const { return (kFfn0Bias + ffn) / 8; }
  __host__ __device__ int rows_step() const {
    return vectors() + kChunk * (2 * chunks(256, 256) + 2 * chunks(ffn, 256) + chunks(768, 256) + chunks(kNarrow, 256));
  }
  __host__ __device__ int branch_step() const {
    return kBranchVectors / 8 + kChunk * (3 * chunks(256, 256) + chunks(kNarrow, 256));
  }
  __host__ __device__ int class_branch() const {
    return kClassVectors / 8 + kChunk * (2 * chunks(256, 256) + chunks(kNarrow, 256));
  }
  __host__ __device__ int64_t rows(int step) const { return static_cast<int64_t>(step) * rows_step(); }
  __host__ __device__ int64_t branch(int step) const { return rows(layers + 1) + static_cast<int64_t>(step) * branch_step(); }
  __host__ __device__ int64_t classes() const { return branch(layers + 1); }
  __host__ __device__ int64_t end() const { return classes() + class_branch(); }
};

struct PackJob {
  const void* from;
  int out, in;    // of a matrix; in = 0: a vector of `out` elements
  int64_t to;     // pieces
  int offset;     // of a vector, elements
};

constexpr int kMaxJobs = 40;
struct PackJobs {
  PackJob at[kMaxJobs];
  int count = 0;
};

__global__ void pack_kernel(const __grid_constant__ PackJobs jobs, uint4* packed) {
  const PackJob& job = jobs.at[blockIdx.y];
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  const uint16_t* from = static_cast<const uint16_t*>(job.from);
  if (job.in == 0) {
    uint16_t* to = reinterpret_cast<uint16_t*>(packed + job.to) + job.offset;
    for (int i = first; i < job.out; i += step) to[i] = from[i];
    return;
  }
  for (int i = first; i < chunks(job.out, job.in) * kChunk; i += step) {
    const int chunk = i / kChunk, k = i / 32 % 16, lane = i % 32;
    const int across = job.in / 256, out = chunk / across * 16 + lane / 4, in = chunk % across * 256 + k * 16 + lane % 4 * 2;
    auto pair = [&](int o, int c) {
      if (o >= job.out) return 0u;
      const uint16_t* p = from + static_cast<int64_t>(o) * job.in + c;
      return p[0] | static_cast<uint32_t>(p[1]) << 16;
    };
    packed[job.to + i] = make_uint4(pair(out, in), pair(out, in + 8), pair(out + 8, in), pair(out + 8, in + 8));
  }
}

// ---------------------------------------------------------------- parameters

struct FusedLevel {
  const void* data;
  int64_t batch, cam, channel, y, x;  // strides, elements
  int height, width;                  // of the level, which is half the map's where it is pooled
  float scale;
  bool pool;
  int format;                         // 0: 8 channels in one access; 1: by strides; 2: int8 in CHW32
};

struct Fused {
  int64_t rows;
  int queries, keys;  // keys: queries, up to a multiple of 32
  int ffn, step, layers;
  const uint4* packed;
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
  float low[3], size[3], image[2], depth_eps, clamp[2];
  bool in_image;
  FusedLevel level[kMaxCameraLevels];
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

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

// What the kernel in front wrote is there from here on; and the next may start reading its weights.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---------------------------------------------------------------- matrix products

__device__ __forceinline__ uint4 fetch(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The weights of one chunk, and where the lane finds the next.
struct Chunk {
  uint4 at[16];
};

template <int From = 0, int To = 16>
__device__ __forceinline__ void fetch(Chunk& w, const uint4* from) {
  if (from == nullptr) return;
#pragma unroll
  for (int k = From; k < To; ++k) w.at[k] = fetch(from + k * 32);
}

// 16 rows x 16 outputs; [0]: outputs 0 to 7, [1]: 8 to 15. Transposed: [0]: rows 0 to 7 (of outputs g, g + 8), [1]: 8 to 15.
struct Sum {
  float at[2][4];
};

template <class T, bool kTransposed, int Steps>
__device__ __forceinline__ void multiply(Sum& sum, const T* tile, int pitch, Chunk& w, const uint4* next) {
  const int lane = threadIdx.x % 32;
  const uint32_t from = shared_address(tile + lane % 16 * pitch + lane / 16 * 8);
  Sum odd{};
  uint32_t x[Steps < 4 ? Steps : 4][4];
#pragma unroll
  for (int k = 0; k < Steps && k < 4; ++k) load_matrix(x[k], from + k * 32);
#pragma unroll
  for (int k = 0; k < Steps; ++k) {
    uint32_t(&a)[4] = x[k % 4];
    const uint4 b = w.at[k];
    float(&to)[2][4] = k % 2 ? odd.at : sum.at;
    if (kTransposed) {
      const uint32_t outputs[4] = {b.x, b.z, b.y, b.w};
      mma<T>(to[0], outputs, a[0], a[2]);
      mma<T>(to[1], outputs, a[1], a[3]);
    } else {
      mma<T>(to[0], a, b.x, b.y);
      mma<T>(to[1], a, b.z, b.w);
    }
    if (k + 4 < Steps) load_matrix(a, from + (k + 4) * 32);
    if (next) w.at[k] = fetch(next + k * 32);
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
template <class T>
__device__ __forceinline__ const uint4* narrow_chunk(const uint4* matrix, int warp, int lane) {
  return matrix + (warp % 4) * kChunk + warp / 4 * 8 * 32 + lane;
}

template <class T>
__device__ __forceinline__ void multiply_narrow(float* partial, const T* tile, Chunk& w, const uint4* next) {
  const int warp = threadIdx.x / 32;
  Sum sum{};
  multiply<T, false, 8>(sum, tile + warp / 4 * 128, kPitch, w, next);
  fetch<8, 16>(w, next);
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

template <class T>
__device__ __forceinline__ void load_vectors(T* to, const uint4* from, int pieces) {
  for (int i = threadIdx.x; i < pieces; i += kThreads) copy_async(reinterpret_cast<uint4*>(to) + i, from + i, true);
}

template <class T>
__device__ __forceinline__ float2 two(const T* p) {
  return unpack<T>(*reinterpret_cast<const uint32_t*>(p));
}

// ---------------------------------------------------------------- sampling

// u and v of camera `lane`; not seen: u = NaN.
__device__ __forceinline__ void project(const Fused& a, int64_t row, float& u, float& v) {
  const int lane = threadIdx.x % 32;
  u = v = NAN;
  if (row >= a.rows || lane >= a.cams) return;
  float place[3], image[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) place[i] = fmaf(a.points[row * 3 + i], a.size[i], a.low[i]);
  const int64_t at = row / a.queries * a.lidar2img_strides[0] + lane * a.lidar2img_strides[1];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    float m[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) m[j] = a.lidar2img.get(at + i * a.lidar2img_strides[2] + j * a.lidar2img_strides[3]);
    image[i] = fmaf(m[0], place[0], fmaf(m[1], place[1], m[2] * place[2])) + m[3];
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
template <class T>
__device__ __forceinline__ uint4 pixel(const FusedLevel& l, int64_t image, int y, int x) {
  const int lane = threadIdx.x % 32;
  const int64_t at = image + y * l.y + x * l.x;
  if (l.format == 2) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(static_cast<const int8_t*>(l.data) + at + lane / 4 * l.channel +
                                                         lane % 4 * 8));
    return make_uint4(v.x, v.y, 0, 0);
  }
  if (l.format == 0) return __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(l.data) + at + lane * 8));
  const uint16_t* p = static_cast<const uint16_t*>(l.data) + at + lane * 8 * l.channel;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = __ldg(p + 2 * i * l.channel) | static_cast<uint32_t>(__ldg(p + (2 * i + 1) * l.channel)) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Of a pixel of the level.
template <class T>
__device__ __forceinline__ uint4 tap(const FusedLevel& l, int64_t image, int y, int x) {
  if (!l.pool) return pixel<T>(l, image, y, x);
  uint4 m = pixel<T>(l, image, 2 * y, 2 * x);
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    const uint4 v = pixel<T>(l, image, 2 * y + i / 2, 2 * x + i % 2);
    if (l.format == 2) {
      m = make_uint4(__vmaxs4(m.x, v.x), __vmaxs4(m.y, v.y), 0, 0);
    } else {
      m = make_uint4(max_of<T>(m.x, v.x), max_of<T>(m.y, v.y), max_of<T>(m.z, v.z), max_of<T>(m.w, v.w));
    }
  }
  return m;
}

template <class T>
__device__ __forceinline__ void add_tap(const FusedLevel& l, const uint4& v, float weight, float (&sum)[8]) {
  float x[8];
  if (l.format == 2) {
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

// sum += what all cameras see on all levels, by a warp. weights: of camera and level c * levels + l, in lanes' first and
// second. Four levels' pixels are on their way at once.
template <class T>
__device__ __forceinline__ void sample(const Fused& a, int batch, float u, float v, const float (&weights)[2],
                                       float (&sum)[8]) {
  for (unsigned seen = __ballot_sync(0xffffffffu, !isnan(u)); seen; seen &= seen - 1) {
    const int cam = __ffs(seen) - 1;
    const float cam_u = __shfl_sync(0xffffffffu, u, cam), cam_v = __shfl_sync(0xffffffffu, v, cam);
    for (int first = 0; first < a.levels; first += 4) {
      uint4 taps[4][4];
      float by[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i >= a.levels) break;
        const FusedLevel& l = a.level[first + i];
        const Place p = place_on(l, batch, cam, cam_u, cam_v);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          taps[i][j] = tap<T>(l, p.image, p.y.index[j / 2], p.x.index[j % 2]);
          by[i][j] = p.y.weight[j / 2] * p.x.weight[j % 2];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i >= a.levels) break;
        const FusedLevel& l = a.level[first + i];
        const int which = cam * a.levels + first + i;
        const float even = __shfl_sync(0xffffffffu, weights[0], which % 32);
        const float odd = __shfl_sync(0xffffffffu, weights[1], which % 32);
        const float weight = (which < 32 ? even : odd) * l.scale;
        float sampled[8] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) add_tap<T>(l, taps[i][j], by[i][j], sampled);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] = fmaf(isnan(sampled[c]) ? 0.f : sampled[c], weight, sum[c]);
      }
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
      if (l.format != 0 || l.pool) continue;
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
  T in[kTile], x[kTile], sum[kTile], where[kTile], query_pos[kTile];
  float partial[2 * kRows * kNarrow];
  T rest[1];  // hidden: 16 rows of ffn + 8; vectors

  static constexpr size_t bytes(int ffn) {
    return offsetof(RowsShared, rest) + (kRows * (ffn + 8) + kFfn0Bias + ffn) * sizeof(T);
  }
};

template <class T>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1) rows_kernel(const __grid_constant__ Fused a) {
  extern __shared__ __align__(128) char memory[];
  RowsShared<T>& s = *reinterpret_cast<RowsShared<T>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hidden_pitch = a.ffn + 8;
  T* hidden = s.rest;
  T* vectors = hidden + kRows * hidden_pitch;
  const uint32_t rank = pair_rank();
  const int64_t row0 = blockIdx.x / kPair * static_cast<int64_t>(kRows);

  // Where this lane finds the weights of its warp's columns.
  const Packed packing{a.ffn, a.layers};
  const uint4* packed = a.packed + packing.rows(a.step);
  const uint4* matrix = packed + packing.vectors();
  const int mine = rank * 8 + warp;  // the warp's 16 of 256 columns
  const uint4* const out_proj = matrix + mine * kChunk + lane;
  matrix += chunks(256, 256) * kChunk;
  const uint4* const logits = narrow_chunk<T>(matrix, warp, lane);
  matrix += chunks(kNarrow, 256) * kChunk;
  const uint4* const output_proj = matrix + mine * kChunk + lane;
  matrix += chunks(256, 256) * kChunk;
  const int hidden_chunks = a.ffn / 256;  // of 16 columns of the ffn for this warp, and of 256 inputs of its second layer
  const uint4* const ffn0 = matrix + (rank * 8 * hidden_chunks + warp) * kChunk + lane;  // next: 8 chunks on
  matrix += chunks(a.ffn, 256) * kChunk;
  const uint4* const ffn2 = matrix + mine * hidden_chunks * kChunk + lane;  // next: 1 chunk on
  matrix += chunks(256, a.ffn) * kChunk;
  const uint4* const in_proj = a.step < a.layers ? matrix + mine * kChunk + lane : nullptr;  // next: 16 chunks on

  pair_arrive();
  Chunk w;
  fetch(w, a.before ? out_proj : a.after ? output_proj : in_proj);
  load_vectors(vectors, packed, packing.vectors());
  wait_for_previous();

  const void* x_from = a.step <= 1 ? a.query : a.x;  // what the layer began with, or its out_proj and norm left
  if (a.after && !a.before) x_from = a.x;
  load_tile(s.x, x_from, row0, a.rows);
  load_tile(s.query_pos, a.query_pos, row0, a.rows);
  if (a.before || a.after) load_tile(s.in, a.mixed, row0, a.rows);
  copy_async_commit();

  if (a.step == 0) {  // the only kernel of this step, so what else is to be done in the beginning
    const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x, step = gridDim.x * static_cast<int64_t>(kThreads);
    for (int64_t i = first; i < a.rows * 3; i += step) a.points[i] = a.given.get(i);
    const int padding = a.keys - a.queries;  // values of keys that are not: they are multiplied with zero
    for (int64_t i = first; i < a.rows / a.queries * kChannels * padding; i += step) {
      static_cast<T*>(a.v)[i / padding * a.keys + a.queries + i % padding] = from_float<T>(0.f);
    }
  }

  const int own = rank * (kRows / kPair) + warp;  // the row this warp samples
  const int batch = static_cast<int>((row0 + own) / a.queries);
  float u = NAN, v = NAN;
  if (a.sample) {
    project(a, row0 + own, u, v);
    prefetch<T>(a, batch, u, v);
  }
  copy_async_wait<0>();
  __syncthreads();
  pair_wait();  // the other block runs

  if (a.before) {
    Sum sum{};
    multiply<T, false, 16>(sum, s.in, kPitch, w, nullptr);
    if (a.sample) fetch<0, 8>(w, logits);
    each_pair(sum, mine * 16, [&](int row, int column, float p, float q) {
      const float2 bias = two(vectors + kOutProjBias + column), x = two(s.x + row * kPitch + column);
      p += bias.x + x.x, q += bias.y + x.y;
      if (a.residual_query_pos) {
        const float2 position = two(s.query_pos + row * kPitch + column);
        p += position.x, q += position.y;
      }
      store_both(s.sum + row * kPitch + column, pack<T>(p, q), rank);
    });
    pair_sync();
    normalize_tile(s.sum, vectors + kNorm1, false, s.x, s.query_pos, s.where);
    __syncthreads();
  }

  if (a.sample) {
    multiply_narrow(s.partial, s.where, w, output_proj);
    __syncthreads();
    float weights[2], sampled[8] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      weights[i] = to_float(from_float<T>(narrow_sum(s.partial, own, lane + i * 32) + to_float(vectors[kLogitsBias + lane + i * 32])));
    }
    activate(a.activation, a.logits, weights);
    sample<T>(a, batch, u, v, weights, sampled);
    store_both(s.in + own * kPitch + lane * 8, pack8<T>(sampled), rank);
    pair_sync();
  }

  if (a.before && !a.after) {  // the sampling is not ours
    store_half(a.x, s.x, row0, a.rows, rank);
    store_half(a.where, s.where, row0, a.rows, rank);
    return;
  }

  if (a.after) {
    Sum sum{};
    uint32_t position[4];
    each_pair(sum, mine * 16, [&, i = 0](int row, int column, float, float) mutable {
      const T* at = static_cast<const T*>(a.position) + (row0 + row) * kChannels + column;
      position[i++] = row0 + row < a.rows ? *reinterpret_cast<const uint32_t*>(at) : 0u;
    });
    multiply<T, false, 16>(sum, s.in, kPitch, w, ffn0);
    each_pair(sum, mine * 16, [&, i = 0](int row, int column, float p, float q) mutable {
      const float2 bias = two(vectors + kOutputProjBias + column), x = two(s.x + row * kPitch + column);
      const float2 extra = unpack<T>(position[i++]);
      store_both(s.sum + row * kPitch + column, pack<T>(p + bias.x + x.x + extra.x, q + bias.y + x.y + extra.y), rank);
    });
    pair_sync();
    normalize_tile(s.sum, vectors + kNorm2, false, s.x);
    __syncthreads();

    for (int j = 0; j < hidden_chunks; ++j) {
      Sum sum{};
      multiply<T, false, 16>(sum, s.x, kPitch, w, j + 1 < hidden_chunks ? ffn0 + (j + 1) * 8 * kChunk : ffn2);
      each_pair(sum, (rank * 8 * hidden_chunks + j * 8 + warp) * 16, [&](int row, int column, float p, float q) {
        const float2 bias = two(vectors + kFfn0Bias + column);
        store_both(hidden + row * hidden_pitch + column, pack<T>(relu(p + bias.x), relu(q + bias.y)), rank);
      });
    }
    pair_sync();
    sum = Sum{};
    for (int j = 0; j < hidden_chunks; ++j) {
      multiply<T, false, 16>(sum, hidden + j * 256, hidden_pitch, w, j + 1 < hidden_chunks ? ffn2 + (j + 1) * kChunk : in_proj);
    }
    each_pair(sum, mine * 16, [&](int row, int column, float p, float q) {
      const float2 bias = two(vectors + kFfn2Bias + column), x = two(s.x + row * kPitch + column);
      store_both(s.sum + row * kPitch + column, pack<T>(p + bias.x + x.x, q + bias.y + x.y), rank);
    });
    pair_sync();
    normalize_tile(s.sum, vectors + kNorm3, false, s.x, s.query_pos, s.where);
    __syncthreads();
    store_half(a.x, s.x, row0, a.rows, rank);
  } else {
    normalize_nothing:
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
  if (in_proj == nullptr) return;

  // Queries, scaled for exp2, and keys by rows; values by columns.
  const float scale = 0.17677669529663687f * 1.4426950408889634f;  // log2(e) / sqrt(32)
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    Sum sum{};
    const uint4* next = j < 2 ? in_proj + (j + 1) * 16 * kChunk : nullptr;
    if (j < 2) {
      multiply<T, false, 16>(sum, s.where, kPitch, w, next);
      each_pair(sum, mine * 16, [&](int row, int column, float p, float q) {
        const float2 bias = two(vectors + kInProjBias + j * kChannels + column);
        if (row0 + row >= a.rows) return;
        const int64_t b = (row0 + row) / a.queries, at = (row0 + row) % a.queries;
        T* to = static_cast<T*>(j == 0 ? a.q : a.k) + ((b * kHeads + column / kHeadDim) * a.keys + at) * kHeadDim + column % kHeadDim;
        const float by = j == 0 ? scale : 1.f;
        *reinterpret_cast<uint32_t*>(to) = pack<T>((p + bias.x) * by, (q + bias.y) * by);
      });
    } else {
      multiply<T, true, 16>(sum, s.x, kPitch, w, next);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = mine * 16 + lane / 4 + i / 2 % 2 * 8, row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row0 + row >= a.rows) continue;
        const int64_t b = (row0 + row) / a.queries, at = (row0 + row) % a.queries;
        static_cast<T*>(a.v)[(b * kChannels + column) * a.keys + at] =
            from_float<T>(sum.at[i / 4][i % 4] + to_float(vectors[kInProjBias + 2 * kChannels + column]));
      }
    }
  }
}
