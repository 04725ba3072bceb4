"""svexport bench: the table, JSON and page that compare files with their model."""

from __future__ import annotations

import onnx
import pytest


@pytest.fixture
def file(run, project):
    assert run("export", "nets.py:Ready", "-o", "net.onnx", "--verify", "quick").code == 0
    return project / "net.onnx"


def test_files_beside_torch(run, file, project):
    result = run("bench", "nets.py:Ready", file, "--runs", 12, "--report", "bench.html", "--json")
    assert result.code == 0, result.err
    torch, engine = result.json["timings"]
    assert (torch["name"], engine["name"]) == ("torch", "net.onnx")
    assert torch["runs"] == engine["runs"] == 12
    assert torch["error"] is None
    assert engine["ok"]
    assert engine["error"] < 1e-5
    for timing in (torch, engine):
        times = timing["milliseconds"]
        assert 0 < times["min"] <= times["p50"] <= times["p90"] <= times["p99"]
    page = (project / "bench.html").read_text()
    assert "net.onnx" in page
    assert "<svg" in page


def test_a_file_that_computes_something_else_fails(run, file, project):
    model = onnx.load(file)
    [bias] = [t for t in model.graph.initializer if list(t.dims) == [4]]
    bias.raw_data = bytes(16)
    onnx.save(model, project / "wrong.onnx")
    result = run("bench", "nets.py:Ready", file, "wrong.onnx", "--runs", 10)
    assert result.code == 1
    assert "FAIL" in result.out
    assert run("bench", "nets.py:Ready", "none.onnx").code == 1
    assert run("bench", "nets.py:Ready", "--runs", 10).code == 0
