"""Reduction of large files with a planted bad node to the smallest part that fails."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import svexport
from svexport import SvexportError
from svexport.graph.reduce import part_of
from svexport.graph.reduce import reduce as reduce_nodes
from tests.cli.conftest import run  # noqa: F401 - a fixture
from tests.tensorrt.reference import install
from tests.tensorrt.reference.builder import OnnxParser

value = helper.make_tensor_value_info
node = helper.make_node


def chain(count: int, bad: int = -1, seed: int = 0) -> onnx.ModelProto:
    """Nodes in a chain with branches and weights; the one of number ``bad`` is a Det, which TensorRT has not."""
    draw = random.Random(seed)
    nodes, weights, names = [], [], ["x"]
    for i in range(count):
        output = f"v{i}"
        if i == bad:
            nodes.append(node("Det", [names[-1]], [f"d{i}"], name=f"bad{i}"))
            nodes.append(node("Add", [names[-1], f"d{i}"], [output], name=f"after{i}"))
        elif i % 3 == 0:
            weights.append(numpy_helper.from_array(torch.full((4, 4), 0.5).numpy(), f"w{i}"))
            nodes.append(node("MatMul", [names[-1], f"w{i}"], [output], name=f"n{i}"))
        elif i % 7 == 0:
            nodes.append(node("Add", [names[-1], draw.choice(names)], [output], name=f"n{i}"))
        else:
            nodes.append(node(draw.choice(["Relu", "Tanh", "Neg"]), [names[-1]], [output], name=f"n{i}"))
        names.append(output)
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [4, 4])], [value(names[-1], TensorProto.FLOAT, [4, 4])], weights
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


@pytest.mark.parametrize(
    "bad", [pytest.param(0, marks=pytest.mark.exhaustive), 501, pytest.param(999, marks=pytest.mark.exhaustive)]
)
def test_one_bad_node_of_a_thousand(bad: int, tmp_path: Path) -> None:
    found = svexport.reduce(chain(1000, bad), "check", tmp_path / "small.onnx", target="10.3")
    assert found.nodes == [(f"bad{bad}", "Det")]
    assert found.before == 1001
    assert found.tried < 60
    assert "Det" in found.failure
    small = onnx.load(tmp_path / "small.onnx")
    onnx.checker.check_model(small, full_check=True)
    assert not svexport.check(small, "10.3").ok
    assert not small.graph.initializer
    script = tmp_path / "small.py"
    assert found.script == script
    shown = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(svexport.__file__).parents[1]), "PATH": ""},
    )  # fmt: skip
    assert "Det" in shown.stdout


def test_failures_that_need_several_nodes() -> None:
    """All that are needed stay, wherever they stand; nothing else does."""
    model = chain(200)
    wanted = {"n17", "n18", "n150"}

    def fails(part: onnx.ModelProto) -> bool:
        onnx.checker.check_model(part, full_check=True)
        return wanted <= {n.name for n in part.graph.node}

    small = reduce_nodes(model, fails)
    assert {n.name for n in small.graph.node} == wanted
    assert len(model.graph.node) == 200


def test_parts_compute_what_they_did_in_the_whole() -> None:
    model = chain(40)
    x = torch.randn(4, 4)
    engine = _engine(model)
    names = [n.output[0] for n in model.graph.node]
    probe = engine.with_outputs(names)
    values = {"x": x, **dict(zip(probe.output_names, probe.run([x]), strict=True))}
    draw = random.Random(1)
    for _ in range(20):
        part = part_of(model, draw.sample(range(40), draw.randint(1, 40)))
        assert part is not None
        onnx.checker.check_model(part, full_check=True)
        inner = _engine(part)
        for name, result in zip(inner.output_names, inner.run([values[n] for n in inner.input_names]), strict=True):
            torch.testing.assert_close(result, values[name])


def _engine(model: onnx.ModelProto) -> Any:
    from svexport.runtime.session import OnnxEngine

    return OnnxEngine(model, device="cpu")


def test_constants_and_nested_graphs_stay() -> None:
    branch = helper.make_graph([node("Mul", ["a", "w"], ["m"])], "then", [], [value("m", TensorProto.FLOAT, [2])])
    other = helper.make_graph([node("Neg", ["a"], ["n"])], "else", [], [value("n", TensorProto.FLOAT, [2])])
    constant = helper.make_tensor("", TensorProto.BOOL, [], [True])
    nodes = [
        node("Relu", ["x"], ["a"], name="relu"),
        node("Constant", [], ["c"], value=constant),
        node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=other),
    ]
    weight = numpy_helper.from_array(torch.ones(2).numpy(), "w")
    ends = value("x", TensorProto.FLOAT, [2]), value("y", TensorProto.FLOAT, [2])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [ends[0]], [ends[1]], [weight]), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 8
    small = reduce_nodes(model, lambda part: any(n.op_type == "If" for n in part.graph.node))
    onnx.checker.check_model(small, full_check=True)
    assert [n.op_type for n in small.graph.node] == ["Constant", "If"]
    assert [v.name for v in small.graph.input] == ["a"]
    assert [t.name for t in small.graph.initializer] == ["w"]
    assert torch.equal(_engine(small)(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0]))


def test_what_tensorrt_does_not_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, "10.16.1")
    plain = OnnxParser.parse

    def parse(self: Any, model: bytes, path: str | None = None) -> bool:
        loaded = onnx.load_from_string(model)
        for index, one in enumerate(loaded.graph.node):
            if one.name == "n77":
                self._fail(index, one, f"Assertion failed: {index} of {len(loaded.graph.node)}")
        return plain(self, model, path)

    monkeypatch.setattr(OnnxParser, "parse", parse)
    found = svexport.reduce(chain(100), "build", tmp_path / "small.onnx")
    assert [name for name, _ in found.nodes] == ["n77"]
    assert "Assertion failed" in found.failure


def test_an_engine_that_computes_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, "10.16.1")
    plain = OnnxParser.parse

    def parse(self: Any, model: bytes, path: str | None = None) -> bool:
        loaded = onnx.load_from_string(model)
        for one in loaded.graph.node:
            if one.name == "n31":
                one.op_type = "Sigmoid"
        return plain(self, loaded.SerializeToString(), path)

    monkeypatch.setattr(OnnxParser, "parse", parse)
    found = svexport.reduce(chain(60), "differs", tmp_path / "small.onnx")
    assert [name for name, _ in found.nodes] == ["n31"]
    # The script, in this process, where there is a TensorRT: on the inputs that the part had in the whole.
    monkeypatch.chdir(tmp_path)
    said: list[Any] = []
    text = (tmp_path / "small.py").read_text()
    exec(compile(text, "small.py", "exec"), {"print": lambda *values: said.extend(values)})  # noqa: S102 - our own
    [[expected], [actual]] = said
    assert not torch.allclose(expected, actual)


def test_a_failure_that_comes_and_goes() -> None:
    """What was found is kept, and it is said."""
    answers = iter(["bad weather"] * 4)
    found = svexport.reduce(chain(8), lambda part: next(answers, ""))
    assert 1 <= len(found.nodes) < 8
    assert found.failure.startswith("bad weather\n(not when it was tried once more")


def test_wrong_requests(tmp_path: Path) -> None:
    model = chain(5)
    with pytest.raises(SvexportError, match="nothing to reduce"):
        svexport.reduce(model, "load")
    with pytest.raises(SvexportError, match="nothing to reduce"):
        svexport.reduce(model, "check", target="10.3")
    with pytest.raises(SvexportError, match="needs target="):
        svexport.reduce(model, "check")
    with pytest.raises(SvexportError, match="expected the name of an ONNX file"):
        svexport.reduce(model, "load", tmp_path / "small.txt")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(SvexportError, match="not an ONNX file"):
        svexport.reduce(tmp_path / "text.onnx", "load")
    weights = numpy_helper.from_array(torch.ones(500).numpy(), "w")
    beside = helper.make_model(
        helper.make_graph(
            [helper.make_node("Neg", ["w"], ["y"])], "g", [], [helper.make_empty_tensor_value_info("y")], [weights]
        )
    )
    onnx.save(beside, tmp_path / "beside.onnx", save_as_external_data=True, location="weights.bin")
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(SvexportError, match=r"beside.onnx is not a valid ONNX file.*weights.bin"):
        svexport.reduce(tmp_path / "beside.onnx", "load")
    with pytest.raises(SvexportError, match="expects one of"):
        svexport.reduce(model, "crash")
    for place in (tmp_path / "text.onnx" / "small.onnx", tmp_path):
        asked: list[Any] = []
        with pytest.raises(SvexportError):
            svexport.reduce(model, lambda part, asked=asked: asked.append(part), place)
        assert not asked  # it is told before the work
    with pytest.raises(SvexportError, match="inputs names 'z', which is no input; there are x"):
        svexport.reduce(model, "differs", inputs={"z": torch.ones(1)})
    assert svexport.reduce(model, lambda part: "x" in [v.name for v in part.graph.input]).nodes == [("n0", "MatMul")]


def test_on_the_command_line(run: Any, tmp_path: Path) -> None:  # noqa: F811
    onnx.save(chain(50, 20), tmp_path / "m.onnx")
    result = run(
        "debug", "reduce", tmp_path / "m.onnx", "-o", tmp_path / "s.onnx", "--fails", "check", "--target", "10.3"
    )
    assert result.code == 0, result.err
    assert "1 of 51 nodes" in result.out
    assert (tmp_path / "s.onnx").is_file()
    assert run("debug", "reduce", tmp_path / "no.onnx", "-o", tmp_path / "t.onnx", "--fails", "load").code == 1
    assert (
        "nothing to reduce"
        in run("debug", "reduce", tmp_path / "m.onnx", "-o", tmp_path / "t.onnx", "--fails", "load").err
    )
    assert not (tmp_path / "t.onnx").exists()
