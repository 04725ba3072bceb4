"""What lies at a place of sorted values. NaN is larger than all numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FUNCTIONS"]

Pair = tuple[Tensor, Tensor]


def _at(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """A tensor of at least one dimension, and its dimension from the front."""
    x = x if x.dim() else x.reshape(1)
    return x, dim % x.dim()


def _like(x: Tensor, dim: int, keepdim: bool, *results: Tensor) -> Pair:
    """Values and places with a dimension of size 1, as torch returns them of ``x``."""
    values, places = results if keepdim and x.dim() else (result.squeeze(dim) for result in results)
    return values, places


def _median(input: Tensor, dim: int, keepdim: bool = False) -> Pair:
    """The lower of two; NaN where one is, and the first of those."""
    x, dim = _at(input, dim)
    values, places = (part.narrow(dim, (x.size(dim) - 1) // 2, 1) for part in x.sort(dim))
    if x.is_floating_point():
        nan = x.isnan()
        some = nan.any(dim, keepdim=True)
        values = torch.where(some, torch.nan, values).to(x.dtype)
        places = torch.where(some, nan.to(torch.float32).argmax(dim, keepdim=True), places)
    return _like(input, dim, keepdim, values, places)


def _nan_median(input: Tensor, dim: int, keepdim: bool = False) -> Pair:
    """Of the numbers, the lower of two; NaN where there are none."""
    if not input.is_floating_point():
        return _median(input, dim, keepdim)
    x, dim = _at(input, dim)
    count = (~x.isnan()).sum(dim, keepdim=True)
    middle = torch.floor_divide((count - 1).clamp(min=0), 2)
    return _like(input, dim, keepdim, *(part.gather(dim, middle) for part in x.sort(dim)))


def _kth_value(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    x, dim = _at(input, dim)
    found = (part.narrow(dim, k - 1, 1) for part in torch.topk(x, k, dim, largest=False, sorted=True))
    return _like(input, dim, keepdim, *found)


def _mode(input: Tensor, dim: int = -1, keepdim: bool = False) -> Pair:
    """The smallest of the most frequent values, and its last place, from all pairs; NaN where there are no numbers."""
    if input.dtype == torch.bool:
        values, places = _mode(input.to(torch.int64), dim, keepdim)
        return values.to(torch.bool), places
    x, dim = _at(input, dim)
    x = x.transpose(dim, -1)
    counts = (x.unsqueeze(-1) == x.unsqueeze(-2)).sum(-1)
    frequent = counts == counts.amax(-1, keepdim=True)
    worst = torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).max
    values = torch.where(frequent, x, worst).to(x.dtype).amin(-1, keepdim=True)
    same = x == values
    if x.is_floating_point():
        same = same | (x.isnan() & values.isnan())
    places = torch.where(same, torch.arange(x.size(-1), device=x.device), -1).amax(-1, keepdim=True)
    return _like(input, dim, keepdim, values.transpose(dim, -1), places.transpose(dim, -1))


def _median_of_all(x: Tensor) -> Tensor:
    x = x.flatten()
    count = x.size(0)
    if not x.is_floating_point() or type(count) is int:
        return _median(x, 0)[0]
    values = F.pad(x.sort().values, (1, 0), value=torch.nan)  # of none it is NaN
    return torch.where(x.isnan().any(), torch.nan, values.narrow(0, (count + 1) // 2, 1)).to(x.dtype).squeeze(0)


def _nan_median_of_all(x: Tensor) -> Tensor:
    x = x.flatten()
    if x.is_floating_point() and type(x.size(0)) is not int:
        x = F.pad(x, (0, 1), value=torch.nan)
    return _nan_median(x, 0)[0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::kthvalue": _kth_value,
    "aten::median": _median_of_all,
    "aten::median.dim": _median,
    "aten::mode": _mode,
    "aten::nanmedian": _nan_median_of_all,
    "aten::nanmedian.dim": _nan_median,
}
