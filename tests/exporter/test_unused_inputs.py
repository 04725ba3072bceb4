from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import svexport
from tests.support import check_export

pytestmark = pytest.mark.core


class Model(nn.Module):
    def forward(self, before: Tensor, x: Tensor, after: Tensor) -> list[Tensor]:
        return [x * 2]


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_inputs_that_nothing_uses_stay(opset: int, tmp_path) -> None:
    """Whoever runs the file gives what the model was given."""
    args = (torch.zeros(2, 3, dtype=torch.int64), torch.randn(4), torch.zeros(1, dtype=torch.bool))
    report = check_export(Model(), tmp_path, opset, args, dynamic_shapes={"before": {0: "n"}, "x": {0: "m"}})
    assert report.verified
    assert report.inputs == {"before": "int64[n, 3]", "x": "float32[m]", "after": "bool[1]"}
    before, x, after = svexport.load(report.path).inputs
    assert (before.name, x.name, after.name) == ("before", "x", "after")


class SameNames(nn.Module):
    """``forward(self, w, b)`` beside ``self.w`` and ``self.b``, one of which is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("b", torch.tensor([4.0, 5.0, 6.0]))
        self.w_inner = nn.Parameter(torch.tensor([7.0, 8.0, 9.0]))

    def forward(self, w: Tensor, b: Tensor, c: Tensor) -> dict[str, Tensor]:
        return {"product": w * self.w * self.w_inner, "sum": self.b + c, "given": b + 1}


@pytest.mark.parametrize("opset", [11, 17, 18, 20])
def test_parameters_and_inputs_of_one_name(opset, tmp_path) -> None:
    args = tuple(torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(3))
    model = SameNames()
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=opset)
    assert list(report.inputs) == ["w", "b", "c"]
    for actual, expected in zip(svexport.load(report.path)(*args), model(*args).values(), strict=True):
        torch.testing.assert_close(actual, expected)
