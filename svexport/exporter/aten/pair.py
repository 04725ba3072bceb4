"""Binary functions: copysign, fmax, fmin, heaviside, hypot, isin, nextafter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError

__all__ = ["FUNCTIONS"]


def _numbers(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.result_type(x, other)
    return x.to(dtype), other.to(dtype)


def _extreme(of_masks: Callable[..., Tensor], comes_first: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The larger or smaller of two numbers; if one is NaN, the other."""

    def extreme(input: Tensor, other: Tensor) -> Tensor:
        x, y = _numbers(input, other)
        if x.dtype == torch.bool:
            return of_masks(x, y)
        first = comes_first(x, y)
        return torch.where(first | y.isnan() if y.is_floating_point() else first, x, y)

    return extreme


def _copy_sign(input: Tensor, other: Any) -> Tensor:
    """-0 is negative. NaN counts as positive, because ONNX has no operator that tells its sign.

    The sign is multiplied, because ONNX Runtime's Where loses the sign of zeros.
    """
    dtype = torch.result_type(input, other)
    size = input.to(dtype if dtype.is_floating_point else torch.get_default_dtype()).abs()
    if isinstance(other, Tensor):
        return size * torch.where(torch.signbit(other), -1, 1).to(size.dtype)
    return -size if math.copysign(1, other) < 0 else size


def _heaviside(input: Tensor, values: Tensor) -> Tensor:
    """1 for positive numbers, ``values`` for 0, and 0 for negative numbers and NaN."""
    if input.dtype == torch.bool:  # ONNX Runtime has no Where for bool
        return input | values
    return torch.where(input == 0, values, (input > 0).to(input.dtype))


def _next_after(input: Tensor, other: Tensor) -> Tensor:
    """Adds three fifths of the distance to the next number in float64, and rounds to the input's dtype.

    Raises:
        ExportError: for float64, because ONNX has no wider dtype.
    """
    x, goal = _numbers(input, other)
    if x.dtype == torch.float64:
        raise ExportError("torch.nextafter of float64 has no exact form in ONNX; compute it in float32")
    info = torch.finfo(x.dtype)
    beyond = info.max / (1 - info.eps / 2)  # the number that would follow the largest one stands for infinity
    start = torch.where(x.isinf(), x.sign().double() * beyond, x.double())
    step = torch.clamp_min(start.abs() * (0.6 * info.eps), 0.75 * info.smallest_normal * info.eps)
    step = torch.where(goal.double() < start, -step, step)
    return torch.where((x == goal) | goal.isnan(), goal, (start + step).to(x.dtype))


def _hypot(input: Tensor, other: Tensor) -> Tensor:
    """sqrt(x² + y²) without overflow of the squares; infinite if either input is, even if the other is NaN."""
    x, y = (t.abs() for t in _numbers(input, other))
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    ratio = small / torch.where(large == 0, 1, large)
    return torch.where(x.isinf() | y.isinf(), torch.inf, large * (1 + ratio * ratio).sqrt()).to(large.dtype)


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each of ``elements`` equals any of ``test_elements``; either may be a number."""
    if isinstance(elements, Tensor) and isinstance(test_elements, Tensor):
        found = (elements.unsqueeze(-1) == test_elements.reshape(-1)).any(-1)
    else:
        found = elements == test_elements
        found = found if isinstance(elements, Tensor) else found.any()
    return ~found if invert else found


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::copysign.Scalar": _copy_sign,
    "aten::copysign.Tensor": _copy_sign,
    "aten::fmax": _extreme(torch.logical_or, torch.ge),
    "aten::fmin": _extreme(torch.logical_and, torch.le),
    "aten::heaviside": _heaviside,
    "aten::hypot": _hypot,
    **{f"aten::isin.{kind}": _isin for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")},
    "aten::nextafter": _next_after,
}
"""By ATen overload."""
