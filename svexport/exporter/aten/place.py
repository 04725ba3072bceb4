"""What lies at places that a mask chooses. Places beyond the ends are the ends; a mask may hide them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError

__all__ = ["FUNCTIONS", "fill_diagonal"]


def _inside(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Places counted from the front."""
    counted: list[Tensor | None] = []
    for axis, index in enumerate(indices):
        if index is not None:
            index = torch.where(index < 0, index + x.size(axis), index).clamp(min=0)
            index = torch.minimum(index, torch.full_like(index, x.size(axis) - 1))
        counted.append(index)
    return counted


def _masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: Any) -> Tensor:
    found = torch.ops.aten.index(x, _inside(x, indices))
    if x.dtype == torch.bool:  # of which ONNX Runtime has no Where
        return (mask & found) | ~mask if fill else mask & found
    return torch.where(mask, found, torch.full_like(found, fill))


def _masked_index_put_accumulate(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        raise ExportError("_unsafe_masked_index_put_accumulate of booleans is not exported; add up integers")
    added = torch.where(mask, values, torch.zeros_like(values))
    return torch.ops.aten.index_put(x, _inside(x, indices), added, accumulate=True)


def fill_diagonal(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    """A number where all indices are equal; of a tall matrix and ``wrap``, below again, a row left out each time."""
    places = [
        torch.arange(size, device=x.device).reshape([-1 if i == axis else 1 for i in range(x.dim())])
        for axis, size in enumerate(x.shape)
    ]
    if wrap and x.dim() == 2:
        places[0] = places[0] % (x.shape[1] + 1)
    same = torch.stack(torch.broadcast_tensors(*places)) == places[-1]
    if x.dtype == torch.bool:  # of which ONNX Runtime has no Where
        return x | same.all(0) if value else x & ~same.all(0)
    return torch.where(same.all(0), torch.full_like(x, value), x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::_unsafe_masked_index": _masked_index,
    "aten::_unsafe_masked_index_put_accumulate": _masked_index_put_accumulate,
}
