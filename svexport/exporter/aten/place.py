"""What lies at places that a mask chooses. Places beyond the ends are the ends; a mask may hide them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError
from svexport.tracing.swapped import untraced

__all__ = ["FUNCTIONS", "OTHERWISE", "fill_diagonal"]


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


def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """``torch.gather`` of tensors that are broadcast. Torch's own takes dynamic sizes for numbers."""
    size = x.numel() if dim is None else x.shape[dim] if x.dim() else 1
    indices = torch.where(indices < 0, indices + size, indices)
    if dim is None:
        return x.flatten().gather(0, indices.flatten())
    wide = [_widened(*pair, dim % (x.dim() or 1)) for pair in ((x, indices), (indices, x))]
    return wide[0].gather(dim, wide[1])


def _widened(x: Tensor, other: Tensor, dim: int) -> Tensor:
    """With the sizes of another where it has 1, but along one dimension."""
    with untraced():
        is_one = [not isinstance(size, torch.SymInt) and size == 1 for size in x.shape]
    sizes = [other.size(axis) if one and axis != dim else -1 for axis, one in enumerate(is_one)]
    return x.expand(sizes)


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
    "aten::take_along_dim": _take_along_dim,
}

OTHERWISE = ("aten::take_along_dim",)
