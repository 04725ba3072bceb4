#include "deform_conv2d/launch.h"
#include "deform_conv2d/tensors.h"

#include <algorithm>

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/sum.h>

#include "accumulate.h"
#include "binding.h"
#include "matmul.h"

namespace svexport {
namespace {

int64_t bytes(const at::Tensor& t) { return static_cast<int64_t>(t.nbytes()); }

// Bytes of `copy`; 0 if it is the original.
int64_t bytes_beside(const at::Tensor& original, const at::Tensor& copy) {
  return copy.is_alias_of(original) ? 0 : bytes(copy);
}

// What x (images*groups, channels, oH*oW) has for the output pixels of a piece.
at::Tensor part_of(const at::Tensor& x, const deform::Piece& piece, int64_t groups, int64_t width) {
  return x.narrow(0, piece.first * groups, piece.images * groups).narrow(2, piece.row * width, piece.rows * width);
}

// Whether the pixels of an image and all output pixels fit the kernels' counters.
bool countable(const at::Tensor& input, const at::Tensor& offset) {
  return input.size(2) * input.size(3) <= INT32_MAX && offset.size(0) * offset.size(2) * offset.size(3) < 1 << 30;
}

bool floats(at::TensorList tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) { return t.is_floating_point(); });
}

std::vector<at::Tensor> present(std::initializer_list<std::optional<at::Tensor>> tensors) {
  std::vector<at::Tensor> found;
  for (const auto& t : tensors) {
    if (t) found.push_back(*t);
  }
  return found;
}

DeformConv2d parameters(const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
                        at::IntArrayRef dilation, int64_t groups, int64_t offset_groups, double scale) {
  const auto pair = [](at::IntArrayRef x, int (&y)[2]) {
    for (int i = 0; i < 2; ++i) y[i] = static_cast<int>(x[i]);
  };
  DeformConv2d conv{};
  pair(weight.sizes().slice(2), conv.kernel);
  pair(stride, conv.stride);
  pair(padding, conv.padding);
  pair(dilation, conv.dilation);
  conv.channels = static_cast<int>(weight.size(1) * groups);
  conv.groups = static_cast<int>(groups);
  conv.offset_groups = static_cast<int>(offset_groups);
  conv.scale = static_cast<float>(scale);
  return conv;
}

at::Tensor empty(const Tensor& like, const at::TensorOptions& options) {
  return at::empty(at::IntArrayRef(like.sizes, like.rank), options.memory_format(at::MemoryFormat::Contiguous));
}

// x packed, (N, H, W, packed C): a view if x is packed already, else a copy.
at::Tensor pack(const at::Tensor& x, const DeformConv2d& conv) {
  Tensor y;
  if (is_packed(view(x), conv, &y)) return x.as_strided(at::IntArrayRef(y.sizes, y.rank), at::IntArrayRef(y.strides, y.rank));
  const auto result = empty(y, x.options());
  TORCH_CHECK(done(pack(view(x), view(result), conv, stream())), "svexport: deform_conv2d of too large a tensor");
  return result;
}

at::Tensor unpack(const at::Tensor& y, const at::Tensor& like, const DeformConv2d& conv) {
  const auto x = fresh(like);
  TORCH_CHECK(done(unpack(view(y), view(x), conv, stream())), "svexport: deform_conv2d of too large a tensor");
  return x;
}

// Does what the launcher does, but by cuBLAS' product. That is faster where packing is worth it, but knows neither
// groups nor biases of another type, and is no better for float32.
at::Tensor by_cublas(const at::Tensor& input, const at::Tensor& offset, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mask,
                     const DeformConv2d& conv) {
  const auto image = input.scalar_type() == at::kChar ? input : pack(input, conv);
  const int64_t images = input.size(0), outputs = weight.size(0), width = offset.size(3);
  const auto kernels = pack(weight, conv).view({1, outputs, -1});  // (1, O, K)
  const int64_t k = kernels.size(2), row = width * k * weight.element_size();
  const auto output = fresh({images, outputs, offset.size(2), width}, weight), planes = output.flatten(2);
  const int64_t more = 2 * bytes(output) - bytes_beside(input, image) - bytes_beside(weight, kernels);
  for (const deform::Piece& piece : deform::columns_of(view(offset), row, more).pieces()) {
    const auto columns = at::empty({piece.images, piece.rows * width, k}, kernels.options());
    TORCH_CHECK(done(deform_conv2d_columns(false, view(image), view(offset), view(mask), conv, piece, view(columns),
                                           stream())),
                "svexport: deform_conv2d of too many taps or channels");
    const auto left = kernels.expand({piece.images, outputs, k}), right = columns.transpose(1, 2);
    auto part = part_of(planes, piece, 1, width);
    if (bias) {
      at::baddbmm_out(part, bias->view({1, outputs, 1}), left, right);
    } else {
      at::bmm_out(part, left, right);
    }
  }
  return output;
}

// For tests, the input may also be int8 in CHW32 or CHW4, (N, ceil(C/V), H, W, V): the op has no schema for that.
std::optional<at::Tensor> deform_conv2d_torch(const at::Tensor& input, const at::Tensor& offset,
                                              const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                              const std::optional<at::Tensor>& mask, at::IntArrayRef stride,
                                              at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                                              int64_t offset_groups, double scale) {
  const bool int8 = input.scalar_type() == at::kChar;
  if (!int8 && weight.scalar_type() != input.scalar_type()) return {};
  if (!floats(present({offset, weight, bias, mask}))) return {};
  const auto conv = parameters(weight, stride, padding, dilation, groups, offset_groups, scale);
  const auto forced = forced_tactic("deform_conv2d");
  if (weight.scalar_type() != at::kFloat && groups == 1 && (!bias || bias->scalar_type() == weight.scalar_type()) &&
      countable(input, offset) && input.numel()) {
    const auto problem = deform::problem_of(view(input), view(offset), conv);
    if ((problem.packed || !int8) && choose(problem, current_gpu(), forced).kernel == deform::Kernel::kPacked) {
      return by_cublas(input, offset, weight, bias, mask, conv);
    }
  }
  const auto output = fresh({input.size(0), weight.size(0), offset.size(2), offset.size(3)}, weight);
  const auto scratch = workspace(deform_conv2d_scratch(view(input), view(offset), view(weight), conv, forced), input);
  return if_done(deform_conv2d(view(input), view(offset), view(weight), view(bias), view(mask), view(output), conv,
                               forced, scratch.data_ptr(), svexport::stream()),
                 output);
}

// c = a b, or c += a b, for batches of matrices; where a or b has fewer, these are used in turn. c may be transposed.
// The kernel is faster for float32, cuBLAS for other types and for matrices of a few rows.
void product(at::Tensor c, const at::Tensor& a, const at::Tensor& b, bool add = false) {
  if (!c.is_contiguous()) return product(c.transpose(1, 2), b.transpose(1, 2), a.transpose(1, 2), add);
  if (c.scalar_type() == at::kFloat && a.size(1) >= 8 && a.size(2) >= 8 && b.size(2) >= 8) {
    const auto scratch = workspace(matmul_partials(view(a), view(c)), c);
    if (done(matmul(view(a), view(b), {}, view(c), add, scratch.data_ptr(), stream()))) return;
  }
  const auto all = [&](const at::Tensor& t) {
    const int64_t times = c.size(0) / t.size(0);
    return times == 1 ? t : t.expand({times, t.size(0), t.size(1), t.size(2)}).flatten(0, 1);
  };
  if (add) {
    at::baddbmm_out(c, c, all(a), all(b));
  } else {
    at::bmm_out(c, all(a), all(b));
  }
}

Wanted deform_conv2d_backward_torch(at::TensorList grads, const at::Tensor& input, const at::Tensor& offset,
                                    const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                    const std::optional<at::Tensor>& mask, at::IntArrayRef stride,
                                    at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                                    int64_t offset_groups, double, const c10::List<bool>& needs_grad) {
  const int64_t images = offset.size(0), width = offset.size(3), plane = offset.size(2) * width;
  if (!floats(present({input, offset, weight, bias, mask})) || weight.scalar_type() != input.scalar_type() ||
      grads[0].scalar_type() != input.scalar_type() || !countable(input, offset)) {
    return {};
  }
  const bool needs_bias = bias && needs_grad[3], needs_mask = mask && needs_grad[bias ? 4 : 3];
  const bool needs_taps = needs_grad[0] || needs_grad[1] || needs_mask;
  const auto conv = parameters(weight, stride, padding, dilation, groups, offset_groups, 1);
  const int64_t outputs = weight.size(0) / groups;
  const bool planes = has_short_runs(view(input), conv);
  const auto image = planes ? input.contiguous() : pack(input, conv);
  const auto kernels = (planes ? weight.contiguous() : pack(weight, conv)).reshape({groups, outputs, -1});
  const int64_t k = kernels.size(2);
  const auto grad_planes = grads[0].contiguous().view({images * groups, outputs, plane});

  const auto grad_offset = needs_grad[1] ? fresh(offset) : at::Tensor(),
             grad_mask = needs_mask ? fresh(*mask) : at::Tensor();
  std::optional<Accumulator> grad_input;
  if (needs_grad[0]) {
    const int64_t taps_per_image = offset.size(1) * plane;
    grad_input.emplace(image.sizes(), input, present({grads[0], weight, mask}),
                       static_cast<double>(taps_per_image) * static_cast<double>(outputs));
  }
  at::Tensor grad_kernels;

  // Memory beside columns and results: copies, wider sums, what a piece adds to the weight's gradient.
  const bool wide = input.scalar_type() == at::kFloat;
  const int64_t terms = wide ? matmul_partials(view(grad_planes), view(kernels)) : 2 * bytes(kernels);
  const int64_t beside = bytes_beside(input, image) + bytes_beside(weight, kernels) +
                         (grad_input ? bytes(grad_input->sums) - bytes(input) : 0) +
                         (needs_grad[2] ? terms : 0);
  const int64_t row = width * groups * k * input.element_size();
  for (const deform::Piece& piece : deform::columns_of(view(offset), row, -beside).pieces()) {
    const int64_t pixels = piece.rows * width, batch = piece.images * groups;
    const auto storage = at::empty({batch, planes ? k : pixels, planes ? pixels : k}, kernels.options());
    const auto columns = planes ? storage.transpose(1, 2) : storage;  // (batch, rows*oW, K)
    const auto part = part_of(grad_planes, piece, groups, width);
    if (needs_taps) {
      product(columns, part.transpose(1, 2), kernels);
      if (grad_input) grad_input->check(columns);
      TORCH_CHECK(done(deform_conv2d_columns_backward(
                      planes, view(storage), needs_grad[2], view(image), view(offset), view(mask), conv, piece,
                      grad_input ? view(grad_input->sums) : Tensor{}, grad_input ? view(grad_input->scale) : Tensor{},
                      view(grad_offset), view(grad_mask), svexport::stream())),
                  "svexport: deform_conv2d of too many taps or channels");
    } else if (needs_grad[2]) {
      TORCH_CHECK(done(deform_conv2d_columns(planes, view(image), view(offset), view(mask), conv, piece, view(storage),
                                             svexport::stream())),
                  "svexport: deform_conv2d of too many taps or channels");
    }
    if (!needs_grad[2]) continue;
    const bool add = grad_kernels.defined() && wide && piece.images == 1;
    const auto products = add ? grad_kernels : at::empty({batch, outputs, k}, kernels.options());
    product(products, part, columns, add);
    if (add) continue;
    const auto sum = piece.images > 1 ? products.unflatten(0, {-1, groups}).sum(at::IntArrayRef(0), false, at::kFloat)
                                      : products.to(at::kFloat);
    grad_kernels = grad_kernels.defined() ? grad_kernels.add_(sum) : sum;
  }

  std::vector<at::Tensor> results;
  if (needs_grad[0]) {
    const auto sums = grad_input->result(input.scalar_type());
    results.push_back(planes ? sums : unpack(sums, input, conv));
  }
  if (needs_grad[1]) results.push_back(grad_offset);
  if (needs_grad[2]) {
    if (!grad_kernels.defined()) grad_kernels = at::zeros(kernels.sizes(), kernels.options().dtype(at::kFloat));
    const auto sums = grad_kernels.to(weight.scalar_type());
    results.push_back(planes ? sums.view(weight.sizes())
                             : unpack(sums.view({weight.size(0), weight.size(2), weight.size(3), -1}), weight, conv));
  }
  if (needs_bias) {
    const auto sum = grad_planes.view({images, groups * outputs, plane}).sum(at::IntArrayRef({0, 2}), false, at::kFloat);
    results.push_back(sum.to(bias->scalar_type()));
  }
  if (needs_mask) results.push_back(grad_mask);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, CUDA, m) {
  implement(m, "deform_conv2d", deform_conv2d_torch);
  implement(m, "deform_conv2d_backward", deform_conv2d_backward_torch);
}

}  // namespace svexport
