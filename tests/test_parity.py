"""Compares parity with a plain numpy version of its definition, also on values where comparisons usually fail."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from svexport.parity import HISTOGRAM_RANGE, parity

pytestmark = pytest.mark.core

NAN, INF = math.nan, math.inf
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def compared(expected, actual, **options):
    return parity("y", torch.tensor(expected), torch.tensor(actual), **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 1, 5), (0, 4)])
def test_identical_tensors(dtype, shape):
    x = torch.randn(shape).to(dtype)
    p = parity("y", x, x.clone())
    assert p.ok
    assert (p.max_abs, p.max_rel, p.mismatched) == (0.0, 0.0, 0)
    assert p.cosine == pytest.approx(1.0)
    assert (p.shape, p.dtype) == (shape, str(dtype).removeprefix("torch."))
    assert sum(p.histogram) == p.histogram[0] == x.numel()


@pytest.mark.parametrize("rtol", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("atol", [0.0, 1e-4, 0.5])
def test_against_numpy(rtol, atol):
    rng = np.random.default_rng(0)
    e = rng.normal(size=(31, 17)) * 10.0 ** rng.integers(-6, 3, (31, 17))
    a = e * (1 + rng.normal(size=e.shape) * 10.0 ** rng.integers(-9, 0, e.shape))
    p = parity("y", torch.from_numpy(e), torch.from_numpy(a), rtol=rtol, atol=atol)
    error = np.abs(e - a)
    assert p.mismatched == int((~np.isclose(a, e, rtol=rtol, atol=atol)).sum())
    assert p.ok == np.allclose(a, e, rtol=rtol, atol=atol)
    assert p.max_abs == pytest.approx(error.max())
    tiny = np.finfo(np.float32).tiny
    assert p.max_rel == pytest.approx((error / np.maximum(np.abs(e), atol or tiny)).max())
    assert p.cosine == pytest.approx((e * a).sum() / np.linalg.norm(e) / np.linalg.norm(a))
    low, high = HISTOGRAM_RANGE
    edges = [-math.inf, *(10.0**d for d in range(low + 1, high)), math.inf]
    assert list(p.histogram) == np.histogram(error, edges)[0].tolist()


@pytest.mark.parametrize(
    ("expected", "actual", "wrong"),
    [
        ([1.0, NAN], [1.0, NAN], 0),
        ([1.0, NAN], [1.0, 0.0], 1),
        ([1.0, 0.0], [1.0, NAN], 1),
        ([INF, -INF], [INF, -INF], 0),
        ([INF, 1.0], [-INF, 1.0], 1),
        ([INF, 1.0], [1e30, 1.0], 1),
        ([1e30, 1.0], [INF, 1.0], 1),
        ([NAN, INF], [INF, NAN], 2),
        ([NAN], [NAN], 0),
        ([0.0], [-0.0], 0),
    ],
)
def test_nan_and_infinity(expected, actual, wrong):
    p = compared(expected, actual)
    assert p.mismatched == wrong
    assert p.ok == (wrong == 0)
    assert not math.isnan(p.max_abs)
    assert not math.isnan(p.max_rel)
    assert not math.isnan(p.cosine)
    assert math.isinf(p.max_abs) == bool(wrong)
    assert sum(p.histogram) == len(expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_agreement_at_infinity_changes_nothing_else(dtype):
    """Numbers that are all finite are compared on a shorter way."""
    e = torch.randn(50).to(dtype)
    a = (e + torch.randn(50) * 10.0 ** torch.randint(-6, 0, (50,))).to(dtype)
    ends = torch.tensor([INF, -INF, NAN], dtype=dtype)
    p, q = parity("y", e, a), parity("y", torch.cat((e, ends)), torch.cat((a, ends)))
    assert (q.max_abs, q.max_rel, q.mismatched) == (p.max_abs, p.max_rel, p.mismatched)
    assert q.cosine == pytest.approx(p.cosine, rel=1e-12)
    assert q.histogram == (p.histogram[0] + 3, *p.histogram[1:])


def test_an_infinite_expectation_does_not_widen_the_tolerance():
    assert compared([INF, 1.0], [INF, 1.5]).mismatched == 1


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 3), torch.zeros(6)),
        (torch.zeros(1), torch.zeros(())),
        (torch.zeros(0), torch.zeros(0, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.uint8)),
    ],
)
def test_other_shapes_and_types_never_agree(expected, actual):
    p = parity("y", expected, actual, rtol=1e9, atol=1e9)
    assert not p.ok
    assert p.mismatched >= 1
    assert p.max_abs == INF
    assert str(list(actual.shape)) in p.name
    assert str(actual.dtype).removeprefix("torch.") in p.name


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers_and_masks(dtype):
    e = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    a = torch.tensor([0, 1, 0, 0, 1]).to(dtype)
    assert parity("y", e, e.clone()).ok
    p = parity("y", e, a)
    assert (p.mismatched, p.max_abs) == (1, 1.0)


def test_complex():
    e = torch.randn(40, dtype=torch.complex64)
    assert parity("y", e, e.clone()).ok
    assert parity("y", e, e.conj()).mismatched > 30
    assert parity("y", e, e * 1j).max_abs == pytest.approx(float((e - e * 1j).abs().max()))


def test_cosine_of_zeros_and_of_opposites():
    assert compared([0.0, 0.0], [0.0, 0.0]).cosine == 1.0
    assert compared([0.0, 0.0], [1.0, 0.0]).cosine == 0.0
    assert compared([1.0, 2.0], [2.0, 4.0]).cosine == pytest.approx(1.0)


def test_it_computes_in_float64():
    e = torch.full((10,), 65504.0, dtype=torch.float16)  # its square, and the sum, overflow in half
    p = parity("y", e, e.clone())
    assert p.ok
    assert p.cosine == pytest.approx(1.0)


def test_views_gradients_and_names():
    x = torch.randn(6, 4, requires_grad=True)
    p = parity("boxes", x.t(), x.t().contiguous(), run="random")
    assert (p.ok, p.name, p.run) == (True, "boxes", "random")
    assert x.grad is None


def test_to_dict_is_json():
    fields = json.loads(json.dumps(compared([1.0, 2.0], [1.0, 3.0]).to_dict()))
    assert fields["ok"] is False
    assert fields["mismatched"] == 1
    assert fields["shape"] == [2]
    assert len(fields["histogram"]) == HISTOGRAM_RANGE[1] - HISTOGRAM_RANGE[0]
