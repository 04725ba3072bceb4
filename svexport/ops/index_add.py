"""Adds rows by index, correct for duplicate indices at every opset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op, precise_dtype

__all__ = ["index_add"]


def reference(input: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float) -> Tensor:
    # Compute in float32 at least, as files and torch on CUDA do.
    precise = precise_dtype(input)
    scaled = source.to(precise) * (alpha if input.is_floating_point() else int(alpha))
    return torch.index_add(input.to(precise), dim, index, scaled).to(input.dtype).contiguous()


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield make(4, 3), 0, torch.tensor([0, 0, 2, 0, 3]), make(5, 3), 1.0
    yield make(2, 4, 3), 1, torch.tensor([3, 3]), make(2, 2, 3), -0.5
    yield make(2, 3, 5), -1, torch.tensor([1]), make(2, 3, 1), 2.0
    yield make(7), 0, torch.tensor([6, 1, 6]), make(3), 1.0
    yield make(3, 2), 0, torch.zeros(0, dtype=torch.int64), make(0, 2), 1.0


OP = Op(
    name="index_add",
    schema="(Tensor input, int dim, Tensor index, Tensor source, float alpha) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """``torch.index_add``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_add_.html

    Shape:
        - input: ``(*, S, *)`` with S at ``dim``
        - index: ``(J,)``, integers
        - source: ``(*, J, *)``
        - output: that of the input

    Below opset 16 a file needs memory for ``source.numel() * S`` elements, and is refused beyond 64 million.
    """
    return torch.index_add(input, dim, index, source, alpha=alpha)
