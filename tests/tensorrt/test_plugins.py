"""The C++ plugins in the host: creation, fields, shapes, types, formats, serialization; needs TensorRT's headers."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import svexport
from svexport.graph.nodes import svexport_nodes, weight_attributes
from svexport.ops._op import OPS, Op, as_tuple
from svexport.tensorrt import library
from svexport.tensorrt.nodes import plugin_ops
from tests.support import op_model
from tests.tensorrt.cases import CASES, COORDINATES, arguments, inputs_of, small_decoder, with_inputs
from tests.tensorrt.conftest import CUDA
from tests.tensorrt.host import (
    CHW4,
    CHW32,
    FLOAT16,
    FLOAT32,
    FORMATS,
    HWC8,
    INT32,
    LINEAR,
    SOURCES,
    Desc,
    Host,
    Plugin,
    fields_of,
    without_launchers,
)

cases = pytest.mark.parametrize(("op", "i"), CASES, ids=[f"{op.name}-{i}" for op, i in CASES])


def case(op: Op, i: int) -> tuple:
    return next(itertools.islice(arguments(op), i, None))


def node_of(op: Op, args: tuple) -> onnx.NodeProto:
    return op_model(op, args, 17, lowered=False).graph.node[0]


def plugin_of(host: Host, op: Op, args: tuple) -> Plugin:
    plugin = host.create_from(node_of(op, args))
    assert plugin, host.log()
    return plugin


def index_type(host: Host, dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.int64 and host.version < (10, 0) else dtype


def test_every_node_has_a_creator(host: Host) -> None:
    assert host.types == [op.node_type for op in plugin_ops()]


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_fields_are_the_attributes_of_the_op(host: Host, op: Op) -> None:
    types = {"int": INT32, "ints": INT32, "float": FLOAT32, "floats": FLOAT32}
    expected = {a.name: types[a.kind] for a in op.attributes}
    expected |= dict.fromkeys(weight_attributes(op, {"num_layers": 12, "learned_offsets": 1}), FLOAT32)
    assert host.fields(op.node_type) == expected


@cases
def test_nodes_become_plugins(host: Host, op: Op, i: int) -> None:
    node = node_of(op, case(op, i))
    plugin = host.create_from(node)
    assert plugin, host.log()
    assert plugin.outputs == op.num_outputs
    again = plugin.reload()
    assert again.serialized() == plugin.serialized() == plugin.clone().serialized() == plugin.attach().serialized()
    for name, (_, values) in fields_of(node, host.fields(op.node_type)).items():
        assert values.tobytes() in again.serialized(), name


class Nodes(nn.Module):
    """What users write, one of each."""

    def forward(self, image: torch.Tensor, grid: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sampled = nn.functional.grid_sample(image, grid, mode="nearest", padding_mode="border", align_corners=True)
        return sampled, *svexport.ops.bilinear_sample(image, grid), torch.linalg.inv(matrix)


@pytest.mark.parametrize("target", ["8.6", "10.0", None])
def test_exported_files_become_plugins(host: Host, tmp_path: Path, target: str | None) -> None:
    args = torch.randn(1, 3, 5, 7), torch.rand(1, 2, 3, 2), torch.eye(3)[None] + 0.1
    svexport.export(Nodes(), args, tmp_path / "nodes.onnx", opset=13, target=target)
    nodes = [n for n in onnx.load(tmp_path / "nodes.onnx").graph.node if n.domain == "svexport"]
    assert {n.op_type for n in nodes} == {"SvGridSample", "SvBilinearSample", "SvInverse"}
    for node in nodes:
        assert host.create_from(node), host.log()


class One(nn.Module):
    """One operator, its tensors being inputs."""

    def __init__(self, op: Op, args: tuple) -> None:
        super().__init__()
        self.op, self.args = op, args

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.op(*with_inputs(self.op, self.args, tensors))


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_an_exported_node_becomes_a_plugin(host: Host, tmp_path: Path, op: Op) -> None:
    for i in range(sum(1 for _ in arguments(op))):
        args = case(op, i)
        tensors = tuple(x for _, x in inputs_of(op, args))
        svexport.export(One(op, args), tensors, tmp_path / "one.onnx", target="8.6", verify=False)
        (node,) = svexport_nodes(onnx.load(tmp_path / "one.onnx"))
        plugin = host.create_from(node)
        assert plugin, host.log()
        assert plugin.serialized() == plugin_of(host, op, args).serialized()


@cases
@pytest.mark.parametrize("known", [True, False], ids=["static", "symbolic"])
def test_shapes_are_those_of_the_op(host: Host, op: Op, i: int, known: bool) -> None:
    args = case(op, i)
    expected = [tuple(y.shape) for y in as_tuple(op.fake(*args) if op.fake else op.reference(*args))]
    inputs = [Desc(tuple(x.shape), known=known) for _, x in inputs_of(op, args)]
    shapes = plugin_of(host, op, args).shapes(inputs)
    assert shapes is not None, host.log()
    assert [shape for shape, _ in shapes] == expected
    assert all(constant for _, constant in shapes) or not known


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_wrong_ranks_and_counts_are_refused(host: Host, op: Op) -> None:
    args = case(op, 0)
    plugin = plugin_of(host, op, args)
    inputs = [Desc(tuple(x.shape)) for _, x in inputs_of(op, args)]
    required = sum(a.kind != "tensor" or not a.optional for a in op.arguments if a.is_tensor)
    wrong = [[], inputs[: required - 1], [*inputs[:-1], Desc((1,) * 7)], [Desc(()), *inputs[1:]]]
    if not any(a.kind == "tensors" for a in op.arguments):
        wrong.append([*inputs, *inputs])
    if op.name == "inverse":  # takes any rank from 2 on
        wrong.remove([Desc((1,) * 7)])
    for tensors in wrong:
        assert plugin.shapes(tensors) is None, tensors
        assert "svexport: " + op.node_type in host.log() or host.version < (8, 6)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precise", [False, True], ids=["same", "coordinates-float32"])
def test_formats_in_strongly_typed_networks(host: Host, op: Op, i: int, dtype: torch.dtype, precise: bool) -> None:
    """Every combination found has the types of the network, and the linear one is among them."""
    if host.version < (10, 0) and dtype == torch.bfloat16:
        pytest.skip("TensorRT 8 has no bfloat16")
    args = case(op, i)
    plugin = plugin_of(host, op, args)
    keep = COORDINATES.get(op.name, ()) if precise else ()
    types = [
        index_type(host, x.dtype) if not x.is_floating_point() else torch.float32 if name in keep else dtype
        for name, x in inputs_of(op, args)
    ]
    types += plugin.output_types(types)
    expected = [dtype] * op.num_outputs
    if op.name == "transformer_decoder":  # boxes and points are as precise as the points that come in
        expected[1:] = [types[2]] * 2
    if op.name == "grid_sample" and types[0] == torch.int8:  # what is sampled is as precise as the points
        expected = [types[1]]
    assert types[-op.num_outputs :] == expected
    outputs = [Desc(shape) for shape, _ in plugin.shapes([Desc(tuple(x.shape)) for _, x in inputs_of(op, args)])]
    tensors = [*(Desc(tuple(x.shape)) for _, x in inputs_of(op, args)), *outputs]
    found = plugin.formats(tensors, [[t] for t in types])
    assert [LINEAR] * len(tensors) in [[d.format for d in combination] for combination in found]
    for combination in found:
        assert all(d.format in FORMATS[d.dtype] for d in combination)
        assert all(d.format != HWC8 or d.shape[-3] % 8 == 0 for d in combination[-op.num_outputs :])


INT8_MAPS = ("camera_sample", "deform_conv2d", "grid_sample", "ms_deform_attn")
"""Ops whose first input TensorRT may quantize by a dynamic range."""


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_formats_in_weakly_typed_networks(host: Host, op: Op) -> None:
    """Everything is float32 in the network: TensorRT may try half and int8, but not for coordinates."""
    args = list(arguments(op))[-1]
    plugin = plugin_of(host, op, args)
    inputs = inputs_of(op, args)
    declared = [torch.float32 if x.is_floating_point() else torch.int32 for _, x in inputs]
    outputs = plugin.output_types(declared)
    shapes = [shape for shape, _ in plugin.shapes([Desc(tuple(x.shape)) for _, x in inputs])]
    tensors = [*(Desc(tuple(x.shape)) for _, x in inputs), *map(Desc, shapes)]
    may = {torch.float32: [torch.float32, torch.float16, torch.int8], torch.int32: [torch.int32]}
    found = plugin.formats(tensors, [may[t] for t in (*declared, *outputs)])
    firsts = {combination[0].dtype for combination in found}
    assert {torch.float32, torch.float16} <= firsts
    assert (torch.int8 in firsts) == (op.name in INT8_MAPS)
    for combination in found:
        for (name, x), desc in zip(inputs, combination):
            if name in COORDINATES.get(op.name, ()) and x.is_floating_point():
                assert desc.dtype == torch.float32
            assert desc.dtype != torch.int8 or desc.format in (LINEAR, CHW4, CHW32)
        assert all(d.dtype != torch.int8 for d in combination[len(inputs) :])


def test_a_plugin_says_what_is_wrong_with_its_fields(host: Host) -> None:
    good = fields_of(node_of(OPS["camera_sample"], case(OPS["camera_sample"], 0)), host.fields("SvCameraSample"))
    assert host.create("SvCameraSample", good)
    missing = {name: value for name, value in good.items() if name != "depth_eps"}
    for fields, reason in [
        (missing, "depth_eps is missing"),
        (good | {"colour": (INT32, [1])}, "unknown attribute colour"),
        (good | {"depth_eps": (INT32, [1])}, "depth_eps should be of type FLOAT32"),
        (good | {"depth_eps": (FLOAT32, [])}, "depth_eps should be one number"),
        (good | {"depth_eps": (FLOAT32, [1.0, 2.0])}, "depth_eps should be one number"),
        (good | {"image_size": (INT32, [1] * 100)}, "image_size should be a list of at most"),
        (good | {"image_size": (INT32, [32])}, "image_size should be (height, width)"),
        (good | {"pc_range": (FLOAT32, [1.0])}, "pc_range should be 6 numbers"),
        (good | {"activation": (INT32, [2])}, "activation should be 0 (sigmoid) or 1 (softmax)"),
        ({}, "image_size is missing"),
    ]:
        assert host.create("SvCameraSample", fields) is None
        if host.version >= (8, 6):  # older ones have no logger for a library
            log = host.log()
            assert "svexport: SvCameraSample: " in log
            assert reason in log


@pytest.mark.parametrize(
    ("layers", "offsets", "options", "dtype", "number"),
    [
        (1, False, {}, FLOAT32, 32 + 10),
        (3, True, {}, FLOAT32, 3 * 34 + 10),
        (2, False, {"dtype": torch.float16}, FLOAT16, 2 * 32 + 10),
    ],
)
def test_weights_may_be_attributes(
    host: Host, held: Any, layers: int, offsets: bool, options: dict, dtype: int, number: int
) -> None:
    node = held(small_decoder(layers, offsets), **options)
    fields = fields_of(node, host.fields(node.op_type))
    plugin = host.create(node.op_type, fields)
    assert plugin, host.log()
    again = plugin.reload()
    assert again.serialized() == plugin.serialized() == plugin.clone().serialized() == plugin.attach().serialized()
    weights = {name: values for name, (kind, values) in fields.items() if values.size > 8 or "weight" in name}
    assert len(fields) == number + len(OPS["transformer_decoder"].attributes)
    assert all(values.tobytes() in again.serialized() for _, values in fields.values())
    assert all(fields[name][0] == dtype for name in weights)
    inputs = [Desc(s) for s in [(1, 5, 32), (1, 5, 32), (1, 5, 3), (1, 2, 32, 4, 6), (1, 2, 32, 2, 3), (1, 2, 4, 4)]]
    assert plugin.shapes(inputs) == [((1, 5, 3), True), ((1, 5, 8), True), ((1, 5, 3), True)]
    assert plugin.shapes([*inputs, Desc((3,))]) is None


def test_weights_that_do_not_fit_are_refused(host: Host, held: Any) -> None:
    node = held(small_decoder(2))
    good = fields_of(node, host.fields(node.op_type))
    names = [name for name in good if name.endswith(("_weight", "_bias"))]
    kind, values = good[names[0]]
    for fields, reason in [
        ({n: v for n, v in good.items() if n != names[-1]}, "cls_6_bias is missing"),
        ({n: v for n, v in good.items() if n != names[0]}, "unknown attribute "),
        (good | {"layers_2_mha_norm_bias": good[names[-1]]}, "unknown attribute layers_2_mha_norm_bias"),
        (good | {names[0]: (kind, values[:-1])}, "a weight does not fit"),
        (good | {names[0]: (kind, values[:0])}, f"{names[0]} should be a tensor of floating point numbers"),
        (good | {names[0]: (INT32, values.astype("int32"))}, f"{names[0]} should be a tensor of floating"),
        (good | {"num_layers": (INT32, [1])}, "unknown attribute layers_1_"),
        (good | {"num_layers": (INT32, [2**30])}, "num_layers, num_heads"),
        (good | {"num_points": (INT32, [3])}, "no decoder has weights of these sizes"),
    ]:
        assert host.create(node.op_type, fields) is None, reason
        assert host.version < (8, 6) or reason in host.log()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs memory that is counted")
def test_weights_are_on_the_device_once_and_as_long_as_somebody_needs_them(
    host: Host, held: Any, plugin_library: Path
) -> None:
    library = ctypes.CDLL(str(plugin_library))
    library.stand_in_device_blocks.restype = ctypes.c_long
    before = library.stand_in_device_blocks()

    def blocks() -> int:
        return library.stand_in_device_blocks() - before

    shapes = [(1, 5, 32), (1, 5, 32), (1, 5, 3), (1, 2, 32, 4, 6), (1, 2, 32, 2, 3), (1, 2, 4, 4), (1, 5, 3), (1, 5, 8)]
    tensors = [Desc(s) for s in (*shapes, (1, 5, 3))]
    half = [replace(d, dtype=torch.float16) for d in tensors]
    plugin = host.create_from(held(small_decoder(1)))
    assert plugin.configure(tensors) >= 0
    assert blocks() == 0
    engine = plugin.reload()
    contexts = [engine.attach(), engine.attach()]
    for context in contexts:
        assert context.prepare(tensors) == 0
        context.enqueue(tensors, [torch.zeros(1) for _ in tensors], stream=0)
        assert blocks() == 1
    assert context.prepare(half) == 0
    assert blocks() == 2
    del contexts[1], context
    assert blocks() == 1
    del contexts[0], engine, plugin
    assert blocks() == 0


def test_fuzzed_fields_are_refused_under_sanitizers(headers: library.Headers, tmp_path: Path) -> None:
    """And what they make lives with tensors of any sizes."""
    parts = [SOURCES / f"{name}.cpp" for name in ("fuzz", "host", "stand_in")]
    include = ["-I", library.CSRC / "cuda", "-isystem", headers.folder, "-isystem", CUDA / "include"]
    flags = ["-std=c++17", "-O1", "-g", "-no-pie", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [*parts, *sorted(library.CSRC.glob("tensorrt/*.cpp"))]
    subprocess.run(["g++", *flags, *include, "-c", *sources], cwd=tmp_path, check=True)
    objects = sorted(tmp_path.glob("*.o"))
    link = [*without_launchers(objects), *objects, "-ldl", "-o", tmp_path / "fuzz"]
    subprocess.run(["g++", *flags, *link], check=True)
    result = subprocess.run([tmp_path / "fuzz", "20000"], capture_output=True, text=True, errors="replace", check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    words = result.stdout.split()
    made, refused, silent, weights, lived = map(int, words[1::2])
    assert made > 1000
    assert weights > 50
    assert lived > 1000
    assert refused > 10000
    assert silent == 0 or headers.version < (8, 6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs launchers that do nothing")
@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_enqueue_allocates_nothing_and_adds_little_to_its_launcher(host: Host, op: Op, plugin_library: Path) -> None:
    library = ctypes.CDLL(str(plugin_library))
    for name in ("stand_in_allocations", "stand_in_launches"):
        getattr(library, name).restype = ctypes.c_long
    args = case(op, 0)
    plugin = plugin_of(host, op, args)
    inputs = inputs_of(op, args)
    shapes = plugin.shapes([Desc(tuple(x.shape)) for _, x in inputs])
    tensors = [Desc(tuple(x.shape), index_type(host, x.dtype)) for _, x in inputs] + [Desc(s) for s, _ in shapes]
    assert plugin.configure(tensors) >= 0
    assert plugin.prepare(tensors) == 0
    memory = [torch.zeros(1) for _ in tensors]
    plugin.enqueue(tensors, memory, stream=0)
    allocated, launched = library.stand_in_allocations(), library.stand_in_launches()
    best = min(plugin.enqueue(tensors, memory, stream=0, times=500) for _ in range(10))
    print(f"\n{op.name}: {best:.2f} us beside its launcher")
    assert library.stand_in_allocations() == allocated
    assert library.stand_in_launches() >= launched + 5000
    assert best < 5


TACTICS = ["add_bias_residual_layer_norm", "bilinear_sample", "grid_sample", "ms_deform_attn"]
"""Ops of whose kernels TensorRT is offered several."""


def tactic_arguments(op: Op) -> Iterator[tuple]:
    """Where kernels of several kinds can run."""
    if op.name == "add_bias_residual_layer_norm":
        for d in (64, 250, 512, 1001, 4096, 5003, 9000, 20001):
            x, bias, residual, weight, norm_bias = (torch.randn(*s) for s in [(1, 37, d), (d,)] * 2 + [(d,)])
            yield x, bias, residual, weight, norm_bias, 1e-5, torch.randn(1, 37, d) if d % 3 else None
    elif op.name == "bilinear_sample":
        for shape, points in [((2, 8, 9, 11), (13, 4)), ((1, 40, 60, 70), (90, 80))]:
            yield torch.randn(shape), torch.rand(shape[0], *points, 2) * 11 - 1
    elif op.name == "grid_sample":
        for shape, points in [((2, 8, 9, 11), (13, 4)), ((1, 40, 60, 70), (90, 80)), ((1, 64, 200, 200), (300, 240))]:
            yield torch.randn(shape), torch.rand(shape[0], *points, 2) * 2.2 - 1.1, 0, 0, False, 1.0
    else:
        shapes, starts = torch.tensor([[6, 5], [3, 2]]), torch.tensor([0, 30])
        for d in (32, 36, 64, 200, 264):
            locations, weights = torch.rand(2, 11, 3, 2, 4, 2), torch.rand(2, 11, 3, 2, 4)
            yield torch.randn(2, 36, 3, d), shapes, starts, locations, weights, 1.0


def configured(host: Host, name: str, args: tuple, dtype: torch.dtype = torch.float32) -> tuple[Plugin, list[Desc]]:
    plugin = plugin_of(host, OPS[name], args)
    inputs = inputs_of(OPS[name], args)
    shapes = plugin.shapes([Desc(tuple(x.shape)) for _, x in inputs])
    types = [dtype if x.is_floating_point() else index_type(host, x.dtype) for _, x in inputs]
    tensors = [Desc(tuple(x.shape), t) for (_, x), t in zip(inputs, types)] + [Desc(s, dtype) for s, _ in shapes]
    assert plugin.configure(tensors) >= 0
    return plugin, tensors


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_tactics_are_offered_and_kept_in_the_plan(host: Host, op: Op) -> None:
    planned = op.name in TACTICS
    plugin, _ = configured(host, op.name, next(tactic_arguments(op)) if planned else case(op, 0))
    found = plugin.tactics()
    if host.version < (10, 0) or not planned:
        assert found == []
        return
    assert len(found) > 1, "a choice"
    assert len(set(found)) == len(found)
    assert min(found) > 0, "0 is TensorRT's own"
    default = plugin.serialized()
    for tactic in found:
        plugin.set_tactic(tactic)
        assert plugin.serialized() != default
        for copy in (plugin.reload(), plugin.clone(), plugin.attach()):
            assert copy.serialized() == plugin.serialized()
    plugin.set_tactic(0)
    assert plugin.serialized() == default


def test_descriptions_that_do_not_fit_are_refused(host: Host) -> None:
    op = OPS["grid_sample"]
    args = case(op, 0)
    plugin = plugin_of(host, op, args)
    tensors = [Desc(tuple(x.shape)) for _, x in inputs_of(op, args)] + [Desc((2, 3, 3, 2))]
    assert plugin.configure(tensors) >= 0
    assert plugin.configure(tensors[1:]) < 0 or host.version < (10, 0)
    int8 = [replace(tensors[0], dtype=torch.int8), *tensors[1:]]
    found = plugin.formats(int8, [[torch.int8], [torch.float32], [torch.int8, torch.float32]])
    assert {combination[-1].dtype for combination in found} == {torch.float32}  # maps may be int8, results never
