"""Finding where in a tensor an error lies."""

from __future__ import annotations

import json
import math

import pytest
import torch

from svexport.runtime.where import BINS, locate


def test_one_channel() -> None:
    expected = torch.zeros(2, 64, 5, 5)
    actual = expected.clone()
    actual[:, 17] += 0.5
    actual[:, 3:6, 2, 2] += 0.25
    where = locate("y", expected, actual, rtol=1e-3, atol=1e-4)
    assert where is not None
    assert str(where) == "on axis 1 only at 3-5, 17 (of 64)"
    assert where.outside[1] == ((3, 5), (17, 17))
    assert [where.largest[1][i] for i in (3, 17, 20)] == [0.25, 0.5, 0.0]
    assert where.largest[0] == (0.5, 0.5)
    assert json.dumps(where.to_dict())


def test_it_agrees_with_a_loop_over_all_indices() -> None:
    expected, actual = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    where = locate("y", expected, actual, rtol=0.1, atol=0.5)
    assert where is not None
    error = (expected.double() - actual.double()).abs()
    beyond = error > 0.5 + 0.1 * expected.double().abs()
    for axis, size in enumerate(expected.shape):
        for index in range(size):
            assert where.largest[axis][index] == float(error.select(axis, index).max())
            inside = any(first <= index <= last for first, last in where.outside[axis])
            assert inside == bool(beyond.select(axis, index).any())


def test_everywhere_and_many_places() -> None:
    everywhere = locate("y", torch.zeros(4, 4), torch.ones(4, 4), rtol=0, atol=0)
    assert str(everywhere) == "all over the tensor"
    actual = torch.zeros(100)
    actual[::4] = 1
    assert (
        str(locate("y", torch.zeros(100), actual, rtol=0, atol=0))
        == "on axis 0 only at 0, 4, 8, 12, 16, 20, … (of 100)"
    )


def test_long_axes_are_binned() -> None:
    actual = torch.zeros(10_001)
    actual[10_000] = 3
    where = locate("y", torch.zeros(10_001), actual, rtol=0, atol=0)
    assert where is not None
    assert len(where.largest[0]) <= BINS
    assert where.largest[0][-1] == 3
    assert where.outside == (((10_000, 10_000),),)


def test_numbers_that_are_not_finite() -> None:
    expected = torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0])
    where = locate("y", expected, torch.tensor([math.nan, math.nan, math.inf, math.inf, 2.0]), rtol=0, atol=0)
    assert where is not None
    assert where.outside == (((0, 0), (3, 3)),)
    assert where.largest[0] == (math.inf, 0.0, 0.0, math.inf, 0.0)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (torch.ones(3), torch.ones(3) * 1.0001),  # within the tolerances
        (torch.ones(3), torch.ones(4)),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (torch.tensor(1.0), torch.tensor(2.0)),  # no axes
    ],
)
def test_nothing_to_say(expected: torch.Tensor, actual: torch.Tensor) -> None:
    assert locate("y", expected, actual, rtol=1e-3, atol=1e-4) is None


def test_integers_booleans_and_complex() -> None:
    for expected, actual in (
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])),
        (torch.tensor([True, True, True]), torch.tensor([True, True, False])),
        (torch.tensor([1j, 2, 3]), torch.tensor([1j, 2, 4])),
    ):
        where = locate("y", expected, actual, rtol=0, atol=0.5)
        assert where is not None
        assert where.outside == (((2, 2),),)
