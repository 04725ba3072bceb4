from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from svexport.ops.unflatten import unflatten
from tests.support import check_export


class Unflattens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Unflatten(1, (3, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        n, _, w = x.shape
        return {
            "module": self.layer(x),
            "method": x.unflatten(-2, (2, -1)) * 2,
            "function": torch.unflatten(x, 1, (1, 12)),
            "batch": x.transpose(1, 2).flatten(0, 1).unflatten(0, (n, w)),
            "inferred": x.flatten(1).unflatten(1, (-1, 2, w)),
            "computed": x.flatten().unflatten(0, (n, 12, w)) + 1,
            "first": x.unflatten(0, (-1, 1)),
            "ours": unflatten(x, 1, (6, 2)),
        }


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 12, 13, 17, 18])
@pytest.mark.parametrize("dynamic", [False, True])
def test_unedited_models(opset: int, dynamic: bool, tmp_path) -> None:
    torch.manual_seed(opset)
    shapes = {"x": {0: "n", 2: "w"}} if dynamic else None
    others = [(torch.randn(7, 12, 3),), (torch.randn(1, 12, 1),)] if dynamic else []
    report = check_export(Unflattens(), tmp_path, opset, (torch.randn(2, 12, 5),), *others, dynamic_shapes=shapes)
    assert report.verified
    assert "SvUnflatten" not in report.nodes
    assert report.nodes["Reshape"] >= 5


def test_types_of_what_follows(tmp_path) -> None:
    """An exporter that lost the type after it would fail at LayerNorm and at the matrix product."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.linear = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> list[Tensor]:
            n = x.shape[0]
            return [self.linear(self.norm(x.flatten().unflatten(0, (n, x.shape[1] // 4, 4))))]

    shapes = {"x": {0: "n", 1: "c"}}
    check_export(Model(), tmp_path, 11, (torch.randn(2, 12),), (torch.randn(5, 8),), dynamic_shapes=shapes)
