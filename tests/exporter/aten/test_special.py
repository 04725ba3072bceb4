"""Compares special functions, and functions of positions, with torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import exported, results
from tests.exporter.aten.test_pair import TRACED


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_inverse_error_function(opset: int, first: bool, tmp_path) -> None:
    exported(lambda x: torch.erfinv(x), torch.rand(2, 999) * 2 - 1, tmp_path, opset, first)
    near_one = 1 - 2.0 ** -torch.arange(1.0, 25.0).repeat(42)[:999]
    x = torch.stack([torch.linspace(-1, 1, 999), near_one])
    x[0, ::100] = torch.tensor([-1.0, 1.0, 0.0, -0.0, torch.nan, 2.0, -2.0, torch.inf, 1e-30, -1e-40])
    actual = svexport.load(tmp_path / "m.onnx")(x)
    torch.testing.assert_close(actual, torch.erfinv(x.double()).float(), rtol=1e-6, atol=0, equal_nan=True)


def binned(x: Tensor) -> tuple[Tensor, ...]:
    places = (x[0] * 3).abs().to(torch.int32)
    return torch.bincount(places, x[1], minlength=3), places.bincount(x[1].double()), torch.bincount(places, places)


@pytest.mark.parametrize("opset", [11, 20])
@pytest.mark.parametrize(
    "function",
    [
        binned,
        lambda x: torch.combinations(x[0]),
        lambda x: (torch.combinations(x[0, :5], 3, with_replacement=True), torch.combinations(x[0, :2], 3)),
    ],
    ids=["bincount", "combinations", "combinations of three"],
)
def test_places(function: Callable[[Tensor], Tensor], opset: int, tmp_path) -> None:
    exported(function, torch.randn(2, 7), tmp_path, opset, True)
    engine = svexport.load(tmp_path / "m.onnx")
    for x in (torch.randn(2, 7), torch.randn(2, 7) * 9, torch.zeros(2, 7)):
        for actual, expected in zip(results(engine(x)), results(function(x)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
