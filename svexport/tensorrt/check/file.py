"""Findings about a file as a whole: opset, functions, data types, external data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from svexport.graph.scope import constant_value, is_standard
from svexport.graph.walk import STANDARD, attributes_of, graphs, opset_of
from svexport.tensorrt.check.report import Finding, listed
from svexport.tensorrt.support.datatypes import FIRST, NARROWED, onnx_name
from svexport.tensorrt.support.node import reduces_everything
from svexport.tensorrt.support.operators import is_parsed
from svexport.tensorrt.support.opsets import newer_than
from svexport.tensorrt.support.target import Target, dotted

__all__ = ["file_findings"]

_INT32 = np.iinfo(np.int32)


def file_findings(
    model: onnx.ModelProto,
    light: onnx.ModelProto,
    target: Target,
    types: Mapping[str, onnx.TypeProto.Tensor],
    path: Path | None,
) -> Iterator[Finding]:
    """All findings that are not about a single node.

    Args:
        model: the model.
        light: the model without its large weights.
        target: the TensorRT version.
        types: types of its tensors, by name.
        path: path of the file; None for a model in memory.
    """
    every = list(graphs(model.graph))
    yield from _opset(model, every, target, types)
    yield from _validity(light)
    yield from _functions(model, target)
    yield from _other_files(every, path)
    yield from _inputs(model.graph)
    yield from _renamed(model.graph, target)
    yield from _data_types(every, target, types)
    if target.version < NARROWED["INT64"][1]:
        yield from _narrowed(every)


def _finding(severity: str, rule: str, expected: str, came: str, todo: str) -> Finding:
    return Finding(severity, rule, "", "", "", expected, came, todo)


def _harmless(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto.Tensor]) -> bool:
    """Whether a node's newer input or attribute changes nothing: it reduces all axes, or splits into equal parts."""
    if node.op_type.startswith("Reduce") and len(node.input) > 1:
        return reduces_everything(node, types)
    if node.op_type == "Split" and node.input[0] in types:
        given, dims = attributes_of(node), types[node.input[0]].shape.dim
        axis, parts = given.get("axis", 0), given.get("num_outputs", 0)
        if parts > 0 and -len(dims) <= axis < len(dims) and dims[axis].HasField("dim_value"):
            return dims[axis].dim_value % parts == 0
    return False


def _opset(
    model: onnx.ModelProto,
    every: Sequence[onnx.GraphProto],
    target: Target,
    types: Mapping[str, onnx.TypeProto.Tensor],
) -> Iterator[Finding]:
    """For an opset newer than the version supports, the node features that older opsets lack. The parser ignores the
    opset number, and reads nodes as those of the opsets that it supports."""
    low, high = target.opsets
    opset = opset_of(model)
    expected, came = f"opset {low} to {high}", f"opset {opset}"
    if opset > high:
        nodes = [n for graph in every for n in graph.node if n.domain in STANDARD and not _harmless(n, types)]
        new = Counter((node.op_type, text) for node in nodes if (text := newer_than(node, opset, high)))
        for (name, text), count in new.items():
            said = f"{came}, in which {f'{count} {name}' if count > 1 else name} has {text}"
            yield _finding("error", "opset", expected, said, f"export with opset={high}")
        if not new:
            said = f"{came}, but no node uses anything newer than opset {high}"
            yield _finding("warning", "opset", expected, said, f"export with opset={high}, to be on the safe side")
    elif opset < low:
        yield _finding("warning", "opset", expected, came, f"export with opset={low} or later")


def _validity(light: onnx.ModelProto) -> Iterator[Finding]:
    """The errors of onnx.checker, except about ops and versions unknown to it, which other checks here cover."""
    try:
        onnx.checker.check_model(light)
    except Exception as error:  # noqa: BLE001 - it has several
        text = str(error).strip()
        if not any(words in text for words in ("No Op registered", "ir_version", "No opset import")):
            expected = "what the checker of onnx accepts"
            yield _finding("warning", "onnx", expected, text.split("\n")[0], "export it again, or repair it")


def _functions(model: onnx.ModelProto, target: Target) -> Iterator[Finding]:
    for domain, name in dict.fromkeys((function.domain, function.name) for function in model.functions):
        if is_parsed(name, target.version):
            came = f"{domain}::{name}, never called: the parser looks at names alone, and knows this one"
            yield _finding("warning", "shadowed_function", "functions with names of their own", came, "rename it")


def _other_files(every: Sequence[onnx.GraphProto], path: Path | None) -> Iterator[Finding]:
    """Checks that external data files are where the parser will look for them. They are not opened."""
    outside = [t for graph in every for t in graph.initializer if t.data_location == TensorProto.EXTERNAL]
    places = (next((entry.value for entry in t.external_data if entry.key == "location"), "") for t in outside)
    counts = Counter(places)
    for location, count in counts.items():
        expected = f"{location} beside the file"
        if not location or Path(location).is_absolute() or ".." in Path(location).parts:
            came = f"{count} weights in {location!r}"
            yield _finding("error", "external_data", "weights beside the file", came, "save it again")
        elif path is not None and not (path.parent / location).is_file():
            yield _finding("error", "external_data", expected, "no such file", "copy it along")
        else:
            todo = "keep them together, and parse by path: the parser has to know the folder"
            yield _finding("note", "external_data", expected, f"{count} weights in it", todo)


def _inputs(graph: onnx.GraphProto) -> Iterator[Finding]:
    for value in (*graph.input, *graph.output):
        kind = (value.type.WhichOneof("value") or "tensor_type").removesuffix("_type")
        if kind != "tensor":
            came = f"{value.name!r} is a {kind}"
            yield _finding("error", "data_type", "tensors as inputs and outputs", came, "take and return tensors")
    given = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in given and not value.type.tensor_type.HasField("shape"):
            todo = "state its shape, with names for dynamic sizes"
            yield _finding("error", "rank", "inputs of known rank", f"{value.name!r} has none", todo)


def _renamed(graph: onnx.GraphProto, target: Target) -> Iterator[Finding]:
    """Inputs that are outputs too, directly or through a node that passes them on: renamed to ``__`` and the output."""
    names = {value.name: value.name for value in graph.output}
    for node in graph.node:
        attributes = attributes_of(node) if node.op_type == "Transpose" else {}
        order = list(attributes.get("perm", ()))
        same = node.op_type == "Transpose" and order == sorted(order) and len(order) > 0 and target.version < (8, 5)
        # The branch of 8.6 has an Identity here, later than the parser that came with 8.6.1 and 9.0.
        mask = node.op_type == "Dropout" and len(node.output) > 1 and target.version < (9, 1)
        if same or mask:
            names.setdefault(node.input[0], node.output[0])
    for value in graph.input:
        if value.name in names:
            came = (
                f"{value.name!r}, which is {names[value.name]!r} too, and becomes '__{names[value.name]}' as an input"
            )
            todo = "return it through Identity, under another name"
            yield _finding("error", "renamed_input", "inputs that are no outputs", came, todo)


def _data_types(
    every: Sequence[onnx.GraphProto], target: Target, types: Mapping[str, onnx.TypeProto.Tensor]
) -> Iterator[Finding]:
    """Types that the version does not support, or converts to others: one finding each."""
    names: dict[str, list[str]] = {}
    for name, type_ in types.items():
        names.setdefault(onnx_name(type_.elem_type), []).append(name)
    names.pop("UNDEFINED", None)
    if uint8 := _misplaced(every, target, names.pop("UINT8", [])):
        known = target.version >= FIRST["UINT8"]
        expected = "UINT8 as inputs and outputs only" if known else f"no UINT8 before TensorRT {dotted(FIRST['UINT8'])}"
        todo = "cast what is fed at once, and what is returned last" if known else "feed and return another type"
        yield _finding("error", "data_type", expected, listed(uint8), todo)
    for kind, found in names.items():
        first = FIRST.get(kind)
        if first is None or target.version < first:
            since = f" before TensorRT {dotted(first)}" if first else ""
            yield _finding("error", "data_type", f"no {kind}{since}", listed(found), "export another type, or cast")
        elif kind == "DOUBLE":
            came = f"{listed(found)}, computed in FLOAT"
            yield _finding("warning", "data_type", "no DOUBLE", came, "see that FLOAT is precise enough")


def _misplaced(every: Sequence[onnx.GraphProto], target: Target, uint8: list[str]) -> list[str]:
    """UINT8 tensors that are neither constants nor quantized nor, if the version supports it, inputs or outputs."""
    if not uint8:
        return []
    fine = {tensor.name for graph in every for tensor in graph.initializer}
    makers = (node for graph in every for node in graph.node if node.op_type in ("Constant", "QuantizeLinear"))
    fine.update(name for node in makers for name in node.output)
    if target.version >= FIRST["UINT8"]:
        fine.update(value.name for value in (*every[0].input, *every[0].output))
    return [name for name in uint8 if name not in fine]


def _narrowed(every: Sequence[onnx.GraphProto]) -> Iterator[Finding]:
    """INT64 that becomes INT32: values that do not fit, and inputs and outputs that callers must convert."""
    nodes = [node for graph in every for node in graph.node]
    bounds = {name for node in nodes if node.op_type == "Slice" for name in node.input[1:3]}  # clamped, they do as well
    constants = [(tensor.name, tensor) for graph in every for tensor in graph.initializer]
    for node in nodes:
        if is_standard(node, "Constant") and node.output and (tensor := constant_value(node)) is not None:
            constants.append((node.output[0], tensor))
    for name, tensor in constants:
        if tensor.data_type == TensorProto.INT64 and name not in bounds and (number := _beyond_int32(tensor)):
            came = f"{name!r} holds {number}, which is clamped"
            todo = "check that the clamped number serves as well"
            yield _finding("warning", "int64_range", "INT64 constants that fit into INT32", came, todo)
    boundary = (*every[0].input, *every[0].output)
    if names := [value.name for value in boundary if value.type.tensor_type.elem_type == TensorProto.INT64]:
        came = f"{listed(names)} as INT64"
        yield _finding("note", "int64_binding", "INT32 bindings", came, "feed and read them as INT32")


def _beyond_int32(tensor: TensorProto) -> str:
    """A value of an INT64 constant that INT32 does not hold, read in place; empty if there is none."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return ""
    raw = tensor.raw_data
    values = np.frombuffer(raw[: len(raw) // 8 * 8], "<i8") if raw else np.asarray(tensor.int64_data, np.int64)
    ends = (values.min(), values.max()) if values.size else ()
    return next((str(value) for value in ends if not _INT32.min <= value <= _INT32.max), "")
