"""Nodes that may be given nothing, where values decide how many there are.

Of what a mask or a threshold picks there may be none, though in no input that was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svexport.graph.integers import Known, constants_of
from svexport.graph.reshaped import Reshapes, one_or_none, reached
from svexport.graph.scope import is_standard
from svexport.graph.substitute import Made, rewrite
from svexport.graph.walk import attributes_of, graphs, remove_attribute
from svexport.symbolic._builder import Builder, Value

__all__ = ["any_finds", "take_zero_for_a_size", "write_for_nothing"]

_FINDING = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
"""Ops that return as many as values say."""

_JOINING = {"Cast", "Concat", "Reshape", "Unsqueeze"}
"""Ops that make a list of sizes of sizes."""

_Form = Callable[[Builder, onnx.NodeProto, Mapping[str, Value]], "list[Value] | None"]
"""Writes a node with others; None leaves it."""

_LENGTHS = 4
"""Of the inputs of an LSTM or a GRU: of each sequence its length."""

_OF_SEQUENCES = (0, 5, 6)
"""Those with sequences along axis 1: the numbers, and the first states."""


def any_finds(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether values decide how many there are of anything."""
    return any(node.op_type in _FINDING for node in nodes)


def write_for_nothing(model: onnx.ModelProto, infer: Callable[[], Mapping[str, Value]]) -> None:
    """Writes nodes that end the process where they are given nothing with others that do not, in place, if values
    decide sizes.

    An LSTM or a GRU is given one sequence more, of zeros, and what it returns of it is cut off. Of a MatMul and a
    Transpose that moves its batches ONNX Runtime makes one node, which divides by their number: a Reshape to the sizes
    that are there keeps them apart. The last of cumulative sums, of which there may be none, is a sum.

    Args:
        model: with unique names of values.
        infer: the types of its values, asked for only where values decide sizes.
    """
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    if not any_finds(nodes):
        return
    constants = constants_of(model)
    types = infer()
    made_by = {name: node for node in nodes for name in node.output}
    nothing = reached(nodes, _FINDING)
    moved = any(is_standard(node, "Transpose") and attributes_of(node).get("perm", [1])[0] for node in nodes)
    forms: dict[str, _Form] = {
        "GRU": _one_more,
        "Gather": _last_sum(nodes, constants),
        "LSTM": _one_more,
        "MatMul": _product(moved, nothing),
        "Reshape": Reshapes(Known(types, made_by, constants), nothing),
        "SoftmaxCrossEntropyLoss": _cross_entropy,
    }
    made_anew: set[str] = set()

    def write(b: Builder, node: onnx.NodeProto) -> Made:
        form = forms.get(node.op_type)
        made = form(b, node, types) if form else None
        made_anew.update(node.output if made is not None else ())
        return made

    rewrite(model, "nothing", write)
    for graph in graphs(model.graph):  # torch.export states a wrong rank of all that an LSTM returns
        for info in [info for info in graph.value_info if info.name in made_anew]:
            graph.value_info.remove(info)


def take_zero_for_a_size(model: onnx.ModelProto) -> None:
    """Of Reshapes to sizes that are computed makes ones to which 0 is a size, in place, if values decide sizes: by
    default it stands for that of the input at its place.

    Args:
        model: of opset 14 or later.
    """
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    if not any_finds(nodes):
        return
    made_by = {name: node for node in nodes for name in node.output}
    constants = constants_of(model)

    def may_be_any(name: str) -> bool:
        """Whether -1 is among sizes, with which there may be no 0."""
        if name in constants:
            return bool((numpy_helper.to_array(constants[name]) < 0).any())
        node = made_by.get(name)
        return node is not None and node.op_type in _JOINING and any(map(may_be_any, node.input))

    for node in nodes:
        if is_standard(node, "Reshape") and node.input[1] not in constants and not may_be_any(node.input[1]):
            remove_attribute(node, "allowzero")
            node.attribute.append(helper.make_attribute("allowzero", 1))


def _product(transposed: bool, nothing: set[str]) -> _Form:
    """A MatMul with batches.

    Args:
        transposed: whether there are Transposes that move batches.
        nothing: values of which there may be none.
    """

    def form(b: Builder, node: onnx.NodeProto, types: Mapping[str, Value]) -> list[Value] | None:
        given = [types.get(name, Value(name)) for name in node.input]
        operands = _apart(b, given) if transposed else given
        if any(x.name in nothing for x in given):
            operands = _as_many(b, operands)
        return None if operands == given else [b.op("MatMul", *operands)]

    return form


def _apart(b: Builder, operands: list[Value]) -> list[Value]:
    if any(x.shape is None or x.rank < 3 for x in operands) or not any(None in (x.shape or ()) for x in operands):
        return operands
    return [b.op("Reshape", x, b.ints(*[0] * x.rank), shape=x.shape) for x in operands]


def _as_many(b: Builder, operands: list[Value]) -> list[Value]:
    """One matrix for all of no batches is none: ONNX Runtime refuses that, unless it stands on the right."""
    left, right = operands
    if left.shape is None or right.shape is None or left.rank < 2 or right.rank < 3:
        return operands
    rank = max(left.rank, right.rank)

    def of_batches(x: Value, other: Value) -> Value:
        own, batches = ([*[1] * (rank - y.rank), *(y.shape or ())][:-2] for y in (x, other))
        places = [i - rank for i in range(rank - 2) if own[i] == 1 and batches[i] is None]
        sizes = [b.dim(other, i) if i in places else 1 for i in range(-rank, 0)]
        return b.op("Expand", x, one_or_none(b, b.shape(*sizes))) if places else x

    return [of_batches(left, right), of_batches(right, left)]


def _last_sum(nodes: Sequence[onnx.NodeProto], constants: Mapping[str, TensorProto]) -> _Form:
    """As the exporter on torch.export writes of how many places repeat_interleave makes."""
    plain = [n for n in nodes if is_standard(n, "CumSum") and not any(attributes_of(n).values())]
    sums = {node.output[0]: node.input[0] for node in plain}

    def form(b: Builder, node: onnx.NodeProto, types: Mapping[str, Value]) -> list[Value] | None:
        index = constants.get(node.input[1]) if node.input[0] in sums else None
        x = types.get(sums[node.input[0]]) if index is not None else None
        if index is None or x is None or x.shape is None or x.rank != 1:
            return None
        last = numpy_helper.to_array(index)
        return [b.reduce("ReduceSum", x, [0], keepdims=last.ndim == 1)] if last.tolist() in (-1, [-1]) else None

    return form


def _cross_entropy(b: Builder, node: onnx.NodeProto, types: Mapping[str, Value]) -> list[Value] | None:
    """In its two parts: ONNX Runtime's own reshapes to a size that is to be found."""
    scores, *rest = (types.get(name, Value(name)) for name in node.input)
    if b.opset < 13 and (scores.shape is None or scores.rank != 2):  # there of all axes from that one on
        return None
    likely = b.op("LogSoftmax", scores, axis=1)
    return [b.op("NegativeLogLikelihoodLoss", likely, *rest, **attributes_of(node)), likely]


def _one_more(b: Builder, node: onnx.NodeProto, types: Mapping[str, Value]) -> list[Value] | None:
    x = types.get(node.input[0])
    if x is None or x.shape is None or x.shape[1] is not None:
        return None
    given = [Value(name) if name else None for name in node.input]
    for index, value in enumerate(given):
        if value is not None and index == _LENGTHS:
            given[index] = b.op("Concat", value, b.constant(np.ones(1, np.int32)), axis=0)
        elif value is not None and index in _OF_SEQUENCES:
            given[index] = _padded(b, value)
    outputs = b.ops(node.op_type, *given, outputs=len(node.output), **attributes_of(node))
    return [
        b.slice(made, 2 if made is outputs[0] else 1, 0, -1) if name else made
        for made, name in zip(outputs, node.output, strict=True)
    ]


def _padded(b: Builder, x: Value) -> Value:
    """(T, B, I) -> (T, B + 1, I)."""
    pads = [0, 0, 0, 0, 1, 0]
    return b.op("Pad", x, pads=pads) if b.opset < 11 else b.op("Pad", x, b.ints(*pads))
