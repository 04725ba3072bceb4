"""Upper and lower triangles of matrices; ONNX has Trilu from opset 14 on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["tril", "triu"]


def reference(input: Tensor, diagonal: int, upper: bool) -> Tensor:
    return (torch.triu if upper else torch.tril)(input, diagonal)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield make(3, 5), 0, True
    yield make(2, 5, 3), 1, True
    yield make(2, 5, 3), -1, False
    yield make(1, 1), 0, False
    yield make(4, 4) > 0, 1, True
    yield make(2, 3, 7), -9, True
    yield make(7, 2), 9, False
    yield make(0, 3), 0, True


OP = Op(
    name="triu",
    schema="(Tensor input, SymInt diagonal, bool upper) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def triu(input: Tensor, diagonal: int = 0) -> Tensor:
    """``torch.triu``: zero below the diagonal, whose number may be a dynamic size.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.triu.html

    Shape:
        - input: ``(*, m, n)``, any dtype
        - output: that of the input
    """
    return torch.triu(input, diagonal)


def tril(input: Tensor, diagonal: int = 0) -> Tensor:
    """``torch.tril``: zero above the diagonal; otherwise as :func:`triu`."""
    return torch.tril(input, diagonal)
