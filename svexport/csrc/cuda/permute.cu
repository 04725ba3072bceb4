#include "permute.h"

#include "strided.cuh"

namespace svexport {
namespace {

constexpr int kTile = 32, kThreads = 256;

// Copies kElements per thread, kThreads apart. All are read before the first is written.
template <int kElements, class T>
__global__ void __launch_bounds__(kThreads) copy_elements(const T* input, T* output,
                                                          const __grid_constant__ Walk<2> walk) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads * kElements) + threadIdx.x;
  T values[kElements];
  int64_t at[kElements][2];  // output, input
  UNROLL for (int k = 0; k < kElements; ++k) {
    walk.offsets(first + k * kThreads, at[k]);
    values[k] = load_if<T, 1>(input + at[k][1], first + k * kThreads < walk.count).at[0];
  }
  UNROLL for (int k = 0; k < kElements; ++k) {
    if (first + k * kThreads < walk.count) output[at[k][0]] = values[k];
  }
}

// Input and output are contiguous along different axes: tiles are transposed in shared memory. Elements of less than 4
// bytes are read and written V at once.
template <class T, int V>
struct Tiles {
  static constexpr int kRows = kTile * V, kColumns = kTile * (V > 1 ? V : 2);

  Walk<2> batch;
  int64_t row_to, column_from;  // strides; the input's along rows and the output's along columns are 1
  int64_t rows, columns;
  Divider row_tiles, column_tiles;
};

template <class T, int V>
__global__ void __launch_bounds__(kThreads) copy_tiles(const T* input, T* output,
                                                       const __grid_constant__ Tiles<T, V> a) {
  using Tile = Tiles<T, V>;
  __shared__ Vec<T, V> tile[Tile::kColumns][kTile + 1];
  const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
  uint32_t block = blockIdx.x;
  int64_t at[2];
  const int64_t column0 = static_cast<int64_t>(a.column_tiles.split(block)) * Tile::kColumns;
  const int64_t row0 = static_cast<int64_t>(a.row_tiles.split(block)) * Tile::kRows;
  a.batch.offsets(block, at);
  output += at[0] + row0 * a.row_to + column0;
  input += at[1] + row0 + column0 * a.column_from;
  const int rows = static_cast<int>(min(a.rows - row0, static_cast<int64_t>(Tile::kRows)));
  const int columns = static_cast<int>(min(a.columns - column0, static_cast<int64_t>(Tile::kColumns)));
  UNROLL for (int k = 0; k < Tile::kColumns; k += kThreads / kTile) {
    tile[y + k][x] = load_if<T, V>(input + x * V + (y + k) * a.column_from, x * V < rows && y + k < columns);
  }
  __syncthreads();
  UNROLL for (int k = 0; k < kTile; k += kThreads / kTile) {
    UNROLL for (int column = 0; column < Tile::kColumns; column += kTile * V) {
      Vec<T, V> in[V];
      UNROLL for (int j = 0; j < V; ++j) in[j] = tile[column + x * V + j][y + k];
      UNROLL for (int i = 0; i < V; ++i) {
        Vec<T, V> out;
        UNROLL for (int j = 0; j < V; ++j) out.at[j] = in[j].at[i];
        if ((y + k) * V + i < rows && column + x * V < columns) {
          store<T, V>(output + ((y + k) * V + i) * a.row_to + column + x * V, out);
        }
      }
    }
  }
}

template <class T, int V>
cudaError_t launch_tiles(const void* input, void* output, const Axes<2>& axes, int row, cudaStream_t stream) {
  using Tile = Tiles<T, V>;
  const int column = axes.rank - 1;
  Walk<2> batch;
  for (int i = column - 1; i >= 0; --i) {
    if (i != row) batch.push(axes.at[i]);
  }
  const int64_t rows = axes.at[row].size, columns = axes.at[column].size;
  const int64_t row_tiles = ceil_div<int64_t>(rows, Tile::kRows);
  const int64_t column_tiles = ceil_div<int64_t>(columns, Tile::kColumns);
  const int64_t blocks = row_tiles * column_tiles * batch.count;
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  const Tile tiles{batch, axes.at[row].strides[0], axes.at[column].strides[1], rows, columns, Divider(row_tiles),
                   Divider(column_tiles)};
  copy_tiles<T, V><<<static_cast<int>(blocks), kThreads, 0, stream>>>(static_cast<const T*>(input),
                                                                      static_cast<T*>(output), tiles);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const void* input, void* output, const Axes<2>& axes, cudaStream_t stream) {
  int row = 0;  // the axis along which the input is contiguous
  while (row < axes.rank && axes.at[row].strides[1] != 1) ++row;
  const int column = axes.rank - 1;
  if (row >= column || axes.at[column].strides[0] != 1 || axes.at[row].size < 8 || axes.at[column].size < 8) {
    const Walk<2> walk(axes);
    const int elements = walk.count < (1 << 16) ? 1 : 4;
    const int64_t blocks = ceil_div<int64_t>(walk.count, kThreads * elements);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    (elements == 1 ? copy_elements<1, T> : copy_elements<4, T>)<<<static_cast<int>(blocks), kThreads, 0, stream>>>(
        static_cast<const T*>(input), static_cast<T*>(output), walk);
    return cudaGetLastError();
  }
  if constexpr (sizeof(T) < 4) {
    constexpr int V = 4 / sizeof(T);
    bool vectors = reinterpret_cast<uintptr_t>(input) % 4 == 0 && reinterpret_cast<uintptr_t>(output) % 4 == 0;
    for (int i = 0; i < axes.rank; ++i) {
      const auto [size, strides] = axes.at[i];
      vectors = vectors && (i == column || strides[0] % V == 0) && (i == row || strides[1] % V == 0);
      if (i == row || i == column) vectors = vectors && size % V == 0;
    }
    if (vectors) return launch_tiles<T, V>(input, output, axes, row, stream);
  }
  return launch_tiles<T, 1>(input, output, axes, row, stream);
}

}  // namespace

cudaError_t permute(const Tensor& input, const Tensor& output, cudaStream_t stream) {
  if (output.numel() == 0) return cudaSuccess;
  Axes<2> axes({&output, &input}, 0, Axes<2>::Order::kMemory);
  if (axes.rank == 0) axes.at[axes.rank++] = {1, {1, 1}};
  // Runs that are contiguous in both are copied in larger words.
  int64_t bytes = input.item_size();
  Axis<2>& last = axes.at[axes.rank - 1];
  auto doubles = [&] {
    bool result = bytes < 16 && last.strides[0] == 1 && last.strides[1] == 1 && last.size % 2 == 0 &&
                  reinterpret_cast<uintptr_t>(input.data) % (2 * bytes) == 0 &&
                  reinterpret_cast<uintptr_t>(output.data) % (2 * bytes) == 0;
    for (int i = 0; i < axes.rank - 1; ++i) {
      result = result && axes.at[i].strides[0] % 2 == 0 && axes.at[i].strides[1] % 2 == 0;
    }
    return result;
  };
  while (doubles()) {
    bytes *= 2;
    last.size /= 2;
    for (int i = 0; i < axes.rank - 1; ++i) {
      axes.at[i].strides[0] /= 2;
      axes.at[i].strides[1] /= 2;
    }
  }
  switch (bytes) {
    case 1: return launch<int8_t>(input.data, output.data, axes, stream);
    case 2: return launch<int16_t>(input.data, output.data, axes, stream);
    case 4: return launch<int32_t>(input.data, output.data, axes, stream);
    case 8: return launch<int64_t>(input.data, output.data, axes, stream);
    default: return launch<int4>(input.data, output.data, axes, stream);
  }
}

}  // namespace svexport
