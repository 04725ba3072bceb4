"""Unedited ``F.max_pool2d`` of images without a batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport


class Peaks(nn.Module):
    """0 where a score is the largest of its neighbourhood."""

    def forward(self, scores: Tensor) -> Tensor:
        return F.max_pool2d(scores, 5, stride=1, padding=2) - scores


@pytest.mark.parametrize("opset", [9, 11, 17, 18])
@pytest.mark.parametrize("shape", [(2, 9, 11), (2, 3, 9, 11)], ids=str)
def test_with_and_without_a_batch(shape, opset, tmp_path) -> None:
    report = svexport.export(Peaks(), torch.randn(shape), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert report.nodes["MaxPool"] == 1


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d((3, 2), (2, 1), 1), nn.MaxPool2d(3, 1, 1, 2), nn.MaxPool2d(2, ceil_mode=True)],
    ids=str,
)
def test_options(pool, opset, tmp_path) -> None:
    x = torch.randn(3, 9, 11)
    assert svexport.export(pool, x, tmp_path / "m.onnx", opset=opset).verified
    report = svexport.export(pool, x, tmp_path / "d.onnx", opset=opset, dynamic_axes={"input": [0, 1, 2]})
    assert report.verified
