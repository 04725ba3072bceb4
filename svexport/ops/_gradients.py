"""What backwards that are written out have in common: gradients of linear layers and of norms."""

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
"""Whether the backward that runs may run again, retain_graph=True."""

LARGE = 2**22
"""Inputs of so many elements are not kept for a product of all layers, which takes memory and would save little."""


class Attended(NamedTuple):
    """softmax(QKᵀ)V, and what its backward needs.

    Where torch takes a kernel whose backward is an operator too, that is called; else autograd has it.
    """

    output: Tensor
    heads: tuple[Tensor, Tensor, Tensor]
    kept: tuple[Tensor, ...]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Of queries, keys and values ``(N, H, Q, D)`` without gradients."""
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
    """A norm of ``product + bias + residual (+ extra)``, as its op takes it."""

    product: Tensor
    bias: Tensor
    residual: Tensor
    weight: Tensor
    norm_bias: Tensor
    eps: float
    extra: Tensor | None

    def backward(self, grad: Tensor, unused: Tensor, into: dict[str, Tensor], linear: str, norm: str) -> Tensor:
        """The gradient of the sum; adds those of the bias and of the norm's parameters."""
        needs = [True, True, False, True, True] + ([] if self.extra is None else [False])
        total, *rest = _norm_backward([grad, unused], *self, needs)
        into[f"{linear}.bias"], into[f"{norm}.weight"], into[f"{norm}.bias"] = rest
        return total


class Linears:
    """Gradients of the parameters of linear layers: of all of one size at once, which is a product and a sum."""

    def __init__(self, before_norm: tuple[str, ...]) -> None:
        """``before_norm``: names of layers in front of a norm, whose backward has the gradient of their bias."""
        self._before_norm = before_norm
        self._kept: dict[tuple[int, int], list[tuple[str, Tensor, Tensor]]] = {}

    def add(self, name: str, grad: Tensor, x: Tensor) -> None:
        """Keeps the gradient of the output of a layer, and the input."""
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
        """Those with inputs of :data:`LARGE` and more."""
        for layers in self._kept.values():
            for name, grad, x in [kept for kept in layers if kept[2].numel() >= LARGE]:
                into[f"{name}.weight"] = grad.t() @ x
                if not name.endswith(self._before_norm):
                    into[f"{name}.bias"] = grad.sum(0)
            layers[:] = [kept for kept in layers if kept[2].numel() < LARGE]
        self._kept = {size: layers for size, layers in self._kept.items() if layers}
