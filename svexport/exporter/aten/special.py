"""Special functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from svexport.errors import UnsupportedError

__all__ = ["FUNCTIONS", "OTHERWISE", "floating", "log1p", "polynomial"]


def floating(x: Tensor) -> Tensor:
    """The tensor converted to floating point."""
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def log1p(x: Tensor) -> Tensor:
    """Next to 0 the rounding error of 1 + x is as large as x: it is added, over what the logarithm is taken of."""
    x = floating(x)
    rounded = 1 + x
    more = rounded - 1  # x itself where that is infinite, or 1 + x is 0
    log = rounded.log()
    return torch.where(more == x, log, log + (x - more) / rounded)


def _expm1(x: Tensor) -> Tensor:
    """Next to 0 exp(x) - 1 has the rounding error of a number next to 1; this is the same product without it."""
    x = floating(x)
    return (x * 0.5).tanh() * (x.exp() + 1)


_MIDDLE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_END = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def _inverse_error_function(y: Tensor) -> Tensor:
    """Without the erf of the result, of which rounding leaves nothing near 1.

    Raises:
        UnsupportedError: of float64, for it is right to 4e-7.

    Source: M. Giles, Approximating the erfinv function, GPU Computing Gems, 2012, in single precision.
    """
    if y.dtype == torch.float64:
        raise UnsupportedError("erfinv of float64 has no exact form in ONNX; compute it in float32")
    kind = y.dtype if y.is_floating_point() else torch.get_default_dtype()
    y = y.to(torch.promote_types(kind, torch.float32))
    apart = -torch.log((1 - y) * (1 + y))
    factor = torch.where(apart < 5, polynomial(apart - 2.5, _MIDDLE), polynomial(torch.sqrt(apart) - 3, _END))
    x = torch.where(y.abs() == 1, y * math.inf, factor * y)
    return x.to(kind)


def polynomial(x: Tensor, factors: Sequence[float]) -> Tensor:
    """The factor of the highest power first."""
    result = x * factors[0] + factors[1]
    for factor in factors[2:]:
        result = result * x + factor
    return result


_OTHERWISE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten::expm1", "aten::special_expm1"), _expm1),
    **dict.fromkeys(("aten::log1p", "aten::special_log1p"), log1p),
}

FUNCTIONS: dict[str, Callable[..., Any]] = {"aten::erfinv": _inverse_error_function, **_OTHERWISE}

OTHERWISE = tuple(_OTHERWISE)
