"""``dynamic_shapes="auto"``: torch.export finds the batch sizes that a model allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import svexport


class Cameras(nn.Module):
    """Six images of each sample, in one axis; a scale that is no batch, and points that are another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: Tensor, poses: Tensor, scale: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(images).mean((2, 3)).view(poses.shape[0], 6, 4)
        return torch.einsum("bnc,bncd->bnd", features, poses) * scale, points * 2


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("batch", [1, 2])
def test_sizes_that_hang_together(batch: int, opset: int, tmp_path) -> None:
    args = torch.randn(6 * batch, 3, 8, 8), torch.randn(batch, 6, 4, 4), torch.randn(1), torch.randn(7, 4)
    report = svexport.export(Cameras(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes="auto")
    assert report.inputs == {
        "images": "float32[6*batch, 3, 8, 8]",
        "poses": "float32[batch, 6, 4, 4]",
        "scale": "float32[1]",
        "points": "float32[points_batch, 4]",
    }
    assert report.verified
    assert any("points_batch=" in p.run for p in report.parity)
    (note,) = (note for note in report.notes if note.startswith("dynamic_shapes='auto'"))
    assert note.endswith(
        "images (6*batch), poses (batch), points (points_batch); "
        "static, because the model uses the size as a number, for scale"
    )


def test_a_size_that_the_model_takes_for_a_number(tmp_path) -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            assert x.shape[0] == 2
            return x + y

    args = torch.randn(2, 3), torch.randn(2, 3)
    report = svexport.export(Pairs(), args, tmp_path / "m.onnx", opset=18, dynamic_shapes="auto")
    assert report.inputs == {"x": "float32[2, 3]", "y": "float32[2, 3]"}
    assert report.notes == [
        "dynamic_shapes='auto': the first size is dynamic for no inputs; "
        "static, because the model uses the size as a number, for x, y"
    ]


@pytest.mark.parametrize("opset", [11, 18])
def test_a_size_that_is_one_for_every_batch(opset: int, tmp_path: Path) -> None:
    """``depths.view(b, 1, n, -1)`` of ``(b, n)`` has a last size of 1, which is broadcast."""

    class Planes(nn.Module):
        def forward(self, x: Tensor, depths: Tensor) -> Tensor:
            batch, channels, height, width = x.shape
            points = x.view(batch, channels, 1, height * width)
            return points * depths.view(batch, 1, depths.shape[1], -1)

    args = torch.randn(2, 3, 4, 5), torch.randn(2, 7)
    report = svexport.export(Planes(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes="auto")
    assert report.verified
    assert not any("TorchScript" in note for note in report.notes)
    engine = svexport.load(report.path)
    for batch in (1, 5):
        x, depths = torch.randn(batch, 3, 4, 5), torch.randn(batch, 7)
        torch.testing.assert_close(engine(x, depths), x.flatten(2)[:, :, None] * depths[:, None, :, None])


def test_three_operands_where_opt_einsum_is_installed(tmp_path: Path) -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor, s: Tensor) -> Tensor:
            return torch.einsum("bi,bij,bj->b", x, s, x)

    args = torch.randn(2, 3), torch.randn(2, 3, 3)
    report = svexport.export(Gate(), args, tmp_path / "m.onnx", opset=18, dynamic_shapes="auto")
    x, s = torch.randn(5, 3), torch.randn(5, 3, 3)
    torch.testing.assert_close(svexport.load(report.path)(x, s), (x[:, None] @ s @ x[:, :, None]).flatten())


@pytest.mark.parametrize("opset", [11, 18])
def test_zeros_around_a_pool(opset: int, tmp_path: Path) -> None:
    """ONNX Runtime joins Pad and MaxPool, and pads with less than any number."""

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.max_pool2d(nn.functional.pad(x, [1, 1, 0, 1]), 3, 2)

    report = svexport.export(Pool(), torch.randn(1, 2, 7, 5), tmp_path / "m.onnx", opset=opset)
    x = -1 - torch.rand(1, 2, 7, 5)
    torch.testing.assert_close(svexport.load(report.path)(x), Pool()(x))
    assert not any("TorchScript" in note for note in report.notes)


def test_another_word(tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match="or 'auto', got 'all'"):
        svexport.export(Cameras(), (torch.zeros(1),) * 4, tmp_path / "m.onnx", dynamic_shapes="all")


def test_a_range_is_said(tmp_path) -> None:
    """With three rows forward goes another way, and the file is for four and more."""

    class Few(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(0) if x.shape[0] > 3 else x.sum(0)

    report = svexport.export(Few(), torch.randn(6, 4), tmp_path / "m.onnx", opset=11, dynamic_shapes="auto")
    assert any("first size is dynamic for x (batch from 4)" in note for note in report.notes), report.notes


@pytest.mark.parametrize("opset", [11, 18])
def test_a_model_that_torch_export_does_not_take(opset: int, tmp_path: Path) -> None:
    """It is told what to do about the axes, whatever the opset."""

    class Most(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, : int(x.amax())]

    with pytest.raises(
        svexport.ExportError, match=r"'auto' finds no axes.*\n  at .*test_batches.py.*\n  name the axes"
    ):
        svexport.export(Most(), torch.ones(2, 4), tmp_path / "m.onnx", opset=opset, dynamic_shapes="auto")
