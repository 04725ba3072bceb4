"""Functions whose output size depends on values, such as ``nonzero`` and mask indexing, and tests with other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from svexport.exporter.masks import is_mask_of_places

__all__ = ["deciding", "finding", "returns_found"]


def deciding(name: str, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose values decide how many elements a function returns or writes; empty for any other function."""
    if name in _INDEXED:
        return [index for index in _indices(args) if is_mask_of_places(index)] if len(args) > 1 else []
    if name in _ALSO:
        return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if name not in _CHANGES or (name == "where" and len(args) + len(kwargs) > 1):
        return []
    if name == "one_hot" and _argument(args, kwargs, 1, "num_classes", -1) != -1:
        return []
    place, keyword, _ = _place(name, args, kwargs)
    decisive = _argument(args, kwargs, place, keyword, None)
    return [decisive] if isinstance(decisive, Tensor) else []


def returns_found(name: str) -> bool:
    """Whether a function returns what it finds, if anything decides how many that is."""
    return name not in _WRITING


def finding(count: int, function: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a function that finds, or writes to what is found, returns where there are ``count`` (as many as there can
    be): masks keep that many of their first elements, other values the first ones."""
    if name in _INDEXED:
        changed = tuple(_mask(index, count) if is_mask_of_places(index) else index for index in _indices(args))
        return function(args[0], type(args[1])(changed) if isinstance(args[1], (list, tuple)) else changed, *args[2:])
    if name in _ALSO:
        return function(*args, **kwargs)[:count]
    place, keyword, change = _place(name, args, kwargs)
    if len(args) > place:
        return function(*args[:place], change(args[place], count), *args[place + 1 :], **kwargs)
    return function(*args, **{**kwargs, keyword: change(kwargs[keyword], count)})


def _place(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[int, str, Callable[[Tensor, int], Tensor]]:
    place, keyword, change = _CHANGES[name]
    if name == "repeat_interleave" and len(args) + len(kwargs.keys() - {"dim", "output_size"}) == 1:
        place, keyword = 0, "repeats"
    return place, keyword, change


def _argument(args: tuple, kwargs: dict[str, Any], place: int, keyword: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(keyword, default)


def _indices(args: tuple) -> Iterable[Any]:
    return args[1] if isinstance(args[1], (list, tuple)) else args[1:2]


def _mask(values: Tensor, count: int) -> Tensor:
    """A mask of the first ``count`` nonzero elements, filled up with the first of the others."""
    mask = values != 0
    order = (~mask).flatten().to(torch.uint8).argsort(stable=True)
    kept = torch.zeros_like(mask).flatten()
    kept[order[:count]] = True
    return kept.reshape(mask.shape)


def _distinct(values: Tensor, count: int) -> Tensor:
    """``count`` values that differ, the smallest there are, or larger ones after them."""
    if not values.numel() or values.dtype == torch.bool:
        return values
    known = values.flatten().unique()
    more = known[-1] + 1 + torch.arange(max(count - len(known), 0), dtype=values.dtype, device=values.device)
    known = torch.cat([known, more])[: max(count, 1)]
    place = torch.arange(values.numel(), device=values.device).clamp(max=len(known) - 1)
    return known[place].reshape(values.shape)


def _below(values: Tensor, count: int) -> Tensor:
    """Whole numbers of which ``count - 1`` is the largest."""
    values = values.clamp(max=max(count - 1, 0))
    if values.numel():
        values.view(-1)[0] = max(count - 1, 0)
    return values


def _adding_up(counts: Tensor, count: int) -> Tensor:
    """Numbers of repetitions, ``count`` in all."""
    if not counts.numel():
        return counts
    ends = counts.flatten().cumsum(0).clamp(max=count)
    ends[-1] = count
    return ends.diff(prepend=ends.new_zeros(1)).to(counts.dtype).reshape(counts.shape)


_INDEXED = {"__getitem__", "__setitem__", "index_put", "index_put_"}
_WRITING = {"__setitem__", "index_put", "index_put_", "masked_scatter", "masked_scatter_"}
_CHANGES: dict[str, tuple[int, str, Callable[[Tensor, int], Tensor]]] = {
    "argwhere": (0, "input", _mask),
    "bincount": (0, "input", _below),
    "masked_scatter": (1, "mask", _mask),
    "masked_scatter_": (1, "mask", _mask),
    "masked_select": (1, "mask", _mask),
    "nonzero": (0, "input", _mask),
    "one_hot": (0, "tensor", _below),
    "repeat_interleave": (1, "repeats", _adding_up),
    "unique": (0, "input", _distinct),
    "unique_consecutive": (0, "input", _distinct),
    "where": (0, "condition", _mask),
}
"""By function: which argument decides how many there are, and what makes it another number."""

_ALSO = {"batched_nms", "nms"}
"""Functions that find as well, by more than one argument."""
