"""Finds softmax(QK^T)V, written with einsum or matrix products."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from svexport import ops
from svexport.exporter.patterns.pattern import Pattern
from svexport.exporter.patterns.traced import Traced, operand
from svexport.exporter.proof import Random

__all__ = ["SOFTMAX", "find"]

SOFTMAX: set[Any] = {torch.softmax, F.softmax, "softmax"}
_PRODUCTS = {operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm", "__matmul__"}
_SCALES: dict[Any, bool] = {  # True for a factor, False for a divisor
    **dict.fromkeys((operator.mul, torch.mul, "mul"), True),
    **dict.fromkeys((operator.truediv, torch.div, "div"), False),
}


@dataclass(frozen=True)
class _Product:
    """A product of two tensors that sums over one dimension.

    Attributes:
        left, right: nodes of the two tensors.
        labels: labels of the dimensions of the two and of the result, as in einsum.
    """

    left: fx.Node
    right: fx.Node
    labels: tuple[str, str, str]


def _product(traced: Traced, node: fx.Node) -> _Product | None:
    if node.target in (torch.einsum, torch.functional.einsum, ops.einsum) and len(node.args) == 3:
        equation, left, right = node.args
        if not isinstance(equation, str) or "->" not in equation or "." in equation:
            return None
        inputs, output = equation.replace(" ", "").split("->")
        a, _, b = inputs.partition(",")
    elif node.target in _PRODUCTS and len(node.args) == 2:
        left, right = node.args
        value = traced.tensor(left)
        if value is None or not 3 <= value.dim() <= 4:
            return None
        lead = "bh"[: value.dim() - 2]
        a, b, output = f"{lead}qd", f"{lead}dk", f"{lead}qk"
    else:
        return None
    x, y = traced.tensor(left), traced.tensor(right)
    if x is None or y is None or (x.dim(), y.dim()) != (len(a), len(b)):
        return None
    if any(len(set(labels)) != len(labels) for labels in (a, b, output)):
        return None
    sizes = dict(zip(a, x.shape, strict=True))
    if any(sizes.setdefault(label, size) != size for label, size in zip(b, y.shape, strict=True)):
        return None  # a dimension is broadcast
    return _Product(left, right, (a, b, output))  # type: ignore[arg-type]


def find(traced: Traced) -> Iterator[Pattern]:
    """Every attention in a graph: a softmax between two products."""
    for node in traced.graph.nodes:
        is_softmax = node.target in SOFTMAX or isinstance(traced.called(node), nn.Softmax)
        if is_softmax and len(node.users) == 1 and (pattern := _attention(traced, node)) is not None:
            yield pattern


def _attention(traced: Traced, softmax: fx.Node) -> Pattern | None:
    scores, scales = operand(softmax, 0, "input"), []
    while isinstance(scores, fx.Node) and scores.target in _SCALES and len(scores.users) == 1:
        inner, factor = scores.args[:2]
        number = traced.values.get(factor) if isinstance(factor, fx.Node) else factor
        if not isinstance(number, (int, float)) or not isinstance(inner, fx.Node):
            return None
        scales.append((scores.target, factor))
        scores = inner
    if not isinstance(scores, fx.Node) or len(scores.users) != 1 or traced.tensor(scores) is None:
        return None
    (output,) = softmax.users
    first, second = _product(traced, scores), _product(traced, output)
    if first is None or second is None or second.left is not softmax:
        return None
    arranged = _arranged(first, second)
    if arranged is None:
        return None
    orders, back = arranged
    query, key, value = first.left, first.right, second.right

    def scale_of(numbers: list[Any]) -> Any:
        scale = 1.0
        for (target, _), number in zip(scales, numbers, strict=True):
            scale = scale * number if _SCALES[target] else scale / number
        return scale

    width = traced.values[query].shape[orders[0][-1]]
    numbers = [traced.values[f] if isinstance(f, fx.Node) else f for _, f in scales]

    usual = math.isclose(scale_of(numbers), 1 / math.sqrt(width), rel_tol=1e-12)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(order) for x, order in zip((q, k, v), orders, strict=True))
        return ops.scaled_dot_product_attention(q, k, v, scale=scale_of(numbers)).permute(back)

    def build(graph: fx.Graph) -> fx.Node:
        scale: Any = 1.0
        for target, factor in () if usual else scales:
            operation = operator.mul if _SCALES[target] else operator.truediv
            if isinstance(scale, fx.Node) or isinstance(factor, fx.Node):
                scale = graph.call_function(operation, (scale, factor))
            else:
                scale = operation(scale, factor)

        def permuted(node: fx.Node, order: tuple[int, ...]) -> fx.Node:
            moved = [i for i, j in enumerate(order) if i != j]
            if not moved:
                return node
            if len(moved) == 2:
                return graph.call_method("transpose", (node, *moved))
            return graph.call_method("permute", (node, *order))

        q, k, v = (permuted(x, order) for x, order in zip((query, key, value), orders, strict=True))
        attended = graph.call_function(ops.scaled_dot_product_attention, (q, k, v), {} if usual else {"scale": scale})
        return permuted(attended, back)

    def draw(random: Random) -> list[Tensor]:
        return [random.normal(traced.values[node]) for node in (query, key, value)]

    return Pattern("scaled_dot_product_attention", "softmax(QK^T)V", output, (query, key, value), ours, build, draw)


def _arranged(first: _Product, second: _Product) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]] | None:
    """Permutations of q, k and v to ``(..., length, channels)``, and of the result back; None if it is no attention."""
    q, k, scores = first.labels
    (channels,) = summed if len(summed := (set(q) & set(k)) - set(scores)) == 1 else ("",)
    lead = [label for label in q if label in k and label in scores]
    (query,) = found if len(found := set(q) - set(lead) - {channels}) == 1 else ("",)
    (key,) = found if len(found := set(k) - set(lead) - {channels}) == 1 else ("",)
    if not channels or not query or not key or set(scores) != {*lead, query, key} or scores[-1] != key:
        return None
    # The second product has its own labels for the dimensions of the scores.
    weights, v, output = second.labels
    names = dict(zip(weights, scores, strict=True))
    taken = set(q) | set(k)
    for label in v + output:
        if label not in names:
            names[label] = next(c for c in "abcdefghijklmnopqrstuvwxyz" if c not in taken and c not in names.values())
    v, output = ("".join(names[c] for c in labels) for labels in (v, output))
    (width,) = found if len(found := set(v) - set(lead) - {key}) == 1 else ("",)
    if not width or set(v) != {*lead, key, width} or set(output) != {*lead, query, width}:
        return None

    def order(labels: str, *last: str) -> tuple[int, ...]:
        return tuple(labels.index(label) for label in (*lead, *last))

    arranged = "".join((*lead, query, width))
    back = tuple(arranged.index(label) for label in output)
    return (order(q, query, channels), order(k, key, channels), order(v, key, width)), back
