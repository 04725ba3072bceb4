from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import svexport
from svexport.ops import quantize
from svexport.ops.dequantize import DTYPES, OP, dequantize
from tests.support import OPSETS, op_model, run_op

ALL_OPSETS = sorted({*OPSETS, 10, 12, 19, 21})
EVERY = torch.arange(-128, 128).to(torch.int8)
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.float64: np.float64}


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.0078125, 3e4, 1e-9])
def test_values(scale, dtype) -> None:
    """The product in float32 at least, rounded once to the dtype."""
    precise = np.promote_types(NUMPY[dtype], np.float32)
    with np.errstate(over="ignore"):
        expected = (EVERY.numpy().astype(precise) * np.float32(scale).astype(precise)).astype(NUMPY[dtype])
    for step in (scale, torch.tensor(scale), torch.tensor([scale])):
        y = dequantize(EVERY, step, dtype)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.numpy(), expected)


def test_bfloat16() -> None:
    y = dequantize(EVERY, 0.1, torch.bfloat16)
    assert torch.equal(y, (EVERY.float() * 0.1).bfloat16())


@settings(deadline=None, derandomize=True, database=None)
@given(
    x=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9),
    scale=st.floats(2.0**-20, 2.0**10, width=32),
)
def test_round_trip_is_within_half_a_step(x, scale) -> None:
    x = torch.tensor(x)
    inside = x.abs() <= 127 * scale
    error = (dequantize(quantize(x, scale), scale, torch.float64) - x.double()).abs()
    assert (error[inside] <= 0.5 * scale * (1 + 1e-5)).all()


@pytest.mark.parametrize("opset", ALL_OPSETS)
def test_body(opset) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, axis in [((2, 5, 3, 2), 1), ((4, 3), 0), ((2, 7), 1), ((3, 1), 1), ((11,), 0), ((2, 0, 3), 1)]:
        q = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        for dtype in NUMPY:
            scales = torch.rand(shape[axis], generator=generator).to(dtype) + 0.01
            size = [-1 if i == axis else 1 for i in range(q.dim())]
            expected = (q.double() * scales.double().reshape(size)).to(dtype)
            for dynamic in (False, True):
                (y,) = run_op(OP, (q, 1.0, scales, axis, NUMBERS[dtype]), opset, dynamic=dynamic)
                torch.testing.assert_close(y, expected, rtol=0 if dtype == torch.float16 else 1e-7, atol=0)
                (y,) = run_op(OP, (q, 0.1, None, 0, NUMBERS[dtype]), opset, dynamic=dynamic)
                assert torch.equal(y, dequantize(q, 0.1, dtype))


CARRIED = {
    "pool": lambda x: F.max_pool2d(x, 2),
    "reshape": lambda x: x.reshape(2, -1),
    "transpose": lambda x: x.transpose(1, 3),
    "slice": lambda x: x[..., 1:4],
}


@pytest.mark.parametrize("opset", [13, 19, 21, 22, 23])
@pytest.mark.parametrize("name", CARRIED)
def test_before_what_runtimes_move_it_across(name, opset, tmp_path) -> None:
    """ONNX Runtime does, from opset 21 on by a node that it cannot load itself if there is a zero point."""

    class Carried(nn.Module):
        def forward(self, x):
            return CARRIED[name](dequantize(quantize(x, 0.1), 0.1))

    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    for plugins in (True, False):
        svexport.export(Carried(), x, tmp_path / "m.onnx", opset=opset, plugins=plugins)
        expected = CARRIED[name]((x.double() / 0.1).round().clamp(-127, 127) * 0.1).float()
        torch.testing.assert_close(svexport.load(tmp_path / "m.onnx")(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("opset", ALL_OPSETS)
def test_the_native_node_where_there_is_one(opset) -> None:
    q = torch.zeros(2, 3, dtype=torch.int8)
    types = [node.op_type for node in op_model(OP, (q, 0.1, None, 0, 1), opset).graph.node]
    assert (types == ["DequantizeLinear"]) == (opset >= 10)
    types = [node.op_type for node in op_model(OP, (q, 1.0, torch.rand(3), 1, 1), opset).graph.node]
    assert (types == ["DequantizeLinear"]) == (opset >= 13)


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_gradient_of_the_scale(shape) -> None:
    """That of ``q * scale``, which learned step sizes are trained by."""
    q = torch.randint(-128, 128, (3, 5), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scale = torch.full(shape, 0.1, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 5).double()
    (gradient,) = torch.autograd.grad((dequantize(q, scale, torch.float64) * weights).sum(), scale)
    torch.testing.assert_close(gradient, (weights * q).sum(0).sum_to_size(shape))


def test_errors() -> None:
    q = torch.zeros(2, 3, dtype=torch.int8)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="dequantize expects a positive, finite scale, got"):
            dequantize(q, scale)
    with pytest.raises(ValueError, match=r"size of axis 1 of a tensor \(2, 3\); got \(2,\)"):
        dequantize(q, torch.ones(2))
    with pytest.raises(TypeError, match=r"got torch\.uint8 and torch\.float32"):
        dequantize(q.to(torch.uint8), 1.0)
    with pytest.raises(TypeError, match=r"got torch\.int8 and torch\.int32"):
        dequantize(q, 1.0, torch.int32)
