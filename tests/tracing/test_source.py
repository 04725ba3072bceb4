"""Sources have the same names wherever they are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest
import torch

import svexport
from svexport.tracing.source import shown_path

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return torch.nn.functional.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False)
"""


@pytest.mark.parametrize(
    ("file", "packages", "shown"),
    [
        ("work/models/net.py", (), "models/net.py"),
        ("alone/net.py", (), "net.py"),
        ("lib/vision/models/net.py", ("lib/vision", "lib/vision/models"), "vision/models/net.py"),
        ("env/lib/site-packages/vision/models/net.py", (), "vision/models/net.py"),
        ("work/env/lib/dist-packages/vision/net.py", (), "vision/net.py"),  # below the working directory
    ],
)
def test_paths(file, packages, shown, tmp_path, monkeypatch) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    for package in packages:
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "work").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    assert shown_path(str(path)) == shown


def test_a_file_does_not_say_where_its_source_was(tmp_path, monkeypatch) -> None:
    files = []
    for place in ("here", "there"):
        source = tmp_path / place / "net.py"
        source.parent.mkdir()
        source.write_text(NET)
        spec = importlib.util.spec_from_file_location("net", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        path = tmp_path / f"{place}.onnx"
        report = svexport.export(module.Net(), torch.rand(1, 3, 5, 7), path, verify=False)
        assert report.svexport_nodes[0].source.startswith("net.py:8 in forward")
        files.append(path.read_bytes())
    assert files[0] == files[1]
    (node,) = [n for n in onnx.load(path).graph.node if n.op_type == "SvGridSample"]
    assert node.doc_string.startswith("net.py:8")
    assert str(Path(tmp_path)).encode() not in files[0]


class Helped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixed(x).relu()

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return mixed_by(x, x.mT) + 1


def mixed_by(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,jk", x, y)


@pytest.mark.parametrize("opset", [11, 18])
def test_lines_are_those_of_helpers(opset: int, tmp_path) -> None:
    """That call torch, not those of forward, or of what exports."""
    report = svexport.export(Helped(), torch.randn(2, 3), tmp_path / "m.onnx", opset=opset)
    (node,) = report.svexport_nodes
    assert node.source.endswith('in mixed_by: return torch.einsum("ij,jk", x, y)')
