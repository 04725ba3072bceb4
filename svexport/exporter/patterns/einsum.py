"""Finds sums of broadcast products, ``(x[..., None] * y).sum(-2)``: matrix products that store every factor."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from svexport import ops
from svexport.exporter.patterns.pattern import Pattern
from svexport.exporter.patterns.traced import Traced, operand
from svexport.exporter.proof import Random

__all__ = ["PRODUCTS", "SUMS", "find", "sum_of_products"]

PRODUCTS: set[Any] = {operator.mul, torch.mul, torch.multiply, "mul", "multiply"}
SUMS: set[Any] = {torch.sum, "sum"}


def sum_of_products(equation: str, x: Tensor, y: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """``(x * y).sum(dims, keepdim)``; as it stands under autocast, which rounds the factors of products of matrices."""
    if x.dtype != y.dtype or not x.is_floating_point() or torch.is_autocast_enabled(x.device.type):
        return (x * y).sum(dims, keepdim)
    output = ops.einsum(equation, x, y)
    for dim in dims if keepdim else ():  # in rising order
        output = output.unsqueeze(dim)
    return output


def find(traced: Traced) -> Iterator[Pattern]:
    """Sums over dimensions of a product that is larger than each of its factors, some of which both factors have."""
    for node in traced.graph.nodes:
        if node.target not in SUMS or node.kwargs.keys() - {"dim", "axis", "keepdim", "input"}:
            continue
        product = operand(node, 0, "input")
        dims = operand(node, 1, "dim" if "dim" in node.kwargs else "axis")
        keepdim = operand(node, 2, "keepdim") or False
        value = traced.tensor(product)
        if value is None or len(product.users) != 1 or product.target not in PRODUCTS or len(product.args) != 2:
            continue
        factors = product.args
        x, y = (traced.tensor(f) for f in factors)
        dims = (dims,) if isinstance(dims, int) else dims
        if x is None or y is None or not dims or not all(type(d) is int for d in dims) or type(keepdim) is not bool:
            continue
        summed = tuple(sorted({d % value.dim() for d in dims}))
        if x.dtype != y.dtype or not x.is_floating_point() or not _contracts(x.shape, y.shape, value.shape, summed):
            continue
        yield _pattern(traced, node, factors, value.dim(), summed, keepdim)


def _contracts(x: Sequence[int], y: Sequence[int], shape: Sequence[int], summed: Sequence[int]) -> bool:
    sizes = [[1] * (len(shape) - len(s)) + list(s) for s in (x, y)]
    both = [min(a, b) for a, b in zip(*sizes, strict=True)]
    largest = max(torch.Size(s).numel() for s in sizes)
    return torch.Size(shape).numel() > largest and any(both[d] > 1 for d in summed)


def _pattern(
    traced: Traced, node: fx.Node, factors: tuple[Any, ...], rank: int, summed: tuple[int, ...], keepdim: bool
) -> Pattern:
    letters = "abcdefghijklmnopqrstuvwxyz"[:rank]
    left, right = (letters[rank - traced.values[f].dim() :] for f in factors)
    equation = f"{left},{right}->{''.join(c for i, c in enumerate(letters) if i not in summed)}"

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return sum_of_products(equation, x, y, summed, keepdim)

    def build(graph: fx.Graph) -> fx.Node:
        return graph.call_function(sum_of_products, (equation, *factors, summed, keepdim))

    def draw(random: Random) -> list[Tensor]:
        return [random.normal(traced.values[f]) for f in factors]

    return Pattern("einsum", "sum of broadcast products", node, factors, ours, build, draw)
