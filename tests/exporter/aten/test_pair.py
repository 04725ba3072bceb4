"""fmax, fmin, hypot and isin: NaN, infinities, large and small numbers, types, broadcasting, dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import exported, results

TRACED = [(11, True), (11, False), (17, True), (20, True)]
"""Opset, and whether torch.export traces below 18."""

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fmax": lambda x: torch.fmax(x, x.roll(1, 1)),
    "fmax of types": lambda x: (x * 3).nan_to_num(0, 9, -9).to(torch.int32).fmax(x[:1]),
    "fmin": lambda x: torch.fmin(x, x.roll(1, 1)),
    "fmin of integers": lambda x: torch.fmin(
        (x * 3).nan_to_num(0, 9, -9).long(), torch.tensor([[1], [2]]).flatten()[:1]
    ),
    "both of masks": lambda x: torch.fmax(x > 0, x[:1] < 0.5) == torch.fmin(x > 1, x > 0),
    "hypot": lambda x: torch.hypot(x, x.roll(1, 1)),
    "isin": lambda x: torch.isin(x.round(), x[:, :2].round()),
    "isin, inverted": lambda x: torch.isin(x.round(), torch.tensor([0, 1]), invert=True),
    "isin of a number": lambda x: torch.isin(x.round(), 1),
}


@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pairs(name: str, opset: int, first: bool, tmp_path) -> None:
    function = FUNCTIONS[name]
    exported(function, torch.randn(4, 7), tmp_path, opset, first, dynamic_shapes={"x": {0: "n"}})
    engine = svexport.load(tmp_path / "m.onnx")
    for rows in (1, 4, 11):
        x = torch.randn(rows, 7)
        extremes = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 3e38, -3e38, 1e-30]).expand(rows, 7)
        both = torch.where(torch.rand(rows, 7) < 0.6, extremes, x)
        for given in (x, extremes.contiguous(), both):
            if "types" in name or "integers" in name:
                given = given.nan_to_num(0, 5, -5).clamp(-9, 9) if "integers" in name else given.clamp(-9, 9)
            for actual, expected in zip(results(engine(given)), results(function(given)), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0, equal_nan=True)
