"""Multi-scale deformable attention with its projections as one autograd node, used where gradients are recorded.

Training is bound by the CPU: composed from torch ops, the four linear layers, the softmax and the locations are some
fifty calls forward and backward, most of them views, each with its own autograd node. This module saves the activations
itself and writes out the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from svexport.ops._op import gradients_again
from svexport.ops.ms_deform_attn import OP

__all__ = ["Shape", "attend", "projected", "sampled", "sampled_backward"]

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
    """Samples around each query, at locations and with weights computed from the query, and mixes the samples.

    ``weights`` holds weight and bias of the linear layers for offsets, attention and output and, if there are eight
    tensors, for the value.

    Shape:
        - query: ``(N, Lq, C)``
        - source: ``(N, S, C)``, from which the value is projected; with six weights the value itself, ``(N, S, M, D)``
        - centre: broadcasts to ``(N, Lq, M, L, P, 2)``; the origin of the offsets, 0 to 1 across the image
        - scale: broadcasts likewise; the divisor of the offsets. It has no gradient.
        - spatial_shapes, level_start_index: as in :func:`svexport.ops.ms_deform_attn`
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
    """Returns the output, and as activations the operator's arguments and its result."""
    w_output, b_output = weights[4:6]
    given = centre, scale, spatial_shapes, level_start_index
    args = sampled(shape, query, source, given, [*weights[:4], *weights[6:]])
    mixed = attend(args)
    output = _linear(mixed, w_output, b_output)
    return output.view(*query.shape[:2], w_output.shape[0]), (*args, mixed)


def sampled(
    shape: Shape, query: Tensor, source: Tensor, given: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The arguments of the operator: value, shapes, starts, locations, weights.

    Args:
        given: centre, scale, shapes and starts.
        weights: those of offsets, of attention and, unless the source is the value itself, of the value.
    """
    n, queries, channels = query.shape
    centre, scale, spatial_shapes, level_start_index = given
    rows = query.reshape(-1, channels)
    w_offsets, b_offsets, w_attention, b_attention, *of_value = weights
    offsets = _linear(rows, w_offsets, b_offsets).view(n, queries, *shape, 2)
    locations = torch.addcdiv(centre, offsets, scale)  # (N, Lq, M, L, P, 2)
    scores = _linear(rows, w_attention, b_attention).view(n, queries, shape.heads, shape.levels * shape.points)
    attention = scores.softmax(-1).view(n, queries, *shape)
    value = source
    if of_value:
        value = _linear(source.reshape(-1, source.shape[-1]), *of_value).view(n, source.shape[1], shape.heads, -1)
    return value, spatial_shapes, level_start_index, locations, attention


def attend(args: Sequence[Tensor]) -> Tensor:
    """Calls the operator and returns its output as rows ``(N*Lq, M*D)``."""
    return OP(*args, 1.0).flatten(0, 1)


def sampled_backward(
    grad: Tensor, args: Sequence[Tensor], scale: Tensor, into_value: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of the value, of locations, of offsets and of scores; all but those of locations as rows.

    Args:
        grad: gradient of the operator's output, as rows.
        args: the operator's arguments.
        into_value: whether the gradient of the value is needed.
    """
    *_, locations, attention = args
    n, queries, heads, levels, points, _ = locations.shape
    found = iter(_backward([grad.view(n, queries, grad.shape[1])], *args, 1.0, [into_value, False, False, True, True]))
    g_value = next(found).flatten(2).flatten(0, 1) if into_value else None
    g_locations, g_attention = found
    flat = n, queries, heads, levels * points
    g_scores = _softmax_backward(g_attention.view(flat), attention.view(flat), -1, attention.dtype)
    return g_value, g_locations, (g_locations / scale).flatten(0, 1).flatten(1), g_scores.flatten(0, 1).flatten(1)


def _of_linear(grad: Tensor, x: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of a linear layer's weight and bias; None for those not needed."""
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
            return None, *gradients_again(partial(_composed, ctx.shape), tensors, [grad], needs)
        query, source, centre, scale, shapes, starts, *weights = tensors
        w_offsets, _, w_attention, _, w_output, _, *of_value = weights
        rows, g = query.reshape(-1, query.shape[-1]), grad.reshape(-1, grad.shape[-1])
        of_output = _of_linear(g, mixed, needs[10:12])
        args = value, shapes, starts, locations, attention
        into_value = needs[1] or any(needs[12:])
        g_value, g_locations, g_offsets, g_scores = sampled_backward(g @ w_output, args, scale, into_value)
        into = [*_of_linear(g_offsets, rows, needs[6:8]), *_of_linear(g_scores, rows, needs[8:10]), *of_output]
        g_query = torch.addmm(g_scores @ w_attention, g_offsets, w_offsets).view_as(query) if needs[0] else None
        g_centre = g_locations.sum_to_size(centre.shape) if needs[2] else None
        if of_value and g_value is not None:
            into += _of_linear(g_value, source.reshape(-1, source.shape[-1]), needs[12:])
            g_value = (g_value @ of_value[0]).view_as(source) if needs[1] else None
        elif of_value:
            into += [None, None]
        elif g_value is not None:
            g_value = g_value.view_as(source)
        return None, g_query, g_value, g_centre, None, None, None, *into


def _composed(shape: Shape, *args: Any) -> Tensor:
    return _forward(shape, *args[:6], args[6:])[0]  # type: ignore[call-arg, arg-type]
