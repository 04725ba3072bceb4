"""Compares each method with its definition, computed the slow way from the elements themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from svexport import SvexportError
from svexport.quantization.calibrators import METHODS, calibrate, check_method
from svexport.quantization.histogram import Histogram

DISTRIBUTIONS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: torch.randn(20000),
    "uniform": lambda: torch.rand(20000) * 3 - 1,
    "laplace": lambda: torch.distributions.Laplace(0.0, 1.0).sample((20000,)),
    "heavy": lambda: torch.distributions.StudentT(2.5).sample((20000,)),
    "heavier": lambda: torch.distributions.StudentT(1.2).sample((5000,)),
    "relu": lambda: torch.randn(20000).relu(),
    "mostly_zero": lambda: torch.randn(20000) * (torch.rand(20000) < 0.01),
    "bimodal": lambda: torch.cat([torch.randn(10000) * 0.1 + 4, torch.randn(10000) * 0.1 - 1]),
    "outlier": lambda: torch.cat([torch.randn(20000), torch.tensor([60.0])]),
    "few": lambda: torch.tensor([0.0, 0.25, 1.0, 7.0, 7.0]),
}


def histogram_of(x: torch.Tensor) -> Histogram:
    histogram = Histogram()
    histogram.add(x)
    return histogram


def kl_definition(histogram: Histogram) -> float:
    """What TensorRT's presentation tells, bin by bin."""
    counts = [float(n) for n in histogram.counts[: histogram.used]]
    counts[0] = counts[1]
    best, least = None, np.inf
    for bins in range(128, len(counts) + 1):
        p = counts[:bins]
        q, levels = [0.0] * bins, defaultdict(list)
        for i in range(bins):
            levels[i * 128 // bins].append(i)
        for inside in levels.values():
            full = [i for i in inside if counts[i]]
            for i in full:
                q[i] = sum(counts[j] for j in full) / len(full)
        p[-1] += sum(counts[bins:])
        if any(b == 0 and a > 0 for a, b in zip(p, q, strict=True)):
            continue
        total_p, total_q = sum(p), sum(q)
        terms = [a / total_p * np.log((a / total_p) / (b / total_q)) for a, b in zip(p, q, strict=True) if a]
        divergence = sum(terms)
        if divergence <= least * (1 + 1e-12):
            best, least = bins, min(divergence, least)
    return histogram.largest if best is None else min(best * histogram.width, histogram.largest)


def mean_squared_error(x: torch.Tensor, largest: float) -> float:
    x = x.double()
    scale = largest / 127
    return float(((x / scale).round().clamp(-127, 127) * scale - x).square().mean())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_minmax_and_percentile(name: str) -> None:
    x = DISTRIBUTIONS[name]()
    histogram = histogram_of(x)
    assert calibrate(histogram, "minmax", 1) == float(x.abs().max())
    for percentile in (50, 99, 99.9, 100):
        exact = float(np.percentile(x.abs().numpy(), percentile, method="inverted_cdf"))
        found = calibrate(histogram, "percentile", percentile)
        assert -1e-12 <= found - exact <= histogram.width * (1 + 1e-9)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_mse(name: str) -> None:
    """No edge of a bin has a smaller error, but for what a bin's width blurs."""
    x = DISTRIBUTIONS[name]()
    histogram = histogram_of(x)
    found = mean_squared_error(x, calibrate(histogram, "mse", 1))
    edges = np.linspace(0, histogram.largest, 300)[1:]
    assert found <= min(mean_squared_error(x, edge) for edge in edges) * 1.02 + histogram.width**2 / 12


@pytest.mark.parametrize("name", ["heavy", "relu", "bimodal", "few", "outlier"])
def test_entropy(name: str) -> None:
    histogram = histogram_of(DISTRIBUTIONS[name]())
    # The definition takes seconds of a whole histogram: the range four times as large leaves a quarter of it.
    histogram._reach(histogram.largest * 4)
    assert abs(calibrate(histogram, "entropy", 1) - kl_definition(histogram)) <= histogram.width


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_entropy_of_a_whole_histogram(name: str) -> None:
    histogram = histogram_of(DISTRIBUTIONS[name]())
    assert abs(calibrate(histogram, "entropy", 1) - kl_definition(histogram)) <= histogram.width


@pytest.mark.parametrize("method", METHODS)
def test_heavy_tails_are_cut_off_but_by_minmax(method: str) -> None:
    x = DISTRIBUTIONS["heavy"]()
    found, largest = calibrate(histogram_of(x), method, 99.9), float(x.abs().max())
    assert (found == largest) if method == "minmax" else (float(x.std()) < found < largest)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("x", [torch.zeros(5), torch.zeros(0), torch.full((3,), -2.5), torch.tensor(1e-40)], ids=str)
def test_hardly_anything(x: torch.Tensor, method: str) -> None:
    largest = float(x.abs().max()) if x.numel() else 0.0
    assert calibrate(histogram_of(x), method, 99.99) == largest


def test_arguments() -> None:
    with pytest.raises(SvexportError, match="method: expected one of entropy, minmax, mse, percentile, got 'max'"):
        check_method("max", 99)
    for percentile in (0, -1, 100.1, float("nan")):
        with pytest.raises(SvexportError, match="percentile: expected a number above 0 and up to 100"):
            check_method("percentile", percentile)
