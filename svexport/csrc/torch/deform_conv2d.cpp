#include "deform_conv2d.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>

#include "accumulate.h"
#include "binding.h"

namespace svexport {
namespace {

constexpr int64_t kColumnsBytes = 128 << 20;  // of columns at a time

// With stride 1 along C, copied if need be.
at::Tensor channels_last(const at::Tensor& x) {
  if (x.stride(1) == 1 || x.size(1) == 1) return x;
  const auto y = at::empty({x.size(0), x.size(2), x.size(3), x.size(1)},
                           x.options().memory_format(at::MemoryFormat::Contiguous));
  TORCH_CHECK(done(to_channels_last(view(x), view(y), stream())), "svexport: deform_conv2d of too many channels");
  return y.permute({0, 3, 1, 2});
}

bool supported(const at::Tensor& input, const at::Tensor& offset, const at::Tensor& weight,
               const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mask) {
  const auto is_float = [](const at::Tensor& t) {
    return t.is_cuda() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16);
  };
  return is_float(input) && is_float(offset) && weight.scalar_type() == input.scalar_type() &&
         (!bias || is_float(*bias)) && (!mask || is_float(*mask)) && input.size(1) <= 32 * 65535 &&
         input.size(0) <= 65535 && weight.size(0) <= 65535;
}

DeformConv2d parameters(const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
                        at::IntArrayRef dilation, int64_t groups, int64_t offset_groups) {
  const auto pair = [](at::IntArrayRef x, int (&y)[2]) {
    for (int i = 0; i < 2; ++i) y[i] = static_cast<int>(x[i]);
  };
  DeformConv2d conv{};
  pair(weight.sizes().slice(2), conv.kernel);
  pair(stride, conv.stride);
  pair(padding, conv.padding);
  pair(dilation, conv.dilation);
  conv.groups = static_cast<int>(groups);
  conv.offset_groups = static_cast<int>(offset_groups);
  return conv;
}

// (O, C/groups, kH, kW) -> (groups, O/groups, kH*kW*C/groups)
at::Tensor matrix(const at::Tensor& weight, int64_t groups) {
  return channels_last(weight).permute({0, 2, 3, 1}).reshape({groups, weight.size(0) / groups, -1});
}

// Calls f(first, columns) for parts of the columns of all output pixels.
template <class F>
void for_columns(const at::Tensor& input, const at::Tensor& offset, const at::Tensor& weight, int64_t groups, F&& f) {
  const int64_t rows = offset.size(0) * offset.size(2) * offset.size(3), taps = weight.size(2) * weight.size(3);
  const int64_t width = taps * input.size(1);
  const int64_t most = std::max<int64_t>(kColumnsBytes / (width * input.element_size()), 1);
  for (int64_t first = 0; first < rows; first += most) {
    f(first, at::empty({groups, std::min(most, rows - first), width / groups},
                       input.options().memory_format(at::MemoryFormat::Contiguous)));
  }
}

at::Tensor deform_conv2d_torch(const at::Tensor& input, const at::Tensor& offset, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mask,
                               at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                               int64_t groups, int64_t offset_groups) {
  const c10::cuda::CUDAGuard guard(input.device());
  if (!supported(input, offset, weight, bias, mask)) {
    return reference("deform_conv2d", deform_conv2d_torch, input, offset, weight, bias, mask, stride, padding, dilation,
                     groups, offset_groups);
  }
  const auto conv = parameters(weight, stride, padding, dilation, groups, offset_groups);
  const auto image = channels_last(input), kernels = matrix(weight, groups).transpose(1, 2);
  const auto output = at::empty({input.size(0) * offset.size(2) * offset.size(3), groups, weight.size(0) / groups},
                                input.options().memory_format(at::MemoryFormat::Contiguous));
  for_columns(input, offset, weight, groups, [&](int64_t first, const at::Tensor& columns) {
    done(deform_conv2d_columns(view(image), view(offset), view(mask), conv, first, view(columns), svexport::stream()));
    output.narrow(0, first, columns.size(1)).copy_(at::bmm(columns, kernels).transpose(0, 1));
  });
  auto result = output.view({input.size(0), offset.size(2), offset.size(3), weight.size(0)}).permute({0, 3, 1, 2});
  if (bias) result = result + bias->to(input.scalar_type()).view({1, -1, 1, 1});
  return result.contiguous();
}

std::vector<at::Tensor> deform_conv2d_backward_torch(
    at::TensorList grads, const at::Tensor& input, const at::Tensor& offset, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mask, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, int64_t offset_groups,
    const c10::List<bool>& needs_grad) {
  const c10::cuda::CUDAGuard guard(input.device());
  if (!supported(input, offset, weight, bias, mask) || grads[0].scalar_type() != input.scalar_type()) {
    return reference("deform_conv2d_backward", deform_conv2d_backward_torch, grads, input, offset, weight, bias, mask,
                     stride, padding, dilation, groups, offset_groups, needs_grad);
  }
  const auto conv = parameters(weight, stride, padding, dilation, groups, offset_groups);
  const auto image = channels_last(input), kernels = matrix(weight, groups);
  const int64_t rows = grads[0].numel() / weight.size(0), per_group = weight.size(0) / groups;
  // (groups, N*oH*oW, O/groups)
  const auto grad_rows = grads[0].permute({0, 2, 3, 1}).reshape({rows, groups, per_group}).transpose(0, 1);
  const bool needs_bias = bias && needs_grad[3], needs_mask = mask && needs_grad[bias ? 4 : 3];
  const bool needs_taps = needs_grad[0] || needs_grad[1] || needs_mask;
  const auto fresh = [](const at::Tensor& t) { return at::empty_like(t, at::MemoryFormat::Contiguous); };
  at::Tensor grad_offset, grad_mask, grad_weight;
  if (needs_grad[1]) grad_offset = fresh(offset);
  if (needs_mask) grad_mask = fresh(*mask);
  std::optional<Accumulator> grad_input;
  if (needs_grad[0]) {
    std::vector<at::Tensor> factors = {grads[0], weight};
    if (mask) factors.push_back(*mask);
    grad_input.emplace(at::IntArrayRef{input.size(0), input.size(2), input.size(3), input.size(1)}, input, factors,
                       static_cast<double>(offset.numel() / std::max<int64_t>(offset.size(0), 1)) * static_cast<double>(per_group));
  }
  if (needs_grad[2]) grad_weight = at::zeros(kernels.sizes(), kernels.options().dtype(at::kFloat));

  for_columns(input, offset, weight, groups, [&](int64_t first, const at::Tensor& columns) {
    const auto part = grad_rows.narrow(1, first, columns.size(1));
    if (needs_grad[2]) {
      done(deform_conv2d_columns(view(image), view(offset), view(mask), conv, first, view(columns), svexport::stream()));
      grad_weight.add_(at::bmm(part.transpose(1, 2), columns));
    }
    if (needs_taps) {
      auto out = columns;
      at::bmm_out(out, part, kernels);
      if (grad_input) grad_input->check(columns);
      done(deform_conv2d_columns_backward(view(columns), view(image), view(offset), view(mask), conv, first,
                                          grad_input ? view(grad_input->sums) : Tensor{},
                                          grad_input ? view(grad_input->scale) : Tensor{}, view(grad_offset),
                                          view(grad_mask), svexport::stream()));
    }
  });

  std::vector<at::Tensor> results;
  if (needs_grad[0]) {
    results.push_back(grad_input->result(input.scalar_type()).permute({0, 3, 1, 2}).contiguous());
  }
  if (needs_grad[1]) results.push_back(grad_offset);
  if (needs_grad[2]) {
    results.push_back(grad_weight.view({weight.size(0), weight.size(2), weight.size(3), weight.size(1)})
                          .permute({0, 3, 1, 2})
                          .to(weight.scalar_type())
                          .contiguous());
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
