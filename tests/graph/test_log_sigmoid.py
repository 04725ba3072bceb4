"""Compares logarithms of sigmoids with torch, also for very negative arguments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import svexport


class Losses(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        likely = torch.sigmoid(2 * x)
        return likely.log(), likely, x.sigmoid().log().sum(1)


@pytest.mark.parametrize("opset", [9, 18])
def test_log_of_sigmoid(opset: int, tmp_path) -> None:
    report = svexport.export(Losses(), torch.randn(3, 7), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert report.nodes["Sigmoid"] == 1  # of which there is an output
    assert "Log" not in report.nodes
    engine = svexport.load(tmp_path / "m.onnx")
    for scale in (1e-3, 1, 10, 40, 1000):
        x = scale * torch.randn(3, 7)
        x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        for result, expected in zip(engine(x), Losses()(x), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_other_logarithms_stay(tmp_path) -> None:
    class Of(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return (x.sigmoid() + 1e-6).log(), x.double().sigmoid().log()

    assert svexport.export(Of(), torch.randn(5), tmp_path / "m.onnx", opset=17).nodes["Log"] == 2
