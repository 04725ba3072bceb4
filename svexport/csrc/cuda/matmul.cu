#include "matmul.h"

#include <cmath>

#include "mma.cuh"

namespace svexport {
namespace {

constexpr int kStages = 4;  // stages in flight, of 64 bytes of the inner dimension each
constexpr int kThreads = 256;
template <class T>
constexpr int kInner = 64 / sizeof(T);
template <class T>
constexpr int kVector = 16 / sizeof(T);

// One factor, a or the transpose of b: (count, rows, inner).
struct Factor {
  const void* data;
  int64_t batch, step;  // strides; step: of the axis that is not contiguous
  int rows, count;
  bool vectors;  // whether whole vectors of contiguous elements can be read
};

struct Matmul {
  Factor left, right;
  AnyFloat bias;
  int64_t bias_stride;
  void* c;
  int64_t c_step;   // elements from row to row of c
  bool add;         // whether to add to c
  bool pairs;       // whether two neighbours of a row of c, or of partials, can be written at once
  float* partials;  // (parts, batch, M, N), if there are several parts
  int inner, batch, parts, part;  // a block does `part` of the inner dimension
};

// Rows of a factor in shared memory, contiguous along the same axis as in the factor. The pitches put what a warp reads
// at once, 8 rows x 16 bytes of the inner dimension, in different banks.
template <class T, int kRows, bool kAlongInner>
struct Tile {
  static constexpr int V = kVector<T>;
  static constexpr int kPitch = kAlongInner ? kInner<T> + V : kRows + 8;
  static constexpr int kSize = (kAlongInner ? kRows : kInner<T>) * kPitch;
  static constexpr int kPieces = (kAlongInner ? kInner<T> : kRows) / V;  // of 16 bytes, along the contiguous axis
  static constexpr int kFar = kThreads / kPieces;                       // from a thread's piece to its next one
  static constexpr int kCount = kRows * kInner<T> / V / kThreads;

  // What a thread fetches: pieces that are kFar rows, or kFar elements of the inner dimension, apart.
  const T* from[kCount];
  int64_t next;  // elements from fetch to fetch
  int row, rows, k;
  bool vectors;

  __device__ __forceinline__ Tile(const Factor& f, int batch, int row0, int k0)
      : next(kAlongInner ? kInner<T> : kInner<T> * f.step), rows(f.rows), vectors(f.vectors) {
    const int far = threadIdx.x / kPieces, near = threadIdx.x % kPieces * V;
    row = row0 + (kAlongInner ? far : near);
    k = k0 + (kAlongInner ? near : far);
    const int64_t at = kAlongInner ? row * f.step + k : k * f.step + row;
    UNROLL for (int i = 0; i < kCount; ++i) {
      from[i] = static_cast<const T*>(f.data) + batch * f.batch + at + i * kFar * f.step;
    }
  }
  __device__ __forceinline__ void fetch(T* tile, int end) {
    tile += threadIdx.x / kPieces * kPitch + threadIdx.x % kPieces * V;
    const auto there = [&](int i, int j) {  // whether element j of piece i exists
      const int far = i * kFar;
      return (kAlongInner ? row + far : row + j) < rows && (kAlongInner ? k + j : k + far) < end;
    };
    if (vectors) {
      UNROLL for (int i = 0; i < kCount; ++i) copy_async(tile + i * kFar * kPitch, from[i], there(i, 0));
    } else {
      UNROLL for (int i = 0; i < kCount; ++i) {
        Vec<T, V> v;
        UNROLL for (int j = 0; j < V; ++j) v.at[j] = load_if<T, 1>(from[i] + j, there(i, j)).at[0];
        store(tile + i * kFar * kPitch, v);
      }
    }
    UNROLL for (int i = 0; i < kCount; ++i) from[i] += next;
    k += kInner<T>;
  }
  static __device__ __forceinline__ const T* at(const T* tile, int row, int k) {
    return tile + (kAlongInner ? row * kPitch + k : k * kPitch + row);
  }
};

// sums, F x F tiles of 16 x 8, += the product of 16 * F rows of left and 8 * F rows of right in shared memory.
template <class Left, class Right, bool kRightAlongInner, class T, int F>
__device__ __forceinline__ void multiply(float (&sums)[F][F][4], const T* left, int row, const T* right, int column) {
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
#if __CUDA_ARCH__ < 800
  if constexpr (!std::is_same_v<T, __half>) {  // no tensor cores for this type
#pragma unroll 1
    for (int k = 0; k < kInner<T>; ++k) {
      UNROLL for (int i = 0; i < F; ++i) {
        UNROLL for (int j = 0; j < F; ++j) {
          UNROLL for (int e = 0; e < 4; ++e) {
            sums[i][j][e] = fmaf(to_float(*Left::at(left, row + i * 16 + e / 2 * 8 + group, k)),
                                 to_float(*Right::at(right, column + j * 8 + pair * 2 + e % 2, k)), sums[i][j][e]);
          }
        }
      }
    }
    return;
  }
#endif
  if constexpr (sizeof(T) == 4) {
    float part[F][F][4] = {};  // tensor cores truncate in long sums; the additions below round
    UNROLL for (int k = 0; k < kInner<T>; k += 8) {
      Parts r[F][2];
      UNROLL for (int j = 0; j < F; ++j) {
        UNROLL for (int h = 0; h < 2; ++h) r[j][h] = parts(*Right::at(right, column + j * 8 + group, k + h * 4 + pair));
      }
      UNROLL for (int i = 0; i < F; ++i) {
        uint32_t big[4], small[4];
        UNROLL for (int h = 0; h < 4; ++h) {
          const Parts l = parts(*Left::at(left, row + i * 16 + h % 2 * 8 + group, k + h / 2 * 4 + pair));
          big[h] = l.big;
          small[h] = l.small;
        }
        UNROLL for (int j = 0; j < F; ++j) mma_tf32(part[i][j], small, r[j][0].big, r[j][1].big);
        UNROLL for (int j = 0; j < F; ++j) mma_tf32(part[i][j], big, r[j][0].small, r[j][1].small);
        UNROLL for (int j = 0; j < F; ++j) mma_tf32(part[i][j], big, r[j][0].big, r[j][1].big);
      }
    }
    UNROLL for (int i = 0; i < F; ++i) {
      UNROLL for (int j = 0; j < F; ++j) {
        UNROLL for (int e = 0; e < 4; ++e) sums[i][j][e] += part[i][j][e];
      }
    }
  } else {
    UNROLL for (int k = 0; k < kInner<T>; k += 16) {
      uint32_t r[F / 2][4];
      UNROLL for (int j = 0; j < F; j += 2) {
        if constexpr (kRightAlongInner) {
          const int c = column + j * 8 + lane / 16 * 8 + lane % 8;
          load_matrix(r[j / 2], shared_address(Right::at(right, c, k + lane / 8 % 2 * 8)));
        } else {
          const int c = column + j * 8 + lane / 16 * 8;
          load_matrix_transposed(r[j / 2], shared_address(Right::at(right, c, k + lane % 16)));
        }
      }
      UNROLL for (int i = 0; i < F; ++i) {
        uint32_t l[4];
        load_matrix(l, shared_address(Left::at(left, row + i * 16 + lane % 16, k + lane / 16 * 8)));
        UNROLL for (int j = 0; j < F; ++j) mma<T>(sums[i][j], l, r[j / 2][j % 2 * 2], r[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

// Writes two neighbours of a row of `columns` elements, the first of them at `column`.
template <class T>
__device__ __forceinline__ void store_pair(T* row, int column, int columns, bool add, bool pairs, float x, float y) {
  if (add) {
    if (column < columns) x += to_float(row[column]);
    if (column + 1 < columns) y += to_float(row[column + 1]);
  }
  const Vec<T, 2> v{from_float<T>(x), from_float<T>(y)};
  if (pairs) {
    if (column < columns) store(row + column, v);
  } else {
    if (column < columns) row[column] = v.at[0];
    if (column + 1 < columns) row[column + 1] = v.at[1];
  }
}

// A block computes kTile x kTile of c with 8 warps, 2 x 4.
template <class T, int kTile, bool kLeftAlongInner, bool kRightAlongInner>
__global__ void __launch_bounds__(kThreads) matmul_kernel(const __grid_constant__ Matmul a) {
  using Left = Tile<T, kTile, kLeftAlongInner>;
  using Right = Tile<T, kTile, kRightAlongInner>;
  constexpr int F = kTile / 32;
  extern __shared__ __align__(16) char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);
  const int row0 = blockIdx.x * kTile, column0 = blockIdx.y * kTile;
  const int batch = blockIdx.z % a.batch, begin = blockIdx.z / a.batch * a.part, end = min(a.inner, begin + a.part);
  Left left(a.left, batch % a.left.count, row0, begin);
  Right right(a.right, batch % a.right.count, column0, begin);
  const int warp = threadIdx.x / 32, warp_row = warp / 4 * (kTile / 2), warp_column = warp % 4 * (kTile / 4);

  const int steps = (end - begin + kInner<T> - 1) / kInner<T>;
  const auto stage = [&](int step) { return tiles + step % kStages * (Left::kSize + Right::kSize); };
  const auto fetch = [&](int step) {
    if (step < steps) {
      left.fetch(stage(step), end);
      right.fetch(stage(step) + Left::kSize, end);
    }
    copy_async_commit();
  };
  UNROLL for (int step = 0; step < kStages - 1; ++step) fetch(step);
  float sums[F][F][4] = {};
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    multiply<Left, Right, kRightAlongInner>(sums, stage(step), warp_row, stage(step) + Left::kSize, warp_column);
    fetch(step + kStages - 1);  // while the tensor cores are at work
  }

  const int rows = a.left.rows, columns = a.right.rows, column = column0 + warp_column + threadIdx.x % 4 * 2;
  UNROLL for (int i = 0; i < 2 * F; ++i) {
    const int row = row0 + warp_row + i * 8 + threadIdx.x % 32 / 4;
    if (row >= rows) continue;
    const int64_t at = (static_cast<int64_t>(blockIdx.z) * rows + row) * (a.parts == 1 ? a.c_step : columns);
    const float bias = a.parts == 1 && a.bias.data
                           ? a.bias.get((static_cast<int64_t>(batch % a.left.count) * rows + row) * a.bias_stride)
                           : 0.0f;
    UNROLL for (int j = 0; j < F; ++j) {
      const float x = sums[i / 2][j][i % 2 * 2] + bias, y = sums[i / 2][j][i % 2 * 2 + 1] + bias;
      if (a.parts == 1) {
        store_pair(static_cast<T*>(a.c) + at, column + j * 8, columns, a.add, a.pairs, x, y);
      } else {
        store_pair(a.partials + at, column + j * 8, columns, false, a.pairs, x, y);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Matmul a) {
  const int64_t size = static_cast<int64_t>(a.left.rows) * a.right.rows;
  const int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (at >= size * a.batch) return;
  float sum = a.partials[at];
#pragma unroll 4
  for (int i = 1; i < a.parts; ++i) sum += a.partials[i * size * a.batch + at];
  const int64_t row = at / a.right.rows;
  if (a.bias.data) sum += a.bias.get(row % (static_cast<int64_t>(a.left.rows) * a.left.count) * a.bias_stride);
  T& c = static_cast<T*>(a.c)[row * a.c_step + at % a.right.rows];
  c = from_float<T>(a.add ? to_float(c) + sum : sum);
}

template <class T, int kTile, bool kLeftAlongInner, bool kRightAlongInner>
cudaError_t launch(const Matmul& a, cudaStream_t stream) {
  constexpr int kBytes =
      kStages * (Tile<T, kTile, kLeftAlongInner>::kSize + Tile<T, kTile, kRightAlongInner>::kSize) * sizeof(T);
  const auto kernel = matmul_kernel<T, kTile, kLeftAlongInner, kRightAlongInner>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  const dim3 blocks(ceil_div(a.left.rows, kTile), ceil_div(a.right.rows, kTile), a.batch * a.parts);
  if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
  kernel<<<blocks, kThreads, kBytes, stream>>>(a);
  if (a.parts > 1) {
    const int64_t size = static_cast<int64_t>(a.left.rows) * a.right.rows * a.batch;
    sum_kernel<T><<<static_cast<unsigned>(ceil_div<int64_t>(size, kThreads)), kThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

// t: (count, ., .); its rows are along axis `rows`, the other of the last two axes is the inner one. *along_inner:
// whether t is contiguous along the inner axis. False if it is contiguous along neither axis or too large.
bool factor(const Tensor& t, int rows, Factor* f, bool* along_inner) {
  const int inner = 3 - rows;
  *along_inner = t.strides[inner] == 1 || t.sizes[inner] == 1;
  const int near = *along_inner ? inner : rows, far = 3 - near;
  const int64_t pieces = ceil_div<int64_t>(t.sizes[near] * t.item_size(), 16) * 16 / t.item_size();
  *f = {t.data, t.strides[0], t.strides[far], static_cast<int>(t.sizes[rows]), static_cast<int>(t.sizes[0]),
        t.aligned(near, 16) && (pieces == t.sizes[near] || (!*along_inner && pieces <= t.strides[far]))};
  return (t.strides[near] == 1 || t.sizes[near] == 1) && t.sizes[near] <= INT32_MAX && t.sizes[far] <= INT32_MAX;
}

int processors() { return of_device(cudaDevAttrMultiProcessorCount); }

constexpr int64_t kPartials = 4 * 64 * 64;  // most elements of partials per multiprocessor

// The tile size and number of parts of the inner dimension that should take the least time, in units of what a
// processor takes for 64 x 64 x 64 bytes. Large tiles take less for the same; a second kernel adds parts up.
struct Division {
  int tile = 64, parts = 1;

  Division(const Tensor& a, const Tensor& c) {
    const int64_t count = processors(), steps = ceil_div<int64_t>(a.sizes[2] * a.item_size(), 64);
    float best = INFINITY;
    for (const int size : {64, 128}) {
      if (size > 64 && (c.sizes[1] <= 64 || c.sizes[2] <= 64)) break;
      const int64_t tiles = ceil_div<int64_t>(c.sizes[1], size) * ceil_div<int64_t>(c.sizes[2], size) * c.sizes[0];
      for (int64_t i = 1; i == 1 || (i <= steps / 8 && i * tiles * size * size <= kPartials * count); ++i) {
        const float one = (size == 64 ? 1.1f : 3.6f) * static_cast<float>(ceil_div(steps, i) + 8);
        const float time = one * static_cast<float>(ceil_div(tiles * i, count)) + (i > 1 ? 12.0f : 0.0f);
        if (time >= best) continue;
        best = time;
        tile = size;
        parts = static_cast<int>(i);
      }
    }
  }
};

}  // namespace

size_t matmul_workspace() { return kPartials * processors() * sizeof(float); }

size_t matmul_partials(const Tensor& a, const Tensor& c) {
  const int parts = Division(a, c).parts;
  return parts > 1 ? parts * c.numel() * sizeof(float) : 0;
}

cudaError_t matmul(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& c, bool add, void* workspace,
                   cudaStream_t stream) {
  Matmul m{{}, {}, AnyFloat(bias), bias.strides[0], c.data, c.strides[c.sizes[1] == 1 ? 0 : 1], add, false,
           static_cast<float*>(workspace), 0, 0, 1, 0};
  bool left_along_inner = false, right_along_inner = false;
  if (b.dtype != a.dtype || c.dtype != a.dtype || !factor(a, 1, &m.left, &left_along_inner) ||
      !factor(b, 2, &m.right, &right_along_inner) || (c.strides[2] != 1 && c.sizes[2] > 1) ||
      (c.strides[0] != c.sizes[1] * m.c_step && c.sizes[0] > 1)) {
    return cudaErrorNotSupported;
  }
  if (c.numel() == 0) return cudaSuccess;
  const Division division(a, c);
  m.inner = static_cast<int>(a.sizes[2]);
  m.batch = static_cast<int>(c.sizes[0]);
  m.parts = division.parts;
  m.pairs = c.sizes[2] % 2 == 0 && (m.parts > 1 || c.aligned(2, 2 * c.item_size()));
  return dispatch_float(a.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    m.part = ceil_div(ceil_div(m.inner, m.parts), kInner<T>) * kInner<T>;
    const auto with = [&](auto left, auto right) {
      return division.tile == 128 ? launch<T, 128, left.value, right.value>(m, stream)
                                  : launch<T, 64, left.value, right.value>(m, stream);
    };
    constexpr std::true_type along_inner;
    constexpr std::false_type along_rows;
    if (left_along_inner) return right_along_inner ? with(along_inner, along_inner) : with(along_inner, along_rows);
    if constexpr (sizeof(T) == 4) {
      return right_along_inner ? with(along_rows, along_inner) : with(along_rows, along_rows);
    }
    return cudaErrorNotSupported;
  });
}

}  // namespace svexport
