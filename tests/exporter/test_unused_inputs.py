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
