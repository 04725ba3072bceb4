"""The guard of a body: a node that ONNX Runtime runs and every TensorRT parser refuses.

ONNX Runtime runs bodies, TensorRT runs plugins. TensorRT's parser takes a function of a node's type if it finds no
plugin, and up to 10.6 even before it looks for one. But it finds functions by name alone, whatever their overload,
takes tensors of the graph for a function's inputs of the same name, and reads constants of functions after they are
freed. So every body begins with a node that no parser knows: TensorRT refuses the file by name and runs nothing else.

The guard's result is 1, the length of a sequence of one tensor. A number of the body is multiplied by it: the last one,
because no two nodes share what follows it. No tool folds the guard, because it reads the shape of an input, which a
function does not know. It costs 1 microsecond a node in ONNX Runtime (1.31, CPU), 4 if all nodes have one grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnx import FunctionProto, TensorProto, numpy_helper

if TYPE_CHECKING:  # the builder needs torch, which a check of a file does not
    from svexport.symbolic._builder import Builder, Value

__all__ = ["add_guard", "is_guarded"]

_FIRST_SEQUENCES = 11

_GUARDS = {"SequenceConstruct", "Compress"}
"""Ops that no TensorRT parser knows; TensorRT has no sequences at all."""

_WITH_NUMBERS = {"Add", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mul", "Pow", "Sub"}
_NUMBERS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32)
"""Types of the number to multiply, floats first: integers may be sizes, which runtimes like to know beforehand."""


def is_guarded(body: FunctionProto) -> bool:
    """Whether a body has a guard, so that every TensorRT refuses it."""
    return any(node.op_type in _GUARDS for node in body.node)


def add_guard(builder: Builder, inputs: Sequence[Value], outputs: Sequence[str], node_type: str) -> None:
    """Puts a guard before the body that a builder holds.

    Args:
        builder: the builder that holds the whole body.
        inputs: the inputs of the body, of known rank, without absent ones.
        outputs: the names of the body's results.
        node_type: the node type of the body; the guard's name holds it, so TensorRT's error says what is missing.
    """
    body = list(builder.nodes)
    used = set(outputs)
    live = []
    for node in reversed(body):
        if not used.isdisjoint(node.output):
            used.update(node.input)
            live.append(node)
    del builder.nodes[:]
    if builder.opset >= _FIRST_SEQUENCES:
        shape = builder.op("Shape", inputs[0])
        one = builder.op("SequenceLength", builder.op("SequenceConstruct", shape), shape=())
    else:
        chosen = builder.op("Compress", builder.ints(1), builder.constant([True]))
        one = builder.op("Reshape", chosen, builder.ints(), shape=())
    guard = next(node for node in builder.nodes if node.op_type in _GUARDS)
    guard.name = f"TensorRT needs the plugin {node_type}"

    for kind in _NUMBERS:
        for node in live:
            for index, name in enumerate(node.input):
                number = builder.constants.get(name) if node.op_type in _WITH_NUMBERS else None
                if number is not None and number.data_type == kind and math.prod(number.dims) == 1:
                    value = builder.constant(numpy_helper.to_array(number))
                    node.input[index] = builder.op("Mul", value, builder.cast(one, kind)).name
                    builder.nodes += body
                    return
    # A body without a number gets its smallest input reshaped to its own shape times 1.
    for smallest in sorted((value for value in inputs if value.name in used), key=lambda value: value.rank)[:1]:
        shape = builder.op("Mul", builder.op("Shape", smallest), one)
        reshaped = builder.op("Reshape", smallest, shape)
        for node in body:
            node.input[:] = [reshaped.name if name == smallest.name else name for name in node.input]
    builder.nodes += body
