#include "einsum/launch.h"

#include "einsum/small.cuh"
#include "einsum/tensors.h"

namespace svexport {

namespace einsum {
namespace {

struct Adding {
  const float* parts;
  int count;
  int64_t size, strides[4];
  Divider k, v, w;
};

constexpr int kAdding = 256, kElements = 32;  // threads of a block; elements that it adds up

// Calls write(i, sum) for each element of the block. parts: (count, size), written by the previous kernel.
template <class F>
__device__ __forceinline__ void add_parts(const float* parts, int count, int64_t size, F&& write) {
  __shared__ float sums[kAdding];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kElements + threadIdx.x % kElements;
  float sum = 0.0f;
  wait_for_previous();
  if (i < size) {
#pragma unroll 8
    for (int part = threadIdx.x / kElements; part < count; part += kAdding / kElements) sum += parts[part * size + i];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kElements || i >= size) return;
  UNROLL for (int j = 1; j < kAdding / kElements; ++j) sum += sums[threadIdx.x + j * kElements];
  write(i, sum);
}

// Writes y. Eight threads of a block share an element; each of them adds every eighth part.
template <class T>
__global__ void __launch_bounds__(kAdding) add_kernel(const __grid_constant__ Adding a, T* y, Format<T> format) {
  add_parts(a.parts, a.count, a.size, [&](int64_t i, float sum) {
    auto s = static_cast<uint32_t>(i);
    const int64_t w = a.w.split(s), v = a.v.split(s), k = a.k.split(s);
    y[s * a.strides[0] + k * a.strides[1] + v * a.strides[2] + w * a.strides[3]] = format.rounded(sum);
  });
}

}  // namespace

extern template cudaError_t run_small<Narrow>(const Call&);

cudaError_t add_up(const PartedSum& sum, cudaStream_t stream) {
  const auto& n = sum.sizes;
  Adding a{sum.parts, sum.count, n[0] * n[1] * n[2] * n[3], {}, Divider(n[1]), Divider(n[2]), Divider(n[3])};
  std::copy(sum.strides, sum.strides + 4, a.strides);
  return dispatch_narrow(sum.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    return svexport::launch(add_kernel<T>, static_cast<unsigned>(ceil_div<int64_t>(a.size, kElements)), kAdding, 0,
                            stream, true, a, static_cast<T*>(sum.y), Format<T>(sum.dtype));
  });
}

}  // namespace einsum

size_t einsum_views_workspace(const Tensor& x, const Tensor& y, const Tensor& z, bool sums) {
  const einsum::Problem problem = einsum::problem_of(x, y, z, sums);
  const Gpu gpu = current_gpu();
  size_t bytes = 0;
  for (const auto& tactic : tactics(problem, gpu)) bytes = std::max(bytes, workspace(problem, tactic, gpu));
  return bytes;
}

cudaError_t einsum_views(const Tensor& x, const Tensor& y, const Tensor& z, bool sums, int32_t tactic, void* workspace,
                         bool early, cudaStream_t stream) {
  if (!is_float(x) || y.dtype != x.dtype || z.dtype != x.dtype) return cudaErrorNotSupported;
  const einsum::Problem problem = einsum::problem_of(x, y, z, sums);
  const Gpu gpu = current_gpu();
  const einsum::Tactic chosen = choose(problem, gpu, tactic);
  const einsum::Call call{problem, chosen, gpu, launch(problem, chosen, gpu), x, y, z, workspace, early, stream};
  switch (chosen.kernel) {
    case einsum::Kernel::kLarge: return run_large(call);
    case einsum::Kernel::kSmall:
      return dispatch_narrow(x.dtype, [&](auto* p) { return einsum::run_small<element_t<decltype(p)>>(call); });
    case einsum::Kernel::kChannelProduct: return run_channel_product(call);
    case einsum::Kernel::kChannelCorrelation: return run_channel_correlation(call);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace svexport
