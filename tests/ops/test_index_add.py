from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.ops.index_add import OP, index_add
from tests.support import OPSETS, check_export, run_op


def explicit(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float) -> Tensor:
    output = x.clone()
    for j, place in enumerate(index.tolist()):
        output.select(dim, place).add_(source.select(dim, j), alpha=alpha)
    return output


@pytest.mark.parametrize(
    ("shape", "dim", "count", "alpha"),
    [((5, 3), 0, 9, 1), ((2, 4, 3), 1, 6, -0.5), ((2, 3, 5), -1, 1, 2), ((7,), 0, 11, 1), ((1, 2), 0, 3, 1)],
)
def test_body(shape: tuple[int, ...], dim: int, count: int, alpha: float) -> None:
    torch.manual_seed(count)
    x = torch.randn(shape, dtype=torch.float64)
    index = torch.randint(shape[dim], (count,))
    source = torch.randn([count if i == dim % len(shape) else s for i, s in enumerate(shape)], dtype=torch.float64)
    expected = explicit(x, dim, index, source, alpha)
    torch.testing.assert_close(index_add(x, dim, index, source, alpha=alpha), expected)
    for opset in OPSETS:
        for dynamic in (False, True):
            (actual,) = run_op(OP, (x.float(), dim, index, source.float(), alpha), opset, dynamic=dynamic)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


class Adds(nn.Module):
    def forward(self, x: Tensor, index: Tensor, source: Tensor) -> dict[str, Tensor]:
        return {
            "method": x.index_add(0, index, source),
            "in place": (x * 2).index_add_(0, index, source),
            "alpha": torch.index_add(x, 0, index, source, alpha=-1.5),
            "columns": x.t().index_add(1, index.int(), source.t()),
            "integers": (x * 9).long().index_add(0, index, (source * 9).long(), alpha=2),
            "ours": index_add(x, 0, index, source),
        }


def inputs(count: int) -> tuple[Tensor, ...]:
    index = torch.randint(4, (count,), generator=torch.Generator().manual_seed(count))
    index[-1] = index[0]
    return torch.randn(4, 3), index, torch.randn(count, 3)


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 13, 16, 17, 18, 20])
def test_unedited_models(opset: int, tmp_path) -> None:
    shapes = {"index": {0: "m"}, "source": {0: "m"}} if opset in (9, 13, 17, 20) else None
    others = [inputs(9), inputs(2)] if shapes else []
    assert check_export(Adds(), tmp_path, opset, inputs(6), *others, dynamic_shapes=shapes).verified


def test_what_would_take_too_much_is_refused(tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, index: Tensor, source: Tensor) -> Tensor:
            return x.index_add(0, index, source)

    args = (torch.zeros(1000, 8), torch.zeros(10_000, dtype=torch.int64), torch.zeros(10_000, 8))
    with pytest.raises(svexport.ExportError, match="opset=16"):
        svexport.export(Model(), args, tmp_path / "m.onnx", opset=13)
