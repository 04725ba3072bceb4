"""Numeric comparison of one tensor with its reference: what verify and compare both report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError
from svexport.text import dtype_text

__all__ = ["ATOL", "RTOL", "Parity", "check_tolerances", "parity", "tolerances"]

RTOL, ATOL = 1e-3, 1e-4
"""Tolerances where none are given; of half types :func:`tolerances` makes larger ones."""

HISTOGRAM_RANGE = (-12, 4)
"""Decades of absolute error covered by :attr:`Parity.histogram`; its first bin also holds the exact zeros."""


@dataclass(frozen=True)
class Parity:
    """How close ``actual`` is to ``expected``.

    Attributes:
        name: of the output (or layer).
        run: which inputs: ``"given"``, ``"random"``, ...
        shape: of both.
        dtype: of the expected tensor.
        max_abs: largest absolute difference (inf where one is NaN and the other is not).
        max_rel: largest absolute difference over ``max(|expected|, atol)``.
        cosine: cosine similarity of the two, flattened (1 for two zero tensors).
        mismatched: number of elements outside ``atol + rtol * |expected|``.
        histogram: counts of absolute errors per decade, from 1e-12 (and below) to 1e4.
        rtol: relative tolerance it was held to.
        atol: absolute tolerance.
    """

    name: str
    run: str
    shape: tuple[int, ...]
    dtype: str
    max_abs: float
    max_rel: float
    cosine: float
    mismatched: int
    histogram: tuple[int, ...] = field(repr=False)
    rtol: float = RTOL
    atol: float = ATOL

    @property
    def ok(self) -> bool:
        """Whether every element is within the tolerances."""
        return self.mismatched == 0

    def to_dict(self) -> dict[str, Any]:
        """Its fields and ``ok``, for JSON."""
        return {**asdict(self), "ok": self.ok}


def check_tolerances(rtol: float | None, atol: float | None) -> None:
    """Raises :class:`ExportError` unless both are finite numbers from 0 on, or None."""
    if not all(value is None or 0 <= value < math.inf for value in (rtol, atol)):
        raise ExportError(f"rtol and atol must be finite and 0 or more, got {rtol} and {atol}")


def tolerances(rtol: float | None, atol: float | None, dtypes: Iterable[torch.dtype]) -> tuple[float, float]:
    """Both as given; where they are None, what the coarsest of the data types that take part can resolve."""
    halves = [16 * torch.finfo(kind).eps for kind in {*dtypes} & {torch.float16, torch.bfloat16}]
    return max([RTOL, *halves]) if rtol is None else rtol, max([ATOL, *halves]) if atol is None else atol


def parity(
    name: str, expected: Tensor, actual: Tensor, *, run: str = "given", rtol: float = RTOL, atol: float = ATOL
) -> Parity:
    """Compares two tensors element by element, in float64; NaN equals NaN, an infinity equals itself.

    Tensors of different shapes or data types never agree: every element counts as mismatched. Where both are on one GPU
    they are compared there, unless it has no room for that.
    """
    if expected.device == actual.device and expected.is_cuda:
        with suppress(torch.OutOfMemoryError):
            return _parity(name, expected, actual, run, rtol, atol)
    return _parity(name, expected.cpu(), actual.cpu(), run, rtol, atol)


def _parity(name: str, expected: Tensor, actual: Tensor, run: str, rtol: float, atol: float) -> Parity:
    low, high = HISTOGRAM_RANGE
    bins = high - low
    shape, dtype = tuple(expected.shape), dtype_text(expected.dtype)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        found = f"{name} (came as {dtype_text(actual.dtype)}{list(actual.shape)})"
        count = max(expected.numel(), actual.numel(), 1)
        return Parity(found, run, shape, dtype, math.inf, math.inf, 0.0, count, (0,) * bins, rtol, atol)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    e, a = expected.detach().to(wide).flatten(), actual.detach().to(wide).flatten()
    if not e.numel():
        return Parity(name, run, shape, dtype, 0.0, 0.0, 1.0, 0, (0,) * bins, rtol, atol)
    error, magnitude = (e - a).abs(), e.abs()
    both = e.isfinite() & a.isfinite()
    finite = e, a
    if not both.all():  # the rare case, and half of the time
        same = (e == a) | (e.isnan() & a.isnan())
        error = torch.where(same, 0.0, error)
        error = torch.where(error.isnan(), math.inf, error)
        magnitude = torch.where(e.isfinite(), magnitude, 0.0)
        finite = e[both], a[both]
    mismatched = int((error > atol + rtol * magnitude).sum())
    dot = (finite[0].conj() * finite[1]).sum().abs()
    norms = finite[0].abs().square().sum().sqrt() * finite[1].abs().square().sum().sqrt()
    cosine = float(dot / norms) if norms > 0 else float(bool((error == 0).all()))
    decades = error.clamp(10.0**low, 10.0**high * 0.999).log10().floor().long() - low
    return Parity(
        name=name,
        run=run,
        shape=shape,
        dtype=dtype,
        max_abs=float(error.max()),
        max_rel=float((error / magnitude.clamp(min=atol or torch.finfo(torch.float32).tiny)).max()),
        cosine=cosine,
        mismatched=mismatched,
        histogram=tuple(torch.bincount(decades.clamp(0, bins - 1), minlength=bins).tolist()),
        rtol=rtol,
        atol=atol,
    )
