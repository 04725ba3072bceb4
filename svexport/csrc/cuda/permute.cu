#include "permute.h"

#include <algorithm>

#include "device.cuh"

namespace svexport {
namespace {

constexpr int kTile = 32;

struct Axis {
  int64_t size, from, to;  // strides of input and output
};

// Offsets of the elements in input and output, in the order of the output.
struct Walk {
  int rank = 0;
  Divider sizes[kMaxRank];  // the last axis first
  int64_t from[kMaxRank], to[kMaxRank];

  void push(const Axis& axis) {
    sizes[rank] = Divider(axis.size);
    from[rank] = axis.from;
    to[rank++] = axis.to;
  }
  __device__ __forceinline__ void offsets(uint32_t i, int64_t& in, int64_t& out) const {
    in = out = 0;
#pragma unroll
    for (int k = 0; k < kMaxRank; ++k) {
      if (k == rank) break;
      const int64_t rest = k == rank - 1 ? i : sizes[k].split(i);
      in += rest * from[k];
      out += rest * to[k];
    }
  }
};

// kElements per thread, a block apart, all read before the first is written.
template <class T, int kElements>
__global__ void __launch_bounds__(256) copy_elements(const T* input, T* output, const __grid_constant__ Walk walk,
                                                     uint32_t count) {
  const uint32_t first = blockIdx.x * (256u * kElements) + threadIdx.x;
  T values[kElements];
  int64_t to[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    int64_t from;
    walk.offsets(first + k * 256u, from, to[k]);
    if (first + k * 256u < count) values[k] = input[from];
  }
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    if (first + k * 256u < count) output[to[k]] = values[k];
  }
}

// Input and output each have neighbours along an axis of their own: tiles of both are turned in shared memory.
template <class T>
__global__ void __launch_bounds__(kTile* 8) copy_tiles(const T* input, T* output, const __grid_constant__ Walk batch,
                                                       int rows, int columns, int64_t row_to, int64_t column_from,
                                                       Divider row_tiles, Divider column_tiles) {
  // rows: stride 1 in the input; columns: stride 1 in the output
  __shared__ T tile[kTile][kTile + (sizeof(T) < 4 ? 4 / sizeof(T) : 1)];
  uint32_t block = blockIdx.x;
  const int column0 = static_cast<int>(column_tiles.split(block)) * kTile;
  const int row0 = static_cast<int>(row_tiles.split(block)) * kTile;
  int64_t from, to;
  batch.offsets(block, from, to);
  input += from;
  output += to;
#pragma unroll
  for (int k = 0; k < kTile; k += 8) {
    const int row = row0 + threadIdx.x, column = column0 + threadIdx.y + k;
    if (row < rows && column < columns) tile[threadIdx.y + k][threadIdx.x] = input[row + column * column_from];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTile; k += 8) {
    const int row = row0 + threadIdx.y + k, column = column0 + threadIdx.x;
    if (row < rows && column < columns) output[row * row_to + column] = tile[threadIdx.x][threadIdx.y + k];
  }
}

// The axes with more than one index, by descending output stride, joined where both tensors allow it.
int axes_of(const Tensor& input, const Tensor& output, Axis (&axes)[kMaxRank]) {
  int rank = 0;
  for (int i = 0; i < input.rank; ++i) {
    if (input.sizes[i] != 1) axes[rank++] = {input.sizes[i], input.strides[i], output.strides[i]};
  }
  std::stable_sort(axes, axes + rank, [](const Axis& a, const Axis& b) { return a.to > b.to; });
  int joined = 0;
  for (int i = 0; i < rank; ++i) {
    Axis& last = axes[joined > 0 ? joined - 1 : 0];
    if (joined > 0 && last.from == axes[i].from * axes[i].size && last.to == axes[i].to * axes[i].size) {
      last = {last.size * axes[i].size, axes[i].from, axes[i].to};
    } else {
      axes[joined++] = axes[i];
    }
  }
  return joined;
}

template <class T>
cudaError_t launch_elements(const void* input, void* output, const Axis* axes, int rank, cudaStream_t stream) {
  Walk walk;
  int64_t count = 1;
  for (int i = rank - 1; i >= 0; --i) {
    walk.push(axes[i]);
    count *= axes[i].size;
  }
  constexpr int kElements = 4;
  if (count > INT32_MAX) return cudaErrorNotSupported;
  copy_elements<T, kElements><<<static_cast<int>(ceil_div<int64_t>(count, 256 * kElements)), 256, 0, stream>>>(
      static_cast<const T*>(input), static_cast<T*>(output), walk, static_cast<uint32_t>(count));
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const void* input, void* output, const Axis* axes, int rank, cudaStream_t stream) {
  const Axis* row = std::find_if(axes, axes + rank, [](const Axis& a) { return a.from == 1; });
  const Axis& column = axes[rank - 1];
  if (rank < 2 || row == axes + rank || row == &column || column.to != 1 || row->size < 8 || column.size < 8 ||
      row->size > INT32_MAX || column.size > INT32_MAX) {
    return launch_elements<T>(input, output, axes, rank, stream);
  }
  Walk batch;
  const int64_t row_tiles = ceil_div<int64_t>(row->size, kTile), column_tiles = ceil_div<int64_t>(column.size, kTile);
  int64_t blocks = row_tiles * column_tiles;
  for (int i = rank - 2; i >= 0; --i) {
    if (&axes[i] == row) continue;
    batch.push(axes[i]);
    blocks *= axes[i].size;
  }
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  copy_tiles<T><<<static_cast<int>(blocks), dim3(kTile, 8), 0, stream>>>(
      static_cast<const T*>(input), static_cast<T*>(output), batch, static_cast<int>(row->size),
      static_cast<int>(column.size), row->to, column.from, Divider(row_tiles), Divider(column_tiles));
  return cudaGetLastError();
}

}  // namespace

cudaError_t permute(const Tensor& input, const Tensor& output, cudaStream_t stream) {
  if (output.numel() == 0) return cudaSuccess;
  Axis axes[kMaxRank];
  int rank = axes_of(input, output, axes);
  if (rank == 0) axes[rank++] = {1, 1, 1};
  // Runs that are contiguous in both are copied in larger words.
  int64_t bytes = input.item_size();
  Axis& last = axes[rank - 1];
  auto doubles = [&] {
    bool result = bytes < 16 && last.from == 1 && last.to == 1 && last.size % 2 == 0 &&
                  reinterpret_cast<uintptr_t>(input.data) % (2 * bytes) == 0 &&
                  reinterpret_cast<uintptr_t>(output.data) % (2 * bytes) == 0;
    for (int i = 0; i < rank - 1; ++i) result = result && axes[i].from % 2 == 0 && axes[i].to % 2 == 0;
    return result;
  };
  while (doubles()) {
    bytes *= 2;
    last.size /= 2;
    for (int i = 0; i < rank - 1; ++i) {
      axes[i].from /= 2;
      axes[i].to /= 2;
    }
  }
  switch (bytes) {
    case 1: return launch<int8_t>(input.data, output.data, axes, rank, stream);
    case 2: return launch<int16_t>(input.data, output.data, axes, rank, stream);
    case 4: return launch<int32_t>(input.data, output.data, axes, rank, stream);
    case 8: return launch<int64_t>(input.data, output.data, axes, rank, stream);
    default: return launch_elements<int4>(input.data, output.data, axes, rank, stream);
  }
}

}  // namespace svexport
