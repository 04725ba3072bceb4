"""Engines: every node and example is parsed, built, run and compared with torch, for every kind of plugin.

All tests need TensorRT and a GPU, except those at the end, which check here the code that runs there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch

from svexport.ops._op import Op
from svexport.tensorrt import aot, libraries, plugins
from svexport.tensorrt.nodes import plugin_ops
from tests.tensorrt import engines
from tests.tensorrt.test_python_plugins import ROOT

TENSORRT = [
    pytest.mark.tensorrt,
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="TensorRT not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
KINDS = ("C++", "AOT", "JIT")
Answers = tuple[str, Path, dict[str, dict[str, Any]]]


def run(*arguments: Any) -> dict[str, dict[str, Any]]:
    """Answers by name; those before it ended, if TensorRT ends the process."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.tensorrt.engines", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"name"')]
    print(result.stderr[-4000:])
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=TENSORRT) for kind in KINDS])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    if request.param == "C++" and not libraries():
        pytest.skip("no plugin library: svexport plugins build")
    if request.param == "AOT" and not aot.available():
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("engines")
    return request.param, folder, run(request.param, folder)


def check(said: dict[str, Any] | None, name: str) -> None:
    assert said is not None, "the process ended before or in it"
    assert said["error"] is None, said["error"]
    assert said["difference"] < (5e-3 if "float16" in name else 1e-4)


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_nodes(answers: Answers, op: Op) -> None:
    kind, _, by_name = answers
    names = [name for name, (other, _) in engines.SAMPLES.items() if other is op]
    assert names
    for name in names:
        said = by_name.get(name)
        check(said, name)
        assert said is not None
        assert said["plugins"] == 1
        assert said["kind"] == (kind if kind != "AOT" or op.name in aot.AOT_OPS else "JIT")


@pytest.mark.parametrize("name", engines.EXAMPLES)
def test_examples(answers: Answers, name: str) -> None:
    said = answers[2].get(name)
    check(said, name)
    assert said is not None
    assert said["plugins"] == said["nodes"]


@pytest.mark.parametrize("op", [op for op in plugin_ops() if op.name in aot.AOT_OPS], ids=lambda op: op.name)
def test_engines_compiled_ahead_of_time_need_no_plugin(answers: Answers, op: Op, tmp_path: Path) -> None:
    kind, folder, _ = answers
    if kind != "AOT":
        pytest.skip("of the others")
    plans = list(folder.glob(f"{op.name}-*.plan"))
    assert plans
    for plan in plans:
        (tmp_path / plan.name).symlink_to(plan)
    for name, said in run("run", tmp_path).items():
        check(said, name)


# ------------------------------------------------------------------------------------------- without TensorRT or a GPU


def test_there_is_a_case_for_every_op_and_example() -> None:
    assert {op for op, _ in engines.SAMPLES.values()} == set(plugin_ops())
    assert {f"{name}.py" for name in engines.EXAMPLES} == {f.name for f in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("name", engines.SAMPLES)
def test_what_is_run_is_the_node(name: str) -> None:
    content, inputs, expected, profile = engines.sample(name)
    model = onnx.load_from_string(content)
    assert [node.op_type for node in model.graph.node] == [engines.SAMPLES[name][0].node_type]
    assert not model.functions
    assert list(inputs) == [i.name for i in model.graph.input]
    assert len(expected) == len(model.graph.output)
    assert (profile is not None) == name.endswith("dynamic")
    assert engines.compare([t.float() for t in expected], expected) < 1e-6


@pytest.mark.parametrize("kind", ["AOT", "JIT"])
def test_the_process(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything but what TensorRT does, which is taken from torch instead."""
    names = [next(n for n in engines.SAMPLES if n.startswith(op.name)) for op in plugin_ops()]
    kinds = {op.node_type: kind for op in plugin_ops()}
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.16.1"))
    monkeypatch.setattr(engines, "NAMES", [*names, "stgcn", "no such name"])
    monkeypatch.setattr(engines, "build", lambda trt, model, profile: (model, {"PLUGIN_V3": 1}))
    monkeypatch.setattr(plugins, "libraries", plugins.libraries)
    monkeypatch.setattr(aot, "available", aot.available)
    monkeypatch.setattr(plugins, "register_plugins", lambda: plugins.Registered(kinds))
    monkeypatch.setattr(sys, "path", list(sys.path))
    samples = {engines.sample(name)[0]: engines.sample(name)[2] for name in names}

    def run(trt: Any, plan: bytes, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if plan in samples:
            return {str(i): t for i, t in enumerate(samples[plan])}
        with torch.no_grad():
            return {"output": importlib.import_module("stgcn").model(frames=20)(*inputs.values())}

    monkeypatch.setattr(engines, "run", run)
    engines.main(kind, str(tmp_path))
    said = {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    for name in names:
        check(said[name], name)
        assert said[name]["kind"] == kind
    check(said["stgcn"], "stgcn")
    assert said["stgcn"]["nodes"] == 0  # einsum is standard ONNX there
    assert "ModuleNotFoundError" in said["no such name"]["error"]
    assert plugins.libraries() == []
    assert aot.available() == (False if kind == "JIT" else aot.available())

    engines.main("run", str(tmp_path))
    again = {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(again) == set(names)
    for name in names:
        check(again[name], name)
