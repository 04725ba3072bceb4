"""Evenly spaced numbers between two numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError
from svexport.tracing.swapped import untraced

__all__ = ["FUNCTIONS", "OTHERWISE", "between", "linspace"]


def between(start: Any, end: Any, steps: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """``(steps,)`` of a floating-point type, from both ends to the middle, as torch computes it."""
    place = torch.arange(steps, dtype=dtype, device=device)
    first, last = (_as(place, value) for value in (start, end))
    if isinstance(steps, int) and not isinstance(steps, Tensor):
        if steps <= 1:
            return first.reshape(1)[:steps].clone()
        half, step = steps // 2, (last - first) / (steps - 1)
    else:  # one more from the start, so that a single number is that
        half, step = (steps + 1) // 2, (last - first) / _as(place, steps - 1).clamp(min=1)
    return torch.where(place < half, first + place * step, last - (steps - 1 - place) * step)


def _as(place: Tensor, value: Any) -> Tensor:
    """A number or a tensor as a tensor of the type of ``place``."""
    return value.to(place) if isinstance(value, Tensor) else place.new_full((), value)


def linspace(
    start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Any:
    """``torch.linspace``; the exporters' own are for constant numbers, or compute with doubles."""
    if not any(isinstance(value, (Tensor, torch.SymInt, torch.SymFloat)) for value in (start, end, steps)):
        with untraced():
            return torch.linspace(start, end, steps, dtype=dtype, device=device, **options)
    dtype, device = _as_given(start, end, steps, dtype, device, "linspace")
    precise = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64
    return between(start, end, steps, precise, device).to(dtype)


def _logspace(
    start: Any,
    end: Any,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **_: Any,
) -> Any:
    """In double precision, for a power is large in what its exponent is small in."""
    dtype, device = _as_given(start, end, steps, dtype, device, "logspace")
    exponent = between(start, end, steps, torch.float64, device)
    return torch.pow(torch.full_like(exponent, base), exponent).to(dtype)


def _as_given(
    start: Any, end: Any, steps: int, dtype: torch.dtype | None, device: Any, name: str
) -> tuple[torch.dtype, Any]:
    """The type and the device of the result.

    Raises:
        ExportError: of integers, which torch cuts off after fused multiplications, and so not as ONNX does; dynamic
            sizes are tensors as well.
    """
    dtype = dtype or torch.get_default_dtype()
    several = not isinstance(steps, int) or isinstance(steps, Tensor) or steps > 1 or (steps and name == "logspace")
    if not dtype.is_floating_point and several:
        raise ExportError(
            f"torch.{name} of {dtype} between tensors has no exact form in ONNX; make floating-point numbers, and round"
        )
    tensors = (value.device for value in (start, end) if isinstance(value, Tensor) and device is None)
    return dtype, next(tensors, device)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"aten::{name}.{form}": function
    for name, function in (("linspace", linspace), ("logspace", _logspace))
    for form in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
}

OTHERWISE = FUNCTIONS.keys()
