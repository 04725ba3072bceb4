// Shared by the kernels: conversions, vectors of elements, dispatch on data types, launch sizes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <utility>

#include "tensor.h"

// Written before a loop, it unrolls the loop fully.
#define UNROLL _Pragma("unroll")

namespace svexport {

// An attribute of the current device; 0 if there is none.
inline int of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(int8_t x) { return static_cast<float>(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Conversions between float and the elements of a tensor of type T.
template <class T, class Element = T>
struct Format {
  using Type = T;

  __host__ __device__ explicit Format(DType = {}) {}

  __device__ __forceinline__ float number(Element x) const { return to_float(reinterpret_cast<const T&>(x)); }
  __device__ __forceinline__ Element rounded(float x) const {
    const T rounded = from_float<T>(x);
    return reinterpret_cast<const Element&>(rounded);
  }
  // Calls f(format) with a format that the compiler knows.
  template <class F>
  __device__ __forceinline__ void known(F&& f) const { f(*this); }
};

// An element of half or bfloat16; its Format says which. Kernels that take it are compiled once for both types.
struct Narrow {
  uint16_t bits;
};

template <>
struct Format<Narrow> {
  uint32_t half;  // all bits set if the type is half, none if it is bfloat16

  __host__ __device__ explicit Format(DType dtype) : half(dtype == DType::kFloat16 ? ~0u : 0) {}

  // By masks, because ptxas runs out of predicates.
  __device__ __forceinline__ float number(Narrow x) const {
    const uint32_t bits = __float_as_uint(Format<__half, Narrow>().number(x));
    return __uint_as_float((bits & half) | (static_cast<uint32_t>(x.bits) << 16 & ~half));
  }
  __device__ __forceinline__ Narrow rounded(float x) const {
    const auto first = Format<__half, Narrow>().rounded(x), second = Format<__nv_bfloat16, Narrow>().rounded(x);
    return {static_cast<uint16_t>((first.bits & half) | (second.bits & ~half))};
  }
  // Branches, the same way in all threads: faster for four conversions or more. The assembly keeps the compiler from
  // converting both ways and selecting.
  template <class F>
  __device__ __forceinline__ void known(F&& f) const {
    if (half) {
      asm volatile("");
      f(Format<__half, Narrow>());
    } else {
      asm volatile("");
      f(Format<__nv_bfloat16, Narrow>());
    }
  }
};

// N elements that one access of N * sizeof(T) bytes, at most 16, loads or stores.
template <class T, int N>
struct alignas(N * sizeof(T)) Vec {
  static_assert(N * sizeof(T) <= 16, "one access is at most 16 bytes");
  T at[N];
};

// Converts all elements. For int8, a byte permutation and a subtraction are four times as fast as the conversion.
template <class T, int N>
__device__ __forceinline__ void to_floats(const Vec<T, N>& v, float (&x)[N]) {
  if constexpr (sizeof(T) == 1 && N % 4 == 0) {
    UNROLL for (int i = 0; i < N; i += 4) {
      uint32_t codes;
      memcpy(&codes, &v.at[i], 4);
      codes ^= 0x80808080;  // code + 128: the lowest bits of 2^23 + 128 + code
      UNROLL for (int j = 0; j < 4; ++j) {
        x[i + j] = __uint_as_float(__byte_perm(codes, 0x4b000000, 0x7440 + j)) - 8388736.0f;
      }
    }
  } else {
    UNROLL for (int i = 0; i < N; ++i) x[i] = to_float(v.at[i]);
  }
}

template <class T, int N>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

template <class T, int N>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// Loads if `there`, else gives zeros, without a branch, because the compiler waits for a load in a branch before the
// next one. It must not read memory that the kernel writes.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_if(const T* p, bool there) {
  constexpr int kBytes = sizeof(Vec<T, N>);
  Vec<T, N> v;
  if constexpr (kBytes == 1) {
    uint16_t x;
    asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.u8 %0, [%1];}"
        : "=h"(x)
        : "l"(p), "r"(static_cast<int>(there)));
    memcpy(&v, &x, kBytes);
  } else if constexpr (kBytes == 2) {
    uint16_t x;
    asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.b16 %0, [%1];}"
        : "=h"(x)
        : "l"(p), "r"(static_cast<int>(there)));
    memcpy(&v, &x, kBytes);
  } else {
    uint32_t x[kBytes / 4];
    if constexpr (kBytes == 4) {
      asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1];}"
          : "=r"(x[0])
          : "l"(p), "r"(static_cast<int>(there)));
    } else if constexpr (kBytes == 8) {
      asm("{.reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2];}"
          : "=r"(x[0]), "=r"(x[1])
          : "l"(p), "r"(static_cast<int>(there)));
    } else {
      static_assert(kBytes == 16);
      asm("{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
          "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];}"
          : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
          : "l"(p), "r"(static_cast<int>(there)));
    }
    memcpy(&v, x, kBytes);
  }
  return v;
}

// Hides the origin of a pointer to global memory: addresses from it then take one or two instructions instead of four.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
  asm("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
  return p;
}

// Device memory whose float type is known only at run time, for the few numbers that decide what else a kernel reads.
struct AnyFloat {
  void* data;
  DType dtype;  // one of the three float types

  __host__ __device__ explicit AnyFloat(const Tensor& t) : data(t.data), dtype(t.dtype) {}

  // Reads, or gives 0, without a branch, so that reads can overlap. It must not read memory that the kernel writes.
  __device__ __forceinline__ float get(int64_t i, bool there = true) const {
    const bool wide = dtype == DType::kFloat32;
    const char* p = static_cast<const char*>(data) + i * (wide ? 4 : 2);
    const uint32_t word = load_if<uint32_t, 1>(reinterpret_cast<const uint32_t*>(p), there && wide).at[0];
    const Narrow narrow = load_if<Narrow, 1>(reinterpret_cast<const Narrow*>(p), there && !wide).at[0];
    return wide ? __uint_as_float(word) : Format<Narrow>(dtype).number(narrow);
  }
  __device__ __forceinline__ void set(int64_t i, float x) const {
    if (dtype == DType::kFloat32) {
      static_cast<float*>(data)[i] = x;
    } else {
      static_cast<Narrow*>(data)[i] = Format<Narrow>(dtype).rounded(x);
    }
  }
};

__device__ __forceinline__ float warp_sum(float x) {
  UNROLL for (int other = 16; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

__host__ __device__ inline bool is_float(const Tensor& t) {
  return t.dtype == DType::kFloat32 || t.dtype == DType::kFloat16 || t.dtype == DType::kBFloat16;
}

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// n / d and n % d of numbers below 2^31, by a multiplication.
struct Divider {
  uint32_t d, factor, shift;

  __host__ __device__ explicit Divider(int64_t divisor)
      : d(divisor > 0 ? static_cast<uint32_t>(divisor) : 1), shift(0) {
    while ((1ull << shift) < d) ++shift;
    factor = static_cast<uint32_t>(((1ull << 32) * ((1ull << shift) - d)) / d + 1);
  }
  __host__ __device__ Divider() : Divider(1) {}

  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }
  // Leaves the quotient in n and returns the remainder.
  __device__ __forceinline__ uint32_t split(uint32_t& n) const {
    const uint32_t quotient = divide(n), rest = n - quotient * d;
    n = quotient;
    return rest;
  }
};

// Calls f with a null pointer of the element type: dispatch_float(t.dtype, [&](auto* p) { using T = ...; }).
template <class F>
cudaError_t dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: return f(static_cast<float*>(nullptr));
    case DType::kFloat16: return f(static_cast<__half*>(nullptr));
    case DType::kBFloat16: return f(static_cast<__nv_bfloat16*>(nullptr));
    default: return cudaErrorNotSupported;
  }
}

// The same, with Narrow for half and bfloat16.
template <class F>
cudaError_t dispatch_narrow(DType dtype, F&& f) {
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) return f(static_cast<Narrow*>(nullptr));
  return dtype == DType::kFloat32 ? f(static_cast<float*>(nullptr)) : cudaErrorNotSupported;
}

// The same for any type, by the size of an element in bytes.
template <class F>
cudaError_t dispatch_size(int64_t bytes, F&& f) {
  switch (bytes) {
    case 1: return f(static_cast<int8_t*>(nullptr));
    case 2: return f(static_cast<int16_t*>(nullptr));
    case 4: return f(static_cast<int32_t*>(nullptr));
    default: return f(static_cast<int64_t*>(nullptr));
  }
}

// The element type within such a function f: `using T = element_t<decltype(p)>;`
template <class Pointer>
using element_t = std::remove_cv_t<std::remove_pointer_t<Pointer>>;

template <int N>
using Int = std::integral_constant<int, N>;

// Calls f with `number` as a constant, which is one of the template arguments; the last one if no other matches.
#pragma nv_exec_check_disable
template <int kFirst, int... kOthers, class F>
__host__ __device__ __forceinline__ auto with_constant(int number, F&& f) {
  if constexpr (sizeof...(kOthers) > 0) {
    if (number != kFirst) return with_constant<kOthers...>(number, f);
  }
  return f(Int<kFirst>());
}

}  // namespace svexport
