// Autograd of all operators on CUDA tensors. `_autograd` of ops/_op.py does the same in Python, for other devices and
// for calls that this file leaves to it; there, a call that is recorded takes the CPU two to three times as long.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

// Tests that have no GPU build this file for AutogradCPU.
#ifndef SVEXPORT_AUTOGRAD
#define SVEXPORT_AUTOGRAD AutogradCUDA
#endif

namespace svexport {
namespace {

using torch::autograd::variable_list;
using torch::jit::Stack;

// The tensors among the arguments, those of lists included, in order and without absent ones.
template <class Arguments>
variable_list tensors_of(const Arguments& arguments) {
  variable_list tensors;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      tensors.push_back(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorList()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

bool records(const variable_list& tensors) {
  return at::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

// Whether torch.func or forward-mode differentiation transforms the call: these go through the reference.
bool transformed(const variable_list& tensors) {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  if (included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) {
    return true;
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor._fw_grad(/*level=*/0).defined()) return true;
  }
  return false;
}

// Calls the Python kernel, which torch keeps under the key of a device that nobody has.
void call_python(const c10::OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradPrivateUse3), stack);
}

void call_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

struct Recorded : torch::autograd::Function<Recorded> {
  static variable_list forward(torch::autograd::AutogradContext* context, const c10::OperatorHandle* op,
                               c10::DispatchKeySet keys, Stack* stack, at::TensorList tensors) {
    c10::impl::GenericList kept(c10::AnyType::get());  // the arguments, with the number of tensors in place of tensors
    for (const c10::IValue& argument : torch::jit::last(*stack, op->schema().arguments().size())) {
      if (argument.isTensorList()) {
        kept.push_back(static_cast<int64_t>(argument.toTensorList().size()));
      } else {
        kept.push_back(argument.isTensor() ? c10::IValue(1) : argument);
      }
    }
    context->save_for_backward(tensors.vec());
    context->saved_data["op"] = op->schema().name();
    context->saved_data["arguments"] = std::move(kept);
    call_below(*op, keys, stack);
    const auto outputs = torch::jit::last(*stack, op->schema().returns().size());
    variable_list results;
    for (const c10::IValue& output : outputs) results.push_back(output.toTensor());
    torch::jit::drop(*stack, results.size());
    return results;
  }

  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& grads) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        (context->saved_data["op"].toStringRef() + "_backward").c_str(), "");
    const variable_list tensors = context->get_saved_variables();
    const auto kept = context->saved_data["arguments"].toList();
    Stack stack{c10::IValue(grads)};
    auto next = tensors.begin();
    for (size_t i = 0; i < kept.size(); ++i) {  // the arguments follow the gradients
      const auto& type = *op.schema().arguments()[i + 1].type();
      const c10::IValue argument = kept.get(i);
      if (type.isSubtypeOf(*c10::ListType::ofTensors())) {
        stack.emplace_back(variable_list(next, next + argument.toInt()));
        next += argument.toInt();
      } else if (!argument.isNone() && type.isSubtypeOf(*c10::OptionalType::ofTensor())) {
        stack.emplace_back(*next++);
      } else {
        stack.push_back(argument);
      }
    }
    c10::List<bool> needs_grad;
    for (size_t i = 0; i < tensors.size(); ++i) needs_grad.push_back(context->needs_input_grad(i));
    stack.emplace_back(needs_grad);
    if (at::GradMode::is_enabled()) {
      call_python(op, &stack);  // create_graph=True
    } else {
      op.callBoxed(&stack);
    }

    const auto found = stack.front().toTensorVector();
    auto gradient = found.begin();
    variable_list results(3);  // op, keys and stack have no gradients
    for (const bool needs : needs_grad) results.push_back(needs ? *gradient++ : at::Tensor());
    return results;
  }
};

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const variable_list tensors = tensors_of(torch::jit::last(*stack, op.schema().arguments().size()));
  if (transformed(tensors)) return call_python(op, stack);
  if (!records(tensors)) return call_below(op, keys, stack);
  for (at::Tensor& output : Recorded::apply(&op, keys, stack, at::TensorList(tensors))) {
    stack->emplace_back(std::move(output));
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(svexport, SVEXPORT_AUTOGRAD, m) {
  const std::string suffix = "_backward";
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const size_t length = op.name.size() - std::min(op.name.size(), suffix.size());
    if (op.getNamespace() == "svexport" && op.name.substr(length) == suffix) {
      m.impl(op.name.substr(0, length).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    }
  }
}

}  // namespace svexport
