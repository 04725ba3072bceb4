// What the kernels large and small share: products of rows of two large tensors and a small one.
#pragma once

#include "bulk.cuh"
#include "einsum/run.h"
#include "overlap.cuh"

namespace svexport::einsum {

// Every warp works on its own. It copies rows of the large tensors to shared memory as they lie in memory, some tiles
// ahead, and multiplies them there. Rows and elements may take any place in the fragments as long as both factors
// agree; in the orders used here, the lanes of a warp read from different banks.

// What a lane holds of a row or column in one step of a product: 8 bytes, as pieces of neighbouring elements.
template <class T>
constexpr int kEach = 8 / sizeof(T);
template <class T>
constexpr int kPieces = sizeof(T) == 4 ? 1 : 2;

template <class T>
struct alignas(8) Fragment {
  uint32_t both[2];

  __device__ __forceinline__ void set(const T (&x)[4], bool = false) { memcpy(both, x, sizeof(both)); }
};
template <>
struct alignas(16) Fragment<float> {
  uint32_t big[2], small[2];

  // Rounding the first part leaves a second one of either sign. Doing so for one factor is enough for errors to cancel.
  __device__ __forceinline__ void set(const float (&x)[2], bool rounded = false) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const Parts p = rounded ? parts(x[i]) : cut(x[i]);
      big[i] = p.big;
      small[i] = p.small;
    }
  }

 private:
  // The first part is x, of which mma_tf32 cuts off low bits; the second part is these bits.
  static __device__ __forceinline__ Parts cut(float x) {
    const uint32_t bits = __float_as_uint(x);
    return {bits, __float_as_uint(x - __uint_as_float(bits & 0xffffe000u))};
  }
};

// F: a known format. c += a b for 16 rows, 8 of them in each of a's two fragments, and 8 * J columns.
template <class F, class T, int J>
__device__ __forceinline__ void multiply(const F&, float (&c)[J][4], const Fragment<T>& upper, const Fragment<T>& lower,
                                         const Fragment<T> (&b)[J]) {
  if constexpr (sizeof(T) == 4) {
    const uint32_t big[4] = {upper.big[0], lower.big[0], upper.big[1], lower.big[1]};
    const uint32_t small[4] = {upper.small[0], lower.small[0], upper.small[1], lower.small[1]};
    UNROLL for (int j = 0; j < J; ++j) mma_tf32(c[j], small, b[j].big[0], b[j].big[1]);
    UNROLL for (int j = 0; j < J; ++j) mma_tf32(c[j], big, b[j].small[0], b[j].small[1]);
    UNROLL for (int j = 0; j < J; ++j) mma_tf32(c[j], big, b[j].big[0], b[j].big[1]);
  } else {
    const uint32_t both[4] = {upper.both[0], lower.both[0], upper.both[1], lower.both[1]};
    UNROLL for (int j = 0; j < J; ++j) mma<typename F::Type>(c[j], both, b[j].both[0], b[j].both[1]);
  }
}

// A large tensor. Strides are in bytes: of S, O and the third dimension.
struct Large {
  char* data;
  int64_t strides[3];
  int count, width;  // sizes of the third and the last dimension
  int slip;          // third stride modulo 16 bytes
  int pitch;         // bytes in shared memory of a tile, for one element of the third dimension
  const char* end;   // end of the tensor
  bool ragged;       // whether the tensor ends off a multiple of 16 bytes

  template <class T>
  __device__ __forceinline__ T* at(int64_t s, int64_t o, int64_t k, int64_t row) const {
    return reinterpret_cast<T*>(data + s * strides[0] + o * strides[1] + k * strides[2] +
                                row * width * static_cast<int>(sizeof(T)));
  }
  // Where in shared memory the rows of element k begin, less the offset of element 0 within 16 bytes.
  __device__ __forceinline__ int begin(int k) const { return k * pitch + (k * slip & 15); }
};

struct Einsum {
  DType dtype;
  Large x, z;
  char* y;
  int64_t y_shared, rows;           // the stride of y over S; T
  int y_k, y_v, y_m, y_w;           // the other strides of y
  int shared, tiles;                // S times what is apart; tiles of each of these
  Divider apart;                    // M (for a sum: K) if its elements have tiles of their own, and count is 1; else 1
  Divider per_shared, per_outer;    // tiles of one element of S, and of one of O
  int steps, groups;                // steps of the product over K and V; groups of the M * W columns
  Divider per_group, per_k, per_m;  // steps of a group; pieces, or elements, of one of K; columns of one of M
  int workers, stages;              // warps that have tiles; tiles of a warp in flight
  int before, stage, warp;          // bytes of shared memory: before the warps', of a stage, of a warp
  float* partials;                  // (parts, S, K, V, W)
  int parts;
  Divider per_row;                  // groups of kNeighbours elements of W
  // For large_kernel only:
  Divider per_block;            // blocks that share `span` tiles
  int count;                    // elements of M that a warp does
  int span, each, more;         // each: tiles of a block; more: blocks that do one more
};

// Part `part` of 0, 1, .., count - 1, which is cut into `parts` parts of about equal size.
struct Range {
  int begin, end;

  __device__ __forceinline__ Range(int count, int part, int parts) {
    const int each = static_cast<uint32_t>(count) / static_cast<uint32_t>(parts), more = count - each * parts;
    begin = each * part + min(part, more);
    end = begin + each + (part < more ? 1 : 0);
  }
};

// The rows of a tile.
struct Place {
  int64_t outer, first;
  int rows;

  __device__ __forceinline__ Place(const Einsum& a, int tile) {
    auto rest = static_cast<uint32_t>(tile);
    first = static_cast<int64_t>(a.per_outer.split(rest)) * kRows;
    outer = rest;
    rows = static_cast<int>(min(static_cast<int64_t>(kRows), a.rows - first));
  }
};

__device__ __forceinline__ int within_16(const void* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 15); }

// Copies from shared to global memory by the copy engine.
__device__ __forceinline__ void engine_put(char* to, const char* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Waits until the copy engine has read what this thread puts.
__device__ __forceinline__ void engine_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// The stages of a warp. Their tiles are fetched in pieces or, if kWhole, by the copy engine.
template <bool kWhole>
class Stages {
 public:
  // barriers: 8 bytes for each stage; fetches: calls of fetch() that fill a stage.
  __device__ __forceinline__ Stages(char* memory, char* barriers, int stages, int bytes, int fetches)
      : memory_(memory), barriers_(shared_address(barriers)), stages_(stages), bytes_(bytes) {
#if __CUDA_ARCH__ >= 900
    if constexpr (!kWhole) return;
    if (static_cast<int>(threadIdx.x) % 32 < stages) {
      init_barrier(barrier(threadIdx.x % 32), fetches);
      publish_barriers();
    }
    __syncwarp();
#endif
  }
  __device__ __forceinline__ char* at(int stage) const { return memory_ + stage * bytes_; }
  __device__ __forceinline__ uint32_t barrier(int stage) const { return barriers_ + stage * 8; }

  // Waits until the tiles of a stage are there.
  __device__ __forceinline__ void wait(int stage) {
    if constexpr (kWhole) {
      wait_for(barrier(stage), turns_ >> stage & 1);
      turns_ ^= 1u << stage;
    } else {
      with_constant<1, 2, 3, kMostStages>(stages_, [](auto stages) { copy_async_wait<stages.value - 1>(); });
    }
    __syncwarp();
  }

 private:
  char* memory_;
  uint32_t barriers_;
  int stages_, bytes_;
  uint32_t turns_ = 0;
};

// Copies rows of `count` elements of the third dimension to shared memory, where they keep their offset within 16
// bytes. Fills up with zeros to `filled` rows, beginning behind the piece of 16 bytes in which the rows end.
template <bool kWhole, class T>
__device__ __forceinline__ void fetch(char* to, const Large& t, int count, const T* first, int rows, int filled,
                                      uint32_t barrier) {
  constexpr int kSize = sizeof(T);
  const int lane = threadIdx.x % 32, begin = kWhole ? 0 : within_16(first), bytes = rows * t.width * kSize;
  const char* from = reinterpret_cast<const char*>(first);
  if constexpr (kWhole) {
    if (lane == 0) expect_bytes(barrier, bytes * count);
    if (lane < count) copy_bulk(to + lane * t.pitch, from + lane * t.strides[2], bytes, barrier);
  } else {
    // Copies whole pieces, with what lies around the rows.
    for (int k = 0; k < count; ++k, from += t.strides[2]) {
      const int before = within_16(from), end = before + bytes;
      int pieces = ceil_div(end, 16);
      char* shared = to + t.begin(k) + begin - before + lane * 16;
      const char* device = from - before + lane * 16;
      // The tensor may end inside its last piece: copy that piece's elements one by one, and a zero. memcheck takes an
      // asynchronous copy of fewer bytes for one of 16.
      if (t.ragged && from - before + pieces * 16 > t.end) {
        const int i = --pieces * 16 + lane * kSize;
        if (i <= end) {
          const auto last = load_if<T, 1>(reinterpret_cast<const T*>(device - lane * 16 + i), i < end);
          store(reinterpret_cast<T*>(shared - lane * 16 + i), last);
        }
      }
#pragma unroll 1  // few rows: fetching unrolled instructions would take longer than fetching elements
      for (int i = pieces - lane; i > 0; i -= 32, shared += 512, device += 512) copy_async(shared, device, true);
    }
  }
  if (rows >= filled) return;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    char* const rest = to + t.begin(k) + begin;
#pragma unroll 1
    for (int i = bytes + (-within_16(rest + bytes) & 15) + lane * 16; i < filled * t.width * kSize; i += 512) {
      store(reinterpret_cast<uint32_t*>(rest + i), Vec<uint32_t, 4>{});
    }
  }
  if constexpr (kWhole) publish();
}

// Writes zeros between the end of a tile's rows and the place where fetch() begins to fill up.
template <class T>
__device__ __forceinline__ void clear_last(char* rows, const Large& t, int count, int bytes) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    char* const end = rows + t.begin(k) + bytes;
    const int i = lane * static_cast<int>(sizeof(T));
    if (i < (-within_16(end) & 15)) *reinterpret_cast<T*>(end + i) = T{};
  }
}

// Offset within 16 bytes, in shared memory, of rows that are at `first` in device memory.
template <bool kWhole>
__device__ __forceinline__ int begin_of(const void* first) {
  return kWhole ? 0 : within_16(first);
}

// Copies out of shared memory. Source and destination have the same offset within 16 bytes.
template <class T>
__device__ __forceinline__ void put(T* first, const char* from, int bytes) {
  constexpr int kSize = sizeof(T), kPiece = 16 / kSize;
  const int lane = threadIdx.x % 32, begin = within_16(first), end = begin + bytes, last = end / 16 * 16;
  from -= begin;
  char* const to = reinterpret_cast<char*>(first) - begin;
#pragma unroll 4
  for (int i = (begin ? 16 : 0) + lane * 16; i < last; i += 512) {
    store(reinterpret_cast<uint32_t*>(to + i), load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from + i)));
  }
  // Elements of the first and the last 16 bytes, which may hold other rows' elements too.
  const bool is_last = lane >= kPiece;
  const int i = lane % kPiece * kSize + (is_last ? last : 0);
  if (lane < 2 * kPiece && i >= begin && i < end && (is_last ? last || !begin : begin)) {
    *reinterpret_cast<T*>(to + i) = *reinterpret_cast<const T*>(from + i);
  }
}

template <class T>
__device__ __forceinline__ T element(const char* p) {
  return *reinterpret_cast<const T*>(p);
}

// t: (S, O, K, T, V)
inline bool large(const Tensor& t, Large* to) {
  const int64_t size = t.item_size(), width = t.sizes[4];
  auto* const data = static_cast<char*>(t.data);
  *to = {data, {t.strides[0] * size, t.strides[1] * size, t.strides[2] * size}, int_of(t.sizes[2]), int_of(width),
         int_of(t.strides[2] * size & 15), pitch_of(width, size), data + size};
  for (int i = 0; i < 5; ++i) to->end += (t.sizes[i] - 1) * t.strides[i] * size;
  to->ragged = reinterpret_cast<uintptr_t>(to->end) % 16 != 0;
  return (t.strides[4] == 1 || width == 1) && (t.strides[3] == width || t.sizes[3] == 1);
}

// Sets all that does not depend on how the work is divided. False if strides or sizes do not suit the kernels.
inline bool describe(const Tensor& x, const Tensor& y, const Tensor& z, Einsum* a) {
  if (!large(x, &a->x) || !large(z, &a->z)) return false;
  a->dtype = x.dtype;
  a->y = static_cast<char*>(y.data);
  int64_t last = 0;  // offset of the last element within one element of S
  for (int i = 1; i < 5; ++i) last += (y.sizes[i] - 1) * y.strides[i];
  if (last > INT32_MAX || y.numel() > INT32_MAX) return false;
  a->y_shared = y.strides[0];
  const auto stride = [&](int i) { return y.sizes[i] == 1 ? 0 : static_cast<int>(y.strides[i]); };
  a->y_k = stride(1), a->y_v = stride(2), a->y_m = stride(3), a->y_w = stride(4);
  a->rows = x.sizes[3];
  const int64_t per_outer = ceil_div<int64_t>(a->rows, kRows), tiles = per_outer * x.sizes[1];
  if (tiles * x.sizes[0] > INT32_MAX / 2) return false;
  a->per_outer = Divider(per_outer);
  a->tiles = static_cast<int>(tiles);
  a->per_shared = Divider(tiles);
  a->shared = static_cast<int>(x.sizes[0]);
  return true;
}

}  // namespace svexport::einsum
