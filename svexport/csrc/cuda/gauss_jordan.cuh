// Gauss-Jordan elimination of small matrices by groups of lanes, shared by inverse and solve.
//
// Everything is float64. The few operations hide behind the memory traffic, and the inverse of a float32 matrix is as
// exact as float32 can represent, however ill-conditioned the matrix is.
#pragma once

#include "strided.cuh"

namespace svexport {

// A matrix of size n over a group of L >= n lanes, L a power of two: lane r holds row r. Beyond n, it is the identity.
template <int L>
struct LaneMatrix {
  double row[L];
  int pivot[L];  // after invert(): the lane whose row was the pivot of step k
  int step;      // the step in which this lane's row was the pivot
  int info;      // 0, or the number of the first pivot that was zero, from 1

  static __device__ __forceinline__ int lane() { return threadIdx.x % L; }

  __device__ __forceinline__ void read(const AnyFloat& from, int64_t offset, int n, int64_t row_stride,
                                       int64_t column_stride) {
    if (from.dtype == DType::kFloat32) {
      read(static_cast<const float*>(from.data) + offset, n, row_stride, column_stride);
    } else if (from.dtype == DType::kFloat16) {
      read(static_cast<const __half*>(from.data) + offset, n, row_stride, column_stride);
    } else {
      read(static_cast<const __nv_bfloat16*>(from.data) + offset, n, row_stride, column_stride);
    }
  }

  template <class T>
  __device__ __forceinline__ void read(const T* from, int n, int64_t row_stride, int64_t column_stride) {
    const int r = lane();
    from += r * row_stride;
    constexpr int N = L * sizeof(T) <= 16 ? L : 16 / sizeof(T);
    if (n == L && column_stride == 1 && reinterpret_cast<uintptr_t>(from) % (N * sizeof(T)) == 0) {
      UNROLL for (int c = 0; c < L; c += N) {
        const auto v = load<T, N>(from + c);
        UNROLL for (int j = 0; j < N; ++j) row[c + j] = to_float(v.at[j]);
      }
    } else {
      UNROLL for (int c = 0; c < L; ++c) {
        const bool inside = r < n && c < n;
        const float x = to_float(load_if<T, 1>(from + c * column_stride, inside).at[0]);
        row[c] = inside ? x : r == c ? 1 : 0;
      }
    }
  }

  // Inverts in place, without moving rows: this lane ends with row `step` of the inverse; row[j] is in column pivot[j].
  __device__ __forceinline__ void invert() {
    const int r = lane();
    step = L;
    info = 0;
    UNROLL for (int k = 0; k < L; ++k) {
      // Finds the largest element by its high word, which orders as the number does; its last bits hold the lane.
      unsigned key = step == L ? ((__double2hiint(row[k]) & 0x7fffffff) & ~(L - 1)) + L - r : 0;
      UNROLL for (int o = L / 2; o; o /= 2) key = max(key, __shfl_xor_sync(~0u, key, o));
      pivot[k] = (L - (key & (L - 1))) & (L - 1);
      const double p = __shfl_sync(~0u, row[k], pivot[k], L);
      if (p == 0 && info == 0) info = k + 1;
      const bool mine = r == pivot[k];
      // A quotient, because it is exactly 1 for a row equal to the pivot's, of which nothing may remain.
      const double factor = (mine ? 1 : row[k]) / p;
      if (mine) step = k;
      UNROLL for (int j = 0; j < L; ++j) {
        if (j == k) continue;
        const double taken = __shfl_sync(~0u, row[j], pivot[k], L);
        row[j] = mine ? row[j] * factor : row[j] - factor * taken;
      }
      row[k] = mine ? factor : -factor;
    }
  }

  // Puts the columns in order, or sets them to NaN if there is no inverse. Rows stay in their lanes.
  __device__ __forceinline__ void order_columns() {
    double ordered[L];
    UNROLL for (int c = 0; c < L; ++c) {
      UNROLL for (int j = 0; j < L; ++j) {
        if (pivot[j] == c) ordered[c] = row[j];
      }
    }
    UNROLL for (int c = 0; c < L; ++c) row[c] = info ? __longlong_as_double(0x7ff8000000000000) : ordered[c];
  }

  // Moves row r to lane r.
  __device__ __forceinline__ void order_rows() {
    int source = 0;
    UNROLL for (int k = 0; k < L; ++k) {
      if (lane() == k) source = pivot[k];
    }
    UNROLL for (int c = 0; c < L; ++c) row[c] = __shfl_sync(~0u, row[c], source, L);
  }
};

// Calls f with the number of lanes for matrices of size n as a constant.
template <class F>
cudaError_t dispatch_lanes(int64_t n, F&& f) {
  return n < 1 || n > 8 ? cudaErrorNotSupported : with_constant<2, 4, 8>(n <= 2 ? 2 : n <= 4 ? 4 : 8, f);
}

}  // namespace svexport
