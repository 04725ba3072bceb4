// A matrix product whose one factor is what the taps read: columns, made for as many images at a time as fit into memory
// of a bounded size.
#include <algorithm>

#include "deform_conv2d/columns.cuh"
#include "deform_conv2d/planes.cuh"
#include "deform_conv2d/tensors.h"
#include "matmul.h"
#include "permute.h"

namespace svexport {
namespace {

constexpr int64_t kColumnsBytes = 128 << 20;  // of columns at a time

int64_t padded(int64_t size, int64_t multiple) { return ceil_div(size, multiple) * multiple; }

// What the forward takes from its workspace, in this order.
struct Plan {
  bool planes;           // what is read is not packed
  Tensor input, weight;  // as they are used, without data if they must be copied; weight: (groups, O/groups, K)
  Tensor columns;        // of one image, without data: (groups, oH*oW, K), from planes (groups, K, oH*oW)
  int64_t images;        // at a time
  size_t bytes[4];       // of copies of input and weight, of columns, for matmul

  Plan(const Tensor& x, const Tensor& offset, const Tensor& w, const DeformConv2d& conv, bool planes)
      : planes(planes), input(x), weight(w), bytes{} {
    const int64_t plane = offset.sizes[2] * offset.sizes[3], groups = conv.groups, size = w.item_size();
    if (planes) {
      if (!w.contiguous()) weight.data = nullptr;
    } else {
      if (!is_packed(x, conv, &input)) input.data = nullptr;
      if (!is_packed(w, conv, &weight)) weight.data = nullptr;
    }
    const int64_t outputs = weight.sizes[0], k = weight.numel() / std::max<int64_t>(outputs, 1);
    weight = row_major(weight.data, weight.dtype, {groups, outputs / groups, k});
    columns = planes ? row_major(nullptr, w.dtype, {groups, k, padded(plane, 8)})
                     : row_major(nullptr, w.dtype, {groups, plane, k});
    if (planes) columns.sizes[2] = plane;
    const int64_t image = groups * columns.strides[0] * size;
    images = std::min(std::max<int64_t>(kColumnsBytes / std::max<int64_t>(image, 1), 1), x.sizes[0]);
    if (!input.data) bytes[0] = padded(input.numel() * size, 256);
    if (!weight.data) bytes[1] = padded(weight.numel() * size, 256);
    bytes[2] = padded(std::min(x.sizes[0] * image, std::max<int64_t>(kColumnsBytes, image)), 256);
    bytes[3] = matmul_workspace();
  }
  size_t all() const { return bytes[0] + bytes[1] + bytes[2] + bytes[3]; }
};

// Of a kernel that makes columns; of a gradient it has as many, packed.
dim3 blocks_of(const Problem& problem, Kernel kernel) {
  const Launch l = launch(problem, {kernel}, Gpu());
  return dim3(static_cast<unsigned>(l.blocks()), l.grid_y, l.grid_z);
}

}  // namespace

size_t deform_conv2d_workspace(const Tensor& input, const Tensor& offset, const Tensor& weight,
                               const DeformConv2d& conv) {
  const size_t planes = Plan(input, offset, weight, conv, true).all();
  return has_short_runs(input, conv) ? planes : std::max(planes, Plan(input, offset, weight, conv, false).all());
}

cudaError_t deform_conv2d(const Tensor& input, const Tensor& offset, const Tensor& weight, const Tensor& bias,
                          const Tensor& mask, const Tensor& output, const DeformConv2d& conv, int32_t tactic,
                          void* workspace, cudaStream_t stream) {
  // The kernels count pixels, and threads of parts of the output pixels, in int.
  const bool int8 = input.dtype == DType::kInt8;
  if (input.rank == 5 && ((input.sizes[4] != 32 && input.sizes[4] != 4) || input.strides[4] != 1)) {
    return cudaErrorNotSupported;
  }
  if (!is_float(weight) || (!int8 && weight.dtype != input.dtype) || !is_float(offset) || (mask.data && !is_float(mask)) ||
      (bias.data && !is_float(bias)) || input.sizes[2] * input.sizes[3] > INT32_MAX ||
      offset.sizes[0] * offset.sizes[2] * offset.sizes[3] >= 1 << 30) {
    return cudaErrorNotSupported;
  }
  if (output.numel() == 0) return cudaSuccess;
  const Tactic chosen = choose(problem_of(input, offset, conv), current_gpu(), tactic);
  Plan plan(input, offset, weight, conv, chosen.kernel == Kernel::kPlanes);
  if (int8 && plan.bytes[0]) return cudaErrorNotSupported;
  char* rest = static_cast<char*>(workspace);
  cudaError_t status = cudaSuccess;
  if (plan.bytes[0]) {
    plan.input.data = rest;
    status = pack(input, plan.input, conv, stream);
  }
  rest += plan.bytes[0];
  if (plan.bytes[1] && status == cudaSuccess) {
    Tensor copy = plan.planes ? row_major(weight) : packed(weight, conv);
    copy.data = plan.weight.data = rest;
    status = plan.planes ? permute(weight, copy, stream) : pack(weight, copy, conv, stream);
  }
  rest += plan.bytes[1];
  plan.columns.data = rest;
  Tensor images = row_major(output.data, output.dtype,
                            {output.sizes[0], output.sizes[1] / conv.groups, offset.sizes[2] * offset.sizes[3]});
  const int64_t image = conv.groups * images.strides[0] * output.item_size();
  for (int64_t first = 0; first < output.sizes[0] && status == cudaSuccess; first += plan.images) {
    Tensor columns = plan.columns;
    images.sizes[0] = columns.sizes[0] = conv.groups * std::min(plan.images, output.sizes[0] - first);
    images.data = static_cast<char*>(output.data) + first * image;
    status = deform_conv2d_columns(plan.planes, plan.input, offset, mask, conv, first, columns, stream);
    if (!plan.planes) {
      std::swap(columns.sizes[1], columns.sizes[2]);
      std::swap(columns.strides[1], columns.strides[2]);
    }
    if (status == cudaSuccess) status = matmul(plan.weight, columns, bias, images, rest + plan.bytes[2], stream);
  }
  return status;
}

cudaError_t deform_conv2d_columns(bool planes, const Tensor& input, const Tensor& offset, const Tensor& mask,
                                  const DeformConv2d& conv, int64_t first, const Tensor& columns, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  const int64_t images = columns.sizes[0] / conv.groups;
  const dim3 blocks = blocks_of(sizes_of(offset, conv, images), planes ? Kernel::kPlanes : Kernel::kPacked);
  if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
  return dispatch_float(columns.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const auto from = [&](auto* p) {
      using F = element_t<decltype(p)>;
      if (planes) {
        const auto of = planes_of<T, F>(input, offset, mask, conv, first, columns);
        const int channels = of.g.per_offset_group;
        const auto kernel = channels == 1  ? planes_kernel<T, F, 4, true>
                            : channels < 8 ? planes_kernel<T, F, 4, false>
                                           : planes_kernel<T, F, 8, false>;
        kernel<<<blocks, kThreads, 0, stream>>>(of);
      } else {
        const Part part = part_of(input, offset, mask, conv, first, images, kVector<T>);
        columns_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const F*>(input.data), AnyFloat(offset),
                                                        AnyFloat(mask), part, static_cast<T*>(columns.data));
      }
      return cudaGetLastError();
    };
    return input.dtype == DType::kInt8 ? from(static_cast<int8_t*>(nullptr)) : from(p);
  });
}

cudaError_t deform_conv2d_columns_backward(bool planes, const Tensor& columns, bool replace, const Tensor& input,
                                           const Tensor& offset, const Tensor& mask, const DeformConv2d& conv,
                                           int64_t first, const Tensor& grad_input, const Tensor& scale,
                                           const Tensor& grad_offset, const Tensor& grad_mask, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  const int64_t images = columns.sizes[0] / conv.groups;
  dim3 blocks = blocks_of(sizes_of(offset, conv, images), planes ? Kernel::kPlanes : Kernel::kPacked);
  if (planes) blocks.z = conv.offset_groups;
  if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
  const Sums sums{grad_input.data, static_cast<const float*>(scale.data)};
  const AnyFloat of_offset(grad_offset), of_mask(grad_mask);
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    if (planes) {
      planes_backward_kernel<<<blocks, kThreads, 0, stream>>>(
          planes_of<T>(input, offset, mask, conv, first, columns), replace, sums, of_offset, of_mask);
    } else {
      columns_backward_kernel<<<blocks, kThreads, 0, stream>>>(
          static_cast<T*>(columns.data), replace, static_cast<const T*>(input.data), AnyFloat(offset), AnyFloat(mask),
          part_of(input, offset, mask, conv, first, images, 4), sums, of_offset, of_mask);
    }
    return cudaGetLastError();
  });
}

}  // namespace svexport
