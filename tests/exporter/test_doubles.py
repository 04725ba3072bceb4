"""Double-precision models: Python numbers in their arithmetic keep all digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: torch.add(x, x.sin(), alpha=0.1),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 9, value=0.1),
    "addcmul": lambda x: torch.addcmul(x, x, x.sin(), value=0.1),
    "arange": lambda x: x + torch.arange(0.1, 0.6, 0.1, dtype=torch.float64),
    "celu": lambda x: F.celu(x, 0.7),
    "deg2rad": torch.deg2rad,
    "elu": lambda x: F.elu(x, 0.7),
    "hardsigmoid": lambda x: F.hardsigmoid(7 * x),
    "hardswish": lambda x: F.hardswish(7 * x),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "linspace": lambda x: x + torch.linspace(0.1, 0.7, 5, dtype=torch.float64),
    "log10": lambda x: torch.log10(x.abs() + 1),
    "log2": lambda x: torch.log2(x.abs() + 1),
    "logspace": lambda x: x + torch.logspace(0.1, 0.7, 5, dtype=torch.float64),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.1),
    "rad2deg": torch.rad2deg,
    "seconds": lambda x: torch.arange(1.7e9 + 0.1, 1.7e9 + 0.6, 0.1, dtype=torch.float64)[: x.shape[0]] - 1.7e9 + x,
    "selu": F.selu,
    "softplus": lambda x: F.softplus(x, 0.7, 1.3),
    "sub": lambda x: torch.sub(x, x.sin(), alpha=0.3),
}


class Functions(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x) for function in FUNCTIONS.values())


@pytest.mark.parametrize("opset", [11, 18])
def test_numbers_keep_their_digits(opset: int, tmp_path: Path) -> None:
    x = torch.randn(5, 5, dtype=torch.float64)
    report = svexport.export(Functions(), x, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    for scale in (1, 3, 0):
        x = scale * torch.randn_like(x)
        outputs = svexport.load(tmp_path / "m.onnx")(x)
        for name, actual, expected in zip(FUNCTIONS, outputs, Functions()(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
