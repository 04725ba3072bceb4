"""Unedited ``Tensor.unfold``, which goes through the op at opset 17 and below."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first


class Windows(nn.Module):
    def __init__(self, dimension: int, size: int, step: int) -> None:
        super().__init__()
        self.numbers = (dimension, size, step)

    def forward(self, x: Tensor) -> Tensor:
        return x.unfold(*self.numbers) + 1


@pytest.mark.parametrize("opset", [9, 11, 17, 18])
@pytest.mark.parametrize("numbers", [(1, 3, 2), (-1, 3, 1), (-2, 4, 4), (0, 2, 2)], ids=str)
def test_every_dimension(numbers, opset, tmp_path) -> None:
    report = svexport.export(Windows(*numbers), torch.randn(2, 9, 5), tmp_path / "m.onnx", opset=opset)
    assert report.verified


@pytest.mark.parametrize("opset", [9, 11, 17])
@pytest.mark.parametrize("numbers", [(1, 3, 2), (-2, 4, 4), (2, 2, 2)], ids=str)
def test_dynamic(numbers, opset, tmp_path) -> None:
    report = svexport.export(
        Windows(*numbers), torch.randn(2, 9, 5), tmp_path / "m.onnx", opset=opset, dynamic_axes={"x": [0, 1]}
    )
    assert report.verified
    assert any("x_dim_1=11" in p.run for p in report.parity)


def test_windows_that_follow_one_another_are_cut(tmp_path) -> None:
    with torch_export_first(False):
        report = svexport.export(Windows(1, 4, 4), torch.randn(2, 12, 5), tmp_path / "m.onnx")
    assert "Gather" not in report.nodes
