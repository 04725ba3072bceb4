"""Multi-scale deformable attention with its projections, where gradients are recorded, as one node of autograd.

Training waits for the CPU: composed, the four linear layers, the softmax and the locations are some fifty calls forward
and backward, most of them views, each with a node of autograd of its own. Here the activations are kept by hand and the
backward is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from svexport.ops._op import _vjp, aliases
from svexport.ops.ms_deform_attn import OP

__all__ = ["Shape", "projected"]

_backward = torch.ops.svexport.ms_deform_attn_backward.default
_softmax_backward = torch.ops.aten._softmax_backward_data.default


class Shape(NamedTuple):
    """Numbers of heads M, levels L and points P."""

    heads: int
    levels: int
    points: int


def projected(
    shape: Shape,
    query: Tensor,
    source: Tensor,
    centre: Tensor,
    scale: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    weights: Sequence[Tensor],
) -> Tensor:
    """Samples around each query, at places and with weights that follow from it, and mixes them.

    ``weights`` are weight and bias of the linear layers of offsets, of attention, of the output and, if there are eight
    of them, of the value.

    Shape:
        - query: ``(N, Lq, C)``
        - source: ``(N, S, C)``, from which the value is projected; with six weights the value itself, ``(N, S, M, D)``
        - centre: broadcast to ``(N, Lq, M, L, P, 2)``: where offsets start, 0 to 1 across the image
        - scale: likewise: what offsets are divided by. It has no gradient.
        - spatial_shapes, level_start_index: of :func:`svexport.ops.ms_deform_attn`
        - output: ``(N, Lq, C)``
    """
    if torch.is_grad_enabled():
        return _Projected.apply(shape, query, source, centre, scale, spatial_shapes, level_start_index, *weights)
    return _forward(shape, query, source, centre, scale, spatial_shapes, level_start_index, weights)[0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t())


def _forward(
    shape: Shape,
    query: Tensor,
    source: Tensor,
    centre: Tensor,
    scale: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    weights: Sequence[Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and the arguments of the operator and what it returned."""
    n, queries, channels = query.shape
    rows = query.reshape(-1, channels)
    w_offsets, b_offsets, w_attention, b_attention, w_output, b_output, *of_value = weights
    offsets = _linear(rows, w_offsets, b_offsets).view(n, queries, *shape, 2)
    locations = torch.addcdiv(centre, offsets, scale)  # (N, Lq, M, L, P, 2)
    scores = _linear(rows, w_attention, b_attention).view(n, queries, shape.heads, shape.levels * shape.points)
    attention = scores.softmax(-1).view(n, queries, *shape)
    value = source
    if of_value:
        value = _linear(source.reshape(-1, source.shape[-1]), *of_value).view(n, source.shape[1], shape.heads, -1)
    args = value, spatial_shapes, level_start_index, locations, attention
    mixed = OP(*args, 1.0)  # (N, Lq, M*D)
    output = _linear(mixed.view(-1, mixed.shape[-1]), w_output, b_output)
    return output.view(n, queries, w_output.shape[0]), (*args, mixed)


def _of_linear(grad: Tensor, x: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of weight and bias."""
    return [grad.t() @ x if needs[0] else None, grad.sum(0) if needs[1] else None]


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Shape, *tensors: Tensor) -> Tensor:
        output, kept = _forward(shape, *tensors[:6], tensors[6:])  # type: ignore[call-arg, arg-type]
        value, _, _, locations, attention, mixed = kept
        ctx.save_for_backward(*tensors, value, locations, attention, mixed)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, value, locations, attention, mixed = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph=True
            return None, *_composed(ctx.shape, tensors, grad, needs)
        query, source, centre, scale, shapes, starts, *weights = tensors
        w_offsets, _, w_attention, _, w_output, _, *of_value = weights
        n, queries, channels = query.shape
        rows, g = query.reshape(-1, channels), grad.reshape(-1, grad.shape[-1])

        of_output = _of_linear(g, mixed.view(len(g), w_output.shape[1]), needs[10:12])
        g = (g @ w_output).view(n, queries, w_output.shape[1])
        into_value = needs[1] or any(needs[12:])
        found = iter(
            _backward([g], value, shapes, starts, locations, attention, 1.0, [into_value, False, False, True, True])
        )
        g_value = next(found) if into_value else None
        g_locations, g_attention = found

        g_offsets = (g_locations / scale).view(len(rows), w_offsets.shape[0])
        flat = n, queries, ctx.shape.heads, ctx.shape.levels * ctx.shape.points
        g_scores = _softmax_backward(g_attention.view(flat), attention.view(flat), -1, attention.dtype)
        g_scores = g_scores.view(len(rows), w_attention.shape[0])
        into = [*_of_linear(g_offsets, rows, needs[6:8]), *_of_linear(g_scores, rows, needs[8:10]), *of_output]
        g_query = torch.addmm(g_scores @ w_attention, g_offsets, w_offsets).view_as(query) if needs[0] else None
        g_centre = g_locations.sum_to_size(centre.shape) if needs[2] else None
        if of_value and g_value is not None:
            flat_value = g_value.reshape(-1, of_value[0].shape[0])
            into += _of_linear(flat_value, source.reshape(-1, source.shape[-1]), needs[12:])
            g_value = (flat_value @ of_value[0]).view_as(source) if needs[1] else None
        elif of_value:
            into += [None, None]
        return None, g_query, g_value, g_centre, None, None, None, *into


def _composed(shape: Shape, tensors: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients that are differentiable again."""
    seen: list[Any] = aliases(tensors)
    wanted = [t for t, need in zip(seen, needs, strict=True) if need]

    def function(*args: Any) -> Tensor:
        return _forward(shape, *args[:6], args[6:])[0]  # type: ignore[call-arg, arg-type]

    with torch.enable_grad():
        found = iter(_vjp(function, seen, [grad], wanted, create_graph=True))
    return [next(found) if need else None for need in needs]
