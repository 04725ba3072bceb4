"""Numbers at equal distances between two of which one at least is a tensor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError

__all__ = ["FUNCTIONS", "OTHERWISE"]


def _between(start: Any, end: Any, steps: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``(steps,)`` of a floating-point type, from both ends to the middle, as torch computes it."""
    place = torch.arange(steps, dtype=dtype, device=device)
    first, last = (v.to(device, dtype) if isinstance(v, Tensor) else place.new_full((), v) for v in (start, end))
    if steps <= 1:
        return first.reshape(1)[:steps].clone()
    step = (last - first) / (steps - 1)
    return torch.where(place < steps // 2, first + place * step, last - (steps - 1 - place) * step)


def _linspace(
    start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Any:
    dtype, device = _as_given(start, end, steps, dtype, device, "linspace")
    precise = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64
    return _between(start, end, steps, precise, device).to(dtype)


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
    exponent = _between(start, end, steps, torch.float64, device)
    return torch.pow(torch.full_like(exponent, base), exponent).to(dtype)


def _as_given(
    start: Any, end: Any, steps: int, dtype: torch.dtype | None, device: Any, name: str
) -> tuple[torch.dtype, torch.device]:
    """The type and the device of the result.

    Raises:
        ExportError: of integers, which torch cuts off after fused multiplications, and so not as ONNX does.
    """
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point and (steps > 1 or (steps and name == "logspace")):
        raise ExportError(
            f"torch.{name} of {dtype} between tensors has no exact form in ONNX; make floating-point numbers, and round"
        )
    given = next(v for v in (start, end) if isinstance(v, Tensor))
    return dtype, torch.device(device) if device is not None else given.device


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"aten::{name}.{form}": function
    for name, function in (("linspace", _linspace), ("logspace", _logspace))
    for form in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
}

OTHERWISE = FUNCTIONS.keys()
