"""What lies at places, and what is put there. Of places that a mask chooses, those beyond the ends are the ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError

__all__ = ["END", "FUNCTIONS", "OTHERWISE", "depends_on_size"]


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


MOST_OF_A_SIZE = 60
"""Characters of how a size is computed: a sum of the sizes of parts grows with each assignment, and torch with it."""

END = 2**63 - 1


def depends_on_size(start: int, end: int) -> bool:
    """Whether it is the size that says which of two places is the first, one counted from the end."""
    return (start < 0) != (end < 0) and start != 0 and end != END


def _slice_assigned(x: Tensor, values: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """``x[:, 1:3] = values``, put together of parts: the exporters scatter, with an index for each element."""
    size = x.shape[dim]
    start, end = 0 if start is None else start, END if end is None else end
    if step != 1 or not isinstance(start, int) or not isinstance(end, int):
        return NotImplemented
    if type(size) is int:
        start, end, _ = slice(start, end).indices(size)
    elif depends_on_size(start, end) or (isinstance(size, torch.SymInt) and len(str(size)) > MOST_OF_A_SIZE):
        return NotImplemented
    if start >= end and (start < 0) == (end < 0):
        return x.clone()
    parts = [torch.ops.aten.slice(x, dim, 0, start)] if start else []
    parts.append(values)
    if end != END and not (type(size) is int and end == size):
        parts.append(torch.ops.aten.slice(x, dim, end, END))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()


def _index_assigned(x: Tensor, values: Tensor, dim: int, index: Any) -> Any:
    """As of a slice, of one place."""
    if not isinstance(index, int):
        return NotImplemented
    return _slice_assigned(x, values.unsqueeze(dim), dim, index, index + 1 or None)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::_unsafe_masked_index": _masked_index,
    "aten::_unsafe_masked_index_put_accumulate": _masked_index_put_accumulate,
    "aten::select_scatter": _index_assigned,
    "aten::slice_scatter": _slice_assigned,
}

OTHERWISE = ("aten::select_scatter", "aten::slice_scatter")
