"""The six examples from export to benchmark with a TensorRT that runs on the CPU, in Python and on the command line."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

import svexport
from tests.cli.conftest import run  # noqa: F401 - a fixture
from tests.tensorrt.engines import EXAMPLES
from tests.tensorrt.reference import VERSIONS, install

ROOT = Path(__file__).parents[2]
TARGETS = {"8.6.1": "8.6", "10.1.0": "10.1", "10.16.1": None, "11.4.0": None}


def examples(quick: Collection[str], *values: Sequence[Any]) -> list[Any]:
    """Each example, with its value of each sequence in turn; those that are not quick are not of make test."""
    return [
        pytest.param(name, *(v[i % len(v)] for v in values), marks=[] if name in quick else pytest.mark.exhaustive)
        for i, name in enumerate(EXAMPLES)
    ]


@pytest.mark.parametrize(("name", "version"), examples(("detr3d", "fused_decoder", "stgcn", "yolox_stem"), VERSIONS))
def test_in_python(name: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = install(monkeypatch, tmp_path, version)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    model = importlib.import_module(name).model(**EXAMPLES[name]).eval()
    file, plan = tmp_path / "m.onnx", tmp_path / "m.engine"
    svexport.export(model, path=file, opset=17, target=TARGETS[version], verify=False)
    with svexport.build(file, plan) as built:
        report = built.report
        assert report is not None
        assert len(report.plugins) == sum(layer.kind == "PluginV3" for layer in report.layers)
    with svexport.load(plan) as engine:
        comparison = svexport.compare(model, engine)
        assert comparison.ok, comparison
        result = svexport.bench(model, [engine, file], runs=2, copies=1)
        assert result.ok
        assert [t.name for t in result.timings] == ["torch", "m.engine", "m.onnx"]
    assert not list(trt.alive)


@pytest.mark.parametrize("name", examples(("stgcn", "yolox_stem")))
def test_on_the_command_line(
    name: str,
    run: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trt = install(monkeypatch, tmp_path, "10.16.1")
    options = ", ".join(f"{key}={value!r}" for key, value in EXAMPLES[name].items())
    file = tmp_path / f"{name}_small.py"
    text = f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\nimport {name}\n"
    file.write_text(f"{text}def model():\n    return {name}.model({options})\n")
    onnx, plan = tmp_path / "m.onnx", tmp_path / "m.engine"
    for words in (
        ("export", f"{file}:model", "-o", onnx, "--opset", 17, "--no-verify"),
        ("build", onnx, "-o", plan),
        ("compare", f"{file}:model", plan),
        ("bench", f"{file}:model", plan, onnx, "--runs", 2),
    ):
        result = run(*words)
        assert result.code == 0, result.err
    assert "m.engine" in result.out
    assert not list(trt.alive)
