// A matrix product of the weight and columns, which hold what the taps read, for one piece of the output at a time.
#include <algorithm>
#include <numeric>

#include "deform_conv2d/columns.cuh"
#include "deform_conv2d/planes.cuh"
#include "deform_conv2d/tensors.h"
#include "matmul.h"
#include "permute.h"

namespace svexport {
namespace {

// Channels of a run (launch.h says what a run is).
int run(const DeformConv2d& conv) {
  return std::gcd(conv.channels / conv.groups, conv.channels / conv.offset_groups);
}

int packed_run(const DeformConv2d& conv, const Tensor& x) {
  const int v = static_cast<int>(16 / x.item_size());
  return ceil_div(run(conv), v) * v;
}

// A view of (N, C, H, W) as (N, H, W, runs, channels of a run).
Tensor runs_of(const Tensor& x, const DeformConv2d& conv) {
  const int64_t channels = run(conv), *size = x.sizes, *stride = x.strides;
  return as_strided(x, {size[0], size[2], size[3], size[1] / channels, channels},
                    {stride[0], stride[2], stride[3], channels * stride[1], stride[1]});
}

// The same view of a packed tensor.
Tensor packed_runs_of(const Tensor& y, const DeformConv2d& conv) {
  const int64_t padded = packed_run(conv, y), *size = y.sizes, *stride = y.strides;
  return as_strided(y, {size[0], size[1], size[2], size[3] / padded, run(conv)},
                    {stride[0], stride[1], stride[2], padded, 1});
}

}  // namespace

Tensor packed(const Tensor& x, const DeformConv2d& conv) {
  const int64_t channels = x.sizes[1] / run(conv) * packed_run(conv, x);
  return row_major(nullptr, x.dtype, {x.sizes[0], x.sizes[2], x.sizes[3], channels});
}

bool is_packed(const Tensor& x, const DeformConv2d& conv, Tensor* y) {
  if (x.dtype == DType::kInt8) {
    *y = x;
    const int channel = x.rank == 5 ? 4 : 1;
    return run(conv) % 16 == 0 && x.sizes[channel] % 16 == 0 && x.aligned(channel, 16);
  }
  *y = packed(x, conv);
  if (y->sizes[3] != x.sizes[1] || !x.aligned(1, 16)) return false;
  y->data = x.data;
  return (x.sizes[0] <= 1 || x.strides[0] == y->strides[0]) && (x.sizes[2] <= 1 || x.strides[2] == y->strides[1]) &&
         (x.sizes[3] <= 1 || x.strides[3] == y->strides[2]);
}

bool has_short_runs(const Tensor& x, const DeformConv2d& conv) { return run(conv) * x.item_size() < 16; }

cudaError_t pack(const Tensor& x, const Tensor& y, const DeformConv2d& conv, cudaStream_t stream) {
  if (y.numel() == 0) return cudaSuccess;
  if (packed_run(conv, x) != run(conv)) {
    const cudaError_t status = cudaMemsetAsync(y.data, 0, y.numel() * y.item_size(), stream);
    if (status != cudaSuccess) return status;
  }
  return permute(runs_of(x, conv), packed_runs_of(y, conv), stream);
}

cudaError_t unpack(const Tensor& y, const Tensor& x, const DeformConv2d& conv, cudaStream_t stream) {
  return permute(packed_runs_of(y, conv), runs_of(x, conv), stream);
}

namespace {

int64_t padded(int64_t size, int64_t multiple) { return ceil_div(size, multiple) * multiple; }

// The buffers that the forward takes from its workspace, in this order.
struct Plan {
  bool planes;           // the input is not packed
  Tensor input, weight;  // as the kernels read them; no data: must be copied; weight: (groups, O/groups, K)
  Columns all;           // upper bound, where planes are padded
  size_t bytes[4];       // of copies of input and weight, columns, matmul; the last two suffice for smaller tensors too

  Plan(const Tensor& x, const Tensor& offset, const Tensor& w, const DeformConv2d& conv, bool planes)
      : planes(planes), input(x), weight(w), all{}, bytes{} {
    const int64_t size = w.item_size(), width = offset.sizes[3];
    if (planes) {
      if (!w.contiguous()) weight.data = nullptr;
    } else {
      if (!is_packed(x, conv, &input)) input.data = nullptr;
      if (!is_packed(w, conv, &weight)) weight.data = nullptr;
    }
    const int64_t outputs = weight.sizes[0], k = weight.numel() / std::max<int64_t>(outputs, 1);
    weight = row_major(weight.data, weight.dtype, {conv.groups, outputs / conv.groups, k});
    if (!input.data) bytes[0] = padded(input.numel() * size, 256);
    if (!weight.data) bytes[1] = padded(weight.numel() * size, 256);
    // Columns and copies take no more than all columns and two outputs do, which is what torchvision takes.
    const int64_t copies = static_cast<int64_t>(bytes[0] + bytes[1]);
    all = columns_of(offset, conv.groups * k * size * (planes ? padded(width, 8) : width),
                     2 * x.sizes[0] * outputs * offset.sizes[2] * width * size - copies);
    bytes[2] = padded(all.bytes(), 256);
    bytes[3] = matmul_workspace();
  }

  // A piece's tensors, without data. columns: (images*groups, rows*oW, K), from planes (images*groups, K, rows*oW);
  // outputs of the product: (images*groups, O/groups, rows*oW).
  Tensor columns(const Piece& piece) const {
    const int64_t count = piece.images * weight.sizes[0], pixels = piece.rows * all.width, k = weight.sizes[2];
    if (!planes) return row_major(nullptr, weight.dtype, {count, pixels, k});
    Tensor found = row_major(nullptr, weight.dtype, {count, k, padded(pixels, 8)});
    found.sizes[2] = pixels;
    return found;
  }
  Tensor outputs(const Piece& piece) const {
    return row_major(nullptr, weight.dtype, {piece.images * weight.sizes[0], weight.sizes[1], piece.rows * all.width});
  }

  // Returns the pieces and lowers `bytes` to what they need.
  std::vector<Piece> pieces() {
    const std::vector<Piece> found = all.pieces();
    bytes[2] = bytes[3] = 0;
    for (size_t i = 0; i < found.size(); i += std::max<size_t>(found.size() - 1, 1)) {  // the first and the last
      const Tensor read = columns(found[i]);
      bytes[2] = std::max<size_t>(bytes[2], padded(read.sizes[0] * read.strides[0] * read.item_size(), 256));
      bytes[3] = std::max(bytes[3], matmul_partials(weight, outputs(found[i])));
    }
    return found;
  }
  size_t total() const { return bytes[0] + bytes[1] + bytes[2] + bytes[3]; }
};

// The blocks of a kernel that makes columns. The packed backward kernel has as many.
dim3 blocks_of(const Problem& problem, Kernel kernel) {
  const Launch l = launch(problem, {kernel}, Gpu());
  return dim3(static_cast<unsigned>(l.blocks()), l.grid_y, l.grid_z);
}

}  // namespace

size_t deform_conv2d_workspace(const Tensor& input, const Tensor& offset, const Tensor& weight,
                               const DeformConv2d& conv) {
  const size_t planes = Plan(input, offset, weight, conv, true).total();
  return has_short_runs(input, conv) ? planes : std::max(planes, Plan(input, offset, weight, conv, false).total());
}

size_t deform_conv2d_scratch(const Tensor& input, const Tensor& offset, const Tensor& weight, const DeformConv2d& conv,
                             int32_t tactic) {
  const Tactic chosen = choose(problem_of(input, offset, conv), current_gpu(), tactic);
  Plan plan(input, offset, weight, conv, chosen.kernel == Kernel::kPlanes);
  plan.pieces();
  return plan.total();
}

cudaError_t deform_conv2d(const Tensor& input, const Tensor& offset, const Tensor& weight, const Tensor& bias,
                          const Tensor& mask, const Tensor& output, const DeformConv2d& conv, int32_t tactic,
                          void* workspace, cudaStream_t stream) {
  // The kernels count pixels of the input and of the output in int.
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
  const std::vector<Piece> pieces = plan.pieces();
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
  const int64_t width = offset.sizes[3], plane = offset.sizes[2] * width;
  for (const Piece& piece : pieces) {
    if (status != cudaSuccess) break;
    Tensor columns = plan.columns(piece), part = plan.outputs(piece);
    columns.data = rest;
    part.data = output.element(piece.first * output.sizes[1] * plane + piece.row * width);
    part.strides[0] = part.sizes[1] * plane;
    part.strides[1] = plane;
    status = deform_conv2d_columns(plan.planes, plan.input, offset, mask, conv, piece, columns, stream);
    if (!plan.planes) {
      std::swap(columns.sizes[1], columns.sizes[2]);
      std::swap(columns.strides[1], columns.strides[2]);
    }
    if (status == cudaSuccess) status = matmul(plan.weight, columns, bias, part, false, rest + plan.bytes[2], stream);
  }
  return status;
}

cudaError_t deform_conv2d_columns(bool planes, const Tensor& input, const Tensor& offset, const Tensor& mask,
                                  const DeformConv2d& conv, const Piece& piece, const Tensor& columns,
                                  cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  const dim3 blocks = blocks_of(sizes_of(offset, conv, piece), planes ? Kernel::kPlanes : Kernel::kPacked);
  if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
  return dispatch_float(columns.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const auto from = [&](auto* p) {
      using F = element_t<decltype(p)>;
      if (planes) {
        const auto of = planes_of<T, F>(input, offset, mask, conv, piece, columns);
        const int channels = of.g.per_offset_group;
        const auto kernel = channels == 1  ? planes_kernel<T, F, 4, true>
                            : channels < 8 ? planes_kernel<T, F, 4, false>
                                           : planes_kernel<T, F, 8, false>;
        kernel<<<blocks, kThreads, 0, stream>>>(of);
      } else {
        const Part part = part_of(input, offset, mask, conv, piece, kVector<T>);
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
                                           const Piece& piece, const Tensor& grad_input, const Tensor& scale,
                                           const Tensor& grad_offset, const Tensor& grad_mask, cudaStream_t stream) {
  if (columns.numel() == 0) return cudaSuccess;
  dim3 blocks = blocks_of(sizes_of(offset, conv, piece), planes ? Kernel::kPlanes : Kernel::kPacked);
  if (planes) blocks.z = conv.offset_groups;
  if (blocks.y > 65535 || blocks.z > 65535) return cudaErrorNotSupported;
  const Sums sums{grad_input.data, static_cast<const float*>(scale.data)};
  const AnyFloat of_offset(grad_offset), of_mask(grad_mask);
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    if (planes) {
      planes_backward_kernel<<<blocks, kThreads, 0, stream>>>(
          planes_of<T>(input, offset, mask, conv, piece, columns), replace, sums, of_offset, of_mask);
    } else {
      columns_backward_kernel<<<blocks, kThreads, 0, stream>>>(
          static_cast<T*>(columns.data), replace, static_cast<const T*>(input.data), AnyFloat(offset), AnyFloat(mask),
          part_of(input, offset, mask, conv, piece, 4), sums, of_offset, of_mask);
    }
    return cudaGetLastError();
  });
}

}  // namespace svexport
