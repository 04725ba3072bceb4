from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import svexport
from svexport.ops import from_chw32
from svexport.ops.to_chw32 import OP, to_chw32
from tests.support import OPSETS, run_op

SHAPES = [(1, 1, 1, 1), (2, 3, 2, 3), (1, 32, 3, 2), (1, 33, 2, 2), (2, 70, 1, 5), (0, 5, 2, 2)]


def memory(x: np.ndarray) -> np.ndarray:
    """The layout, element by element."""
    n, c, h, w = x.shape
    flat = np.zeros(n * -(-c // 32) * h * w * 32, x.dtype)
    for i, j, y, z in itertools.product(*map(range, x.shape)):
        flat[((i * -(-c // 32) + j // 32) * h * w + y * w + z) * 32 + j % 32] = x[i, j, y, z]
    return flat


def pooled(x: np.ndarray) -> np.ndarray:
    n, c, h, w = x.shape
    y = np.empty((n, c, h // 2, w // 2), x.dtype)
    for i, j, a, b in itertools.product(*map(range, y.shape)):
        y[i, j, a, b] = max(x[i, j, 2 * a + da, 2 * b + db] for da in (0, 1) for db in (0, 1))
    return y


def image(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 60).clamp(-128, 127).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape) -> None:
    for dtype in (torch.int8, torch.float16, torch.float32, torch.int64, torch.bool):
        x = image(shape, dtype)
        y = to_chw32(x)
        n, c, h, w = shape
        assert y.shape == (n, -(-c // 32), h, w, 32)
        assert y.is_contiguous()
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.flatten().numpy(), memory(x.numpy()))
        assert torch.equal(to_chw32(x.to(memory_format=torch.channels_last)), y)


@pytest.mark.parametrize("shape", [(1, 3, 2, 2), (2, 33, 5, 4), (1, 40, 4, 7), (1, 64, 3, 3)])
def test_pool(shape) -> None:
    for dtype in (torch.int8, torch.float16, torch.float32):
        x = image(shape, dtype)
        np.testing.assert_array_equal(to_chw32(x, pool=True).flatten().numpy(), memory(pooled(x.numpy())))


@settings(deadline=None, derandomize=True, database=None)
@given(shape=st.tuples(st.integers(0, 3), st.integers(1, 99), st.integers(0, 5), st.integers(0, 5)))
def test_round_trip(shape) -> None:
    x = image(shape, torch.int8)
    assert torch.equal(from_chw32(to_chw32(x), shape[1]), x)


@pytest.mark.parametrize("opset", OPSETS)
def test_body(opset) -> None:
    for (shape, pool), dtype in itertools.product(
        [*((shape, False) for shape in SHAPES), ((1, 3, 2, 2), True), ((2, 33, 5, 4), True), ((1, 64, 4, 7), True)],
        (torch.int8, torch.float16, torch.float32),
    ):
        x = image(shape, dtype)
        expected = memory(pooled(x.numpy()) if pool else x.numpy())
        for dynamic in (False, True):
            (y,) = run_op(OP, (x, pool), opset, dynamic=dynamic)
            assert y.dtype == dtype
            np.testing.assert_array_equal(y.flatten().numpy(), expected)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"expects \(N, C, H, W\), got \(3, 4, 5\)"):
        to_chw32(torch.randn(3, 4, 5))
    with pytest.raises(TypeError, match=r"pools floating-point and int8 tensors, got torch\.int64"):
        to_chw32(torch.zeros(1, 2, 4, 4, dtype=torch.int64), pool=True)


class Layouts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        blocks = svexport.ops.to_chw32(x)
        q = svexport.ops.quantize(x, 0.02)
        return blocks, svexport.ops.to_chw32(q, pool=True), svexport.ops.from_chw32(blocks * 2, 40)


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 18])
def test_export(opset, tmp_path) -> None:
    shapes = {"x": {0: "n", 2: "h", 3: "w"}}
    report = svexport.export(
        Layouts(), torch.randn(2, 40, 4, 6), tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes
    )
    assert report.verified
    assert (report.traced_nodes["SvToChw32"], report.traced_nodes["SvFromChw32"]) == (2, 1)
    engine = svexport.load(report.path)
    x = torch.randn(1, 40, 7, 2)
    for actual, expected in zip(engine(x), Layouts()(x), strict=True):
        assert torch.equal(actual, expected)
