"""The encoder of Deformable DETR, with its authors' layers, as one autograd node.

Training is bound by the CPU: composed from torch ops, a layer is about thirty calls forward and twice as many backward,
each with its own autograd nodes. This module saves the activations itself, writes out the backward, and computes the
weight gradients of the linear layers for all encoder layers in one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops._deform_attn_gradients import Shape, attend, sampled, sampled_backward
from svexport.ops._gradients import Linears, Norm, keeps_graph, relu_backward
from svexport.ops._op import gradients_again
from svexport.ops.add_bias_residual_layer_norm import OP as ADD_NORM

__all__ = ["MODULES", "encoded"]

MODULES = "offsets", "attention", "output", "value", "norm1", "linear1", "linear2", "norm2"
"""The modules of a layer that have a weight and a bias, in the order of the weights."""

_BEFORE_NORM = "output", "linear2"
"""Linear layers followed by a norm; the norm's backward kernel computes the gradient of their bias."""

_PER_LAYER = 2 * len(MODULES)


class Encoder(NamedTuple):
    """The constants of an encoder.

    Attributes:
        shape: heads, levels and points of the attention.
        eps: epsilons of the two norms of each layer.
    """

    shape: Shape
    eps: tuple[tuple[float, float], ...]


class Given(NamedTuple):
    """The inputs that all layers share.

    Attributes:
        pos: position embedding, broadcasts to ``(N, S, C)``; added to the source to form the queries.
        centre, scale, shapes, starts: as in :func:`svexport.ops._deform_attn_gradients.projected`.
    """

    pos: Tensor
    centre: Tensor
    scale: Tensor
    shapes: Tensor
    starts: Tensor


def encoded(encoder: Encoder, source: Tensor, given: Given, weights: Sequence[Tensor]) -> Tensor:
    """Runs the layers: deformable self attention of the pixels, then a feed forward, each followed by add and norm.

    Args:
        source: ``(N, S, C)``.
        weights: weight and bias of :data:`MODULES`, layer by layer.

    Returns:
        ``(N, S, C)``.
    """
    if torch.is_grad_enabled():
        return _Encoded.apply(encoder, source, *given, *weights)
    for eps, p in zip(encoder.eps, _layers(weights), strict=True):
        source = _layer(encoder.shape, eps, p, source, given)[0]
    return source


def _layers(weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """The weights of each layer by name."""
    names = [f"{module}.{kind}" for module in MODULES for kind in ("weight", "bias")]
    rows = range(0, len(weights), _PER_LAYER)
    return [dict(zip(names, weights[i : i + _PER_LAYER], strict=True)) for i in rows]


class _Layer(NamedTuple):
    """The activations of a layer, all but ``sampling`` as rows ``(N*S, C)``."""

    query: Tensor
    source: Tensor
    sampling: tuple[Tensor, ...]
    mixed: Tensor
    norms: tuple[Norm, Norm]
    middle: Tensor
    hidden: Tensor


def _layer(
    shape: Shape, eps: tuple[float, float], p: dict[str, Tensor], source: Tensor, given: Given
) -> tuple[Tensor, _Layer]:
    query = source + given.pos
    attention = [p[f"{name}.{kind}"] for name in ("offsets", "attention", "value") for kind in ("weight", "bias")]
    sampling = sampled(shape, query, source, given[1:], attention)
    mixed = attend(sampling)
    rows = source.reshape(-1, source.shape[-1])
    middle, first = _add_norm(p, "output", "norm1", mixed, rows, eps[0])
    hidden = torch._addmm_activation(p["linear1.bias"], middle, p["linear1.weight"].t())
    output, second = _add_norm(p, "linear2", "norm2", hidden, middle, eps[1])
    kept = _Layer(query.reshape(rows.shape), rows, sampling, mixed, (first, second), middle, hidden)
    return output.view(source.shape), kept


def _add_norm(
    p: dict[str, Tensor], linear: str, norm: str, x: Tensor, residual: Tensor, eps: float
) -> tuple[Tensor, Norm]:
    product = x @ p[f"{linear}.weight"].t()
    args = Norm(product, p[f"{linear}.bias"], residual, p[f"{norm}.weight"], p[f"{norm}.bias"], eps, None)
    return ADD_NORM(*args)[0], args


class _Sums:
    """Gradients that all layers accumulate into.

    Attributes:
        zeros: the gradient of an unused output.
        pos: gradient of the position embedding, summed over the layers; empty if not needed.
        centre: gradient of the centre; None if not needed.
    """

    def __init__(self, like: Tensor, pos: bool, centre: bool) -> None:
        self.zeros = torch.zeros_like(like)
        self.linears = Linears(_BEFORE_NORM)
        self.needs_pos, self.needs_centre = pos, centre
        self.pos: list[Tensor] = []
        self.centre: Tensor | None = None


def _layer_backward(
    i: int, p: dict[str, Tensor], kept: _Layer, grad: Tensor, sums: _Sums, into: dict[str, Tensor], given: Given
) -> Tensor:
    """The gradient of the source, given that of the output; both as rows."""
    name, linears = f"layers.{i}", sums.linears
    grad = kept.norms[1].backward(grad, sums.zeros, into, f"{name}.linear2", f"{name}.norm2")
    linears.add(f"{name}.linear2", grad, kept.hidden)
    g = relu_backward(grad @ p["linear2.weight"], kept.hidden, 0)
    linears.add(f"{name}.linear1", g, kept.middle)
    grad = torch.addmm(grad, g, p["linear1.weight"])

    grad = kept.norms[0].backward(grad, sums.zeros, into, f"{name}.output", f"{name}.norm1")
    linears.add(f"{name}.output", grad, kept.mixed)
    g_value, g_places, g_offsets, g_scores = sampled_backward(
        grad @ p["output.weight"], kept.sampling, given.scale, True
    )
    assert g_value is not None
    linears.add(f"{name}.value", g_value, kept.source)
    linears.add(f"{name}.offsets", g_offsets, kept.query)
    linears.add(f"{name}.attention", g_scores, kept.query)
    linears.put_large(into)
    g = torch.addmm(g_scores @ p["attention.weight"], g_offsets, p["offsets.weight"])
    if sums.needs_pos:
        sums.pos.append(g)
    if sums.needs_centre:
        g_places = g_places.sum_to_size(given.centre.shape)
        sums.centre = g_places if sums.centre is None else sums.centre + g_places
    return torch.addmm(grad + g, g_value, p["value.weight"])


class _Encoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, encoder: Encoder, source: Tensor, *tensors: Tensor) -> Tensor:
        given, weights = Given(*tensors[: len(Given._fields)]), tensors[len(Given._fields) :]
        ctx.save_for_backward(source, *tensors)
        ctx.encoder, ctx.kept = encoder, []
        for eps, p in zip(encoder.eps, _layers(weights), strict=True):
            source, kept = _layer(encoder.shape, eps, p, source, given)
            ctx.kept.append(kept)
        return source

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # raises if a saved tensor was changed in place
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph=True
            return None, *_composed(ctx.encoder, tensors, grad, needs)
        source, *rest = tensors
        given, weights = Given(*rest[: len(Given._fields)]), rest[len(Given._fields) :]
        into: dict[str, Tensor] = {}
        grad = grad.reshape(-1, grad.shape[-1])
        sums = _Sums(grad, needs[1], needs[2])
        layers = _layers(weights)
        again = keeps_graph()  # this backward may run a second time, so keep the activations
        for i in reversed(range(len(layers))):
            kept = ctx.kept[i] if again else ctx.kept.pop()
            grad = _layer_backward(i, layers[i], kept, grad, sums, into, given)
        sums.linears.put(into)
        pos = torch.stack(sums.pos).sum(0).view_as(source).sum_to_size(given.pos.shape) if sums.pos else None
        names = [f"layers.{i}.{name}" for i, layer in enumerate(layers) for name in layer]
        found = [grad.view_as(source), pos, sums.centre, None, None, None, *(into[name] for name in names)]
        return None, *(g if need else None for g, need in zip(found, needs, strict=True))


def _composed(encoder: Encoder, tensors: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients that can be differentiated again, from the composition of torch ops."""

    def function(source: Tensor, *rest: Any) -> Tensor:
        given, weights = Given(*rest[: len(Given._fields)]), rest[len(Given._fields) :]
        for eps, p in zip(encoder.eps, _layers(weights), strict=True):
            source = _definition(encoder.shape, eps, p, source, given)
        return source

    return gradients_again(function, tensors, [grad], needs)


def _definition(shape: Shape, eps: tuple[float, float], p: dict[str, Tensor], source: Tensor, given: Given) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def norm(name: str, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps)

    attention = [p[f"{name}.{kind}"] for name in ("offsets", "attention", "value") for kind in ("weight", "bias")]
    mixed = attend(sampled(shape, source + given.pos, source, given[1:], attention)).view(*source.shape[:2], -1)
    middle = norm("norm1", source + linear("output", mixed), eps[0])
    return norm("norm2", middle + linear("linear2", linear("linear1", middle).relu()), eps[1])
