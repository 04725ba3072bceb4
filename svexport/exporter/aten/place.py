"""Reads and writes at indices. Masked indices beyond the ends are clamped to the ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError

__all__ = ["END", "FUNCTIONS", "OTHERWISE", "depends_on_size", "fill_diagonal", "unravel_index"]


def _inside(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices counted from the front, clamped to the axis."""
    counted: list[Tensor | None] = []
    for axis, index in enumerate(indices):
        if index is not None:
            index = torch.where(index < 0, index + x.size(axis), index).clamp(min=0)
            index = torch.minimum(index, torch.full_like(index, x.size(axis) - 1))
        counted.append(index)
    return counted


def _masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: Any) -> Tensor:
    found = torch.ops.aten.index(x, _inside(x, indices))
    if x.dtype == torch.bool:  # ONNX Runtime has no Where for bool
        return (mask & found) | ~mask if fill else mask & found
    return torch.where(mask, found, torch.full_like(found, fill))


def _masked_index_put_accumulate(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        raise ExportError("_unsafe_masked_index_put_accumulate of booleans is not exported; add up integers")
    added = torch.where(mask, values, torch.zeros_like(values))
    return torch.ops.aten.index_put(x, _inside(x, indices), added, accumulate=True)


MOST_OF_A_SIZE = 60
"""Longest formula of a size, in characters: each assignment adds its parts' sizes to it, which slows torch down."""

END = 2**63 - 1


def depends_on_size(start: int, end: int) -> bool:
    """Whether the order of ``start`` and ``end`` depends on the size, because one of them counts from the end."""
    return (start < 0) != (end < 0) and start != 0 and end != END


def _slice_assigned(x: Tensor, values: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """``x[:, 1:3] = values`` as a concatenation of parts: the exporters scatter, with an index for each element."""
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
    """:func:`_slice_assigned` for one index."""
    if not isinstance(index, int):
        return NotImplemented
    return _slice_assigned(x, values.unsqueeze(dim), dim, index, index + 1 or None)


def _nonzero_static(input: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """``(size, rank)``: indices of the first nonzero elements; rows of ``fill_value`` fill up if there are fewer."""
    if not input.dim():
        return input.new_zeros((size, 0), dtype=torch.int64)
    found = input if input.dtype == torch.bool else input != 0
    found = torch.nn.functional.pad(found.flatten().to(torch.int64), (0, size)) != 0  # topk needs ``size`` elements
    none = torch.iinfo(torch.int64).max
    order = torch.arange(found.size(0), device=input.device)
    chosen = torch.topk(torch.where(found, order, none), size, largest=False, sorted=True).values
    missing = (chosen == none).unsqueeze(-1)
    return torch.where(missing, fill_value, torch.stack(unravel_index(chosen, input.shape), -1))


def unravel_index(indices: Tensor, shape: Any) -> tuple[Tensor, ...]:
    """``torch.unravel_index``; torch's own takes no dynamic sizes."""
    places: list[Tensor] = []
    for size in reversed(tuple(shape) if isinstance(shape, Iterable) else (shape,)):
        extent = torch.full_like(indices, size).clamp(min=1)  # avoid a remainder by 0
        places.append(indices % extent)
        indices = torch.floor_divide(indices, extent)
    return tuple(reversed(places))


def fill_diagonal(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    """Writes ``value`` where all indices are equal. With ``wrap``, a tall matrix's diagonal restarts after a row."""
    places = [
        torch.arange(size, device=x.device).reshape([-1 if i == axis else 1 for i in range(x.dim())])
        for axis, size in enumerate(x.shape)
    ]
    if wrap and x.dim() == 2:
        places[0] = places[0] % (x.shape[1] + 1)
    same = torch.stack(torch.broadcast_tensors(*places)) == places[-1]
    if x.dtype == torch.bool:  # ONNX Runtime has no Where for bool
        return x | same.all(0) if value else x & ~same.all(0)
    return torch.where(same.all(0), torch.full_like(x, value), x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::_unsafe_masked_index": _masked_index,
    "aten::_unsafe_masked_index_put_accumulate": _masked_index_put_accumulate,
    "aten::nonzero_static": _nonzero_static,
    "aten::select_scatter": _index_assigned,
    "aten::slice_scatter": _slice_assigned,
}

OTHERWISE = ("aten::select_scatter", "aten::slice_scatter")
