"""Arithmetic on dynamic sizes that TorchScript does in float32 is refused if it gives another number than torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first

REFUSED = {
    "factor": lambda x: F.interpolate(x, scale_factor=0.7),
    "larger factor": lambda x: F.interpolate(x, scale_factor=1.3, mode="linear"),
    "computed size": lambda x: F.interpolate(x, scale_factor=0.7, recompute_scale_factor=True),
}
RIGHT = {
    "half": lambda x: F.interpolate(x, scale_factor=0.5),
    "twice": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "half, computed": lambda x: F.interpolate(x, scale_factor=0.5, recompute_scale_factor=True),
    "half a size": lambda x: F.interpolate(x, size=x.shape[2] // 2),
    "in a tensor": lambda x: x * (x.shape[2] * 0.7),
    "quotient": lambda x: x / math.sqrt(2) / x.shape[2],
}


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return x * 2
        return x


class Model(nn.Module):
    """With a scripted module, which torch.export does not take."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.scripted = function, torch.jit.script(Scripted())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.scripted(x))


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, opset: int, tmp_path) -> None:
    options = {"opset": opset, "dynamic_shapes": {"x": {2: "n"}}}
    with pytest.raises(svexport.ExportError, match="for some sizes the file makes another number of pixels than torch"):
        svexport.export(Model(REFUSED[name]), torch.randn(1, 2, 20), tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, opset: int, tmp_path) -> None:
    model = Model(RIGHT[name])
    axes = {"x": {2: "n"}}
    report = svexport.export(model, torch.randn(1, 2, 20), tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    assert [note for note in report.notes if "scripted" in note]
    engine = svexport.load(report.path)
    for n in (2, 10, 90, 170, 333):
        x = torch.randn(1, 2, n)
        torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", REFUSED)
def test_the_second_tracer(name: str, opset: int, tmp_path) -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return REFUSED[name](x)

    with torch_export_first(False), pytest.raises(svexport.ExportError, match="another number of pixels"):
        svexport.export(
            Plain(), torch.randn(1, 2, 20), tmp_path / "m.onnx", opset=opset, dynamic_shapes={"x": {2: "n"}}
        )
