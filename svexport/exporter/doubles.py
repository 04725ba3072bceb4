"""Double-precision functions whose numbers ONNX stores as float32 attributes, or the exporter as float32 constants.

For double tensors they are composed of functions that take these numbers as tensors; for others they stay unchanged.
ONNX also stores the ``eps`` of norms in float32. That is left, because nobody chooses an eps to eight digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from svexport.exporter.aten import made_by_torch
from svexport.exporter.aten.span import between

__all__ = ["DOUBLES"]


def _of_doubles(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(x, *args, **kwargs) if x.dtype == torch.float64 else NotImplemented

    return decomposed


def _added(sign: int) -> Callable[..., Any]:
    def add(x: Tensor, y: Any, *, alpha: Any = 1) -> Any:
        is_double = any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in (x, y))
        return x + y * (sign * alpha) if is_double and isinstance(alpha, float) else NotImplemented

    return add


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if dtype != torch.float64 or not any(isinstance(number, float) for number in (start, end, step)):
        return NotImplemented
    count = math.ceil((end - start) / step)
    return torch.arange(count, device=options.get("device")).to(dtype) * step + start


def _linspace(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if dtype != torch.float64 or any(isinstance(number, Tensor) for number in (start, end)) or steps < 2:
        return NotImplemented
    return between(start, end, steps, dtype, options.get("device"))


def _logspace(
    start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    exponents = _linspace(start, end, steps, dtype=dtype, **options)
    return exponents if exponents is NotImplemented else torch.pow(base, exponents)


def _logarithm(base: float) -> Callable[..., Tensor]:
    return lambda x: x.log() / math.log(base)


_OF_A_TENSOR: dict[str, Callable[..., Tensor]] = {
    **{name: made_by_torch(name) for name in ("addcdiv", "addcmul", "addmm", "celu", "deg2rad", "elu")},
    **{name: made_by_torch(name) for name in ("hardsigmoid", "hardswish", "leaky_relu", "rad2deg", "selu", "softplus")},
    "log10": _logarithm(10),
    "log2": _logarithm(2),
    "masked_fill.Scalar": lambda x, mask, value: torch.where(mask, x.new_full((), value), x),
}

DOUBLES: dict[str, Callable[..., Any]] = {
    "aten::add.Tensor": _added(1),
    "aten::arange.start_step": _arange,
    "aten::linspace": _linspace,
    "aten::logspace": _logspace,
    "aten::sub.Tensor": _added(-1),
    **{f"aten::{name}": _of_doubles(function) for name, function in _OF_A_TENSOR.items()},
}
"""By the overload of ATen; NotImplemented where none is of double precision."""
