from __future__ import annotations

import onnx
import pytest
import torch
from onnx import TensorProto, helper

import svexport
from svexport.graph.walk import opset_of

pytestmark = pytest.mark.core


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x", "z")]
    nodes = [helper.make_node("Gelu", ["x"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, "m.onnx")
    return "m.onnx"


def test_convert(run, file):
    result = run("convert", file, "-o", "older/m.onnx")
    assert result.code == 0, result.err
    assert "opset 20 became 11, 2 nodes 6" in result.out
    assert "written in other ops: 1 Gelu" in result.out
    assert opset_of(onnx.load("older/m.onnx")) == 11
    x = torch.randn(2, 3)
    expected = torch.nn.functional.gelu(x).relu()
    torch.testing.assert_close(svexport.load("older/m.onnx")(x), expected, rtol=1e-5, atol=1e-5)


def test_convert_in_place_as_json(run, file):
    result = run("convert", file, "-o", file, "--opset", "9", "--json")
    facts = {"ok": True, "input": file, "output": file, "from": 20, "opset": 9, "rewritten": {"Gelu": 1}, "nodes": 6}
    assert result.json == facts
    assert opset_of(onnx.load(file)) == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("absent.onnx -o out.onnx", "no such file: absent.onnx"),
        ("text.onnx -o out.onnx", "text.onnx is not an ONNX file that can be read"),
        ("m.onnx -o out.onnx --opset 21", "expected an opset from 9 to the model's own, 20, got 21"),
        ("m.onnx -o .", "expected the path of a file"),
    ],
)
def test_refusals(run, file, tmp_path, words, message):
    (tmp_path / "text.onnx").write_text("not a model")
    result = run("convert", *words.split())
    assert result.code == 1
    assert message in result.err
    assert not (tmp_path / "out.onnx").exists()
