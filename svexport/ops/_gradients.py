"""Gradients of attention, of linear layers and of norms, shared by the backwards that are written out."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from svexport.ops import add_bias_residual_layer_norm  # noqa: F401 - registers the operator

__all__ = ["Attended", "Linears", "Norm", "keeps_graph", "relu_backward"]

relu_backward = torch.ops.aten.threshold_backward.default
_norm_backward = torch.ops.svexport.add_bias_residual_layer_norm_backward.default
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Whether the running backward may run again (``retain_graph=True``)."""

LARGE = 2**22
"""Inputs with this many elements or more are not kept for one product over all layers: memory is not worth the gain."""


class Attended(NamedTuple):
    """softmax(QKᵀ)V, and what its backward needs.

    If torch chooses a kernel whose backward is an operator too, both are called directly; otherwise autograd runs it.
    """

    output: Tensor
    heads: tuple[Tensor, Tensor, Tensor]
    kept: tuple[Tensor, ...]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Attends with queries, keys and values ``(N, H, Q, D)`` that record no gradients."""
        choice = torch._fused_sdp_choice(q, k, v)
        if q.is_cpu and choice == SDPBackend.FLASH_ATTENTION.value:
            output, *kept = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        elif q.is_cuda and choice == SDPBackend.EFFICIENT_ATTENTION.value:
            output, *kept = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        else:
            with torch.enable_grad():
                q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
                output, kept = F.scaled_dot_product_attention(q, k, v), []
        return cls(output, (q, k, v), tuple(kept))

    def backward(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradients of queries, keys and values."""
        if not self.kept:
            return torch.autograd.grad(self.output, self.heads, grad, retain_graph=keeps_graph())
        args = grad, *self.heads
        if grad.is_cpu:
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return tuple(backward(*args, self.output, *self.kept, 0.0, False))
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        return tuple(backward(*args, None, self.output, *self.kept, 0.0, [True, True, True, False]))[:3]


class Norm(NamedTuple):
    """A norm of ``product + bias + residual (+ extra)``, as the arguments of its op."""

    product: Tensor
    bias: Tensor
    residual: Tensor
    weight: Tensor
    norm_bias: Tensor
    eps: float
    extra: Tensor | None

    def backward(self, grad: Tensor, unused: Tensor, into: dict[str, Tensor], linear: str, norm: str) -> Tensor:
        """Returns the gradient of the sum; puts those of the bias and of the norm's parameters into ``into``."""
        needs = [True, True, False, True, True] + ([] if self.extra is None else [False])
        total, *rest = _norm_backward([grad, unused], *self, needs)
        into[f"{linear}.bias"], into[f"{norm}.weight"], into[f"{norm}.bias"] = rest
        return total


class Linears:
    """Parameter gradients of linear layers. All layers of one size share one batched product and one sum."""

    def __init__(self, before_norm: tuple[str, ...]) -> None:
        """``before_norm``: names of layers followed by a norm, whose backward computes the gradient of their bias."""
        self._before_norm = before_norm
        self._kept: dict[tuple[int, int], list[tuple[str, Tensor, Tensor]]] = {}

    def add(self, name: str, grad: Tensor, x: Tensor) -> None:
        """Keeps the gradient of a layer's output, and its input, until :meth:`put`."""
        self._kept.setdefault((grad.shape[-1], x.shape[-1]), []).append((name, grad, x))

    def put(self, into: dict[str, Tensor]) -> None:
        while self._kept:
            _, layers = self._kept.popitem()
            names, *tensors = zip(*layers, strict=True)
            grads, inputs = (torch.stack(t) for t in tensors)
            del layers, tensors
            weights, biases = torch.bmm(grads.transpose(1, 2), inputs).unbind(), grads.sum(1).unbind()
            for name, weight, bias in zip(names, weights, biases, strict=True):
                into[f"{name}.weight"] = weight
                if not name.endswith(self._before_norm):
                    into[f"{name}.bias"] = bias

    def put_large(self, into: dict[str, Tensor]) -> None:
        """Puts the gradients of layers whose inputs have :data:`LARGE` elements or more, one layer at a time."""
        for layers in self._kept.values():
            for name, grad, x in [kept for kept in layers if kept[2].numel() >= LARGE]:
                into[f"{name}.weight"] = grad.t() @ x
                if not name.endswith(self._before_norm):
                    into[f"{name}.bias"] = grad.sum(0)
            layers[:] = [kept for kept in layers if kept[2].numel() < LARGE]
        self._kept = {size: layers for size, layers in self._kept.items() if layers}
