// What channel_product and channel_correlation share: products of the channels of large tensors with a small matrix, as
// in a convolution with a 1 x 1 kernel. For sm_90a only.
#pragma once

#include <algorithm>

#include "einsum/run.h"
#include "planned.cuh"
#include "wgmma.cuh"

namespace svexport::einsum {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SVEXPORT_CHANNELS 1
constexpr bool kCompiled = true;
#else  // launch_compiled() sees that these kernels are bounded to one warp
#define SVEXPORT_CHANNELS 0
constexpr bool kCompiled = false;
#endif

struct Side {  // x or z, with channels
  char* data;
  int64_t strides[2];  // of N and of the channels, in elements
  int channels;
  const char* end;  // end of the tensor
};

#if SVEXPORT_CHANNELS

// kCount elements that are read and written at once.
template <class T, int kCount, int kBytes = kCount * static_cast<int>(sizeof(T))>
using Word = std::conditional_t<kBytes == 16, uint4,
                                std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// Copies a word of at least 4 bytes to shared memory, zeros where not `valid`. Even words of 16 bytes go through the L1
// cache: past it, words that do not lie side by side are written one by one.
template <class Word>
__device__ __forceinline__ void copy_word(char* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(sizeof(Word)), "r"(valid ? static_cast<int>(sizeof(Word)) : 0)
               : "memory");
}

// c (64 x 8 * J) += a b, or = a b without `adds`, by all warps of a warp group, over the width of one fragment: 8
// floats or 16 halves. c and a are fragments as in mma.
template <class T, int J>
__device__ __forceinline__ void wgmma(float (&c)[J][4], const uint32_t (&a)[4], uint64_t b, int adds);

#define SVEXPORT_4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define SVEXPORT_16(j) SVEXPORT_4(j), SVEXPORT_4(j + 1), SVEXPORT_4(j + 2), SVEXPORT_4(j + 3)
#define SVEXPORT_32(j) SVEXPORT_16(j), SVEXPORT_16(j + 4)
#define SVEXPORT_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SVEXPORT_NAMES_32 \
  SVEXPORT_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SVEXPORT_WGMMA(type, shape, more, columns, sums, a0, a1, a2, a3, to, if_adds)                               \
  template <>                                                                                                       \
  __device__ __forceinline__ void wgmma<type, columns / 8>(float (&c)[columns / 8][4], const uint32_t (&a)[4],      \
                                                           uint64_t b, int adds) {                                  \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, " if_adds ", 0; wgmma.mma_async.sync.aligned.m64n" #columns   \
                 shape " {" SVEXPORT_NAMES_##sums "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " to ", adds, 1, 1" more ";}" \
                 : SVEXPORT_##sums(0)                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                                  \
  }
#define SVEXPORT_WGMMAS(type, shape, more)                                            \
  SVEXPORT_WGMMA(type, shape, more, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21") \
  SVEXPORT_WGMMA(type, shape, more, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
SVEXPORT_WGMMAS(float, "k8.f32.tf32.tf32", "")
SVEXPORT_WGMMAS(__half, "k16.f32.f16.f16", ", 0")
SVEXPORT_WGMMAS(__nv_bfloat16, "k16.f32.bf16.bf16", ", 0")
#undef SVEXPORT_WGMMAS
#undef SVEXPORT_WGMMA
#undef SVEXPORT_NAMES_32
#undef SVEXPORT_NAMES_16
#undef SVEXPORT_32
#undef SVEXPORT_16
#undef SVEXPORT_4

// The descriptor by which wgmma finds a matrix in shared memory. Columns of 16 bytes lie one after the other, in groups
// of 8; pitch: bytes to the next 16 bytes of all columns. A product reads two of these.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address, int pitch) {
  return uint64_t{128 / 16} << 32 | static_cast<uint64_t>(pitch / 16) << 16 | address / 16;
}

// Splits a float into what tf32 keeps and what it cuts off. The parts of the other factor are rounded: its second parts
// then have either sign, which is enough for errors to cancel.
__device__ __forceinline__ void cut(float x, uint32_t& big, uint32_t& small) {
  big = __float_as_uint(x) & 0xffffe000u;
  small = __float_as_uint(x - __uint_as_float(big));
}

#endif

// Launches the kernel if the code for this device has it; code for sm_90a does.
template <class Kernel, class Argument>
cudaError_t launch_compiled(Kernel kernel, const Call& call, const Argument& argument) {
  return has_threads(kernel, call.launch.threads()) ? launch_planned(kernel, call.launch, false, call.stream, argument)
                                                    : cudaErrorNotSupported;
}

// t: (1, N, channels, positions, 1)
inline Side side(const Tensor& t) {
  int64_t size = t.item_size();
  for (int i = 0; i < 5; ++i) size += (t.sizes[i] - 1) * t.strides[i] * t.item_size();
  auto* const data = static_cast<char*>(t.data);
  return {data, {t.strides[1], t.strides[2]}, static_cast<int>(t.sizes[2]), data + size};
}

// y: (1, C, 1, D, 1). Whether int offsets reach all of y, and x and z are contiguous along positions.
inline bool countable(const Call& call) {
  const Tensor &x = call.x, &y = call.y, &z = call.z;
  const int64_t last = (y.sizes[1] - 1) * y.strides[1] + (y.sizes[3] - 1) * y.strides[3];
  const auto rows = [](const Tensor& t) { return t.strides[3] == 1 || t.sizes[3] == 1; };
  return rows(x) && rows(z) && last <= INT32_MAX;
}

}  // namespace svexport::einsum
