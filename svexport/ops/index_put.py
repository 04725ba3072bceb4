"""Puts or adds elements by index: with masks, non-adjacent dimensions, broadcast values, and duplicates when adding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["index_put"]


def reference(input: Tensor, indices: Sequence[Tensor], values: Tensor, dims: Sequence[int], accumulate: int) -> Tensor:
    at: list[Tensor | None] = [None] * (dims[-1] + 1)
    for dim, index in zip(dims, indices):
        at[dim] = index
    # torch.index_put accepts no None.
    return torch.ops.aten.index_put(input, at, values, bool(accumulate)).contiguous()


def fake(input: Tensor, indices: Sequence[Tensor], values: Tensor, dims: Sequence[int], accumulate: int) -> Tensor:
    return input.new_empty(input.shape)  # also where the number of values depends on a mask


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    i, j = torch.tensor([0, 2, 0, -1, 2]), torch.tensor([1, 1, 1, 0, -3])
    yield make(3, 4), [i], make(5, 4), (0,), 1
    yield make(3, 4), [i, j], make(5), (0, 1), 1
    yield make(2, 3, 4, 5), [i, j], make(2, 5, 5), (1, 2), 1
    yield make(3, 2, 4), [i, j], make(5, 2), (0, 2), 1
    yield make(2, 5, 3), [i[:, None], j[:2]], make(1), (1, 2), 1
    yield make(3, 4), [i[:0]], make(0, 4), (0,), 1
    yield make(3, 2, 4), [i[1:4], j[1:4]], make(3, 2), (0, 2), 0
    yield make(2, 3, 4), [i[:2, None], j[3:]], make(2, 2, 2), (1, 2), 0


OP = Op(
    name="index_put",
    schema="(Tensor input, Tensor[] indices, Tensor values, int[] dims, int accumulate) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
    plugin=False,
    inline=True,
)


def index_put(input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``torch.index_put``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_put_.html

    Shape:
        - input: any
        - indices: one for each of the first dimensions of input, None for a whole dimension; integers that broadcast
          together to ``(*J)``, negative ones from the end; a mask stands for the indices of its true elements and
          covers as many dimensions as it has
        - values: broadcasts to ``input[indices]``
        - output: that of the input

    Below opset 16 a file that accumulates needs memory for a comparison of every index with every place it may point
    to, and is refused beyond 64 million elements.
    """
    return torch.index_put(input, tuple(indices), values, accumulate)  # type: ignore[arg-type]
