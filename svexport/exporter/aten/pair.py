"""Functions of pairs of numbers: fmax, fmin, hypot, isin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FUNCTIONS"]


def _numbers(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.result_type(x, other)
    return x.to(dtype), other.to(dtype)


def _extreme(of_masks: Callable[..., Tensor], comes_first: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The larger or smaller of two numbers; of a number and NaN the number."""

    def extreme(input: Tensor, other: Tensor) -> Tensor:
        x, y = _numbers(input, other)
        if x.dtype == torch.bool:
            return of_masks(x, y)
        first = comes_first(x, y)
        return torch.where(first | y.isnan() if y.is_floating_point() else first, x, y)

    return extreme


def _hypot(input: Tensor, other: Tensor) -> Tensor:
    """The root of the sum of squares, which may be larger than any number; infinite if one is, beside NaN too."""
    x, y = (t.abs() for t in _numbers(input, other))
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    ratio = small / torch.where(large == 0, 1, large)
    return torch.where(x.isinf() | y.isinf(), torch.inf, large * (1 + ratio * ratio).sqrt()).to(large.dtype)


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each is equal to any of the others; either may be a number."""
    if isinstance(elements, Tensor) and isinstance(test_elements, Tensor):
        found = (elements.unsqueeze(-1) == test_elements.reshape(-1)).any(-1)
    else:
        found = elements == test_elements
        found = found if isinstance(elements, Tensor) else found.any()
    return ~found if invert else found


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::fmax": _extreme(torch.logical_or, torch.ge),
    "aten::fmin": _extreme(torch.logical_and, torch.le),
    "aten::hypot": _hypot,
    **{f"aten::isin.{kind}": _isin for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")},
}
"""By the overload of ATen."""
