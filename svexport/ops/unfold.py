"""Sliding windows along a dimension; the exporter's own are wrong up to opset 17 if it is counted from the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["unfold"]


def reference(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    return input.unfold(dimension, size, step).clone(memory_format=torch.contiguous_format)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield make(2, 9, 5), 1, 3, 2
    yield make(2, 9, 5), -2, 4, 1
    yield make(2, 12, 5), -2, 4, 4
    yield make(2, 3, 14), -1, 4, 4
    yield make(7), 0, 7, 3
    yield make(5, 6), 0, 1, 1
    yield make(0, 6), 1, 2, 3


OP = Op(
    name="unfold",
    schema="(Tensor input, int dimension, int size, int step) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def unfold(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """``torch.Tensor.unfold``: every window of ``size`` elements along a dimension, as a last dimension.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.unfold.html

    Shape:
        - input: any
        - output: that of the input with ``(n - size) // step + 1`` in place of ``n``, and ``size`` at the end
    """
    return input.unfold(dimension, size, step)
