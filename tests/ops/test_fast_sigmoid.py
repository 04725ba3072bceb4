from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.ops.fast_sigmoid import OP, FastSigmoid, FastTanh, fast_sigmoid, fast_tanh
from tests.support import OPSETS, run_op

GRID = torch.cat([torch.linspace(-40, 40, 80_001, dtype=torch.float64), torch.logspace(-9, 18, 2_000).double()])
SPECIAL = torch.tensor([-math.inf, -3e38, -1e20, -300.0, -0.0, 0.0, 1e-40, 300.0, 1e20, 3e38, math.inf, math.nan])


def test_formula() -> None:
    x = GRID.numpy()
    expected = 0.5 * (1 + x * np.abs(x) / (x * x + 0.975))
    np.testing.assert_allclose(fast_sigmoid(GRID).numpy(), expected, rtol=0, atol=2e-16)


def test_error() -> None:
    """0.032 and no better, at about 0.28; the often-copied form is off by 0.38."""
    error = (fast_sigmoid(GRID) - torch.sigmoid(GRID)).abs()
    assert 0.032 < error.max() < 0.0324
    assert 0.27 < GRID[error.argmax()].abs() < 0.29
    error = (fast_tanh(GRID) - torch.tanh(GRID)).abs()
    assert 0.064 < error.max() < 0.0647
    copied = 0.5 * (GRID / (0.975 / GRID.abs() + GRID.abs() + 1))
    assert (copied - torch.sigmoid(GRID)).nan_to_num().abs().max() > 0.38


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_monotone_symmetric_and_bounded(dtype) -> None:
    x = GRID.clamp(-6e4, 6e4).to(dtype).sort().values
    y = fast_sigmoid(x)
    assert (y.diff() >= 0).all()
    assert (y >= 0).all()
    assert (y <= 1).all()
    torch.testing.assert_close(fast_sigmoid(-x), 1 - y, rtol=0, atol=torch.finfo(dtype).eps)
    assert fast_sigmoid(torch.zeros(1, dtype=dtype)) == 0.5
    error = (y.double() - torch.sigmoid(x.double())).abs().max()
    assert error < 0.0324 + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_limits(dtype) -> None:
    y = fast_sigmoid(SPECIAL.to(dtype))
    expected = [0, 0, 0, 0, 0.5, 0.5, 0.5, 1, 1, 1, 1, math.nan]
    torch.testing.assert_close(y.double(), torch.tensor(expected).double(), rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(fast_tanh(SPECIAL.to(dtype)), 2 * y - 1, equal_nan=True, rtol=0, atol=1e-5)


def test_the_left_tail_keeps_its_digits() -> None:
    x = -torch.logspace(0, 6, 50)
    torch.testing.assert_close(fast_sigmoid(x).double(), 0.4875 / (x.double() ** 2 + 0.975), rtol=3e-7, atol=0)


@pytest.mark.parametrize("opset", OPSETS)
def test_body(opset) -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        x = torch.cat([GRID[::97].to(dtype), SPECIAL.to(dtype)])
        for dynamic in (False, True):
            (y,) = run_op(OP, (x,), opset, dynamic=dynamic)
            torch.testing.assert_close(y, fast_sigmoid(x), rtol=0, atol=float(torch.finfo(dtype).eps), equal_nan=True)


@pytest.mark.parametrize("function", [fast_sigmoid, fast_tanh])
def test_integers_are_refused(function) -> None:
    with pytest.raises(TypeError, match=r"expects a floating-point tensor, got torch.int64"):
        function(torch.arange(3))


def test_gradient_far_out_is_finite() -> None:
    x = torch.tensor([-1e30, -1e10, 0.0, 1e10, 1e30], requires_grad=True)
    (gradient,) = torch.autograd.grad(fast_sigmoid(x).sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("opset", [11, 18])
def test_export_of_modules(opset, tmp_path) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sigmoid, self.tanh = FastSigmoid(), FastTanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.sigmoid(x) * self.tanh(x)

    report = svexport.export(Gate(), torch.randn(3, 4) * 5, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert report.traced_nodes["SvFastSigmoid"] == 2


def test_sigmoid_itself_is_left_alone(tmp_path) -> None:
    report = svexport.export(nn.Sigmoid(), torch.randn(3, 4), tmp_path / "m.onnx")
    assert "SvFastSigmoid" not in report.traced_nodes
