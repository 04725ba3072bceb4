"""native_layer_norm: its statistics and their types, and layers without parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import exported
from tests.exporter.aten.test_order import TRACED


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_statistics(opset: int, first: bool, dtype: torch.dtype, mixed: bool, tmp_path) -> None:
    """Of half precision with parameters in single precision torch.export says other types than torch computes."""
    if mixed and first:
        dtype = torch.float32
    weight, bias = (torch.randn(3, 7).to(torch.float32 if mixed else dtype) for _ in range(2))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = torch.native_layer_norm(x, (3, 7), weight, bias, 1e-3)
        plain = torch.native_layer_norm(x, (7,), None, None, 1e-5)
        return *whole, *plain, *torch.native_layer_norm(x, (7,), weight[0], None, 1e-5)

    exported(function, torch.randn(2, 3, 7).to(dtype), tmp_path, opset, first)
    engine = svexport.load(tmp_path / "m.onnx")
    for x in (torch.randn(2, 3, 7), torch.randn(2, 3, 7) * 5 + 2, torch.ones(2, 3, 7)):
        for actual, expected in zip(engine(x.to(dtype)), function(x.to(dtype)), strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=2e-3)
