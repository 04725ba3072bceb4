"""Elementwise functions of two tensors: copysign, fmax, fmin, heaviside, hypot, isin, nextafter."""

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
    """The larger or smaller of two numbers; of a number and NaN the number."""

    def extreme(input: Tensor, other: Tensor) -> Tensor:
        x, y = _numbers(input, other)
        if x.dtype == torch.bool:
            return of_masks(x, y)
        first = comes_first(x, y)
        return torch.where(first | y.isnan() if y.is_floating_point() else first, x, y)

    return extreme


def _copy_sign(input: Tensor, other: Any) -> Tensor:
    """-0 is negative; NaN counts as positive, for ONNX has nothing that tells its sign.

    By a product: of zeros ONNX Runtime's Where loses the sign.
    """
    dtype = torch.result_type(input, other)
    size = input.to(dtype if dtype.is_floating_point else torch.get_default_dtype()).abs()
    if isinstance(other, Tensor):
        return size * torch.where(torch.signbit(other), -1, 1).to(size.dtype)
    return -size if math.copysign(1, other) < 0 else size


def _heaviside(input: Tensor, values: Tensor) -> Tensor:
    """1 of positive numbers, a given value of 0; 0 of NaN."""
    if input.dtype == torch.bool:  # of which ONNX Runtime has no Where
        return input | values
    return torch.where(input == 0, values, (input > 0).to(input.dtype))


def _next_after(input: Tensor, other: Tensor) -> Tensor:
    """From three fifths of the distance between neighbours, in double precision, rounded to the next number.

    Raises:
        ExportError: of float64, than which ONNX has nothing more precise.
    """
    x, goal = _numbers(input, other)
    if x.dtype == torch.float64:
        raise ExportError("torch.nextafter of float64 has no exact form in ONNX; compute it in float32")
    info = torch.finfo(x.dtype)
    beyond = info.max / (1 - info.eps / 2)  # what would follow the largest number, in place of infinity
    start = torch.where(x.isinf(), x.sign().double() * beyond, x.double())
    step = torch.clamp_min(start.abs() * (0.6 * info.eps), 0.75 * info.smallest_normal * info.eps)
    step = torch.where(goal.double() < start, -step, step)
    return torch.where((x == goal) | goal.isnan(), goal, (start + step).to(x.dtype))


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
    "aten::copysign.Scalar": _copy_sign,
    "aten::copysign.Tensor": _copy_sign,
    "aten::fmax": _extreme(torch.logical_or, torch.ge),
    "aten::fmin": _extreme(torch.logical_and, torch.le),
    "aten::heaviside": _heaviside,
    "aten::hypot": _hypot,
    **{f"aten::isin.{kind}": _isin for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")},
    "aten::nextafter": _next_after,
}
"""Compositions by ATen overload."""
