"""Scatter with reduction, correct for duplicate indices at every opset (ScatterElements reduces from 16 or 18 on)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op, precise_dtype

__all__ = ["REDUCTIONS", "scatter_add", "scatter_reduce"]

REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


def reference(input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: int, include_self: bool) -> Tensor:
    # Compute in float32 at least, as files and torch on CUDA do.
    precise = precise_dtype(input)
    result = torch.scatter_reduce(
        input.to(precise), dim, index, src.to(precise), REDUCTIONS[reduce], include_self=include_self
    )
    return result.to(input.dtype).contiguous()


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    def index(shape: tuple[int, ...], size: int) -> Tensor:
        return (make(*shape).sigmoid().float() * size).long().clamp(max=size - 1)

    for reduce in range(len(REDUCTIONS)):
        for include_self in (True, False):
            yield make(3, 4), 1, index((3, 7), 4), make(3, 7), reduce, include_self
    yield make(5, 2, 3), 0, index((11, 2, 3), 5), make(11, 2, 3), 0, True
    yield make(3, 5, 2), -2, index((3, 4, 2), 5), make(3, 4, 2), 4, True
    yield make(6), 0, index((4,), 6), make(4), 1, True
    yield make(3, 4), 1, index((3, 0), 4), make(3, 0), 0, True


OP = Op(
    name="scatter_reduce",
    schema="(Tensor input, int dim, Tensor index, Tensor src, int reduce, bool include_self) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``torch.scatter_reduce``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.scatter_reduce_.html

    Shape:
        - input: any
        - index: int64, same rank as input; no dimension larger than in src or, except for ``dim``, in input
        - src: same rank and dtype as input
        - output: that of the input

    Below opset 16 (18 for ``"amax"`` and ``"amin"``) a file compares every index with every position. It needs memory
    for ``index.numel() * input.shape[dim]`` elements, and is refused beyond 64 million.
    """
    return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """``torch.scatter_add``: :func:`scatter_reduce` with ``"sum"``."""
    return torch.scatter_add(input, dim, index, src)
