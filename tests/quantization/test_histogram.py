"""Histograms of magnitudes do not depend on how the values were split into batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from svexport import SvexportError
from svexport.quantization.histogram import BINS, Histogram


def of(*parts: torch.Tensor) -> Histogram:
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    return histogram


def same(a: Histogram, b: Histogram) -> bool:
    return a.to_dict() == b.to_dict()


@pytest.mark.core
@pytest.mark.parametrize("size", [1, 3, 4, 16, 1000])
def test_batches_of_any_size_give_the_same(size: int) -> None:
    x = torch.randn(1000, 7) * torch.logspace(-4, 5, 1000)[torch.randperm(1000)][:, None]
    x[5], x[17:20] = 0, 2.0**9  # a power of two is where the range ends
    assert same(of(x), of(*x.split(size)))


@pytest.mark.core
def test_against_numpy() -> None:
    x = torch.randn(3, 1001) * 3
    histogram = of(*x)
    counts, _ = np.histogram(x.abs().numpy(), BINS, (0, BINS * histogram.width))
    np.testing.assert_array_equal(histogram.counts, counts)
    assert histogram.largest == float(x.abs().max())
    assert BINS / 2 < histogram.used <= BINS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_strides_and_gradients(dtype: torch.dtype) -> None:
    x = torch.randn(5, 6, 7).to(dtype).transpose(0, 2)[::2]
    assert same(of(x.requires_grad_()), of(x.detach().float().contiguous()))


def test_zeros_and_nothing() -> None:
    assert same(of(torch.zeros(5), torch.zeros(0, 3), torch.tensor(3.0)), of(torch.tensor([0, 0, 3.0, 0, 0, 0])))
    nothing = of(torch.zeros(0))
    assert (nothing.exponent, nothing.counts.sum()) == (None, 0)
    assert of(torch.zeros(4)).counts[0] == 4


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 2.0**-126, 3e38])
def test_extreme_magnitudes(magnitude: float) -> None:
    histogram = of(torch.tensor([magnitude]), torch.tensor([magnitude / 2, 0]))
    assert histogram.counts.sum() == 3
    assert histogram.largest == float(torch.tensor(magnitude))
    assert same(histogram, Histogram.from_dict(json.loads(json.dumps(histogram.to_dict()))))


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite(value: float) -> None:
    with pytest.raises(SvexportError, match="infinity or NaN"):
        of(torch.tensor([1.0, value, 2.0]))


def test_to_a_file_and_back() -> None:
    histogram = of(torch.randn(99), torch.zeros(3))
    again = Histogram.from_dict(json.loads(json.dumps(histogram.to_dict())))
    assert same(histogram, again)
    for one in (histogram, again):
        one.add(torch.full((3,), 77.0))
    assert same(histogram, again)


@pytest.mark.parametrize(
    "change",
    [
        {"counts": [1] * 7},
        {"counts": [-1] * BINS},
        {"counts": [0.5] * BINS},
        {"counts": [2**62] * BINS},
        {"counts": "0"},
        {"exponent": 10**9},
        {"exponent": True},
        {"exponent": 7},
        {"exponent": None},
        {"largest": float("inf")},
        {"largest": -1},
        {"largest": "1"},
        {"largest": 1e300},
        {"more": 1},
    ],
    ids=str,
)
def test_damaged(change: dict[str, object]) -> None:
    data = of(torch.randn(99)).to_dict()
    with pytest.raises(ValueError, match=r"counts|exponent|largest"):
        Histogram.from_dict({**data, **change})
