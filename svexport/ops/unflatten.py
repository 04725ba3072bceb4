"""Reshapes one dimension to several; the TorchScript exporter has it from opset 13 on, wrong for dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["unflatten"]


def reference(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return torch.unflatten(input, dim, sizes).clone(memory_format=torch.contiguous_format)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield make(2, 12, 5), 1, (3, 4)
    yield make(2, 12, 5), -2, (2, -1, 1, 3)
    yield make(7), 0, (-1,)
    yield make(5, 6), 1, (1, 6)
    yield make(3, 0), 1, (0, 2)
    yield make(0, 6), 1, (3, -1)


OP = Op(
    name="unflatten",
    schema="(Tensor input, int dim, SymInt[] sizes) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """``torch.unflatten``, which ``nn.Unflatten`` and ``nn.MultiheadAttention`` call.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.unflatten.html

    Shape:
        - input: any
        - output: ``(*, sizes, *)`` with ``dim`` replaced by ``sizes``, of which one may be -1 and any may be dynamic

    Raises:
        RuntimeError: if the sizes do not multiply to that of the dimension.
        IndexError: if there is no such dimension.
    """
    return torch.unflatten(input, dim, sizes)
