"""Chooses, from a histogram of magnitudes, the magnitude that the largest quantized number represents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from svexport.errors import SvexportError
from svexport.quantization.histogram import Histogram

__all__ = ["METHODS", "calibrate", "check_method"]

LEVELS = 128
"""Magnitudes of int8."""

_CHUNK = 128
"""Candidates that are looked at together."""


def calibrate(histogram: Histogram, method: str, percentile: float) -> float:
    """The magnitude ``amax`` that 127 stands for; the scale is ``amax / 127``. Zero where all elements were zero."""
    if histogram.exponent is None:
        return 0.0
    return METHODS[method](histogram, percentile)


def check_method(method: str, percentile: float) -> None:
    """Raises:
    SvexportError: if the method is not one of :data:`METHODS`, or the percentile is out of range.
    """
    if method not in METHODS:
        raise SvexportError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if not 0 < percentile <= 100:
        raise SvexportError(f"percentile: expected a number above 0 and up to 100, got {percentile!r}")


def _minmax(histogram: Histogram, _: float) -> float:
    return histogram.largest


def _percentile(histogram: Histogram, percentile: float) -> float:
    """The upper edge of the bin in which so many per cent of all elements are reached."""
    reached = histogram.counts.cumsum()
    place = int(np.searchsorted(reached, percentile / 100 * reached[-1]))
    return min((place + 1) * histogram.width, histogram.largest)


def _mse(histogram: Histogram, _: float) -> float:
    """The upper edge of a bin with the least mean squared error, every element at the middle of its bin."""
    used = histogram.used
    counts = histogram.counts[:used].astype(np.float64)
    middles = (np.arange(used) + 0.5) * histogram.width
    edges = np.minimum((np.arange(used) + 1) * histogram.width, histogram.largest)
    errors = np.empty(used)
    for start in range(0, used, _CHUNK):
        scales = edges[start : start + _CHUNK, None] / (LEVELS - 1)  # (candidates, 1)
        values = np.minimum(np.rint(middles / scales), LEVELS - 1) * scales  # (candidates, used)
        errors[start : start + _CHUNK] = (counts * (middles - values) ** 2).sum(1)
    return float(edges[errors.argmin()])


def _entropy(histogram: Histogram, _: float) -> float:
    """The upper edge of a bin with the least Kullback-Leibler divergence, the largest of them, as TensorRT has it.

    What lies beyond is counted in the last bin. The quantized distribution has 128 levels, each spread over its bins
    that are not empty. Source: S. Migacz, 8-bit Inference with TensorRT, GTC 2017. The first bin, with all zeros of a
    ReLU, counts like the second.
    """
    used = histogram.used
    if used <= LEVELS:
        return histogram.largest
    counts = histogram.counts[:used].astype(np.float64)
    counts[0] = counts[1]
    if not counts.any():
        return histogram.largest
    full = (counts > 0).astype(np.float64)
    divergences = np.array([_divergence(counts, full, bins) for bins in range(LEVELS, used + 1)])
    if not np.isfinite(divergences).any():
        return histogram.largest
    best = len(divergences) - 1 - int(divergences[::-1].argmin())
    return min((best + LEVELS) * histogram.width, histogram.largest)


def _divergence(counts: npt.NDArray[np.float64], full: npt.NDArray[np.float64], bins: int) -> float:
    """Divergence of the first ``bins`` bins (the last holds all beyond) from their quantization to 128 levels."""
    starts = -(-np.arange(LEVELS) * bins // LEVELS)  # the first bin of every level
    held = np.add.reduceat(full[:bins], starts)
    level = np.add.reduceat(counts[:bins], starts) / np.maximum(held, 1)
    quantized = np.repeat(level, np.diff(starts, append=bins)) * full[:bins]
    reference = counts[:bins].copy()
    reference[-1] += counts[bins:].sum()
    some = reference > 0
    reference, quantized = reference[some], quantized[some]
    if not quantized.all():
        return np.inf
    ratio = reference / quantized * (quantized.sum() / reference.sum())
    return float((reference * np.log(ratio)).sum() / reference.sum())


METHODS: dict[str, Callable[[Histogram, float], float]] = {
    "entropy": _entropy,
    "minmax": _minmax,
    "mse": _mse,
    "percentile": _percentile,
}
