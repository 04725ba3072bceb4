from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.ops.add_bias_residual_layer_norm import OP, AddBiasResidualLayerNorm, add_bias_residual_layer_norm
from tests.support import OPSETS, run_op

SHAPES = [(2, 3, 7), (1,), (5, 1), (13, 17), (0, 4), (2, 1, 3, 8)]
EXTRA = pytest.mark.parametrize("extra", [False, True])


def problem(shape: tuple[int, ...], extra: bool, dtype: torch.dtype = torch.float64) -> tuple:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])

    def make(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)

    d = shape[-1]
    return make(*shape), make(d), make(*shape), make(d), make(d), 1e-3, make(*shape) if extra else None


def by_hand(x, bias, residual, weight, norm_bias, eps, extra) -> tuple[np.ndarray, np.ndarray]:
    x, bias, residual, weight, norm_bias = (t.double().numpy() for t in (x, bias, residual, weight, norm_bias))
    s = x + bias + residual + (0 if extra is None else extra.double().numpy())
    centred = s - s.sum(-1, keepdims=True) / s.shape[-1]
    deviation = np.sqrt((centred * centred).sum(-1, keepdims=True) / s.shape[-1] + eps)
    return centred / deviation * weight + norm_bias, s


@EXTRA
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, extra) -> None:
    args = problem(shape, extra)
    for actual, expected in zip(add_bias_residual_layer_norm(*args), by_hand(*args), strict=True):
        torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


@EXTRA
@pytest.mark.parametrize("opset", OPSETS)
def test_body(opset, extra) -> None:
    for shape in SHAPES[:3] + SHAPES[-2:-1]:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.float64, 1e-11)):
            args = problem(shape, extra, dtype)
            expected = by_hand(*args[:5], np.float32(args[5]), args[6])
            for dynamic in (False, True):
                for actual, e in zip(run_op(OP, args, opset, dynamic=dynamic), expected, strict=True):
                    assert actual.dtype == dtype
                    torch.testing.assert_close(actual.double(), torch.from_numpy(e), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("opset", [None, 9, 17, 20])
def test_half_normalises_the_sum_before_it_is_rounded(opset) -> None:
    """Around 2048 half knows even numbers only: the rounded sum is constant, the true one is not."""
    x = torch.tensor([[0.25, -0.25, 0.5, -0.5, 0.125, 0.375]]).half()
    args = x, torch.zeros(6).half(), torch.full((1, 6), 2048.0).half(), torch.ones(6).half(), torch.zeros(6).half()
    args += 1e-5, None
    y, s = OP(*args) if opset is None else run_op(OP, args, opset)
    assert (s == 2048).all()
    torch.testing.assert_close(y.double(), F.layer_norm(x.double(), (6,)), rtol=1e-2, atol=1e-2)


def test_gradients_are_those_of_the_composition() -> None:
    for extra in (False, True):
        args = problem((3, 5), extra)
        tensors = [t.requires_grad_() for t in args if isinstance(t, Tensor)]
        x, bias, residual, weight, norm_bias, eps, more = args
        s = x + bias + residual + (more if extra else 0)
        expected = torch.autograd.grad((F.layer_norm(s, (5,), weight, norm_bias, eps) * s.sin()).sum(), tensors)
        y, s = add_bias_residual_layer_norm(*args)
        for a, e in zip(torch.autograd.grad((y * s.sin()).sum(), tensors), expected, strict=True):
            torch.testing.assert_close(a, e)


def test_module_takes_the_parameters_of_layer_norm() -> None:
    norm = nn.LayerNorm(8, eps=1e-3)
    for p in norm.parameters():
        nn.init.normal_(p)
    fused = AddBiasResidualLayerNorm(8, eps=1e-3)
    fused.load_state_dict(norm.state_dict())
    linear = nn.Linear(5, 8)
    x, residual, position = torch.randn(2, 3, 5), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    for extra in ((), (position,)):
        y, s = fused(F.linear(x, linear.weight), linear.bias, residual, *extra)
        total = linear(x) + residual + sum(extra)
        torch.testing.assert_close(s, total)
        torch.testing.assert_close(y, norm(total))


def test_errors() -> None:
    x, bias, residual, weight, norm_bias, eps, _ = problem((2, 3), False)
    for wrong in (
        (x, bias[:2], residual, weight, norm_bias),
        (x, bias, residual[:1], weight, norm_bias),
        (x, bias, residual, weight[None], norm_bias),
        (x, bias, residual, weight, norm_bias, eps, x[0]),
        (x[0, 0], bias, x[0, 0], weight, norm_bias),
    ):
        with pytest.raises(ValueError, match=r"expects x, residual, extra \(\*, D\) .* got x \("):
            add_bias_residual_layer_norm(*wrong)
    with pytest.raises(TypeError, match=r"expects a floating-point x, got torch.int64"):
        add_bias_residual_layer_norm(x.long(), bias, residual, weight, norm_bias)
    with pytest.raises(ValueError, match="normalizes one dimension"):
        AddBiasResidualLayerNorm([3, 4])


@pytest.mark.parametrize("opset", [9, 17, 18])
def test_export(opset, tmp_path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.last = (
                nn.Linear(8, 8),
                AddBiasResidualLayerNorm(8),
                AddBiasResidualLayerNorm(8),
            )

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            y, s = self.norm(F.linear(x, self.linear.weight), self.linear.bias, x, position)
            return self.last(F.linear(y, self.linear.weight), self.linear.bias, s)[0]

    shapes = {"x": {0: "n"}, "position": {0: "n"}}
    args = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    report = svexport.export(Block(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes)
    assert report.verified
    nodes = [n for n in onnx.load(report.path).graph.node if n.op_type == "SvAddBiasResidualLayerNorm"]
    assert [sum(map(bool, n.input)) for n in nodes] == [6, 5]
