"""Standard nodes written so that every version of TensorRT reads them as ONNX means them.

Read in the parsers of 8.4, 8.5, 8.6, 9.3, 10.0 and 10.1, and seen in those that run without TensorRT: 8.4, 8.6, 10.1.
Whatever a node is written as is exactly what it means, in ONNX Runtime too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svexport.graph.scope import constant_value, is_standard
from svexport.graph.substitute import give_outputs, substitute
from svexport.graph.walk import attributes_of, graphs, opset_of
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Value
from svexport.symbolic.layer_norm import define
from svexport.symbolic.triu import keep
from svexport.tensorrt.support.target import Target, Version

__all__ = ["constants_as_tensors", "write_for", "write_plainly"]

_STATED = {
    "RoiAlign": ("sampling_ratio",),  # the parser's own default is 1, where ONNX's is 0
    "Selu": ("alpha", "gamma"),  # where it has four digits
    "Trilu": ("upper",),  # 0 for 1
}
"""Attributes of which the parser has another default than ONNX."""


def constants_as_tensors(model: onnx.ModelProto) -> None:
    """Numbers and lists of them in Constants become tensors, in place: before opset 12 there is nothing else, and up to
    9.1 the parser takes numbers for 0 and lists for empty."""
    for graph in graphs(model.graph):
        for node in graph.node:
            tensor = constant_value(node) if is_standard(node, "Constant") else None
            if tensor is not None and node.attribute[0].name != "value":
                node.attribute[0].CopyFrom(helper.make_attribute("value", tensor))


def write_plainly(model: onnx.ModelProto) -> None:
    """What is the same to every runtime and costs nothing, in place: constants as tensors, and attributes written out
    of which the parser has another default."""
    opset = opset_of(model)
    constants_as_tensors(model)
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.op_type in _STATED and is_standard(node, node.op_type):
                given = {attribute.name for attribute in node.attribute}
                schema = onnx.defs.get_schema(node.op_type, opset)
                for name in _STATED[node.op_type]:
                    if name not in given:
                        node.attribute.append(schema.attributes[name].default_value)


def write_for(model: onnx.ModelProto, target: Target, types: Mapping[str, Value]) -> None:
    """Writes what the versions of a target refuse or take for something else with other nodes, in place.

    Args:
        model: with unique names of values.
        target: the TensorRT version.
        types: of the model's values, by name; what is not known is left as it is.
    """
    opset = opset_of(model)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if _is_small(tensor)}
    for graph in graphs(model.graph):
        for node in graph.node:
            if is_standard(node, "Constant") and (tensor := constant_value(node)) is not None and _is_small(tensor):
                arrays[node.output[0]] = numpy_helper.to_array(tensor)

    def build(node: onnx.NodeProto, prefix: str) -> Builder | None:
        form = _FORMS.get(node.op_type)
        if form is None or not is_standard(node, node.op_type) or not form.since <= target.version < form.before:
            return None
        builder = Builder(opset, f"{prefix}as_")
        given = [types.get(name, Value(name)) for name in node.input]
        outputs = form.write(builder, given, attributes_of(node), [arrays.get(name) for name in node.input])
        if outputs is None:
            return None
        give_outputs(builder, [outputs] if isinstance(outputs, Value) else outputs, node)
        return builder

    substitute(model, build)


def _is_small(tensor: TensorProto) -> bool:
    return len(tensor.dims) <= 1 and sum(tensor.dims) <= 64 and tensor.data_location != TensorProto.EXTERNAL


@dataclass(frozen=True)
class _Form:
    """How the nodes of an op are written for versions from ``since`` on, and before ``before``.

    ``write(builder, inputs, attributes, constants)`` makes the outputs, or returns None to leave a node; constants are
    the numbers of small constant inputs, None for others.
    """

    write: Callable[[Builder, list[Value], dict[str, Any], list[np.ndarray | None]], Any]
    since: Version = (0, 0)
    before: Version = (99, 0)


_FORMS: dict[str, _Form] = {}


def _form(op_type: str, **versions: Version) -> Callable[[Any], Any]:
    def add(write: Any) -> Any:
        _FORMS[op_type] = _Form(write, **versions)
        return write

    return add


_INTEGERS = {TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64}


@_form("ReduceLogSumExp")
def _log_sum_exp(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
    """The parser drops axes that are an input, and reduces everything. Nothing overflows here."""
    x = given[0]
    if len(given) < 2 or x.dtype not in FLOAT_TYPES or attributes.get("noop_with_empty_axes", 0):
        return None
    axes = given[1]
    greatest = b.op("ReduceMax", x, axes, keepdims=1)
    limit = float(np.finfo(helper.tensor_dtype_to_np_dtype(x.dtype)).max) if x.dtype != TensorProto.BFLOAT16 else 3e38
    greatest = b.op("Clip", greatest, b.like(-limit, x), b.like(limit, x))  # no infinity minus itself
    summed = b.op("ReduceSum", b.op("Exp", b.op("Sub", x, greatest)), axes, keepdims=1)
    result = b.op("Add", b.op("Log", summed), greatest)
    if attributes.get("keepdims", 1):
        return result
    return b.op("Squeeze", result, axes)


@_form("Shape", before=(10, 0))
def _shape(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
    """The parser reads no start and end before 10.0."""
    start, end = attributes.get("start", 0), attributes.get("end")
    if not start and end is None:
        return None
    whole = b.op("Shape", given[0], dtype=TensorProto.INT64)
    return b.slice(whole, 0, start, np.iinfo(np.int32).max if end is None else end)


@_form("Mod", before=(8, 5))
def _mod(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
    """Division rounds towards zero, so that this remainder has the sign of ``x``; that of Mod has the sign of ``y``."""
    x, y = given
    if x.dtype not in _INTEGERS:
        return None
    rest = b.op("Sub", x, b.op("Mul", b.op("Div", x, y), y))
    if attributes.get("fmod", 0):
        return rest
    zero = b.like(0, x)
    opposite = [
        b.op("And", b.op(one, rest, zero, dtype=TensorProto.BOOL), b.op(other, y, zero, dtype=TensorProto.BOOL))
        for one, other in (("Less", "Greater"), ("Greater", "Less"))
    ]
    wrong = b.op("Or", *opposite, dtype=TensorProto.BOOL)
    return b.op("Add", rest, b.op("Mul", b.cast(wrong, x.dtype), y))


@_form("TopK", before=(8, 5))
def _smallest(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
    """The parser takes the largest whatever is asked for."""
    if attributes.get("largest", 1):
        return None
    axis = attributes.get("axis", -1)
    values, indices = b.ops("TopK", b.op("Neg", given[0]), given[1], outputs=2, axis=axis)
    return b.op("Neg", values), indices


@_form("Equal", since=(8, 4), before=(8, 5))
def _equal(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
    if given[0].dtype != TensorProto.BOOL:
        return None
    return b.op("Not", b.op("Xor", *given))


def _of_numbers(op_type: str) -> None:
    @_form(op_type, before=(8, 5))
    def write(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
        """Booleans as numbers, which the parser gathers."""
        if given[0].dtype != TensorProto.BOOL:
            return None
        gathered = b.op(op_type, b.cast(given[0], TensorProto.INT32), given[1], **attributes)
        return b.cast(gathered, TensorProto.BOOL)


for _name in ("Gather", "GatherElements", "GatherND"):
    _of_numbers(_name)


@_form("OneHot", before=(8, 5))
def _one_hot(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
    """Of a depth that is known; negative indices count from its end."""
    indices, _, values = given
    depth, pair = constants[1], constants[2]
    if depth is None or pair is None or indices.shape is None or indices.dtype not in _INTEGERS:
        return None
    count = int(depth.item())
    axis = attributes.get("axis", -1) % (indices.rank + 1)
    index = b.unsqueeze(b.cast(indices, TensorProto.INT64), axis)
    sizes = [count if i == axis else 1 for i in range(indices.rank + 1)]
    first, last = (b.constant(np.arange(start, start + count).reshape(sizes)) for start in (0, -count))
    hit = b.op("Or", b.op("Equal", index, first), b.op("Equal", index, last), dtype=TensorProto.BOOL)
    off, on = (b.constant(number, values.dtype) for number in pair.tolist())
    if values.dtype == TensorProto.BOOL:
        return None
    return b.op("Where", hit, on, off)


@_form("Trilu", before=(8, 5))
def _trilu(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
    x = given[0]
    diagonal = 0 if len(given) < 2 or not given[1].name else constants[1]
    if x.shape is None or x.dtype is None or diagonal is None or None in x.shape[-2:]:
        return None
    kept = keep(b, b.dim(x, -2), b.dim(x, -1), int(np.asarray(diagonal).item()), bool(attributes.get("upper", 1)))
    if x.dtype == TensorProto.BOOL:
        return b.op("And", x, kept)
    return b.op("Where", kept, x, b.like(0, x))


@_form("LayerNormalization", before=(8, 6))
def _layer_norm(b: Builder, given: list[Value], attributes: dict[str, Any], constants: list[Any]) -> Any:
    x, weight, *rest = given
    if x.shape is None or x.dtype is None:
        return None
    axis = attributes.get("axis", -1) % x.rank
    bias = rest[0] if rest and rest[0].name else None
    return define(b, x, x.rank - axis, weight, bias, attributes.get("epsilon", 1e-5))
