"""Circular padding, written as slices because no version of TensorRT reads ``mode="wrap"``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport


class Padded(nn.Module):
    def __init__(self, pads: tuple[int, ...]) -> None:
        super().__init__()
        self.pads = pads

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.pads, mode="circular")


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("pads", [(1, 2, 0, 0), (3, 1, 2, 4), (5, 4, 1, 0), (1, -1, -2, 1)])
def test_circular(pads, opset, tmp_path) -> None:
    model, x = Padded(pads), torch.randn(1, 2, 4, 5)
    report = svexport.export(model, x, tmp_path / "m.onnx", opset=opset, target="8.6" if opset == 11 else None)
    assert report.verified
    assert "Pad" not in report.nodes
    assert report.check is None or report.check.ok


@pytest.mark.parametrize("opset", [11, 18])
def test_circular_of_dynamic_sizes(opset, tmp_path) -> None:
    conv = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    axes = {"input": {0: "n", 2: "h", 3: "w"}}
    report = svexport.export(conv, torch.randn(1, 2, 4, 5), tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    assert report.verified
    for shape in ((2, 2, 1, 3), (1, 2, 7, 9), (3, 2, 2, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(svexport.load(report.path)(x), conv(x))
