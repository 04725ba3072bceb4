"""Covariance and correlation: weights, one or no variable, a correction above the observations, dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import exported
from tests.exporter.aten.test_pair import TRACED


def weighted(x: Tensor) -> Tensor:
    counts = (x[0] * 3).abs().long() + 1
    return torch.cov(x[1:], correction=2, fweights=counts, aweights=x[1].abs() + 0.1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cov": torch.cov,
    "cov of counted": lambda x: x.cov(correction=0, fweights=(x[0] * 3).abs().long() + 1),
    "cov of weighted": weighted,
    "cov of integers": lambda x: (x * 9).long().cov(),
    "variance": lambda x: torch.cov(x[1]),
    "none": lambda x: torch.cov(x[:, :1]),
    "corrcoef": torch.corrcoef,
    "corrcoef of one": lambda x: x[1].corrcoef(),
}


@pytest.mark.filterwarnings("ignore:cov")
@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_covariance(name: str, opset: int, first: bool, tmp_path) -> None:
    function = FUNCTIONS[name]
    exported(function, torch.randn(5, 7), tmp_path, opset, first, dynamic_shapes={"x": {1: "observations"}})
    engine = svexport.load(tmp_path / "m.onnx")
    for x in (torch.randn(5, 7), torch.randn(5, 31) * 1e3 + 5, torch.randn(5, 3)):
        expected = function(x.double() if "integers" not in name else x)
        torch.testing.assert_close(engine(x), expected.float(), rtol=1e-4, atol=1e-5, equal_nan=True)
    x = torch.randn(5, 7)
    x[2, 3] = torch.inf
    torch.testing.assert_close(engine(x), function(x), rtol=1e-4, atol=1e-5, equal_nan=True)
