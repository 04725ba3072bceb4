// Matrix fragments of a warp, shared by the kernels that use tensor cores.
//
// The fragments of mma.m16n8k16 in lane 4 * group + pair. A (16 x 16, row-major): rows group and group + 8, columns
// from 2 * pair and from 2 * pair + 8 on. B (16 x 8): row group of its transpose, the same columns. C (16 x 8): c[0],
// c[1] are row group, columns 2 * pair and 2 * pair + 1; c[2], c[3] are row group + 8.
#pragma once

#include "device.cuh"

namespace svexport {

// Whether the current device supports the matrix products below for a dtype; fp32 means tf32.
inline bool has_mma(DType dtype) {
  return of_device(cudaDevAttrComputeCapabilityMajor) >= (dtype == DType::kFloat16 ? 7 : 8);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Loads four 8 x 8 matrices of 16-bit elements; lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c += a (16 x 16) * b (16 x 8)
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// bfloat16 needs sm_80; see has_mma.
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// c += a (16 x 8) * b (8 x 8) in tf32, from sm_80 on. A: rows group and group + 8, columns pair and pair + 4. Transpose
// of B: row group, columns pair and pair + 4. C: as above.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// A float as the sum of two parts, exact up to 2^-22 of it. mma_tf32 uses the upper 19 bits of each. The first part is
// rounded, so that the second has either sign, and the errors of its truncation cancel in a long sum.
struct Parts {
  uint32_t big, small;
};

__device__ __forceinline__ Parts parts(float x) {
  const uint32_t big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  return {big, __float_as_uint(x - __uint_as_float(big))};
}

// c += a b for floats, by the three largest of the four products of their parts: about as exact as float products.
__device__ __forceinline__ void mma_parts(float (&c)[4], const Parts (&a)[4], const Parts& b0, const Parts& b1) {
  const uint32_t big[4] = {a[0].big, a[1].big, a[2].big, a[3].big};
  const uint32_t small[4] = {a[0].small, a[1].small, a[2].small, a[3].small};
  mma_tf32(c, small, b0.big, b1.big);
  mma_tf32(c, big, b0.small, b1.small);
  mma_tf32(c, big, b0.big, b1.big);
}

// Two floats as two adjacent 16-bit elements, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t v);
template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t v) {
  return __half22float2(reinterpret_cast<const __half2&>(v));
}
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// Copies 16 bytes to shared memory, or zeros if not `valid`; asynchronous if the device supports it.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  store(static_cast<uint32_t*>(shared), load_if<uint32_t, 4>(static_cast<const uint32_t*>(global), valid));
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `Pending` of the last groups are in flight.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// Reductions over the four lanes that share a row of C.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The maximum of `largest` and row group + 8 * r of N adjacent products.
template <int N>
__device__ __forceinline__ float row_max(const float (&c)[N][4], int r, float largest) {
  UNROLL for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(c[n][2 * r], c[n][2 * r + 1]));
  return quad_max(largest);
}

}  // namespace svexport
