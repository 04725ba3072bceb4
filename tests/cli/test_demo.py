"""The demo on stand-in models; tests/examples exports the real examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from svexport.cli import demo
from svexport.errors import SvexportError
from svexport.tracing.source import is_library

LINEAR = """
import torch
from torch import nn

QUICK = {"width": 2}


class Linear(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 3)
        self.example_inputs = (torch.linspace(-1, 1, 4 * width).reshape(4, width),)

    def forward(self, x):
        image = torch.einsum("bi,ci->bc", self.linear(x), self.linear(x)).unflatten(0, (2, 2))
        return torch.nn.functional.grid_sample(image[None], x[None, None, :, :2], align_corners=False)


def model(width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return Linear(width)
"""
NOISE = """
import torch


class Noise(torch.nn.Module):
    example_inputs = (torch.ones(3),)

    def forward(self, x):
        return x + torch.rand(3)


def model():
    return Noise()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The examples of an installed package: one model, and a file that has none."""
    examples = tmp_path / "package" / "examples"
    examples.mkdir(parents=True)
    (examples / "linear.py").write_text(LINEAR)
    (examples / "helper.py").write_text("model = None\n")
    monkeypatch.setattr(demo, "PACKAGE", tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    return examples


def test_demo(run, folder, tmp_path):
    result = run("demo")
    assert result.code == 0, result.err
    assert sorted(f.name for f in (tmp_path / "build" / "demo").iterdir()) == [
        "linear-opset11.onnx",
        "linear-opset17.onnx",
        "report.html",
    ]
    rows = [line.split() for line in result.out.splitlines() if "linear" in line]
    assert [row[:2] for row in rows] == [["linear", "11"], ["linear", "17"]]
    assert all("SvGridSample 1" in " ".join(row) and "yes" in row for row in rows)
    assert "SvEinsum" not in result.out  # which no file has, but what it consists of
    assert "build/demo/report.html" in result.out
    assert result.err == ""  # no progress in a pipe


def test_page(run, folder):
    assert run("demo", "-o", "out").code == 0
    page = (folder.parents[1] / "out" / "report.html").read_text()
    assert "svexport demo: 2 of 2 files verified" in page
    for opset in (11, 17):
        assert f"<h1>linear at opset {opset}</h1>" in page
    assert page.count("<svg") == 2 * 4  # for wide and for narrow pages
    assert "linear.py:15 in forward: image = torch.einsum(" in page.replace("<wbr>", "")
    order = [page.index(piece) for piece in ("Verified:", "Parity with torch", ">Nodes<", ">Details<")]
    assert order == sorted(order)
    assert not re.search(r'(src|href)="http', page)
    for opset in (11, 17):
        assert f'<a href="#linear-{opset}">' in page
        assert f'id="linear-{opset}"' in page


def test_quick_and_json(run, folder):
    result = run("demo", "--quick", "--opset", "13", "--model", "linear", "-o", "out", "--json")
    assert result.code == 0, result.err
    (found,) = result.json["runs"]
    assert (found["model"], found["opset"], found["verified"], found["error"]) == ("linear", 13, True, None)
    assert found["report"]["inputs"] == {"x": "float32[4, 2]"}
    assert result.json["report"] == "out/report.html"


def test_the_report_may_go_elsewhere(run, folder):
    result = run("demo", "--quick", "--opset", "13", "-o", "out", "--report", "pages/demo.html", "--json")
    assert result.json["report"] == "pages/demo.html"
    assert "verified" in Path("pages/demo.html").read_text()
    assert not Path("out/report.html").exists()


def test_output_that_is_no_folder_is_refused_before_the_work(run, folder, tmp_path):
    (tmp_path / "file").touch()
    result = run("demo", "-o", "file")
    assert (result.code, result.out) == (1, "")
    assert "cannot write file/report.html" in result.err


def test_failures_are_told_and_the_rest_is_done(run, folder):
    (folder / "noise.py").write_text(NOISE)
    (folder / "zero.py").write_text("def helper(): ...\n\ndef model():\n    return 1 / 0\n")
    result = run("demo", "--opset", "11", "-o", "out")
    assert result.code == 1
    assert "noise, opset 11: forward draws random numbers" in result.out
    assert "zero, opset 11: ZeroDivisionError: division by zero" in result.out
    assert (folder.parents[1] / "out" / "linear-opset11.onnx").is_file()
    assert not (folder.parents[1] / "out" / "noise-opset11.onnx").exists()
    page = (folder.parents[1] / "out" / "report.html").read_text()
    assert "1 of 3 files verified" in page
    assert "division by zero" in page
    assert (
        run("demo", "--opset", "11", "-o", "out", "--json")
        .json["runs"][1]["error"]
        .startswith("forward draws random numbers")
    )


def test_unknown_model(run, folder):
    result = run("demo", "--model", "linear", "resnet")
    assert result.code == 1
    assert f"no example resnet in {folder}; there are linear" in result.err


def test_no_examples(run, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "PACKAGE", tmp_path / "elsewhere" / "package")
    result = run("demo")
    assert result.code == 1
    assert "reinstall svexport" in result.err


def test_installed_examples_are_user_code():
    """Their lines are named in reports, though they lie in svexport's folder."""
    assert is_library(str(demo.PACKAGE / "ops" / "einsum.py"))
    assert not is_library(str(demo.PACKAGE / "examples" / "stgcn.py"))


def test_the_real_examples_are_found():
    assert set(demo.examples()) >= {"deformable_detr", "detr3d", "fused_decoder", "multicamera", "stgcn", "yolox_stem"}
    assert list(demo.examples(["stgcn"])) == ["stgcn"]
    with pytest.raises(SvexportError, match="no example absent"):
        demo.examples(["absent"])


@pytest.mark.parametrize("name", ["deformable_detr", "detr3d", "fused_decoder", "multicamera", "stgcn", "yolox_stem"])
def test_quick_configurations_fit(name):
    from svexport.cli._model import load_file

    module = load_file(demo.examples()[name])
    model = module.model(**module.QUICK)
    with torch.no_grad():
        model(*model.example_inputs)
