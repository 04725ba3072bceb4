#include "deform_conv2d.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/sum.h>

#include "accumulate.h"
#include "binding.h"
#include "matmul.h"

namespace svexport {
namespace {

constexpr int64_t kColumnsBytes = 128 << 20;  // of columns at a time

bool supported(at::TensorList tensors, const at::Tensor& input, const at::Tensor& weight) {
  for (const auto& t : tensors) {
    if (!has_dtype(t) || !t.is_floating_point() || t.device() != input.device()) return false;
  }
  return weight.scalar_type() == input.scalar_type();
}

std::vector<at::Tensor> present(std::initializer_list<std::optional<at::Tensor>> tensors) {
  std::vector<at::Tensor> found;
  for (const auto& t : tensors) {
    if (t) found.push_back(*t);
  }
  return found;
}

DeformConv2d parameters(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
                        at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, int64_t offset_groups) {
  const auto pair = [](at::IntArrayRef x, int (&y)[2]) {
    for (int i = 0; i < 2; ++i) y[i] = static_cast<int>(x[i]);
  };
  DeformConv2d conv{};
  pair(weight.sizes().slice(2), conv.kernel);
  pair(stride, conv.stride);
  pair(padding, conv.padding);
  pair(dilation, conv.dilation);
  conv.channels = static_cast<int>(input.size(1));
  conv.groups = static_cast<int>(groups);
  conv.offset_groups = static_cast<int>(offset_groups);
  return conv;
}

at::Tensor empty(const Tensor& like, const at::TensorOptions& options) {
  return at::empty(at::IntArrayRef(like.sizes, like.rank), options.memory_format(at::MemoryFormat::Contiguous));
}

// Packed, which x itself may be: (N, H, W, packed C).
at::Tensor pack(const at::Tensor& x, const DeformConv2d& conv) {
  Tensor y;
  if (is_packed(view(x), conv, &y)) return x.as_strided(at::IntArrayRef(y.sizes, y.rank), at::IntArrayRef(y.strides, y.rank));
  const auto result = empty(y, x.options());
  TORCH_CHECK(done(pack(view(x), view(result), conv, stream())), "svexport: deform_conv2d of too large a tensor");
  return result;
}

at::Tensor unpack(const at::Tensor& y, const at::Tensor& like, const DeformConv2d& conv) {
  const auto x = at::empty_like(like, at::MemoryFormat::Contiguous);
  TORCH_CHECK(done(unpack(view(y), view(x), conv, stream())), "svexport: deform_conv2d of too large a tensor");
  return x;
}

bool by_kernel() { return getenv("SV_MM"); }  // EXPERIMENT

// c = a b, of batches of matrices.
void product(at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
  if (!by_kernel() || !done(matmul(view(a), view(b), {}, view(c), 1, stream()))) at::bmm_out(c, a, b);
}

// a b in float32, where the inner dimension is the long one.
at::Tensor long_product(const at::Tensor& a, const at::Tensor& b) {
  const int64_t tiles = (a.size(1) + 127) / 128 * ((b.size(2) + 127) / 128), parts = std::min(264 / tiles, b.size(1) / 256);
  if (by_kernel() && a.size(0) == 1 && parts > 1) {
    const auto c = at::empty({parts, a.size(1), b.size(2)}, a.options().memory_format(at::MemoryFormat::Contiguous));
    if (done(matmul(view(a[0]), view(b[0]), {}, view(c), static_cast<int>(parts), stream()))) return c.sum(0, true);
  }
  return at::bmm(a, b).to(at::kFloat);
}

// Two steps: what the taps read, and a product with it by cuBLAS; from planes, or packed and then several images at once
// only if there is one group.
at::Tensor by_columns(const at::Tensor& input, const at::Tensor& offset, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mask,
                      const DeformConv2d& conv, bool planes) {
  const int64_t images = input.size(0), plane = offset.size(2) * offset.size(3), groups = conv.groups;
  const int64_t outputs = weight.size(0) / groups;
  const auto image = !planes ? pack(input, conv) : has_planes(view(input)) ? input : input.contiguous();
  const auto kernels = (planes ? weight : pack(weight, conv)).reshape({1, groups, outputs, -1});
  const int64_t k = kernels.size(3);
  const int64_t most = planes || groups == 1 ? std::max<int64_t>(kColumnsBytes / (groups * k * plane * input.element_size()), 1) : 1;
  const auto output = at::empty({images, groups * outputs, offset.size(2), offset.size(3)},
                                input.options().memory_format(at::MemoryFormat::Contiguous));
  for (int64_t first = 0; first < images; first += most) {
    const int64_t count = std::min(most, images - first), batch = count * groups;
    const auto repeated = [&](const at::Tensor& t) {  // (1, groups, outputs, ...) to (batch, outputs, ...)
      return t.expand({count, groups, outputs, t.size(3)}).reshape({batch, outputs, t.size(3)});
    };
    at::Tensor columns;
    if (planes) {
      columns = at::empty({batch, k, plane}, kernels.options());
      done(deform_conv2d_planes(view(image), view(offset), view(mask), conv, first, view(columns), stream()));
    } else {
      columns = at::empty({groups, count * plane, k}, kernels.options());
      done(deform_conv2d_columns(view(image), view(offset), view(mask), conv, first * plane, view(columns), stream()));
      columns = columns.view({batch, plane, k}).transpose(1, 2);
    }
    auto part = output.narrow(0, first, count).view({batch, outputs, plane});
    const auto kernel_bias = groups == 1 ? view(bias) : Tensor{};
    if (by_kernel() && (groups == 1 || !bias) && done(matmul(view(repeated(kernels)), view(columns), kernel_bias, view(part), 1, stream()))) continue;
    if (bias) {
      at::baddbmm_out(part, repeated(bias->to(input.scalar_type()).view({1, groups, outputs, 1})), repeated(kernels), columns);
    } else {
      at::bmm_out(part, repeated(kernels), columns);
    }
  }
  return output;
}

at::Tensor deform_conv2d_torch(const at::Tensor& input, const at::Tensor& offset, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mask,
                               at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                               int64_t groups, int64_t offset_groups) {
  const c10::cuda::CUDAGuard guard(input.device());
  if (supported(present({input, offset, weight, bias, mask}), input, weight)) {
    const auto conv = parameters(input, weight, stride, padding, dilation, groups, offset_groups);
    const char* e = getenv("SV_DEFORM");  // EXPERIMENT
    if (e && (*e == 'c' || *e == 'p') && offset.size(0) * offset.size(2) * offset.size(3) < 1 << 30) {
      return by_columns(input, offset, weight, bias, mask, conv, *e == 'p');
    }
    const auto output = at::empty({input.size(0), weight.size(0), offset.size(2), offset.size(3)},
                                  input.options().memory_format(at::MemoryFormat::Contiguous));
    const auto scratch = workspace(deform_conv2d_workspace(view(input), view(weight), conv), input);
    if (done(deform_conv2d(view(input), view(offset), view(weight), view(bias), view(mask), view(output), conv,
                           scratch.data_ptr(), svexport::stream()))) {
      return output;
    }
  }
  return reference("deform_conv2d", deform_conv2d_torch, input, offset, weight, bias, mask, stride, padding, dilation,
                   groups, offset_groups);
}

std::vector<at::Tensor> deform_conv2d_backward_torch(
    at::TensorList grads, const at::Tensor& input, const at::Tensor& offset, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mask, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, int64_t offset_groups,
    const c10::List<bool>& needs_grad) {
  const c10::cuda::CUDAGuard guard(input.device());
  const auto tensors = present({input, offset, weight, bias, mask});
  const int64_t rows = offset.size(0) * offset.size(2) * offset.size(3);  // output pixels
  if (!supported(tensors, input, weight) || grads[0].scalar_type() != input.scalar_type() || rows >= 1 << 30 ||
      input.size(2) * input.size(3) > INT32_MAX) {
    return reference("deform_conv2d_backward", deform_conv2d_backward_torch, grads, input, offset, weight, bias, mask,
                     stride, padding, dilation, groups, offset_groups, needs_grad);
  }
  const bool needs_bias = bias && needs_grad[3], needs_mask = mask && needs_grad[bias ? 4 : 3];
  const bool needs_taps = needs_grad[0] || needs_grad[1] || needs_mask;
  const auto conv = parameters(input, weight, stride, padding, dilation, groups, offset_groups);
  const int64_t outputs = weight.size(0) / groups;
  const auto image = pack(input, conv);
  const auto kernels = pack(weight, conv).reshape({groups, outputs, -1});  // (groups, O/groups, K)
  const int64_t k = kernels.size(2);
  // (groups, N*oH*oW, O/groups)
  const auto grad_rows = grads[0].permute({0, 2, 3, 1}).reshape({rows, groups, outputs}).transpose(0, 1);

  const auto fresh = [](const at::Tensor& t) { return at::empty_like(t, at::MemoryFormat::Contiguous); };
  const auto grad_offset = needs_grad[1] ? fresh(offset) : at::Tensor(),
             grad_mask = needs_mask ? fresh(*mask) : at::Tensor();
  std::optional<Accumulator> grad_input;
  if (needs_grad[0]) {
    const int64_t taps_per_image = offset.size(1) * offset.size(2) * offset.size(3);
    grad_input.emplace(image.sizes(), input, present({grads[0], weight, mask}),
                       static_cast<double>(taps_per_image) * static_cast<double>(outputs));
  }
  at::Tensor grad_kernels;

  const int64_t most = std::max<int64_t>(kColumnsBytes / (k * groups * input.element_size()), 1);
  for (int64_t first = 0; first < rows; first += most) {
    auto columns = at::empty({groups, std::min(most, rows - first), k}, kernels.options());
    const auto part = grad_rows.narrow(1, first, columns.size(1));
    if (needs_taps) {
      product(columns, part, kernels);
      if (grad_input) grad_input->check(columns);
      done(deform_conv2d_columns_backward(view(columns), needs_grad[2], view(image), view(offset), view(mask), conv,
                                          first, grad_input ? view(grad_input->sums) : Tensor{},
                                          grad_input ? view(grad_input->scale) : Tensor{}, view(grad_offset),
                                          view(grad_mask), svexport::stream()));
    } else if (needs_grad[2]) {
      done(deform_conv2d_columns(view(image), view(offset), view(mask), conv, first, view(columns), svexport::stream()));
    }
    if (needs_grad[2]) {
      const auto sum = long_product(part.transpose(1, 2), columns);
      grad_kernels = grad_kernels.defined() ? grad_kernels + sum : sum;
    }
  }

  std::vector<at::Tensor> results;
  if (needs_grad[0]) results.push_back(unpack(grad_input->result(at::kFloat), input, conv));
  if (needs_grad[1]) results.push_back(grad_offset);
  if (needs_grad[2]) {
    if (!grad_kernels.defined()) grad_kernels = at::zeros(kernels.sizes(), kernels.options().dtype(at::kFloat));
    const auto packed = grad_kernels.view({weight.size(0), weight.size(2), weight.size(3), -1});
    results.push_back(unpack(packed, weight, conv));
  }
  if (needs_bias) results.push_back(grads[0].sum({0, 2, 3}, false, at::kFloat).to(bias->scalar_type()));
  if (needs_mask) results.push_back(grad_mask);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  m.impl("deform_conv2d", &deform_conv2d_torch);
  m.impl("deform_conv2d_backward", &deform_conv2d_backward_torch);
}

}  // namespace svexport
