from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import svexport
from svexport.ops.quantize import OP, quantize
from tests.support import OPSETS, op_model, run_op

ALL_OPSETS = sorted({*OPSETS, 10, 12, 19, 21})
RESTRICTED = pytest.mark.parametrize("restricted", [True, False])


def by_hand(x: Tensor, scale: float | list[float], restricted: bool = True) -> list[int]:
    """Element by element in rational numbers; ``scale`` may be one for each element."""
    values = x.double().flatten().tolist()
    scales = scale if isinstance(scale, list) else [scale] * len(values)
    low = -127 if restricted else -128
    result = []
    for value, s in zip(values, scales, strict=True):
        steps = Fraction(max(min(value / s, 200), -200) if math.isinf(value) else Fraction(value) / Fraction(s))
        result.append(max(low, min(127, round(steps))))  # Python rounds half to even
    return result


def ties(scale: float) -> Tensor:
    """Every midpoint within and beyond the range, and the numbers next to it. Exact for scales of few bits."""
    middle = (torch.arange(-131, 131).double() + 0.5) * scale
    return torch.cat([middle, middle * (1 - 2**-20), middle * (1 + 2**-20), torch.arange(-131, 132) * scale])


# Of a few bits, so that the midpoints are float32 numbers and the quotients exact, but not by the reciprocals.
SCALES = [1.0, 0.125, 3.0, 0.078125, 11 * 2.0**-9, 2.0**-40]


@RESTRICTED
@pytest.mark.parametrize("scale", SCALES)
def test_ties_go_to_even(scale, restricted) -> None:
    for dtype in (torch.float32, torch.float64):
        x = ties(scale).to(dtype)
        for step in (scale, torch.tensor(scale), torch.tensor([scale])):
            q = quantize(x, step, restricted=restricted)
            assert q.dtype == torch.int8
            assert q.tolist() == by_hand(x, scale, restricted)


@RESTRICTED
@pytest.mark.parametrize("opset", ALL_OPSETS)
def test_body_rounds_ties_to_even(opset, restricted) -> None:
    for scale in SCALES:
        for dtype in (torch.float32, torch.float64):
            x = ties(scale).to(dtype)
            expected = by_hand(x, scale, restricted)
            assert run_op(OP, (x, scale, None, 0, restricted), opset)[0].tolist() == expected
            for dynamic in (False, True):
                args = x, 1.0, torch.tensor(scale, dtype=dtype), 0, restricted
                assert run_op(OP, args, opset, dynamic=dynamic)[0].tolist() == expected


@pytest.mark.parametrize("opset", ALL_OPSETS)
def test_body_next_to_one_half(opset) -> None:
    """Adding 0.5 and rounding down would give 1 and -3: the sums are not float32 numbers."""
    x = torch.tensor([0.49999997, -0.49999997, -2.4999998, 2.4999998, 0.5, 1.5, -0.5, -1e-10, 1e-40])
    expected = [0, 0, -2, 2, 0, 2, 0, 0, 0]
    assert by_hand(x, 1.0) == quantize(x, 1.0).tolist() == expected
    assert run_op(OP, (x, 1.0, None, 0, True), opset)[0].tolist() == expected


@RESTRICTED
@pytest.mark.parametrize("opset", ALL_OPSETS)
def test_body_saturates(opset, restricted) -> None:
    low = -127 if restricted else -128
    x = torch.tensor([-math.inf, -3e38, -1e4, -128.0, -127.6, 126.5, 127.5, 1e4, 3e38, math.inf])
    expected = [low, low, low, low, low, 126, 127, 127, 127, 127]
    assert quantize(x, 1.0, restricted=restricted).tolist() == expected
    for scale in (1.0, 2.0**-30, 2.0**20):
        scaled = x * scale
        assert run_op(OP, (scaled, scale, None, 0, restricted), opset)[0].tolist() == by_hand(scaled, scale, restricted)


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(
    x=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=20),
    scale=st.floats(2.0**-60, 2.0**60, width=32),
    restricted=st.booleans(),
)
def test_is_the_float32_quotient_rounded(x, scale, restricted) -> None:
    with np.errstate(over="ignore"):
        quotient = np.rint(np.float32(x) / np.float32(scale))
    expected = np.clip(quotient, -127 if restricted else -128, 127).astype(np.int8)
    assert quantize(torch.tensor(x), scale, restricted=restricted).tolist() == expected.tolist()


@pytest.mark.parametrize("opset", ALL_OPSETS)
def test_one_scale_per_channel(opset) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, axis in [((2, 5, 3, 2), 1), ((4, 3), 0), ((2, 7), -1), ((3, 1), 1), ((11,), 0), ((2, 0, 3), 1)]:
        x = torch.randn(shape, generator=generator) * 5
        scales = torch.rand(shape[axis], generator=generator) * 0.05 + 0.01
        for restricted in (True, False):
            expected = (
                torch.stack(
                    [
                        quantize(part, float(s), restricted=restricted)
                        for part, s in zip(x.unbind(axis), scales, strict=True)
                    ],
                    axis,
                )
                if x.numel()
                else x.to(torch.int8)
            )
            assert torch.equal(quantize(x, scales, axis, restricted), expected)
            for dynamic in (False, True):
                args = x, 1.0, scales, axis % x.dim(), restricted
                assert torch.equal(run_op(OP, args, opset, dynamic=dynamic)[0], expected)


@pytest.mark.parametrize("opset", ALL_OPSETS)
def test_half_is_divided_in_float32(opset) -> None:
    x = torch.arange(2**16).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    q = quantize(x, 0.1)
    assert torch.equal(q, quantize(x.float(), 0.1))
    assert torch.equal(run_op(OP, (x, 0.1, None, 0, True), opset)[0], q)


@pytest.mark.parametrize("opset", ALL_OPSETS)
def test_the_native_node_where_there_is_one(opset) -> None:
    x = torch.randn(2, 3)
    types = [node.op_type for node in op_model(OP, (x, 0.1, None, 0, False), opset).graph.node]
    assert (types == ["QuantizeLinear"]) == (opset >= 10)
    types = [node.op_type for node in op_model(OP, (x, 1.0, torch.rand(3), 1, False), opset).graph.node]
    assert (types == ["QuantizeLinear"]) == (opset >= 13)


def test_errors() -> None:
    x = torch.randn(2, 3, 4)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive, finite scale, got"):
            quantize(x, scale)
    for scale in (1e39, 3.5e38, 1e-46):
        for op in (quantize, svexport.ops.dequantize):
            with pytest.raises(ValueError, match=f"{op.__name__} .* got {re.escape(str(scale))}, which float32"):
                op(x if op is quantize else x.to(torch.int8), scale)
    for scale in (2.0**-149, torch.finfo(torch.float32).max):
        assert quantize(torch.tensor([scale]), scale).item() == 1
    for scale, axis in ((torch.ones(2), 1), (torch.ones(3, 1), 1), (torch.ones(3), 3), (torch.ones(3), -4)):
        with pytest.raises(ValueError, match=r"size of axis .* of a tensor \(2, 3, 4\); got"):
            quantize(x, scale, axis)
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.int8"):
        quantize(x.to(torch.int8), 1.0)


def test_has_no_gradient() -> None:
    assert not quantize(torch.randn(3, requires_grad=True), 0.1).requires_grad


class RoundTrip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.02, 0.03, 0.01]))
        self.register_buffer("one", torch.tensor([0.05]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        by_number = svexport.ops.quantize(x, 0.04)
        by_channel = svexport.ops.quantize(x, self.scale, restricted=False)
        by_tensor = svexport.ops.quantize(x, self.one)
        back = svexport.ops.dequantize(by_channel, self.scale), svexport.ops.dequantize(by_tensor, self.one, x.dtype)
        return by_number, by_channel, by_tensor, *back


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 13, 18])
def test_export(opset, tmp_path) -> None:
    args = (torch.randn(2, 3, 4, 5),)
    for plugins in (True, False) if opset < 18 else (True,):
        report = svexport.export(
            RoundTrip(), args, tmp_path / "m.onnx", opset=opset, plugins=plugins, dynamic_shapes={"x": {0: "n", 2: "h"}}
        )
        assert report.verified
        assert report.max_abs < 1e-6
        assert (report.traced_nodes["SvQuantize"], report.traced_nodes["SvDequantize"]) == (3, 2)
