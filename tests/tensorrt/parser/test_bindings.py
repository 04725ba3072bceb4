"""Files in ``trt.OnnxParser`` with Python plugins: TensorRT's bindings and parser, with a host as its library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import svexport
from svexport.ops._op import OPS
from svexport.tensorrt import library
from tests.tensorrt.conftest import CUDA
from tests.tensorrt.parser.models import random_model
from tests.tensorrt.parser.parser import Parser, compile_library, configured

VARIABLE = "SVEXPORT_TENSORRT_BINDINGS"


@pytest.fixture(scope="module")
def stand_in(parser: Parser, headers: library.Headers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"needs TensorRT's Python bindings of the parser's version: set {VARIABLE} to their folder")
    objects = configured()
    assert objects is not None
    return compile_library(headers, objects, tmp_path_factory.mktemp("library"), CUDA)


def test_parser_of_the_bindings(parser: Parser, stand_in: Path, tmp_path: Path) -> None:
    """Nodes become plugins in Python, one network after another; lists that the bindings do not show are refused."""
    models, names = {}, {}
    for seed in range(12):
        path = tmp_path / f"{seed}.onnx"
        model, args, inputs = random_model(seed)
        svexport.export(model, args, path, opset=17, target=str(parser), input_names=inputs, verify=False)
        models[str(path)] = [node.op_type for node in onnx.load(path).graph.node if node.domain == "svexport"]
        names[str(path)] = [value.name for value in onnx.load(path).graph.input]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tensorrt.parser.bindings", os.environ[VARIABLE], stand_in, *models],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(stand_in.parent)},
    )
    assert done.returncode == 0, done.stderr
    registered, *parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert set(registered["kinds"].values()) <= {"JIT", "AOT"}
    lists = {op.node_type for op in OPS.values() if any(a.kind in ("ints", "floats") for a in op.attributes)}
    taken = 0
    for result in parsed:
        nodes = models[result["file"]]
        if not registered["lists"] and lists & set(nodes):
            assert not result["ok"]
            assert "use the C++ library (svexport plugins build)" in done.stderr + done.stdout
            continue
        taken += 1
        assert result["ok"], result
        assert result["plugins"] == len(nodes)
        assert result["shapes"] == [[2, 8, 6, 6]]
        assert result["inputs"] == names[result["file"]]
    assert taken > 6
