"""Locates an error in a tensor: the largest error at each index of every axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Where", "locate"]

BINS = 128
"""On an axis with more indices than this, neighbours share a bin."""
_RANGES = 6
"""The maximum number of index ranges that a line of text lists."""


@dataclass(frozen=True)
class Where:
    """Where two tensors differ.

    Attributes:
        name: name of the output or layer.
        shape: shape of both tensors.
        largest: for each axis, the largest absolute error at each of its indices, in at most :data:`BINS` bins.
        outside: for each axis, the indices at which elements are outside the tolerances, as ranges ``(first, last)``.
    """

    name: str
    shape: tuple[int, ...]
    largest: tuple[tuple[float, ...], ...]
    outside: tuple[tuple[tuple[int, int], ...], ...]

    def __str__(self) -> str:
        """``on axis 1 only at 3, 7-9 (of 64)``, for the axes that narrow the error down."""
        told = []
        for axis, (size, ranges) in enumerate(zip(self.shape, self.outside, strict=True)):
            count = sum(last - first + 1 for first, last in ranges)
            if 0 < count <= size // 2:
                listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_RANGES])
                told.append(f"on axis {axis} only at {listed}{', …' if len(ranges) > _RANGES else ''} (of {size})")
        return "; ".join(told) or "all over the tensor"

    def to_dict(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "largest": [list(axis) for axis in self.largest],
            "outside": [[list(pair) for pair in axis] for axis in self.outside],
            "text": str(self),
        }


def locate(name: str, expected: Tensor, actual: Tensor, *, rtol: float, atol: float) -> Where | None:
    """Where ``actual`` differs from ``expected``; None if their shapes differ or all is within the tolerances."""
    if expected.shape != actual.shape or not expected.numel() or not expected.dim():
        return None
    wide = torch.complex128 if expected.is_complex() or actual.is_complex() else torch.float64
    e, a = expected.detach().cpu().to(wide), actual.detach().cpu().to(wide)
    error = (e - a).abs()
    error = torch.where((e == a) | (e.isnan() & a.isnan()), 0.0, error).nan_to_num(math.inf, math.inf)
    magnitude = torch.where(e.isfinite(), e.abs(), 0.0)
    beyond = error > atol + rtol * magnitude
    if not beyond.any():
        return None
    axes = range(error.dim())
    largest = tuple(_binned(error.movedim(axis, 0).reshape(error.shape[axis], -1).amax(1)) for axis in axes)
    outside = tuple(_ranges(beyond.movedim(axis, 0).reshape(error.shape[axis], -1).any(1)) for axis in axes)
    return Where(name, tuple(expected.shape), largest, outside)


def _binned(values: Tensor) -> tuple[float, ...]:
    per = math.ceil(len(values) / BINS)
    return tuple(float(part.max()) for part in values.split(per))


def _ranges(hit: Tensor) -> tuple[tuple[int, int], ...]:
    """Runs of True, as ranges (first, last)."""
    indices = hit.nonzero().flatten().tolist()
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index - 1:
            found[-1] = found[-1][0], index
        else:
            found.append((index, index))
    return tuple(found)
