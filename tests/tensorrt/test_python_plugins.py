"""Python plugins with TensorRT's real bindings and a stub for its libraries; no engine is built here."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from svexport.errors import BackendNotAvailableError, PluginBuildError
from svexport.ops._op import OPS, Op, as_tuple
from svexport.tensorrt import aot, fields, jit_plugin, plugins, register_plugins
from svexport.tensorrt.bindings import dtypes
from svexport.tensorrt.library import Library
from svexport.tensorrt.nodes import plugin_ops
from svexport.tensorrt.signature import COORDINATES, FACTORS, IMAGES, Description, Size, output_descriptions
from tests.tensorrt.cases import arguments, inputs_of, with_inputs
from tests.tensorrt.engines import runnable
from tests.tensorrt.test_aot import AOT_OPS, evaluate, kernel_for

ROOT = Path(__file__).parents[2]
BINDINGS = {
    f.name.removeprefix("tensorrt-"): f
    for f in sorted(Path(sys.prefix).glob("tensorrt-*"))
    if (f / "tensorrt_bindings").is_dir()
}
every_op = pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)


def compile_stub(major: int, folder: Path) -> Path:
    """What stands in for TensorRT's libraries: one file under their three names. Returns the first."""
    names = [f"{name}.so.{major}" for name in ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")]
    for name in names:
        subprocess.run(
            ["g++", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-DTENSORRT_MAJOR={major}",
             f"-Wl,-soname,{name}", "-o", folder / name, Path(__file__).with_name("stub.cpp")],
            check=True,
        )  # fmt: skip
    return folder / names[0]


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
    stub = compile_stub(int(version.split(".")[0]), tmp_path_factory.mktemp("stub"))
    result = subprocess.run(
        [sys.executable, "-m", "tests.tensorrt.bindings", BINDINGS[version], stub],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(stub.parent)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_every_op_registers(bindings: dict[str, Any]) -> None:
    assert bindings["kinds"] == {op.node_type: "AOT" if op.name in aot.AOT_OPS else "JIT" for op in plugin_ops()}
    assert bindings["kinds again"] == bindings["kinds"]
    assert bindings["registered"] == len(plugin_ops())


def test_engines_are_built_and_run_by_what_the_bindings_have(bindings: dict[str, Any]) -> None:
    """The code of the tests that need TensorRT, run with the names and numbers of arguments of the real bindings."""
    said = bindings["build and run"]
    assert said["plan"] == "plan"
    assert said["layers"] == {"PLUGIN_V3": 2}
    assert said["outputs"] == {"y": [[2, 3], "torch.float16"]}
    assert {"OnnxParser.parse", "IOptimizationProfile.set_shape", "IExecutionContext.execute_async_v3"} <= set(
        said["called"]
    )
    assert len(said["failures"]) == 5
    assert "a reason" in said["failures"]["OnnxParser.parse"]


def test_what_builds_and_engines_implement(bindings: dict[str, Any]) -> None:
    said = bindings["subclasses"]
    assert said["bases"] == [True, True]
    assert said["log"] == [["an error"], ["a warning"]]
    assert said["output"] == [True, [2, 3]]
    assert said["goes on"] == [True, False]
    assert len(said["dtypes"]) == 8


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


every_aot_op = pytest.mark.parametrize("op", AOT_OPS, ids=lambda op: op.name)
DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.int8, 7: torch.bfloat16, 8: torch.int64}  # TensorRT's numbers
LINEAR, HWC8, HWC = 0, 2, 8


@every_op
def test_just_in_time_shapes_types_and_formats(bindings: dict[str, Any], op: Op) -> None:
    """Asked from C++, with sizes known and unknown."""
    cases = list(arguments(op))
    answers = bindings["just in time"][op.name]
    assert answers
    for said in answers:
        assert said["step"] == 0, said
        assert said["kind"] == "PLUGIN_V3ONE_BUILD"
        outputs = as_tuple(op(*cases[said["case"]]))
        assert said["shapes"] == [list(o.shape) for o in outputs]
        assert [DTYPES[t] for t in said["types"]] == [o.dtype for o in outputs]
        halves = op.name not in COORDINATES  # float32 coordinates stay what they are
        assert said["taken"] == [1, halves, halves, 0]


@pytest.fixture
def ahead(bindings: dict[str, Any], op: Op) -> list[dict[str, Any]]:
    """Answers of an op's plugin that is compiled ahead of time, each with the arguments it was asked for."""
    cases = list(arguments(op))
    answers = []
    for said in bindings["ahead of time"][op.name]:
        args = cases[said["case"]]
        tensors = [t for _, t in inputs_of(op, args)]
        count, pairs = len(tensors) + op.num_outputs, said["combinations"]
        combinations = [pairs[i : i + count] for i in range(0, len(pairs), count)]
        answers.append({**said, "args": args, "tensors": tensors, "combinations": combinations})
    return answers


@every_aot_op
def test_ahead_of_time_shapes_types_and_formats(op: Op, ahead: list[dict[str, Any]]) -> None:
    for said in ahead:
        assert said["step"] == 0, said
        assert said["kind"] == "PLUGIN_V3QUICKAOT_BUILD"
        outputs = as_tuple(op(*said["args"]))
        assert said["shapes"] == [list(o.shape) for o in outputs]
        assert [DTYPES[t] for t in said["types"]] == [o.dtype for o in outputs]
        first = said["tensors"][0]
        rank, among = IMAGES.get(op.name, (0, ()))
        channels = first.shape[-3] if first.dim() == rank else 0
        assert said["combinations"][0] == [
            [t, LINEAR] for t in [{v: k for k, v in DTYPES.items()}[x.dtype] for x in (*said["tensors"], *outputs)]
        ]
        found = {(pair[0], pair[1]) for combination in said["combinations"] for pair in combination[:1]}
        if first.is_floating_point():
            last = {(0, HWC)} if channels and channels % 4 == 0 else set()
            last |= {(1, HWC8), (7, HWC8)} if channels and channels % 8 == 0 else set()
            assert found == {(0, LINEAR), (1, LINEAR), (7, LINEAR)} | last
        else:
            assert found == {(2, LINEAR)}
        for combination in said["combinations"]:
            data = combination[-1][0]
            names = [name for name, _ in inputs_of(op, said["args"])]
            for name, tensor, (type_, layout) in zip(names, said["tensors"], combination, strict=False):
                assert layout == LINEAR or name in among
                if not tensor.is_floating_point():
                    assert DTYPES[type_] == tensor.dtype
                elif name in COORDINATES.get(op.name, ()):
                    assert type_ == 0  # as declared: in half they would be off by pixels
                else:
                    assert type_ == data or (type_ == 0 and name in FACTORS[op.name])
            assert all(type_ == data for type_, _ in combination[len(names) :])


@every_aot_op
def test_ahead_of_time_launch_parameters(op: Op, ahead: list[dict[str, Any]]) -> None:
    for said in ahead:
        chosen = said["combinations"][said["choice"]]
        tensors = [t.to(DTYPES[type_]) for t, (type_, _) in zip(said["tensors"], chosen, strict=False)]
        last = chosen[0][1] != LINEAR
        kernel, sizes, _ = kernel_for(op, said["args"], tensors, last=last, symbolic=not said["known"], channels=True)
        grid = [evaluate(n, sizes) for n in kernel.grid]
        assert said["launch"] == [*grid, kernel.block, 1, 1, kernel.shared]
        assert said["arguments"] == [evaluate(n, sizes) for n in kernel.sizes]
        if said["code"]:
            assert f".visible .entry {said['name']}(" in said["code"]
    assert any(said["code"] for said in ahead) == aot.available()


@every_aot_op
def test_a_node_can_ask_for_torch(bindings: dict[str, Any], op: Op, ahead: list[dict[str, Any]]) -> None:
    """What an attribute aot=0 becomes; nothing and aot=1 are the kernel. 4: a plugin of another kind was made."""
    assert bindings["requests"][op.node_type] == {"none": 0, "prefer AOT": 0, "AOT": 0, "prefer JIT": 4, "JIT": 4}


def test_nodes_without_a_kernel_are_computed_by_torch(bindings: dict[str, Any]) -> None:
    """4: a plugin of another kind was made; 9: no launch parameters, for a kernel and nothing else was asked for."""
    assert bindings["inverse of 9x9"] == [4, 9]


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


class Registry:
    """TensorRT's, with the creators that a library brings."""

    def __init__(self, library: tuple[str, ...] | None = None) -> None:
        self.library, self.creators = library, {}  # type: ignore[var-annotated]

    def load_library(self, path: str) -> object:
        if self.library is None:
            return None
        self.creators |= dict.fromkeys(self.library, "C++")
        return object()

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get(name)

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name] = creator
        return True


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("nvcc", [True, False])
@pytest.mark.parametrize("library", [None, ("SvGridSample", "SvInverse"), ()])
def test_selection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: bool, nvcc: bool, library: tuple[str, ...] | None
) -> None:
    """The library, else ahead of time, else just in time; and what is there stays."""
    registry = Registry(library)
    fake = fake_tensorrt(quick)
    fake.get_plugin_registry = lambda: registry
    path = tmp_path / "libsvexport_tensorrt10.so"
    path.touch()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.setattr(plugins, "_registered", {})
    monkeypatch.setattr(plugins, "libraries", lambda: [] if library is None else [Library(path, 10), Library(path, 9)])
    monkeypatch.setattr(aot, "available", lambda: nvcc)
    registered = register_plugins()
    expected = {
        op.node_type: "C++"
        if op.node_type in (library or ())
        else "AOT"
        if op.name in aot.AOT_OPS and nvcc and quick
        else "JIT"
        for op in plugin_ops()
    }
    assert registered.kinds == expected
    assert registered.library == (None if library is None else path)
    assert register_plugins() == registered
    for kind in expected.values():
        assert f"{kind}: " in str(registered)
    if library is None:
        with pytest.raises(PluginBuildError, match="build it again"):
            register_plugins(path)


def fake_tensorrt(quick: bool = True) -> SimpleNamespace:
    """What the classes of plugins are made from, without TensorRT."""
    bases = ["IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime", "IPluginCreatorV3One"]
    if quick:
        bases += ["IPluginV3QuickCore", "IPluginV3QuickBuild", "IPluginV3QuickAOTBuild", "IPluginCreatorV3Quick"]
        bases += ["ISymExpr"]
    types = ("FLOAT", "HALF", "BF16", "INT8", "INT32", "INT64", "BOOL")
    return SimpleNamespace(
        __version__="10.16.1",
        DataType=SimpleNamespace(**{name: name for name in types}),
        PluginField=lambda name, data, kind: SimpleNamespace(name=name, data=data, type=kind),
        PluginFieldType=SimpleNamespace(INT32="int", FLOAT32="float"),
        PluginFieldCollection=list,
        **{name: type(name, (), {}) for name in bases},
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@every_op
def test_enqueue_computes_on_the_given_memory_and_stream(
    monkeypatch: pytest.MonkeyPatch, op: Op, dtype: torch.dtype
) -> None:
    fake = fake_tensorrt()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    types = {dtype: type_ for type_, dtype in dtypes(fake).items()}
    stream = torch.cuda.Stream()
    for args in filter(partial(runnable, op), arguments(op)):
        named = inputs_of(op, args)
        keep = COORDINATES.get(op.name, ())
        inputs = [(t.to(dtype) if t.is_floating_point() and n not in keep else t).cuda() for n, t in named]
        attributes = {a.name: v for a, v in zip(op.arguments, args, strict=True) if not a.is_tensor}
        plugin = jit_plugin.plugin_classes(op)[0](attributes)
        expected = as_tuple(op(*with_inputs(op, args, inputs)))
        outputs = [torch.full_like(t, 7) for t in expected]
        descs = [SimpleNamespace(dims=tuple(t.shape), type=types[t.dtype]) for t in (*inputs, *outputs)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # what is on another stream is done before this
            late = [t.clone() for t in inputs]
        plugin.enqueue(
            descs[: len(inputs)],
            descs[len(inputs) :],
            [t.data_ptr() for t in late],
            [t.data_ptr() for t in outputs],
            0,
            stream.cuda_stream,
        )
        stream.synchronize()
        for output, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted, equal_nan=True)


@pytest.mark.parametrize("broken", [False, True])
def test_bindings_that_lose_lists_are_noticed(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Those of 10.14 and 10.15 show the first element as often as there are elements."""

    def field(name: str, data: np.ndarray, kind: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, data=np.full_like(data, data[0]) if broken and data.size else data, type=kind)

    fake = fake_tensorrt()
    fake.__version__, fake.PluginField = "10.15.1", field
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    fields._reads_lists.cache_clear()
    for op in plugin_ops():
        args = next(arguments(op))
        given = {a.name: v for a, v in zip(op.arguments, args, strict=True) if not a.is_tensor}
        collection = fields.fields_of(fake, op, given)
        if broken and any(a.kind in ("ints", "floats") for a in op.attributes):
            with pytest.raises(BackendNotAvailableError, match=r"10\.15\.1 show a plugin only their first elements"):
                fields.attributes_of(op, collection)
        else:
            got = fields.attributes_of(op, collection)
            assert all(np.allclose(got[name], np.asarray(value, float)) for name, value in given.items())
    fields._reads_lists.cache_clear()


def test_without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendNotAvailableError, match="pip install tensorrt"):
        register_plugins()


def test_old_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(__version__="8.6.1", get_plugin_registry=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    monkeypatch.setattr(plugins, "libraries", list)
    with pytest.raises(BackendNotAvailableError, match=r"this is 8\.6\.1.*svexport plugins build"):
        register_plugins()
