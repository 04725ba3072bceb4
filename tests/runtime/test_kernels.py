"""Models for svexport's kernels in ONNX Runtime and the library of the kernels, as far as no GPU is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import svexport
from svexport.errors import BackendNotAvailableError, EngineError, PluginBuildError, UnsupportedError
from svexport.graph.nodes import svexport_nodes
from svexport.ops import _cuda
from svexport.ops._einsum.labels import parse
from svexport.ops._op import OPS
from svexport.runtime import OnnxEngine, kernels
from svexport.tensorrt.library import CSRC
from svexport.tensorrt.nodes import plugin_ops
from tests.csrc import CXX, INCLUDES
from tests.ops.test_every_op import flat, samples
from tests.support import op_model

NODES = {op.name for op in plugin_ops()}


def model_of(name: str, dtype: torch.dtype = torch.float32, index: int = 0) -> onnx.ModelProto:
    return op_model(OPS[name], samples(OPS[name], dtype, 3)[index], 17, lowered=False)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(NODES))
def test_nodes_become_custom_ops(name: str, dtype: torch.dtype) -> None:
    given = model_of(name, dtype)
    before = given.SerializeToString()
    model, taken = kernels.with_kernels(given)
    assert given.SerializeToString() == before
    assert taken == ["node"]
    [node] = model.graph.node
    [original] = given.graph.node
    types = {TensorProto.FLOAT: "FLOAT", TensorProto.FLOAT16: "FLOAT16"}
    outputs = [types[output.type.tensor_type.elem_type] for output in given.graph.output]
    assert node.domain == kernels.DOMAIN
    assert node.op_type == "_".join([OPS[name].node_type, *outputs])
    assert list(node.input) == [name for name in original.input if name]
    assert list(node.output)[:-1] == list(original.output)
    assert node.output[-1] not in {"", *original.input, *original.output}
    assert not model.functions
    assert {(entry.domain, entry.version) for entry in model.opset_import} == {("", 17), (kernels.DOMAIN, 1)}


@pytest.mark.parametrize("name", sorted(set(OPS) - NODES - {"einsum"}))
def test_nodes_without_a_kernel_keep_their_bodies(name: str) -> None:
    given = model_of(name)
    model, taken = kernels.with_kernels(given)
    assert taken == []
    assert model.functions == given.functions
    assert len(list(svexport_nodes(model))) == 1


@pytest.mark.parametrize(
    ("equation", "shapes", "taken"),
    [
        ("nctw,cd->ndtw", [(2, 3, 5, 4), (3, 6)], True),
        ("i,i->", [(7,), (7,)], True),
        ("iji,jk->k", [(3, 4, 3), (4, 2)], False),  # a diagonal
        ("ij->ji", [(3, 4)], False),
        ("ij,ij->ij", [(3, 4), (3, 4)], False),  # nothing is summed
        ("bn,anm,bm->ba", [(2, 5), (3, 5, 4), (2, 4)], False),
        ("abcdefgh,h->abcdefg", [(1, 2, 1, 2, 1, 2, 1, 3), (3,)], True),
        ("abcdefghi,i->abcdefgh", [(1, 2, 1, 2, 1, 2, 1, 2, 3), (3,)], False),  # more dimensions than a kernel takes
    ],
)
def test_einsums_that_are_products(equation: str, shapes: list[tuple[int, ...]], taken: bool) -> None:
    labels, ranks = parse(equation, tuple(map(len, shapes)))
    args = ([torch.randn(shape) for shape in shapes], list(labels), list(ranks))
    _, names = kernels.with_kernels(op_model(OPS["einsum"], args, 17, lowered=False))
    assert bool(names) == taken


def test_types_that_no_kernel_takes() -> None:
    args = samples(OPS["grid_sample"], torch.float32, 1)[0]
    double = op_model(
        OPS["grid_sample"], tuple(a.double() if torch.is_tensor(a) else a for a in args), 17, lowered=False
    )
    assert kernels.with_kernels(double)[1] == []
    mixed = (args[0].half(), *args[1:])  # coordinates keep their precision
    model, taken = kernels.with_kernels(op_model(OPS["grid_sample"], mixed, 17, lowered=False))
    assert taken
    assert model.graph.node[0].op_type == "SvGridSample_FLOAT16"
    codes = (torch.zeros(args[0].shape, dtype=torch.int8), args[1].half(), *args[2:])  # sampled in the type of points
    model, taken = kernels.with_kernels(op_model(OPS["grid_sample"], codes, 17, lowered=False))
    assert [node.op_type for node in model.graph.node] == ["SvGridSample_FLOAT16"]


def test_nodes_within_branches_and_names_that_are_taken() -> None:
    image, grid = torch.randn(1, 2, 3, 3), torch.rand(1, 2, 2, 2)
    inner = op_model(OPS["grid_sample"], (image, grid, 0, 0, False, 1.0), 17, lowered=False)
    node = inner.graph.node[0]
    node.output[:] = ["svexport_kernels_0"]
    out = helper.make_tensor_value_info("svexport_kernels_0", TensorProto.FLOAT, [1, 2, 2, 2])
    branch = helper.make_graph([node], "then", [], [out])
    other = helper.make_graph([helper.make_node("Identity", ["x0"], ["same"])], "else", [], [])
    other.output.append(helper.make_tensor_value_info("same", TensorProto.FLOAT, None))
    choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)
    inputs = [*inner.graph.input, helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph([choice], "g", inputs, [y]), opset_imports=inner.opset_import)
    model.functions.extend(inner.functions)
    changed, taken = kernels.with_kernels(model)
    [kept] = next(a.g.node for a in changed.graph.node[0].attribute if a.name == "then_branch")
    assert len(taken) == 1
    assert kept.domain == kernels.DOMAIN
    assert len(set(kept.output)) == 2


@pytest.mark.parametrize("options", [{"kernels": True}, {"precision": "tf32"}])
def test_they_are_for_cuda(options: dict, tmp_path: Path) -> None:
    onnx.save(model_of("grid_sample"), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match=f"{next(iter(options))} is for engines on CUDA, and this one is on cpu"):
        svexport.load(tmp_path / "m.onnx", device="cpu", **options)
    (tmp_path / "m.engine").touch()
    with pytest.raises(EngineError, match="kernels and precision are for ONNX files"):
        svexport.load(tmp_path / "m.engine", **options)


def test_precisions_that_there_are_not() -> None:
    with pytest.raises(EngineError, match="got 'half'"):
        OnnxEngine(model_of("grid_sample"), device="cpu", precision="half")


HEADER = "onnxruntime_c_api.h"


@pytest.mark.parametrize("folder", ["include", "include/onnxruntime", "include/onnxruntime/core/session", "."])
def test_headers_are_found(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    header = tmp_path / folder / HEADER
    monkeypatch.setenv("ONNXRUNTIME_ROOT", str(tmp_path))
    with pytest.raises(PluginBuildError, match=f"{HEADER} does not exist.*ONNXRUNTIME_ROOT"):
        kernels.find_headers()
    header.write_text("#define ORT_API_VERSION 29\n")
    assert kernels.find_headers() == (tmp_path / folder).resolve()
    header.write_text("#define ORT_API_VERSION 15\n")
    with pytest.raises(PluginBuildError, match=r"of ONNX Runtime 1\.15; the kernels need 1\.16 or newer"):
        kernels.find_headers()


def test_an_old_runtime_is_told_from_a_new_one() -> None:
    with pytest.raises(BackendNotAvailableError, match=r"1\.16 or newer, here is 1\.9\.0"):
        kernels.library(SimpleNamespace(__version__="1.9.0"))


def test_the_library_is_that_of_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that only writes down what it is asked for."""
    (tmp_path / HEADER).write_text("#define ORT_API_VERSION 29\n")
    nvcc, calls = tmp_path / "bin" / "nvcc", tmp_path / "calls"
    nvcc.parent.mkdir()
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nfor last; do :; done\necho > "$last"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("SVEXPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ONNXRUNTIME_ROOT", str(tmp_path))
    path = kernels.build()
    commands = calls.read_text().splitlines()
    compiled = {Path(word).name for line in commands[:-1] for word in line.split() if word.startswith(str(CSRC))}
    assert compiled >= {source.name for source in CSRC.glob("onnxruntime/*.cpp")} | {f"{name}.cpp" for name in NODES}
    assert not {name for name in compiled if name.startswith("interface")}
    assert "-z,nodelete" in commands[-1]
    monkeypatch.delenv("ONNXRUNTIME_ROOT")
    assert kernels.build() == path, "found without headers"
    assert calls.read_text().splitlines() == commands
    changed = tmp_path / "csrc"
    shutil.copytree(CSRC, changed)
    with (changed / "onnxruntime" / "node.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(_cuda, "CSRC", changed)
    monkeypatch.setenv("ONNXRUNTIME_ROOT", str(tmp_path))
    assert kernels.build() != path


def headers() -> Path | None:
    try:
        return kernels.find_headers()
    except PluginBuildError:
        return None


def registered(folder: Path) -> Path:
    """The library with kernels that do nothing, whose custom ops ONNX Runtime can still register."""
    include = [CSRC / "cuda", CSRC / "tensorrt", CSRC / "onnxruntime"]
    sources = [*(CSRC / "tensorrt" / f"{name}.cpp" for name in (*NODES, "plugin", "weights"))]
    sources += CSRC.glob("onnxruntime/*.cpp")
    flags = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", *(f"-I{path}" for path in include)]
    flags += [f"-isystem{path}" for path in (headers(), *INCLUDES)]
    objects = []
    for source in sources:
        objects.append(folder / f"{source.parent.name}-{source.stem}.o")
        subprocess.run([str(CXX), *flags, "-c", str(source), "-o", str(objects[-1])], check=True)
    subprocess.run(["ld", "-r", *map(str, objects), "-o", str(folder / "all.o")], check=True)
    undefined = subprocess.run(["nm", "-u", str(folder / "all.o")], check=True, capture_output=True, text=True).stdout
    names = re.findall(r"U (\w*(?:svexport|cuda)\w*)", undefined)
    assert any("grid_sample" in name for name in names)
    functions = "".join(f".globl {name}\n{name}: ud2\n" for name in names)
    (folder / "nothing.s").write_text(f'.text\n{functions}.section .note.GNU-stack,"",@progbits\n')
    path = folder / "library.so"
    command = ["-shared", str(folder / "all.o"), str(folder / "nothing.s"), "-ldl", "-Wl,--no-undefined"]
    subprocess.run([str(CXX), *command, "-o", str(path)], check=True)
    return path


@pytest.mark.skipif(headers() is None, reason=f"needs {HEADER}: set ONNXRUNTIME_ROOT")
@pytest.mark.skipif(CXX is None or os.uname().machine != "x86_64", reason="needs g++ for x86-64")
def test_onnxruntime_registers_the_custom_ops(tmp_path: Path) -> None:
    """And says of each that only its kernel, which is CUDA's, is missing on the CPU: its types and inputs are right."""
    path = registered(tmp_path)
    for name in sorted(NODES | {"einsum"}):
        given = model_of(name)
        model, taken = kernels.with_kernels(given)
        assert taken
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(str(path))
        with pytest.raises(
            Exception, match=rf"Could not find an implementation for {model.graph.node[0].op_type}\(1\)"
        ):
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        assert len(flat(samples(OPS[name], torch.float32, 3)[0])) == len(model.graph.input)
