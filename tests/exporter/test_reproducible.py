"""A model gives the same file byte for byte, in this process and in another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first

TRACERS = {11: True, 17: False, 20: True}
"""Whether torch.export traces first, by opset."""


class Sizes(nn.Module):
    """Sizes of inputs in functions, arithmetic and reshapes, and of results that find as many as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x = self.conv(x)
        smaller = F.interpolate(x, size=(x.shape[2] // 2 + 1, x.shape[3] // 2 + 1))
        longest = max(x.shape[2], x.shape[3]) if torch.jit.is_tracing() else torch.sym_max(x.shape[2], x.shape[3])
        return smaller, longest * y, x.flatten(1).topk(3).values, y[y > 0]


def write(folder: Path) -> None:
    """A file for each of :data:`TRACERS`."""
    torch.manual_seed(0)
    model, args = Sizes().eval(), (torch.randn(2, 3, 8, 9), torch.randn(5))
    shapes = {"x": {0: "batch", 2: "height", 3: "width"}, "y": {0: "length"}}
    for opset, first in TRACERS.items():
        with torch_export_first(first):
            svexport.export(model, args, folder / f"{opset}.onnx", opset=opset, dynamic_shapes=shapes, verify=False)


def test_bytes(tmp_path) -> None:
    code = f"from pathlib import Path; from {__name__} import write; write(Path({str(tmp_path / 'other')!r}))"
    for folder in ("first", "second", "other"):
        (tmp_path / folder).mkdir()
    environment = os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}  # other orders of sets, and addresses
    with subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=Path.cwd()) as other:
        write(tmp_path / "first")
        write(tmp_path / "second")
        assert other.wait() == 0
    for opset in TRACERS:
        first, second, third = (tmp_path / folder / f"{opset}.onnx" for folder in ("first", "second", "other"))
        assert first.read_bytes() == second.read_bytes() == third.read_bytes()
        assert b" at 0x" not in first.read_bytes()
