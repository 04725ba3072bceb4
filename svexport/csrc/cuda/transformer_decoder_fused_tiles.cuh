// The fused decoder's barriers, tiles of rows in shared memory, and the products and norms of tiles.
#pragma once

#include "bulk.cuh"
#include "transformer_decoder_fused.cuh"
#include "wgmma.cuh"

namespace svexport::fused {

constexpr int kHeadDim = kChannels / kHeads, kOwnHeads = kHeads / 2;
constexpr int kSlots = 2;                                   // slots of the ring, a product each
constexpr int kRowsOfWarp = kRows / kWarps;                 // rows that a warp norms
constexpr int kSampled = kRows / 2;                         // rows that a block samples, one per warp
constexpr int kAtom = kRows * 128, kTileBytes = 4 * kAtom;  // bytes of 64 channels of a tile, of a tile
constexpr int kBox = kHalf * 128, kSlotBytes = 4 * kBox;    // bytes of the weights of 64 inputs, of a product
constexpr int kHeadBytes = kSlotBytes / kOwnHeads;          // bytes of two blocks of keys and values of a head
constexpr int kIncoming = kTileBytes / 2;                   // bytes that the other block sends of a tile
constexpr int kSeen = 2 * kMaxCams;                         // floats per row: u and v in the cameras
constexpr int kLogitsPitch = kNarrow + 4;                   // floats, against bank conflicts
constexpr float kMaxLogit = 11.512915f;                     // the largest inverse sigmoid: log((1 - kEps) / kEps)
static_assert(kSampled == kWarps && kHalf == kWarps * 16 && kHeadBytes == 2 * kKeyBlock * kHeadDim * 2 * 2);

// ---------------------------------------------------------------- barriers

// A barrier of the compute warps.
__device__ __forceinline__ void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kComputing) : "memory"); }

__device__ __forceinline__ int block_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The exchange between the two blocks of a tile. Every store counts its bytes at a barrier of the receiving block. A
// barrier of the cluster would order stores by a fence of the whole device, which takes longer than the exchange. Two
// barriers, used in turn, suffice, because the other block is never more than one exchange ahead.
class Exchange {
 public:
  __device__ __forceinline__ Exchange(uint32_t received, int half) : barrier_(received) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(received), "r"(half ^ 1));
    away_ = there - received;
  }

  // Stores v at the same address in the other block; this block has stored it itself.
  __device__ __forceinline__ void send(uint32_t address, uint4 v) const {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address + away_),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier_ + count_ % 2 * 8 + away_)
                 : "memory");
  }

  // Ends an exchange: waits until all threads have sent, and `bytes` bytes have arrived.
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

// Increments a counter with release semantics: who reads the new count sees this block's writes.
__device__ __forceinline__ void signal(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits for a count, for bulk copies too: by a fence of global memory only, as one of all memory takes that long again.
__device__ __forceinline__ void await(const unsigned* counter, unsigned count) {
  unsigned seen = 0;
  while (seen < count) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---------------------------------------------------------------- tiles

// A tile has the layout of a tensor map with rows of 128 bytes and 128-byte swizzle: 64 channels of all rows, then the
// next 64. A chunk, 16 bytes of 8 channels, lies at 16 * (chunk ^ row) % 128 in its row.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
  return chunk / 8 * kAtom + row * 128 + ((chunk ^ row) & 7) * 16;
}

// The index of a dimension and a key among the values of 64 keys of a head. Rows have 128 bytes; odd rows have their
// halves exchanged, so that two rows use different banks.
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

// The reverse of load_matrix.
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
  UNROLL for (int i = 0; i < 4; ++i) {
    const float2 two = unpack<T>(words[i]);
    x[2 * i] = two.x, x[2 * i + 1] = two.y;
  }
}

template <class T>
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}

// The rounding errors of x, which y is rounded from.
template <class T>
__device__ __forceinline__ uint32_t rest2(float x0, float x1, uint32_t y) {
  const float2 rounded = unpack<T>(y);
  return pack<T>(x0 - rounded.x, x1 - rounded.y);
}

template <class T>
__device__ __forceinline__ uint4 rest8(const float (&x)[8], const uint4& y) {
  return make_uint4(rest2<T>(x[0], x[1], y.x), rest2<T>(x[2], x[3], y.y), rest2<T>(x[4], x[5], y.z),
                    rest2<T>(x[6], x[7], y.w));
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
  UNROLL for (int i = 0; i < 8; ++i) x[i] += y[i];
  return pack8<T>(x);
}

// ---------------------------------------------------------------- matrix products

// wgmma's descriptor of a matrix in shared memory: rows of 128 bytes, swizzled, 1024 bytes between groups of 8 rows.
// The shuffle shows the compiler that all lanes have the same; else it moves it out of lanes' registers for each wgmma.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address) {
  return 0x4000004000010000ull | __shfl_sync(0xffffffffu, address / 16, 0);
}

// sum (64 x 16) += a (64 x 16) b (16 x 16), by all warps of a warp group.
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

// Begins sum + odd += 64 outputs of the weights * 16 rows of a tile, over 256 inputs. There are two sums, because a
// wgmma waits for the previous one that adds to the same sum.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[8], float (&odd)[8], uint32_t weights, uint32_t rows) {
  const uint64_t a = matrix_at(weights), b = matrix_at(rows);
  hold(sum), hold(odd);
  begin_products();
  UNROLL for (int i = 0; i < 16; ++i) {
    wgmma<T>(i % 2 ? odd : sum, a + (i / 4 * kBox + i % 4 * 32) / 16, b + (i / 4 * kAtom + i % 4 * 32) / 16);
  }
  commit_products();
}

// Ends multiply(), with the result in sum.
__device__ __forceinline__ void finish(float (&sum)[8], float (&odd)[8]) {
  await_products();
  hold(sum), hold(odd);
  UNROLL for (int j = 0; j < 8; ++j) sum[j] += odd[j];
}

// ---------------------------------------------------------------- norms

// Layer norm with 8 channels per lane, Rows rows at once. weight, bias: those of the lane's channels. pivot: any number
// near the mean. The sum of the differences from it, and the sum of their squares, can then be added up together.
template <class T, int Rows>
__device__ __forceinline__ void normalize(float (&x)[Rows][8], const float (&pivot)[Rows], const uint4& weight,
                                          const uint4& bias) {
  float sum[Rows], squares[Rows], gamma[8], beta[8];
  UNROLL for (int r = 0; r < Rows; ++r) {
    float odd = 0, odd_squares = 0;
    sum[r] = squares[r] = 0;
    UNROLL for (int i = 0; i < 8; i += 2) {
      x[r][i] -= pivot[r], x[r][i + 1] -= pivot[r];
      sum[r] += x[r][i], odd += x[r][i + 1];
      squares[r] = fmaf(x[r][i], x[r][i], squares[r]), odd_squares = fmaf(x[r][i + 1], x[r][i + 1], odd_squares);
    }
    sum[r] += odd, squares[r] += odd_squares;
  }
  UNROLL for (int step = 16; step > 0; step /= 2) {
    UNROLL for (int r = 0; r < Rows; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step),
          squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], step);
    }
  }
  unpack8<T>(weight, gamma);
  unpack8<T>(bias, beta);
  UNROLL for (int r = 0; r < Rows; ++r) {
    const float mean = sum[r] * (1.f / kChannels), variance = fmaf(-mean, mean, squares[r] * (1.f / kChannels));
    const float scale = rsqrtf(fmaxf(variance, 0.f) + kEps), shift = -mean * scale;
    UNROLL for (int i = 0; i < 8; ++i) x[r][i] = fmaf(fmaf(x[r][i], scale, shift), gamma[i], beta[i]);
  }
}

}  // namespace svexport::fused
