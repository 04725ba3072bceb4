"""Standard nodes written so that every version of TensorRT reads them as ONNX means them.

Read in the parsers of 8.4, 8.5, 8.6, 9.3, 10.0 and 10.1, and seen in those that run without TensorRT: 8.4, 8.6, 10.1.
Whatever a node is written as is exactly what it means, in ONNX Runtime too.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svexport.graph.opsets import rules
from svexport.graph.opsets.known import Known
from svexport.graph.scope import constants_as_tensors, constants_in, drop_unused, is_standard, used_names
from svexport.graph.substitute import Made, rewrite
from svexport.graph.walk import attributes_of, graphs, opset_of
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic.layer_norm import define
from svexport.symbolic.triu import keep
from svexport.tensorrt.support.target import Target, Version

__all__ = ["write_for", "write_plainly"]

_STATED = {
    "RoiAlign": ("sampling_ratio",),  # the parser's own default is 1, where ONNX's is 0
    "Selu": ("alpha", "gamma"),  # where it has four digits
    "Trilu": ("upper",),  # 0 for 1
}
"""Attributes of which the parser has another default than ONNX."""

_LEFT_OUT = {"ScatterND": {"reduction": b"none"}}
"""Attributes that 10.0 and 10.1 refuse whatever they say, with ONNX's own default."""


def write_plainly(model: onnx.ModelProto) -> None:
    """What is the same to every runtime and costs nothing, in place: constants as tensors, attributes written out of
    which the parser has another default, and left out where it refuses to see ONNX's."""
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
            if node.op_type in _LEFT_OUT and is_standard(node, node.op_type):
                for attribute in list(node.attribute):
                    if _LEFT_OUT[node.op_type].get(attribute.name) == helper.get_attribute_value(attribute):
                        node.attribute.remove(attribute)


def write_for(model: onnx.ModelProto, target: Target, types: Mapping[str, Value]) -> None:
    """Writes what the versions of a target refuse or take for something else with other nodes, in place.

    Args:
        model: with unique names of values.
        target: the TensorRT version.
        types: of the model's values, by name; what is not known is left as it is.
    """
    known = ChainMap(*map(constants_in, graphs(model.graph)))
    arrays = {name: numpy_helper.to_array(tensor) for name, tensor in known.items() if _is_small(tensor)}

    def write(b: Builder, node: onnx.NodeProto) -> Made:
        form = _FORMS.get(node.op_type)
        if form is None or not form.since <= target.version < form.before:
            return None
        inputs, outputs = ([types.get(name, Value(name)) for name in names] for names in (node.input, node.output))
        constants = [arrays.get(name) for name in node.input]
        known = _Node(attributes_of(node), inputs, outputs, constants, target.version)
        return form.write(b, known)

    before = [(graph, used_names(graph)) for graph in graphs(model.graph)]
    rewrite(model, "as", write)
    for graph, used in reversed(before):
        drop_unused(graph, used)


def _is_small(tensor: TensorProto) -> bool:
    return len(tensor.dims) <= 1 and sum(tensor.dims) <= 64 and tensor.data_location != TensorProto.EXTERNAL


@dataclass(frozen=True)
class _Node:
    """What is known of a node: its attributes, values, the numbers of small constant inputs, and the target's version.

    What is not known is a value without a type, and None among the constants.
    """

    attributes: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    constants: list[np.ndarray | None]
    version: Version


@dataclass(frozen=True)
class _Form:
    """How the nodes of an op are written for versions from ``since`` on, and before ``before``.

    ``write`` makes the outputs, or returns None to leave a node.
    """

    write: Callable[[Builder, _Node], Any]
    since: Version = (0, 0)
    before: Version = (99, 0)


_FORMS: dict[str, _Form] = {}


def _form(op_type: str, **versions: Version) -> Callable[[Any], Any]:
    def add(write: Any) -> Any:
        _FORMS[op_type] = _Form(write, **versions)
        return write

    return add


_INTEGERS = {TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64}


@_form("MatMul")
def _vector_first(b: Builder, node: _Node) -> Any:
    """The parser drops the first dimension of the matrices that a vector is multiplied by."""
    vector, matrices = node.inputs
    if vector.shape is None or matrices.shape is None or vector.rank != 1 or matrices.rank < 3:
        return None
    return b.squeeze(b.op("MatMul", b.unsqueeze(vector, 0), matrices), matrices.rank - 2)


@_form("Transpose", before=(8, 5))
def _no_transpose(b: Builder, node: _Node) -> Any:
    """Of dimensions in their order the parser returns the input itself, and names it after the output."""
    order = list(node.attributes.get("perm", ()))
    return b.op("Identity", node.inputs[0]) if order and order == sorted(order) else None


@_form("Clip", before=(8, 5))
def _clip(b: Builder, node: _Node) -> Any:
    """The parser refuses bounds of FLOAT16."""
    x = node.inputs[0]
    if x.dtype != TensorProto.FLOAT16 or b.opset < 11:
        return None
    for op_type, bound in zip(("Max", "Min"), node.inputs[1:], strict=False):
        if bound.name:
            x = b.op(op_type, x, bound)
    return x if x is not node.inputs[0] else None


@_form("Pad")
def _pad(b: Builder, node: _Node) -> Any:
    """Cut off first where it is padded with less than nothing, which all parsers refuse."""
    x, *rest = node.inputs
    pads = node.constants[1] if rest else node.attributes.get("pads")
    if x.shape is None or pads is None or min(pads) >= 0 or node.attributes.get("mode", b"constant") != b"constant":
        return None
    axes = list(range(x.rank))
    if len(rest) > 2 and rest[2].name:
        if node.constants[3] is None:
            return None
        axes = node.constants[3].tolist()
    half = len(axes)
    for axis, first, last in zip(axes, pads[:half], pads[half:], strict=True):
        if min(first, last) < 0:
            x = b.slice(x, axis, -min(int(first), 0), min(int(last), 0) or np.iinfo(np.int32).max)
    more = [max(int(number), 0) for number in pads]
    if not any(more):
        return x
    if not rest:
        return b.op("Pad", x, **{**node.attributes, "pads": more})
    return b.op("Pad", x, b.ints(*more), *(value if value.name else None for value in rest[1:]), **node.attributes)


@_form("Resize")
def _resize(b: Builder, node: _Node) -> Any:
    """To sizes that are known, which all parsers align the corners of; ONNX aligns them with size times scale."""
    shape = node.outputs[0].shape
    scales = node.constants[2] if b.opset >= 11 and len(node.inputs) == 3 else None
    if node.attributes.get("coordinate_transformation_mode") != b"align_corners" or shape is None or scales is None:
        return None
    sizes = [shape[axis] for axis in node.attributes.get("axes", range(len(shape)))]
    if None in sizes or all(float(scale).is_integer() for scale in scales):
        return None
    none = b.constant(np.zeros(0, np.float32)) if b.opset < 13 else None
    return b.op("Resize", node.inputs[0], none, none, b.ints(*sizes), **node.attributes)


@_form("Shape", before=(10, 0))
def _shape(b: Builder, node: _Node) -> Any:
    """The parser reads no start and end before 10.0."""
    start, end = node.attributes.get("start", 0), node.attributes.get("end")
    if not start and end is None:
        return None
    whole = b.op("Shape", node.inputs[0])
    return b.slice(whole, 0, start, np.iinfo(np.int32).max if end is None else end)


@_form("Mod", before=(8, 5))
def _mod(b: Builder, node: _Node) -> Any:
    """Division rounds towards zero, so that this remainder has the sign of ``x``; that of Mod has the sign of ``y``."""
    x, y = node.inputs
    quotient = b.op("Div", x, y)
    if x.dtype not in {*_INTEGERS, TensorProto.UINT8}:  # as the parser from 8.5 on has it: of a rounded quotient
        down = b.op("Less", quotient, b.like(0, x), dtype=TensorProto.BOOL)
        quotient = b.op("Where", down, b.op("Ceil", quotient), b.op("Floor", quotient))
    rest = b.op("Sub", x, b.op("Mul", quotient, y))
    if node.attributes.get("fmod", 0):
        return rest
    zero = b.like(0, x)
    opposite = [
        b.op("And", b.op(one, rest, zero), b.op(other, y, zero))
        for one, other in (("Less", "Greater"), ("Greater", "Less"))
    ]
    wrong = b.op("Or", *opposite)
    return b.op("Add", rest, b.op("Mul", b.cast(wrong, x.dtype), y))


@_form("TopK", before=(8, 6))
def _top(b: Builder, node: _Node) -> Any:
    """The parser takes the largest whatever is asked for before 8.5, and wants K as an initializer before 8.6."""
    if len(node.inputs) < 2:  # K as an attribute
        return None
    x, k = node.inputs
    axis = node.attributes.get("axis", -1)
    shape = node.outputs[0].shape
    number = node.constants[1] if shape is None else shape[axis]
    smallest = not node.attributes.get("largest", 1) and node.version < (8, 5)
    if not smallest and (node.constants[1] is not None or number is None):
        return None
    if node.constants[1] is None and number is not None:
        k = b.ints(int(number))
    if not smallest:
        return b.ops("TopK", x, k, outputs=2, axis=axis, largest=node.attributes.get("largest"))
    values, indices = b.ops("TopK", b.op("Neg", x), k, outputs=2, axis=axis)
    return b.op("Neg", values), indices


@_form("Equal", since=(8, 4), before=(8, 5))
def _equal(b: Builder, node: _Node) -> Any:
    if node.inputs[0].dtype != TensorProto.BOOL:
        return None
    return b.op("Not", b.op("Xor", *node.inputs))


def _of_numbers(op_type: str) -> None:
    @_form(op_type, before=(8, 5))
    def write(b: Builder, node: _Node) -> Any:
        """Booleans as numbers, which the parser gathers."""
        if node.inputs[0].dtype != TensorProto.BOOL:
            return None
        gathered = b.op(op_type, b.cast(node.inputs[0], TensorProto.INT32), node.inputs[1], **node.attributes)
        return b.cast(gathered, TensorProto.BOOL)


for _name in ("Gather", "GatherElements", "GatherND"):
    _of_numbers(_name)


@_form("OneHot", before=(8, 5))
def _one_hot(b: Builder, node: _Node) -> Any:
    """Of a depth that is known; negative indices count from its end."""
    indices, _, values = node.inputs
    depth, pair = node.constants[1], node.constants[2]
    if depth is None or pair is None or indices.shape is None or indices.dtype not in _INTEGERS:
        return None
    count = int(depth.item())
    axis = node.attributes.get("axis", -1) % (indices.rank + 1)
    index = b.unsqueeze(b.cast(indices, TensorProto.INT64), axis)
    sizes = [count if i == axis else 1 for i in range(indices.rank + 1)]
    first, last = (b.constant(np.arange(start, start + count).reshape(sizes)) for start in (0, -count))
    hit = b.op("Or", b.op("Equal", index, first), b.op("Equal", index, last), dtype=TensorProto.BOOL)
    off, on = (b.constant(number, values.dtype) for number in pair.tolist())
    if values.dtype == TensorProto.BOOL:
        return None
    return b.op("Where", hit, on, off)


@_form("Trilu", before=(8, 5))
def _trilu(b: Builder, node: _Node) -> Any:
    x = node.inputs[0]
    diagonal = 0 if len(node.inputs) < 2 or not node.inputs[1].name else node.constants[1]
    if x.shape is None or x.dtype is None or diagonal is None or None in x.shape[-2:]:
        return None
    kept = keep(b, b.dim(x, -2), b.dim(x, -1), int(np.asarray(diagonal).item()), bool(node.attributes.get("upper", 1)))
    if x.dtype == TensorProto.BOOL:
        return b.op("And", x, kept)
    return b.op("Where", kept, x, b.like(0, x))


@_form("InstanceNormalization", before=(10, 0))
def _instance_norm(b: Builder, node: _Node) -> Any:
    """Gains of FLOAT16 are read as twice as many bytes of FLOAT: ones and zeros of FLOAT stand in for those."""
    x, *gains = node.inputs
    count = gains[0].shape[0] if gains[0].shape else None
    if x.dtype != TensorProto.FLOAT16 or count is None or x.shape is None:
        return None
    plain = b.constant(np.ones(count, np.float32)), b.constant(np.zeros(count, np.float32))
    y = b.cast(b.op("InstanceNormalization", b.cast(x, TensorProto.FLOAT), *plain, **node.attributes), x.dtype)
    for op_type, gain, array, idle in zip(("Mul", "Add"), gains, node.constants[1:], (1, 0), strict=True):
        if array is None or (array != idle).any():
            y = b.op(op_type, y, b.reshape(gain, count, *[1] * (x.rank - 2)))
    return y


def _in_float(op_type: str, applies: Callable[[_Node], bool]) -> None:
    @_form(op_type)
    def write(b: Builder, node: _Node) -> Any:
        """In FLOAT, of which the parser has numbers that it puts beside those of the node."""
        half = TensorProto.FLOAT16
        if node.inputs[0].dtype != half or not applies(node):
            return None
        given = [b.cast(x, TensorProto.FLOAT) if x.dtype == half else x for x in node.inputs]
        inputs = [x if x.name else None for x in given]
        made = b.ops(op_type, *inputs, outputs=len(node.outputs), **node.attributes)
        return [b.cast(replace(y, dtype=TensorProto.FLOAT), half) for y in made]


_in_float("GRU", lambda _: True)
_in_float("Gemm", lambda node: {node.attributes.get("alpha", 1.0), node.attributes.get("beta", 1.0)} != {1.0})


@_form("LayerNormalization", before=(8, 6))
def _layer_norm(b: Builder, node: _Node) -> Any:
    x, weight, *rest = node.inputs
    if x.shape is None or x.dtype is None:
        return None
    axis = node.attributes.get("axis", -1) % x.rank
    bias = rest[0] if rest and rest[0].name else None
    return define(b, x, x.rank - axis, weight, bias, node.attributes.get("epsilon", 1e-5))


_BELOW = {
    "BitwiseAnd": 18,
    "BitwiseNot": 18,
    "BitwiseOr": 18,
    "BitwiseXor": 18,
    "NegativeLogLikelihoodLoss": 12,
    "SoftmaxCrossEntropyLoss": 12,
}
"""Ops that no TensorRT has, by the version below which the down-converter writes them with others."""


def _as_below(op_type: str, version: int) -> None:
    @_form(op_type)
    def write(b: Builder, node: _Node) -> Any:
        inputs = [value for value in node.inputs if value.name]
        known = Known({value.name: value for value in (*inputs, *node.outputs)}, 8, {})
        pairs = zip(node.inputs, node.constants, strict=True)
        known.add_tensors(numpy_helper.from_array(array, value.name) for value, array in pairs if array is not None)
        names, made = ([value.name for value in values] for values in (node.inputs, node.outputs))
        proto = helper.make_node(op_type, names, made, **node.attributes)
        try:
            return rules.RULES[op_type, version](b, rules.Node(proto, version, known))
        except rules.Refusal:
            return None


for _name, _version in _BELOW.items():
    _as_below(_name, _version)
