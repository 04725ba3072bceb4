from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.core


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 4]) for name in "xy"]
    nodes = [helper.make_node("Det", ["x"], ["d"], name="volume"), helper.make_node("Relu", ["x"], ["y"], name="relu")]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), "det.onnx")
    return Path("det.onnx")


def test_check(run, file):
    result = run("check", file, "--target", "8.4")
    assert result.code == 1
    for words in ("det.onnx for TensorRT 8.4: 1 error", "1 native, 1 unsupported", "no version has Det", "volume"):
        assert words in result.out


def test_check_as_json(run, file):
    result = run("check", file, "--target", "10.12", "--json")
    assert result.code == 1
    assert result.json["ok"] is False
    assert result.json["target"] == "TensorRT 10.12"
    assert result.json["verdicts"] == {"native": 1, "unsupported": 1}
    (finding,) = result.json["findings"]
    assert (finding["severity"], finding["op"], finding["node"]) == ("error", "Det", "volume")


def test_success(run, file):
    model = onnx.load(file)
    del model.graph.node[0]
    onnx.save(model, file)
    result = run("check", file, "--target", "8.4")
    assert result.code == 0
    assert "no problem found" in result.out
    assert run("check", file, "--target", "8.4", "--json").json["ok"] is True


def test_page(run, file):
    assert run("check", file, "--target", "8.4", "--report", "pages/det.html").code == 1
    page = Path("pages/det.html").read_text()
    for words in ("<title>det.onnx for TensorRT 8.4</title>", "1 error", "no version has Det", "volume"):
        assert words in page
    refused = run("check", file, "--target", "8.4", "--report", ".")
    assert (refused.code, "expected the path of a file" in refused.err) == (1, True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("absent.onnx --target 8.4", 1, "no such file: absent.onnx"),
        ("empty.onnx --target 8.4", 1, "empty.onnx is not a valid ONNX file"),
        ("text.onnx --target 8.4", 1, "text.onnx is not a valid ONNX file"),
        ("cut.onnx --target 8.4", 1, "cut.onnx is not a valid ONNX file"),
        (". --target 8.4", 1, "got the folder"),
        ("det.onnx --target 7.0", 1, "target expects a TensorRT version"),
        ("det.onnx", 2, "--target"),
    ],
)
def test_refused(run, file, words, code, message):
    Path("empty.onnx").touch()
    Path("text.onnx").write_text("not a model")
    Path("cut.onnx").write_bytes(file.read_bytes()[:-20])
    result = run("check", *words.split())
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.err


FOUND = """

class Found(nn.Module):
    example_inputs = (torch.eye(3),)

    def forward(self, x):
        return x.nonzero()
"""


def test_export_tells_what_its_target_lacks(project, run):
    (project / "nets.py").write_text((project / "nets.py").read_text() + FOUND)
    result = run("export", "nets:Found", "-o", "n.onnx", "--target", "8.4", "--json")
    assert result.code == 0, result.err
    assert result.json["check"]["ok"] is False
    assert any("NonZero" in note for note in result.json["notes"])
    assert run("check", "n.onnx", "--target", "8.4").code == 1
    assert run("check", "n.onnx", "--target", "8.6").code == 0
