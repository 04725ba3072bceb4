from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.ops.triu import OP, tril, triu
from tests.support import OPSETS, check_export, run_op


class Triangles(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        *_, m, n = x.shape
        ones = torch.ones(m, n, dtype=torch.bool)
        return {
            "triu": torch.triu(x),
            "tril": x.tril(),
            "above": x.triu(1),
            "below": torch.tril(x, diagonal=-2),
            "far": x.triu(-9) + x.tril(9),
            "in place": (x + 1).triu_(1),
            "mask": x.masked_fill(torch.triu(ones, diagonal=1), -7.0),
            "computed": x.triu(n - m) + x.tril(m - n),
            "integers": (x * 9).long().tril(1),
            "ours": triu(x, 1) + tril(x, -1),
        }


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 13, 14, 18])
@pytest.mark.parametrize("dynamic", [False, True])
def test_unedited_models(opset: int, dynamic: bool, tmp_path) -> None:
    shapes = {"x": {0: "b", 1: "m", 2: "n"}} if dynamic else None
    others = [(torch.randn(3, 2, 7),), (torch.randn(1, 5, 1),)] if dynamic else []
    report = check_export(Triangles(), tmp_path, opset, (torch.randn(2, 3, 4),), *others, dynamic_shapes=shapes)
    assert report.verified
    assert ("Trilu" in report.nodes) == (opset >= 14)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float64, torch.float16])
@pytest.mark.parametrize("opset", OPSETS)
def test_types(dtype: torch.dtype, opset: int) -> None:
    x = (torch.randn(4, 5) * 3).to(dtype)
    for diagonal, upper in ((-1, True), (0, False), (2, True)):
        for dynamic in (False, True):
            (actual,) = run_op(OP, (x, diagonal, upper), opset, dynamic=dynamic)
            rows, columns = torch.arange(4)[:, None], torch.arange(5)
            kept = columns >= rows + diagonal if upper else columns <= rows + diagonal
            assert actual.dtype == dtype
            assert torch.equal(actual, torch.where(kept, x, torch.zeros((), dtype=dtype)))


def test_nan_and_infinity_outside_are_gone(tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu()

    x = torch.tensor([[1.0, 2], [torch.inf, 3], [torch.nan, -torch.inf]])
    report = svexport.export(Model(), (x,), tmp_path / "m.onnx", opset=11, verify=False)
    assert svexport.load(report.path)(x).tolist() == [[1, 2], [0, 3], [0, 0]]
