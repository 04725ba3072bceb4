"""Matrix products added to a NaN that must not count; cumprod: signs, zeros, integer overflow, dynamic sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import agrees, exported, results
from tests.exporter.aten.test_order import TRACED


def products(x: Tensor) -> tuple[Tensor, ...]:
    return x.cumprod(0), x.cumprod(-1), x[:1].cumprod(0), x[0, 0].cumprod(0), x[:0].cumprod(0), torch.vander(x[0], 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_of_floats(opset: int, first: bool, dtype: torch.dtype, tmp_path) -> None:
    exported(products, torch.randn(5, 7).to(dtype), tmp_path, opset, first)
    engine = svexport.load(tmp_path / "m.onnx")
    for x in (torch.randn(5, 7), torch.randn(5, 7) * 3, torch.randint(-1, 2, (5, 7)).float()):
        for actual, expected in zip(results(engine(x.to(dtype))), results(products(x.to(dtype))), strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 5e-3, atol=1e-5)


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_of_integers_modulo_the_bits(opset: int, tmp_path) -> None:
    exported(products, torch.randint(-3, 4, (5, 7)), tmp_path, opset, True)
    for high in (4, 2**20, 2**62):
        agrees(tmp_path, products, torch.randint(-high, high, (5, 7)))


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_dynamic_sizes(opset: int, tmp_path) -> None:
    def function(x: Tensor) -> Tensor:
        return x.cumprod(1)

    exported(function, torch.randn(2, 5), tmp_path, opset, True, dynamic_shapes={"x": {1: "n"}})
    engine = svexport.load(tmp_path / "m.onnx")
    for n in (1, 2, 3, 8, 13):
        x = torch.randn(2, n)
        torch.testing.assert_close(engine(x), function(x))


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_added_to_nothing(opset: int, first: bool, tmp_path) -> None:
    """What is multiplied with a ``beta`` of 0 is not read."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y, nan = x.mT, torch.full((2, 3, 3), torch.nan)
        return (
            torch.baddbmm(nan, x, y, beta=0, alpha=2),
            torch.baddbmm(y[:, :3], x, y, beta=-1, alpha=0.5),
            torch.addbmm(nan[0], x, y, beta=0),
            torch.addbmm(y[0, 0, :3], x, y),
            torch.addmv(nan[0, 0], x[0], y[0, :, 0], beta=0),
            torch.addmm(nan[0], x[0], y[0], beta=0),
            torch.baddbmm(y[:, :3].int(), x.int(), y.int(), beta=1.6, alpha=2.6),
        )

    exported(function, torch.randn(2, 3, 4), tmp_path, opset, first)
    x = torch.randn(2, 3, 4)
    for actual, expected in zip(results(svexport.load(tmp_path / "m.onnx")(x)), function(x), strict=True):
        torch.testing.assert_close(actual, expected)
