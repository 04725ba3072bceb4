"""Compares files with torch where values decide sizes, on which torch's own functions branch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import svexport
from tests.exporter.aten import Call


def picked(x: Tensor) -> tuple[Tensor, ...]:
    """Of the rows whose first number is above -3."""
    rows = x[x[:, 0] > -3]
    mean, variance = torch.arange(6.0), torch.arange(6.0) + 1
    return (
        F.batch_norm(rows, mean, variance),
        F.instance_norm(rows.view(-1, 2, 3)),
        torch.kron(rows, torch.ones(2, 1)),
        torch.take_along_dim(rows, rows.argsort(1), 1),
        torch.cat([rows.roll(1, 0), rows.roll(-2)]),
        torch.cov(rows),
        torch.corrcoef(rows),
        torch.linspace(0, 1, rows.shape[0]),
        torch.trapezoid(rows, dx=0.5, dim=0),
    )


@pytest.mark.parametrize("opset", [11, 18])
def test_none_one_and_some(opset: int, tmp_path: Path) -> None:
    x = torch.randn(7, 6)
    report = svexport.export(Call(picked), x, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert not any("TorchScript" in note for note in report.notes)
    engine = svexport.load(tmp_path / "m.onnx")
    for count in (0, 1, 5):
        x = torch.randn(7, 6)
        x[:, 0] = torch.where(torch.arange(7) < count, x[:, 0].abs(), -9.0)
        for actual, expected in zip(engine(x), picked(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("branch", [lambda rows: len(rows) == 1, lambda rows: rows.numel() == 0])
def test_branches_of_users_are_refused(branch, tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        rows = x[x[:, 0] > -3]
        return rows.sum(0) if branch(rows) else rows.mean(0)

    with pytest.raises(svexport.ExportError, match="needs the value of a tensor in Python"):
        svexport.export(Call(function), torch.randn(7, 6), tmp_path / "m.onnx", opset=18)
