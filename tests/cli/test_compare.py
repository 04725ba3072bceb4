from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.core


@pytest.fixture
def file(project, run):
    assert run("export", "nets:Ready", "-o", "ready.onnx").code == 0
    return "ready.onnx"


@pytest.mark.parametrize("words", ["", "--input x=1x3x8x8", "--layers", "--report net.html"])
def test_the_same_model(run, file, words):
    result = run("compare", "nets:Ready", file, *words.split())
    assert result.code == 0, result.err
    assert "the output agrees" in result.out
    assert ("conv" in result.out) == ("--layers" in words)
    assert Path("net.html").is_file() == ("--report" in words)


def test_other_weights(run, file):
    result = run("compare", "nets:Ready", file, "--seed", 7, "--layers", "--json")
    assert result.code == 1
    comparison = result.json
    assert not comparison["ok"]
    assert not comparison["outputs"][0]["ok"]
    assert comparison["first"] == "conv"
    assert result.err == ""


def test_checkpoint_and_inputs(run, project):
    weights = {"conv.weight": torch.full((4, 3, 3, 3), 0.1), "conv.bias": torch.zeros(4)}
    torch.save(weights, "net.pt")
    torch.save({"x": torch.rand(1, 3, 9, 9)}, "in.pt")
    words = "--weights", "net.pt", "--inputs", "in.pt"
    assert run("export", "nets:Net", "-o", "net.onnx", *words).code == 0
    assert run("compare", "nets:Net", "net.onnx", *words).code == 0
    assert run("compare", "nets:Net", "net.onnx", "--inputs", "in.pt").code == 1


def test_recorded_inputs(run, project):
    assert run("export", "nets:Recorded", "-o", "net.onnx").code == 0
    result = run("compare", "nets:Recorded", "net.onnx")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nets:Ready absent.onnx", "absent.onnx"),
        ("nets:Ready nets.py", "expected the path of a .onnx"),
        ("nets:Ready net.engine", "cannot read net.engine"),
        ("nets:Net ready.onnx", "Net came without inputs"),
        ("nets:Ready ready.onnx --input x=1x3x9x9", "input 'x' expects float32[1, 3, 8, 8], got float32[1, 3, 9, 9]"),
        ("nets:Product ready.onnx", "compare a model with its own export"),
        ("nets:Ready ready.onnx --report nets.py/page.html", "cannot write nets.py/page.html"),
        ("nets:nothing_to_load ready.onnx --report .", "expected the path of a file, got the folder ."),
    ],
)
def test_refused(run, file, words, message):
    result = run("compare", *words.split())
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err
