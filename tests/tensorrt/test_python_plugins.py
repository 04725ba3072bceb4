"""Python plugins beside TensorRT's real bindings, whose libraries a stub stands in for: no engine is built here."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from svexport.errors import BackendNotAvailableError
from svexport.ops._op import OPS, Op, as_tuple
from svexport.tensorrt import register_plugins
from svexport.tensorrt.nodes import plugin_ops
from svexport.tensorrt.plugins import Description, Size, output_descriptions

ROOT = Path(__file__).parents[2]
BINDINGS = {f.name.removeprefix("tensorrt-"): f for f in sorted(Path(sys.prefix).glob("tensorrt-*")) if f.is_dir()}
every_op = pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)


@pytest.fixture(scope="module", params=sorted(BINDINGS) or ["none"])
def bindings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one version of the bindings says of all plugins."""
    if not BINDINGS:
        pytest.skip(
            f"no TensorRT bindings in {sys.prefix}/tensorrt-<version>: make test installs them where pip has them"
        )
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the stub of TensorRT's libraries")
    version = request.param
    major = version.split(".")[0]
    folder = tmp_path_factory.mktemp(f"stub{major}")
    names = [f"{name}.so.{major}" for name in ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")]
    for name in names:
        subprocess.run(
            ["g++", "-shared", "-fPIC", f"-DTENSORRT_MAJOR={major}", f"-Wl,-soname,{name}", "-o", folder / name,
             Path(__file__).with_name("stub.cpp")],
            check=True,
        )  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "tests.tensorrt.bindings", BINDINGS[version], folder / names[0]],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_every_op_registers(bindings: dict[str, Any]) -> None:
    assert bindings["kinds"] == {op.node_type: "Python" for op in plugin_ops()}
    assert bindings["registered"] == len(plugin_ops())


@every_op
def test_fields_are_the_attributes(bindings: dict[str, Any], op: Op) -> None:
    said = bindings["ops"][op.name]
    assert said["name"] == op.node_type
    kinds = {"int": "INT32", "ints": "INT32", "float": "FLOAT32", "floats": "FLOAT32"}
    assert said["fields"] == [[a.name, kinds[a.kind]] for a in op.attributes]


@every_op
def test_attributes_of_a_node_arrive_and_round_trip(bindings: dict[str, Any], op: Op) -> None:
    said = bindings["ops"][op.name]
    args = next(iter(op.samples(lambda *shape: torch.zeros(shape))))
    for argument, value in zip(op.arguments, args, strict=True):
        if not argument.is_tensor:
            wanted = list(value) if argument.kind in ("ints", "floats") else [value]
            for got in (said["attributes"], said["serialized"]):
                given = got[argument.name] if isinstance(got[argument.name], list) else [got[argument.name]]
                assert len(given) == len(wanted)
                assert all(math.isclose(g, w, rel_tol=1e-6) for g, w in zip(given, wanted, strict=True))


@every_op
def test_types(bindings: dict[str, Any], op: Op) -> None:
    said = bindings["ops"][op.name]
    args = next(iter(op.samples(lambda *shape: torch.zeros(shape))))
    names = {torch.float32: "FLOAT", torch.int8: "INT8", torch.float16: "HALF"}
    assert said["outputs"] == [names[o.dtype] for o in as_tuple(op(*args))]
    assert set(said["half outputs"]) <= {"HALF", "FLOAT"}
    assert said["supports"]
    assert said["supports half"]
    assert not said["supports channels last"]
    assert not said["supports mixed output"]


@every_op
def test_wrong_fields_are_refused(bindings: dict[str, Any], op: Op) -> None:
    refused = bindings["ops"][op.name]["refused"]
    assert "no_such_attribute" in refused["foreign"]
    for attribute in op.attributes:
        assert f"{attribute.name} is missing" in refused[f"without {attribute.name}"]


class Builder:
    """Expressions of dimensions as numbers, which is what TensorRT makes of them in the end."""

    def constant(self, value: int) -> int:
        return value

    def operation(self, operation: Any, first: int, second: int) -> int:
        return operation(first, second)


class Operations:
    SUM = staticmethod(lambda a, b: a + b)
    SUB = staticmethod(lambda a, b: a - b)
    PROD = staticmethod(lambda a, b: a * b)
    FLOOR_DIV = staticmethod(lambda a, b: a // b)


@every_op
def test_shape_expressions(op: Op) -> None:
    """Evaluated, they are the shapes of what the op returns."""
    for args in op.samples(lambda *shape: torch.zeros(shape)):
        tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
        attributes = {a.name: v for a, v in zip(op.arguments, args, strict=True) if not a.is_tensor}
        given = [Description(tuple(Size(n, Builder(), Operations) for n in t.shape), t.dtype) for t in tensors]
        outputs = output_descriptions(op, given, attributes)
        got = [tuple(s.value if isinstance(s, Size) else s for s in o.shape) for o in outputs]
        assert got == [tuple(o.shape) for o in as_tuple(op(*args))]


def test_ops_without_a_fake_have_no_plugin() -> None:
    assert all(op.fake is not None for op in plugin_ops())
    assert {op.name for op in plugin_ops()} <= set(OPS)


def test_without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendNotAvailableError, match="pip install tensorrt"):
        register_plugins()


def test_old_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="8.6.1"))
    with pytest.raises(BackendNotAvailableError, match=r"this is 8\.6\.1.*svexport plugins build"):
        register_plugins()
