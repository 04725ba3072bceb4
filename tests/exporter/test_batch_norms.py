"""Convolutions with batch norms in half-precision files: each number is rounded only once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport


def moved(norm: nn.Module) -> nn.Module:
    """With statistics as training leaves them, some of them as small as ``eps``."""
    assert isinstance(norm, nn.BatchNorm2d)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    norm.running_var = 10 ** torch.empty(norm.num_features).uniform_(-6, 1)
    return norm


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_each_number_is_rounded_once(groups: int, bias: bool, opset: int, tmp_path: Path) -> None:
    conv, norm = nn.Conv2d(3, 9, (3, 2), groups=groups, bias=bias), moved(nn.BatchNorm2d(9))
    model, x = nn.Sequential(conv, norm).eval(), torch.randn(2, 3, 7, 5)
    options = {"opset": opset, "dtype": torch.float16, "rtol": 0.1, "atol": 0.1}
    report = svexport.export(model, x, tmp_path / "m.onnx", **options)  # type: ignore[arg-type]
    assert "BatchNormalization" not in report.nodes
    assert report.nodes["Conv"] == 1
    exact = {name: value.half().double() for name, value in model.state_dict().items()}
    gain = exact["1.weight"] / (exact["1.running_var"] + norm.eps).sqrt()
    start = exact["0.bias"] if bias else 0.0
    offset = (start - exact["1.running_mean"]) * gain + exact["1.bias"]
    expected = [exact["0.weight"] * gain[:, None, None, None], offset]
    held = [onnx.numpy_helper.to_array(one) for one in onnx.load(report.path).graph.initializer]
    found = [one for one in held if one.dtype == np.float16 and one.shape in {tuple(e.shape) for e in expected}]
    assert len(found) == 2
    for e, f in zip(expected, sorted(found, key=np.ndim, reverse=True), strict=True):
        # Half a unit in the last place, of the sum's terms where they cancel, and a little of float32.
        torch.testing.assert_close(torch.from_numpy(f.astype(np.float64)), e, rtol=2**-11 * 1.01, atol=1e-5)


class Twice(nn.Module):
    """What a norm is given is a result, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), moved(nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y, self.norm(y)


def test_what_is_used_twice_stays(tmp_path: Path) -> None:
    model, x = Twice().eval(), torch.randn(2, 3, 5, 4)
    report = svexport.export(model, x, tmp_path / "m.onnx", opset=18, dtype=torch.float16, rtol=0.1, atol=0.1)
    assert report.nodes["BatchNormalization"] == 1
    with torch.no_grad():
        expected = model(x)[0]
    torch.testing.assert_close(svexport.load(report.path)(x)[0].float(), expected, rtol=0.01, atol=0.01)
