"""Where on masks, which ONNX Runtime does not support, by And, Or and Not; and masks as indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CHOICES", "by_places", "is_mask_of_places", "where"]


def is_mask_of_places(index: Any) -> bool:
    """Whether an index is a mask; bytes are one, too."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def by_places(indices: Iterable[Any]) -> list[Any]:
    """Indices with the places that each mask is true at, in its place."""
    return [place for i in indices for place in (i.nonzero(as_tuple=True) if is_mask_of_places(i) else (i,))]


def _is_mask(value: Any) -> bool:
    return value.dtype == torch.bool if isinstance(value, Tensor) else isinstance(value, bool)


def _where(condition: Any, input: Any = None, other: Any = None) -> Any:
    """``torch.where`` of masks."""
    if not all(map(_is_mask, (condition, input, other))):
        return NotImplemented
    chosen = condition if input is True else condition & input
    return chosen | ~condition if other is True else chosen | (~condition & other)


def where(condition: Tensor, input: Tensor, other: Tensor) -> Tensor:
    """``torch.where``, of masks too."""
    chosen = _where(condition, input, other)
    return torch.where(condition, input, other) if chosen is NotImplemented else chosen


def _filled(input: Tensor, mask: Any, value: Any) -> Any:
    """``masked_fill`` of a mask, by any number."""
    if isinstance(value, Tensor):
        return _where(mask, value, input)
    if not (_is_mask(input) and _is_mask(mask)):
        return NotImplemented
    return input | mask if value else input & ~mask


def _filled_in_place(input: Tensor, mask: Any, value: Any) -> Any:
    result = _filled(input, mask, value)
    return result if result is NotImplemented else input.copy_(result)


CHOICES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.masked_fill: _filled,
    torch.where: _where,
    Tensor.masked_fill: _filled,
    Tensor.masked_fill_: _filled_in_place,
    Tensor.where: lambda input, condition, other: _where(condition, input, other),
}
"""Replacements by Python function, for both tracers; they return NotImplemented for other arguments."""
