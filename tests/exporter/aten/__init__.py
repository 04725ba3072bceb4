"""Compares ATen functions, as both tracers write them, with torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(x)


def exported(
    function: Callable[..., object], x: Tensor, path: Path, opset: int, first: bool, **options: object
) -> svexport.ExportReport:
    """Exports a function, traced by torch.export if ``first``; TorchScript in its stead is a failure."""
    with torch_export_first(first):
        report = svexport.export(Call(function), x, path / "m.onnx", opset=opset, **options)
    assert report.verified
    assert not [note for note in report.notes if note.startswith("traced by TorchScript")]
    return report


def agrees(path: Path, function: Callable[..., object], x: Tensor) -> None:
    """The file gives what torch does, NaN for NaN and to the bit."""
    for actual, expected in zip(results(svexport.load(path / "m.onnx")(x)), results(function(x)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def results(found: object) -> tuple[Tensor, ...]:
    return tuple(found) if isinstance(found, tuple) else (found,)
