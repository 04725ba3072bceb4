"""Finds deformable attention with the linear layers of its offsets, attention weights, output and value."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from svexport.exporter.functions import deform_attn, parameters, starts_of, whole
from svexport.exporter.patterns.attention import SOFTMAX
from svexport.exporter.patterns.ms_deform_attn import deform_attn_of_sizes, drawn_sizes, shapes_of
from svexport.exporter.patterns.pattern import ADDS, VIEWS, Pattern, has_plain_gradients, is_bare
from svexport.exporter.patterns.traced import Traced, operand
from svexport.exporter.proof import Random
from svexport.ops._deform_attn_gradients import Shape, projected
from svexport.ops._op import tracing

__all__ = ["find", "projected_deform_attn"]

WHAT = "linear layers, softmax, deformable attention"

_DIVIDES = {operator.truediv, torch.div, torch.true_divide, "div"}


def projected_deform_attn(
    layers: Sequence[nn.Module],
    shape: tuple[int, int, int],
    query: Tensor,
    source: Tensor,
    centre: Tensor,
    scale: Tensor,
    sizes: Any,
) -> Tensor:
    """:func:`svexport.ops.ms_deform_attn` with the linear layers before and after it.

    Args:
        layers: the linear layers of offsets, attention weights, output and, if there are four, value.
        shape: numbers of heads M, levels L and points P.
        query: ``(N, Lq, C)``.
        source: ``(N, S, C)``, from which the value is projected; with three layers, the value ``(N, S, M, D)``.
        centre: where offsets start, broadcast to ``(N, Lq, M, L, P, 2)``.
        scale: divisor of the offsets, broadcast likewise.
        sizes: (height, width) of each level, as a tensor or constants.
    """
    shapes = sizes if isinstance(sizes, Tensor) else shapes_of(sizes, query.device)
    if _fits(layers, query, source, centre, scale):
        parameters_of: list[Any] = [w for layer in layers for w in (layer.weight, layer.bias)]
        shapes = torch.as_tensor(shapes, device=query.device)
        return projected(Shape(*shape), query, source, centre, scale, shapes, starts_of(shapes), parameters_of)
    n, queries, _ = query.shape
    heads, levels, points = shape
    offsets, attention, output, *of_value = layers
    value = of_value[0](source).view(n, source.shape[1], heads, -1) if of_value else source
    locations = centre + offsets(query).view(n, queries, heads, levels, points, 2) / scale
    weights = attention(query).view(n, queries, heads, levels * points).softmax(-1)
    return output(deform_attn(value, shapes, locations, weights.view(n, queries, heads, levels, points)))


def _fits(layers: Sequence[nn.Module], query: Tensor, source: Tensor, centre: Tensor, scale: Tensor) -> bool:
    """Whether one autograd node can do it all: plain layers, all float32 or all float64, no tracer or transform."""
    dtype = query.dtype
    if tracing() or not has_plain_gradients(query) or scale.requires_grad:
        return False
    if any(t.dtype != dtype for t in (source, centre)) or type(query) is not Tensor:
        return False
    return all(_is_plain(layer) and layer.weight.dtype == dtype for layer in layers)


def _is_plain(layer: Any) -> bool:
    """Whether a module is a plain ``nn.Linear`` with a bias and without hooks."""
    return type(layer) is nn.Linear and layer.bias is not None and is_bare(layer)


def find(traced: Traced) -> Iterator[Pattern]:
    """Calls of :func:`svexport.ops.ms_deform_attn` between linear layers."""
    for node in traced.graph.nodes:
        code = getattr(node.target, "__code__", None)
        known = whole(code) if code is not None else None
        if node.target is not deform_attn_of_sizes and (known is None or known[1] != "ms_deform_attn"):
            continue
        output = node
        while len(output.users) == 1 and (output is node or output.target in VIEWS):
            (output,) = output.users
        if output is node or not _is_linear(traced, output):
            continue
        names = parameters(node.target.__code__)  # type: ignore[union-attr]
        found = _pattern(traced, output, *(operand(node, i, name) for i, name in enumerate(names)))
        if found is not None:
            yield found


def _pattern(traced: Traced, output: fx.Node, value: Any, sizes: Any, locations: Any, weights: Any) -> Pattern | None:
    """The part that ends with ``output``, for the arguments of the call."""
    attention = _linear(traced, _softmax(traced, weights))
    places = _places(traced, locations)
    if attention is None or places is None:
        return None
    offsets, centre, scale = places
    query = operand(offsets, 0, "input")
    if operand(attention, 0, "input") is not query or traced.values[query].dim() != 3:
        return None
    of_value = _linear(traced, value)
    source = value if of_value is None else operand(of_value, 0, "input")
    if traced.values[source].dim() != (4 if of_value is None else 3):
        return None
    names = [str(n.target) for n in (offsets, attention, output, *(() if of_value is None else (of_value,)))]
    shape = tuple(traced.values[locations].shape[2:5])
    given = query, source, centre, scale, *([sizes] if isinstance(sizes, fx.Node) else [])

    def ours(query: Tensor, source: Tensor, centre: Tensor, scale: Tensor, sizes: Any = sizes) -> Tensor:
        layers = [_like(traced.module.get_submodule(name), query.dtype) for name in names]
        return projected_deform_attn(layers, shape, query, source, centre, scale, sizes)  # type: ignore[arg-type]

    def build(graph: fx.Graph) -> fx.Node:
        layers = tuple(graph.get_attr(name) for name in names)
        return graph.call_function(projected_deform_attn, (layers, shape, query, source, centre, scale, sizes))

    turns = itertools.count()

    def draw(random: Random) -> list[Tensor]:
        queries, sources, centres, scales, *tensors = (traced.values[node] for node in given)
        if tensors and source is not query:  # sizes are data
            other = torch.tensor(drawn_sizes(next(turns), shape[1])).to(tensors[0])
            sources, tensors = sources[:, :1].expand(-1, int(other.prod(1).sum()), *sources.shape[2:]), [other]
        near = random.uniform(centres), 1 + 9 * random.uniform(scales)
        return [random.normal(queries), random.normal(sources), *near, *tensors]

    return Pattern("ms_deform_attn", WHAT, output, given, ours, build, draw, modules=frozenset(names))


def _like(layer: Any, dtype: torch.dtype) -> nn.Module:
    """A copy of a linear layer with its weights in a dtype."""
    copy = nn.Linear(layer.in_features, layer.out_features, device="meta")
    copy.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    copy.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    return copy


def _is_linear(traced: Traced, node: Any) -> bool:
    return _is_plain(traced.called(node))


def _source(node: Any) -> Any:
    """The node that a node views, past views with a single user."""
    while isinstance(node, fx.Node) and node.target in VIEWS and len(node.users) == 1:
        node = operand(node, 0, "input")
    return node


def _linear(traced: Traced, node: Any) -> fx.Node | None:
    """The call of a linear layer that a node views, if it has no other users."""
    node = _source(node)
    alone = isinstance(node, fx.Node) and len(node.users) == 1
    return node if alone and _is_linear(traced, node) else None


def _softmax(traced: Traced, node: Any) -> Any:
    """The node whose softmax over the last dimension a node views."""
    node = _source(node)
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    plain = node.target in SOFTMAX and node.kwargs.get("dtype") is None and len(node.args) <= 2
    called = traced.called(node)
    known = plain if called is None else type(called) is nn.Softmax
    return operand(node, 0, "input") if known else None


def _places(traced: Traced, node: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The linear call, centre and scale of a node that is ``centre + linear(query) / scale``; None for any other."""
    if not isinstance(node, fx.Node) or node.target not in ADDS or len(node.args) != 2 or len(node.users) != 1:
        return None
    for centre, divided in (node.args, node.args[::-1]):
        if not isinstance(divided, fx.Node) or divided.target not in _DIVIDES or len(divided.args) != 2:
            continue
        offsets, scale = divided.args
        layer = _linear(traced, offsets)
        tensors = [traced.tensor(n) for n in (centre, scale)]
        if len(divided.users) == 1 and layer is not None and all(t is not None and t.dim() for t in tensors):
            return layer, centre, scale  # type: ignore[return-value]
    return None
