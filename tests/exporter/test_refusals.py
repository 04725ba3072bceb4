"""Refusals of dynamic sizes that become numbers name the user's line and what to do; near misses work."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import svexport
from tests.exporter.aten import Call, agrees, exported

DYNAMIC = {"x": {2: "h"}}


def refused(function: Callable[[Tensor], object], path: Path, opset: int, **options: object) -> str:
    with pytest.raises(svexport.SvexportError) as caught:
        svexport.export(Call(function), torch.randn(2, 3, 8, 6), path / "m.onnx", opset=opset, **options)
    assert not (path / "m.onnx").exists()
    return str(caught.value)


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * math.log2(x.shape[2]),
        lambda x: F.avg_pool2d(x, (x.shape[2] - 1, 1)),
        lambda x: F.avg_pool2d(x, (x.shape[2] // 2, x.shape[3])),
        lambda x: sum(x[:, :, i] for i in range(x.shape[2])),
    ],
    ids=["log2", "kernel", "kernels", "range"],
)
def test_of_sizes_as_numbers(function, opset: int, tmp_path: Path) -> None:
    text = refused(function, tmp_path, opset, dynamic_shapes=DYNAMIC)
    assert "test_refusals.py:" in text
    assert "size" in text
    assert "random numbers" not in text
    assert "onnx::Gather" not in text


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("factor", [lambda h: 16 / h, lambda h: (16 / h, 1.0)], ids=["one", "two"])
def test_of_a_factor_made_of_sizes(factor, opset: int, tmp_path: Path) -> None:
    text = refused(lambda x: F.interpolate(x, None, factor(x.shape[2])), tmp_path, opset, dynamic_shapes=DYNAMIC)
    assert "give size=(height, width)" in text


@pytest.mark.parametrize("opset", [11, 18])
def test_of_complex_numbers(opset: int, tmp_path: Path) -> None:
    text = refused(lambda x: torch.view_as_real(torch.view_as_complex(x[..., :2]).tan()), tmp_path, opset)
    assert "complex numbers" in text
    assert "torch.view_as_real" in text
    assert ".py:" in text


@pytest.mark.parametrize("opset", [11, 18])
def test_istft_of_one_signal(opset: int, tmp_path: Path) -> None:
    window = torch.hann_window(16)

    def function(x: Tensor) -> Tensor:
        return torch.istft(torch.view_as_complex(x), 16, 4, window=window)

    exported(function, torch.randn(9, 11, 2), tmp_path, opset, True)
    x = torch.randn(9, 11, 2)
    torch.testing.assert_close(svexport.load(tmp_path / "m.onnx")(x), function(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("sizes", [lambda x: x.shape[2:], lambda x: (4, x.shape[2], 3), lambda x: 100])
def test_unravel_index(sizes, opset: int, tmp_path: Path) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.unravel_index(x[0].flatten(1).argmax(1) * 3, sizes(x))

    exported(function, torch.randn(2, 3, 8, 6), tmp_path, opset, True, dynamic_shapes=DYNAMIC)
    for h in (1, 5, 19):
        agrees(tmp_path, function, torch.randn(2, 3, h, 6))


@pytest.mark.parametrize("opset", [11, 18])
def test_whole_numbers_by_quotients_of_sizes(opset: int, tmp_path: Path) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole, quotient = torch.arange(1, 7), x.shape[2] / 6
        return whole * quotient + x, quotient * whole + x, whole + quotient, quotient - whole, quotient / whole + x

    exported(function, torch.randn(2, 3, 8, 6), tmp_path, opset, True, dynamic_shapes=DYNAMIC)
    engine = svexport.load(tmp_path / "m.onnx")
    for h in (2, 5, 19):
        x = torch.randn(2, 3, h, 6)
        torch.testing.assert_close(tuple(engine(x)), function(x))


@pytest.mark.parametrize("opset", [11, 18])
def test_of_classes_counted_in_values(opset: int, tmp_path: Path) -> None:
    text = refused(lambda x: F.one_hot(x.long().abs()).float(), tmp_path, opset)
    assert "F.one_hot(x" in text
    assert opset != 11 or "num_classes=" in text


def test_of_branches_that_are_compiled(tmp_path: Path) -> None:
    text = refused(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), tmp_path, 18)
    assert "torch.where" in text
    assert "torch.cond(x.sum()" in text


def test_of_half_models_that_fail_in_torch(tmp_path: Path) -> None:
    """Which no tracer notices: they compute with tensors that have no values."""
    text = refused(lambda x: x.masked_fill(x > 0, -1e9), tmp_path, 17, dtype=torch.float16)
    assert "the model itself fails on these arguments: RuntimeError: value cannot be converted to type" in text
    assert "test_refusals.py:" in text
    assert "torch.cond" not in text


@pytest.mark.parametrize("function", [lambda x: torch.fft.rfft(x).real, lambda x: torch.polar(x, x).real])
def test_of_functions_that_torch_lacks_in_half(function, tmp_path: Path) -> None:
    text = refused(function, tmp_path, 17, dtype=torch.float16)
    assert 'dtype=torch.float16, keep="auto"' in text
    exported(function, torch.randn(3, 6), tmp_path, 17, True, dtype=torch.float16, keep="auto")


def test_of_forwards_that_ask_for_an_export(tmp_path: Path) -> None:
    text = refused(lambda x: x * (2 if torch.onnx.is_in_onnx_export() else 3), tmp_path, 18)
    assert "asks whether it is exported" in text
    assert "test_refusals.py:" in text


def test_of_derivatives_taken_backwards(tmp_path: Path) -> None:
    text = refused(lambda x: torch.func.grad(lambda y: (y**3).sum())(x), tmp_path, 18)
    assert "derivatives in reverse mode" in text
    assert "torch.func.jvp" in text


def test_of_numbers_drawn_by_an_own_generator(tmp_path: Path) -> None:
    text = refused(lambda x: x + torch.randn(6, generator=torch.Generator().manual_seed(3)), tmp_path, 18)
    assert "draws random numbers (randn) from a generator of its own" in text
    assert "in a buffer" in text


def test_of_sizes_looked_up(tmp_path: Path) -> None:
    kept = {size: torch.ones(size, 1) for size in range(9)}
    text = refused(lambda x: x + kept[x.shape[2]], tmp_path, 18, dynamic_shapes=DYNAMIC)
    assert "looks a dynamic size up in a dict" in text
    assert "make the size static" in text


@pytest.mark.parametrize("function", [operator.and_, operator.or_, operator.xor], ids=["and", "or", "xor"])
def test_of_bits_of_sizes(function: Callable[[int, int], int], tmp_path: Path) -> None:
    text = refused(lambda x: x * function(x.shape[2], 6), tmp_path, 18, dynamic_shapes=DYNAMIC)
    assert "bits of a dynamic size" in text
    assert "//" in text
