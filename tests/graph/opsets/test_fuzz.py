"""Randomly changed files either convert to a lower opset or raise an svexport error."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper

import svexport
from svexport import SvexportError
from svexport.graph.walk import graphs
from tests.graph.opsets.backend import cases
from tests.graph.opsets.test_convert import BRANCHES, FUNCTIONS, LOOP, SCAN, model

FILES = ("clip", "gathernd", "gelu", "layernormalization", "pad", "reducesum", "reshape", "resize", "scatternd")
FILES += (
    "slice",
    "split",
    "squeeze",
    "topk",
    "loop",
    "sequence_map",
    "attention",
    "dequantizelinear",
    "constantofshape",
)
NUMBERS = (-(2**63), -(2**31), -7, -1, 0, 1, 2, 5, 2**20, 2**40, 2**63 - 1)

Change = Callable[[random.Random, onnx.ModelProto], None]


def any_graph(rng: random.Random, changed: onnx.ModelProto) -> onnx.GraphProto:
    return rng.choice(list(graphs(changed.graph)))


def any_node(rng: random.Random, changed: onnx.ModelProto) -> onnx.NodeProto:
    held = [node for graph in graphs(changed.graph) for node in graph.node]
    return rng.choice([*held, *(node for function in changed.functions for node in function.node)])


def names(rng: random.Random, changed: onnx.ModelProto) -> None:
    node = any_node(rng, changed)
    field = rng.choice([node.input, node.output])
    if field:
        others = ["", "nothing", *any_node(rng, changed).output, *any_node(rng, changed).input]
        field[rng.randrange(len(field))] = rng.choice(others)


def counts(rng: random.Random, changed: onnx.ModelProto) -> None:
    node = any_node(rng, changed)
    field = rng.choice([node.input, node.output, node.attribute])
    if field and rng.random() < 0.7:
        del field[rng.randrange(len(field)) :]
    elif field is not node.attribute:
        field.append("more")


def kinds(rng: random.Random, changed: onnx.ModelProto) -> None:
    any_node(rng, changed).op_type = rng.choice([any_node(rng, changed).op_type, "Nothing", "Pad", "Loop", "TopK", ""])


def attributes(rng: random.Random, changed: onnx.ModelProto) -> None:
    node = any_node(rng, changed)
    names = [a.name for a in node.attribute] or ["axis", "axes", "mode", "value", "to", "body"]
    value = rng.choice([rng.choice(NUMBERS), 0.5, "text", [1, 2], [0.5], ["a"], TensorProto(), onnx.GraphProto()])
    name = rng.choice(names)
    for attribute in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(attribute)
    node.attribute.append(helper.make_attribute(name, value))
    if rng.random() < 0.2:
        node.attribute[-1].type = rng.choice([AttributeProto.INT, AttributeProto.TENSOR, AttributeProto.GRAPH])


def numbers(rng: random.Random, changed: onnx.ModelProto) -> None:
    found = [a for graph in graphs(changed.graph) for node in graph.node for a in node.attribute]
    if found:
        attribute = rng.choice(found)
        attribute.i = rng.choice(NUMBERS)
        if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(NUMBERS)


def tensors(rng: random.Random, changed: onnx.ModelProto) -> None:
    graph = any_graph(rng, changed)
    held = [
        *graph.initializer,
        *(a.t for node in graph.node for a in node.attribute if a.type == AttributeProto.TENSOR),
    ]
    if not held:
        return
    tensor = rng.choice(held)
    match rng.randrange(4):
        case 0:
            tensor.data_type = rng.choice([0, 1, 7, 8, 9, 10, 16, 17, 22, 99])
        case 1:
            tensor.dims.append(rng.choice(NUMBERS))
        case 2:
            tensor.ClearField(rng.choice(["raw_data", "dims", "int64_data", "float_data", "name"]))
        case _:
            tensor.raw_data = rng.randbytes(len(tensor.raw_data))


def shapes(rng: random.Random, changed: onnx.ModelProto) -> None:
    graph = any_graph(rng, changed)
    infos = [*graph.input, *graph.output]
    if infos:
        tensor = rng.choice(infos).type.tensor_type
        match rng.randrange(4):
            case 0:
                tensor.elem_type = rng.choice([0, 1, 7, 8, 9, 10, 16, 99])
            case 1:
                tensor.ClearField("shape")
            case 2:
                tensor.shape.dim.add().dim_value = rng.choice(NUMBERS)
            case _ if tensor.shape.dim:
                rng.choice(tensor.shape.dim).dim_value = rng.choice(NUMBERS)


def headers(rng: random.Random, changed: onnx.ModelProto) -> None:
    match rng.randrange(4):
        case 0:
            for entry in changed.opset_import[:1]:
                entry.version = rng.choice([*NUMBERS, 18, 21, 23])
        case 1:
            del changed.opset_import[:]
        case 2:
            changed.ir_version = rng.choice([0, 3, 7, 99])
        case _:
            any_graph(rng, changed).ClearField(rng.choice(["name", "input", "output", "initializer", "node"]))


def order(rng: random.Random, changed: onnx.ModelProto) -> None:
    graph = any_graph(rng, changed)
    nodes = list(graph.node)
    rng.shuffle(nodes)
    del graph.node[:]
    graph.node.extend([*nodes, *nodes[: rng.randrange(2)]])


CHANGES: tuple[Change, ...] = (names, counts, kinds, attributes, numbers, tensors, shapes, headers, order)


def originals() -> list[onnx.ModelProto]:
    found = [case.model for name in FILES for case in cases(name)[:: max(1, len(cases(name)) // 6)]]
    return found + [model(text) for text in (BRANCHES, LOOP, SCAN, FUNCTIONS)]


@pytest.mark.parametrize("changes", [1, 3])
def test_changed_models(changes: int, everything: bool) -> None:
    rng, held = random.Random(changes), originals()
    made = 0
    for _ in range(2_000 if everything else 400):
        changed = onnx.ModelProto()
        changed.CopyFrom(rng.choice(held))
        for _ in range(changes):
            if any(graph.node for graph in graphs(changed.graph)):
                rng.choice(CHANGES)(rng, changed)
        with contextlib.suppress(SvexportError):
            svexport.convert(changed, rng.choice([9, 11, 13, 17]))
            made += 1
    assert made > 50


def test_changed_bytes(everything: bool, tmp_path) -> None:
    rng, held = random.Random(0), [each.SerializeToString() for each in originals()]
    parsed = 0
    for _ in range(1_000 if everything else 200):
        content = bytearray(rng.choice(held))
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        (tmp_path / "m.onnx").write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
        with contextlib.suppress(DecodeError):
            onnx.load(tmp_path / "m.onnx", load_external_data=False)
            parsed += 1
        with contextlib.suppress(SvexportError):
            svexport.convert(tmp_path / "m.onnx", 11)
    assert parsed > 20
