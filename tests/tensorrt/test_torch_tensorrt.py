"""Torch-TensorRT with our converters: how its dry run divides models; no engine is built here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from svexport.errors import BackendNotAvailableError
from svexport.ops._op import OPS, Op
from svexport.tensorrt import register_torch_tensorrt
from svexport.tensorrt.nodes import plugin_ops
from tests.tensorrt.cases import inputs_of
from tests.tensorrt.dry_run import EXAMPLES
from tests.tensorrt.test_python_plugins import BINDINGS, ROOT, compile_stub

PACKAGES = [f for f in sorted(Path(sys.prefix).glob("tensorrt-*")) if (f / "torch_tensorrt").is_dir()]


def run(site: Path, stub: Path, *options: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.tensorrt.dry_run", stub, *options],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(stub.parent), "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """With our converters, and without."""
    if not PACKAGES:
        pytest.skip(f"no Torch-TensorRT in {sys.prefix}/tensorrt-<version>: make test installs it where pip has it")
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the stub of TensorRT's libraries")
    package = PACKAGES[-1]
    [info] = package.glob("torch_tensorrt-*.dist-info")
    required = re.search(r"^Requires-Dist: tensorrt<\S*>=(\d+)", (info / "METADATA").read_text(), re.MULTILINE)
    assert required is not None
    found = [folder for version, folder in BINDINGS.items() if version.split(".")[0] == required[1]]
    if not found:
        pytest.skip(f"{info.stem} needs the bindings of TensorRT {required[1]}")
    site = tmp_path_factory.mktemp("site")
    # Its libraries need CUDA. Without them it is Python, and that is all of it up to here.
    shutil.copytree(package / "torch_tensorrt", site / "torch_tensorrt", ignore=shutil.ignore_patterns("lib", "_C.*"))
    (site / info.name).symlink_to(info)
    (site / "tensorrt").symlink_to(found[-1] / "tensorrt_bindings")
    stub = compile_stub(int(required[1]), tmp_path_factory.mktemp("stub"))
    result = shared / "dry_runs.json"
    with FileLock(result.with_suffix(".lock")):
        if not result.exists():
            result.write_text(json.dumps([run(site, stub), run(site, stub, "plain")]))
    with_ours, without = json.loads(result.read_text())
    return with_ours, without


ONE_ENGINE = {"engines": 1, "supported": True, "torch": []}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_one_engine(dry_runs: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    with_ours, without = dry_runs
    assert with_ours["models"][name] == ONE_ENGINE
    assert not without["models"][name]["supported"]  # else this would be no test of ours


def test_grid_sample_of_an_unchanged_model(dry_runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with_ours, without = dry_runs
    assert with_ours["models"]["F.grid_sample"] == ONE_ENGINE
    assert with_ours["models"]["F.grid_sample 5-D"] == ONE_ENGINE
    assert not without["models"]["F.grid_sample 5-D"]["supported"]


# torch.linalg.solve has no converter, and ours becomes it: it stays in torch.
CONVERTED = [op for op in OPS.values() if not op.inline and op.name != "solve"]


@pytest.mark.parametrize("op", CONVERTED, ids=lambda op: op.name)
def test_no_op_breaks_the_graph(dry_runs: tuple[dict[str, Any], dict[str, Any]], op: Op) -> None:
    assert dry_runs[0]["ops"][op.name] == ONE_ENGINE


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_converters_create_plugins_from_attributes(dry_runs: tuple[dict[str, Any], dict[str, Any]], op: Op) -> None:
    said = dry_runs[0]["plugins"][op.name]
    args = next(iter(op.samples(lambda *shape: torch.zeros(shape))))
    assert said["type"] == op.node_type
    assert [name.split("_", 1)[1].rsplit("_", 1)[0] for name in said["inputs"]] == [n for n, _ in inputs_of(op, args)]
    assert said["shape inputs"] == []
    for argument, value in zip(op.arguments, args, strict=True):
        if not argument.is_tensor:
            assert np.allclose(said["attributes"][argument.name], np.asarray(value, float))
    outputs = said["outputs"] if op.num_outputs > 1 else [said["outputs"]]
    assert outputs == [f"output {i}" for i in range(op.num_outputs)]


def test_what_a_plugin_does_not_run_is_not_converted(dry_runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert not dry_runs[0]["models"]["inverse of 9x9"]["supported"]


@pytest.mark.core
@pytest.mark.skipif(importlib.util.find_spec("torch_tensorrt") is not None, reason="Torch-TensorRT is installed")
def test_without_torch_tensorrt() -> None:
    with pytest.raises(BackendNotAvailableError, match="pip install torch-tensorrt"):
        register_torch_tensorrt()
