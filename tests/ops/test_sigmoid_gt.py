from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import svexport
from svexport.ops.sigmoid_gt import OP, logit_below, sigmoid_gt
from tests.support import OPSETS, run_op

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
THRESHOLDS = [0.3, 0.5, 0.05, 0.25, 0.9, 0.999, 1e-7, 1e-30, 1 - 2**-24, 0.5 + 2**-24, 0.5 - 2**-25]
INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def above(x: float, threshold: float) -> bool:
    """The real-number sigmoid against the threshold, to 60 digits."""
    with localcontext() as context:
        context.prec = 60
        return 1 / (1 + (-Decimal(x)).exp()) > Decimal(float(np.float32(threshold)))


def around(x: float, dtype: torch.dtype, steps: int) -> Tensor:
    """The numbers of a type next to ``x``, in order."""
    nearest = torch.tensor(abs(x), dtype=torch.float64).to(dtype)
    rank = int(nearest.view(INTEGERS[dtype])) * (1 if x > 0 else -1)  # the bits of positive numbers are in their order
    ranks = torch.arange(rank - steps, rank + steps + 1)
    return ranks.abs().to(INTEGERS[dtype]).view(dtype) * ranks.sign().to(dtype)


@settings(deadline=None, derandomize=True, database=None, max_examples=150)
@given(threshold=st.floats(2.0**-149, 1 - 2**-24, width=32), dtype=st.sampled_from(DTYPES))
@example(threshold=0.5, dtype=torch.float32)
@example(threshold=float(np.float32(1 / (1 + math.exp(-1)))), dtype=torch.float64)  # logit next to a power of two
def test_exact_next_to_the_threshold(threshold, dtype) -> None:
    x = around(math.log(threshold) - math.log1p(-threshold), dtype, 12)
    expected = [above(v, threshold) for v in x.double().tolist()]
    assert sigmoid_gt(x, threshold).tolist() == expected
    assert {True, False} <= set(expected)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_exact_for_every_half(threshold) -> None:
    x = torch.arange(2**16).to(torch.int16).view(torch.float16)
    x = x[~x.isnan()].sort().values
    y = sigmoid_gt(x, threshold)
    assert (y.int().diff() >= 0).all()  # false up to some number, true from the next
    first = int(y.int().argmax())
    assert y.any()
    assert not above(float(x[first - 1]), threshold)
    assert above(float(x[first]), threshold)


def test_floating_point_sigmoid_is_not_exact() -> None:
    """What the op is for: torch decides differently where its sigmoid is rounded."""
    x, threshold = torch.tensor([16.7, 17.5, 40.0]), 1 - 2**-24
    assert [above(v, threshold) for v in x.tolist()] == [True, True, True] == sigmoid_gt(x, threshold).tolist()
    x = around(math.log(0.3 / 0.7), torch.float32, 40)
    differs = sigmoid_gt(x, 0.3) != (torch.sigmoid(x) > 0.3)
    assert 0 < differs.sum() < 20
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 4
    assert torch.equal(sigmoid_gt(x, 0.3), torch.sigmoid(x.double()) > float(np.float32(0.3)))


@pytest.mark.parametrize("opset", OPSETS)
def test_body(opset) -> None:
    for threshold in THRESHOLDS:
        logit = math.log(threshold) - math.log1p(-threshold)
        for dtype in (torch.float16, torch.float32, torch.float64):
            x = torch.cat([around(logit, dtype, 3), around(-logit, dtype, 3)])
            for dynamic in (False, True):
                (y,) = run_op(OP, (x, threshold), opset, dynamic=dynamic)
                assert torch.equal(y, sigmoid_gt(x, threshold))


SPECIAL = torch.tensor([math.nan, -math.inf, -1e4, -0.0, 1e4, math.inf])
LIMITS = [  # threshold and what is above it
    (-math.inf, [False, True, True, True, True, True]),
    (-1e-60, [False, False, True, True, True, True]),  # a float32 zero
    (-0.25, [False, True, True, True, True, True]),
    (0.0, [False, False, True, True, True, True]),
    (1e-60, [False, False, True, True, True, True]),
    (0.5, [False, False, False, False, True, True]),
    (1 - 1e-9, [False] * 6),  # 1 as float32
    (1.0, [False] * 6),
    (7.0, [False] * 6),
    (1e300, [False] * 6),
]


@pytest.mark.parametrize(("threshold", "expected"), LIMITS)
def test_limits(threshold, expected) -> None:
    for dtype in DTYPES:
        y = sigmoid_gt(SPECIAL.to(dtype), threshold)
        assert y.dtype == torch.bool
        assert y.tolist() == expected
    if abs(threshold) < 1e38:  # an attribute cannot hold it
        for opset in OPSETS:
            for dtype in (torch.float16, torch.float32):
                assert run_op(OP, (SPECIAL.to(dtype), threshold), opset)[0].tolist() == expected


def test_logit_below_is_representable() -> None:
    for dtype in DTYPES:
        for threshold in THRESHOLDS:
            logit = logit_below(threshold, dtype)
            assert float(torch.tensor(logit, dtype=torch.float64).to(dtype)) == logit
    assert logit_below(0.5, torch.float32) == 0


def test_errors() -> None:
    with pytest.raises(ValueError, match="got NaN"):
        sigmoid_gt(torch.randn(2), math.nan)
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.int64"):
        sigmoid_gt(torch.arange(2), 0.5)


@pytest.mark.parametrize("opset", [9, 11, 18])
def test_export(opset, tmp_path) -> None:
    class Keep(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            keep = svexport.ops.sigmoid_gt(x, 0.3)
            return keep, torch.where(keep, x, torch.zeros_like(x))

    report = svexport.export(
        Keep(), torch.randn(3, 4), tmp_path / "m.onnx", opset=opset, dynamic_shapes={"x": {0: "n"}}
    )
    assert report.traced_nodes["SvSigmoidGt"] == 1
    lowered = svexport.export(Keep(), torch.randn(3, 4), tmp_path / "m.onnx", opset=opset, plugins=False)
    assert lowered.verified
    assert not {"Sigmoid", "Exp"} & set(lowered.nodes)


def test_compile() -> None:
    x = torch.randn(50)
    assert torch.equal(
        torch.compile(lambda v: sigmoid_gt(v, 0.3), fullgraph=True, backend="eager")(x), sigmoid_gt(x, 0.3)
    )
