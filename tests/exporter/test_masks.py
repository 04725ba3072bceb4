"""Choices between masks and truth values of bytes, which lack an ONNX Runtime kernel or a type in torch's exporter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "where": lambda a, b: torch.where(a, b, ~b),
    "where of one": lambda a, b: b.where(a, b[:, :1]),
    "where broadcast": lambda a, b: torch.where(a[:1], b[:, :1], b),
    "where true": lambda a, b: torch.where(a, True, b),
    "where not true": lambda a, b: torch.where(a, b, True),
    "filled": lambda a, b: b.masked_fill(a, True),
    "emptied": lambda a, b: torch.masked_fill(b, a[0], False),
    "filled by a mask": lambda a, b: b.masked_fill(a, a.any()),
    "in place": lambda a, b: b.clone().masked_fill_(a, 1) & ~a.clone().masked_fill_(b, 0),
    "numbers": lambda a, b: torch.where(a, b, 2.5) + b.float().masked_fill(a, -1),
    "any byte": lambda a, b: a.to(torch.uint8).any(1, keepdim=True) + b.to(torch.uint8).all(0, keepdim=True),
    "all bytes": lambda a, b: (a.to(torch.uint8) * 2).all() + b.to(torch.uint8).any(),
}


class Masks(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {name: function(a, b) for name, function in FUNCTIONS.items()}


@pytest.mark.parametrize(("opset", "first"), [(11, True), (17, False), (20, True)])
def test_masks(opset: int, first: bool, tmp_path) -> None:
    drawn = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.5
    axes = {"a": {0: "n"}, "b": {0: "n"}}
    with torch_export_first(first):
        report = svexport.export(Masks(), tuple(drawn), tmp_path / "m.onnx", opset=opset, dynamic_axes=axes)
    assert report.verified
    assert not any(note.startswith("traced by TorchScript") for note in report.notes)
    engine = svexport.load(report.path)
    for a, b in (torch.rand(2, 6, 6) > 0.5, torch.rand(2, 3, 6) > 0.8, torch.ones(2, 2, 6, dtype=torch.bool)):
        for name, expected in Masks()(a, b).items():
            torch.testing.assert_close(engine(a, b)[name], expected, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
