"""linspace and logspace between tensors: both tracers, one step, none, infinities; integers are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import agrees, exported, results
from tests.exporter.aten.test_order import TRACED


def spans(x: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.linspace(x[0], x[1], 7),
        torch.linspace(x[0], 4.0, 50),
        torch.linspace(-3, x[1], 1),
        torch.linspace(x[1], x[0], 1),
        torch.linspace(x[0], x[1], 0),
        torch.linspace(x[0], x[1], 2, dtype=torch.float64),
    )


def powers(x: Tensor) -> tuple[Tensor, ...]:
    return torch.logspace(x[0], x[1], 5), torch.logspace(x[0], 2, 6, base=2.0), torch.logspace(1, x[1], 1)


@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("function", [spans, powers])
def test_between_tensors(function, opset: int, first: bool, tmp_path) -> None:
    exported(function, torch.randn(2), tmp_path, opset, first)
    engine = svexport.load(tmp_path / "m.onnx")
    for x in (torch.randn(2), torch.randn(2) * 9, torch.tensor([2.5, 2.5]), torch.tensor([0.0, -0.0])):
        for actual, expected in zip(results(engine(x)), results(function(x)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_one_step_is_the_first_number(opset: int, first: bool, tmp_path) -> None:
    """Whatever the second one is."""

    def function(x: Tensor) -> Tensor:
        return torch.linspace(x[0], x[1], 1)

    exported(function, torch.randn(2), tmp_path, opset, first)
    for pair in ([3.0, float("inf")], [-float("inf"), 4.0], [1e30, -1e30]):
        agrees(tmp_path, function, torch.tensor(pair))


@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("name", ["linspace", "logspace"])
def test_integers_are_refused(name: str, opset: int, first: bool, tmp_path) -> None:
    def function(x: Tensor) -> Tensor:
        return getattr(torch, name)(x[0], x[1], 5, dtype=torch.int64)

    with pytest.raises(svexport.ExportError, match="make floating-point numbers, and round"):
        exported(function, torch.tensor([1, 3]), tmp_path, opset, first)
    assert not list(tmp_path.iterdir())
