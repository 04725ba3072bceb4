"""A histogram of the magnitudes of a tensor over any number of batches, in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svexport.errors import SvexportError

__all__ = ["BINS", "Histogram"]

LEAST = -100
"""Exponent of the smallest range: the inverse of a bin's width is still a float32."""

BINS = 2048
"""At least half of them lie below the largest magnitude."""


class Histogram:
    """Counts of magnitudes in :data:`BINS` bins of equal width, from zero on.

    The range is a power of two, and doubles when a magnitude reaches it: two bins become one. The result does not
    depend on the batches that the elements came in, nor on their order.

    Attributes:
        counts: ``(BINS,)``, int64.
        exponent: the range is two to this power; None while there have been only zeros.
        largest: the largest magnitude.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)
        self.exponent: int | None = None
        self.largest = 0.0

    @property
    def width(self) -> float:
        """The width of a bin."""
        return math.ldexp(1.0, self.exponent or 0) / BINS

    @property
    def used(self) -> int:
        """Bins up to the one of the largest magnitude."""
        return int(self.largest / self.width) + 1

    def add(self, x: Tensor) -> None:
        """Counts the elements of a tensor of any shape, floating-point type and device.

        Raises:
            SvexportError: if an element is infinite or NaN.
        """
        if not x.numel():
            return
        magnitudes = x.detach().flatten().float().abs()
        largest = float(magnitudes.max())
        if not math.isfinite(largest):
            raise SvexportError("expected finite values to calibrate with, got an infinity or NaN")
        self._reach(largest)
        self.largest = max(self.largest, largest)
        places = magnitudes.mul_(1 / self.width).to(torch.int32)  # exact: the width is a power of two
        self.counts += torch.bincount(places, minlength=BINS).cpu().numpy()

    def _reach(self, magnitude: float) -> None:
        exponent = _exponent(magnitude)
        if exponent is None:
            return
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            merged = min(2 ** (exponent - self.exponent), BINS)
            sums = self.counts.reshape(-1, merged).sum(1)
            self.counts = np.pad(sums, (0, BINS - len(sums)))
            self.exponent = exponent

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-serializable values."""
        return {"counts": self.counts.tolist(), "exponent": self.exponent, "largest": self.largest}

    @classmethod
    def from_dict(cls, data: Any) -> Histogram:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: if ``data`` does not describe a histogram.
        """
        if not isinstance(data, dict) or set(data) != {"counts", "exponent", "largest"}:
            raise ValueError("a histogram has counts, exponent and largest")
        counts, exponent, largest = data["counts"], data["exponent"], data["largest"]
        whole = isinstance(counts, list) and len(counts) == BINS and all(type(n) is int and n >= 0 for n in counts)
        if not whole or sum(counts) >= 2**63:
            raise ValueError(f"counts are {BINS} numbers of elements")
        if type(largest) not in (int, float) or not 0 <= largest < 2.0**128:
            raise ValueError("largest is a magnitude of float32")
        if type(exponent) is bool or exponent != _exponent(largest):
            raise ValueError("exponent is not that of largest")
        result = cls()
        result.counts, result.exponent, result.largest = np.array(counts, np.int64), exponent, float(largest)
        return result


def _exponent(magnitude: float) -> int | None:
    """The exponent of the least power of two above the magnitude; None for zero."""
    return max(math.frexp(magnitude)[1], LEAST) if magnitude else None
