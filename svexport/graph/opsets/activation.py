"""Activations: softmax over one axis, and functions that became ops of their own in later opsets."""

from __future__ import annotations

import math
from dataclasses import replace

from svexport.graph.opsets._float import at_least_float
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Value

__all__: list[str] = []

unchanged("Elu Selu HardSigmoid ThresholdedRelu HardSwish Mish", 22)
unchanged("LeakyRelu PRelu", 16)
unchanged("Relu", 13)


@down("Softmax LogSoftmax Hardmax", 13)
def softmax(b: Builder, node: Node) -> Value | None:
    """Before 13 all dimensions from the axis on were one: the axis goes last, where both mean the same."""
    axis = node.attribute("axis")
    x = node.input()
    if x.shape is None:
        if axis != -1:
            node.rank()
        node.set(axis=-1)  # the last alone, whatever the rank; no longer the default
        return None
    rank = len(x.shape)
    axis %= max(rank, 1)
    if all(size == 1 for size in x.shape[axis + 1 :]):
        node.set(axis=axis)
        return None
    perm = [i for i in range(rank) if i != axis] + [axis]
    y = b.op(node.proto.op_type, b.transpose(x, perm), axis=rank - 1)
    return b.transpose(replace(y, shape=tuple(x.shape[i] for i in perm)), [perm.index(i) for i in range(rank)])


@down("Softmax LogSoftmax Hardmax", 11)
def positive(b: Builder, node: Node) -> None:
    """An axis is not counted from the back yet."""
    if (axis := node.attribute("axis")) < 0:
        node.set(axis=axis + node.rank())


@down("Relu", 14)
def relu(b: Builder, node: Node) -> Value | None:
    x = node.input()
    if node.dtype() in FLOAT_TYPES:
        return None
    return b.op("Max", x, b.like(0, x), shape=x.shape)


@down("HardSwish", 14)
def hard_swish(b: Builder, node: Node) -> Value:
    x = node.input()
    return b.op("Mul", x, b.op("HardSigmoid", x, alpha=1 / 6, beta=0.5))


@down("Celu", 12)
def celu(b: Builder, node: Node) -> Value:
    x, alpha = node.typed(), node.attribute("alpha")
    if alpha == 1:
        return b.op("Elu", x, alpha=1.0)
    scaled = b.op("Elu", b.op("Div", x, b.like(alpha, x)), alpha=1.0)
    return b.op("Mul", scaled, b.like(alpha, x))


@down("ThresholdedRelu", 10)
def thresholded_relu(b: Builder, node: Node) -> Value:
    x = node.typed()
    above = b.op("Greater", x, b.like(node.attribute("alpha"), x))
    return b.op("Where", above, x, b.like(0, x))


@down("Mish", 18)
def mish(b: Builder, node: Node) -> Value:
    x = node.input()
    return b.op("Mul", x, b.op("Tanh", b.op("Softplus", x)))


@down("Gelu", 20)
def gelu(b: Builder, node: Node) -> Value:
    """In the form that runtimes make one kernel of."""
    given = node.typed()
    x = at_least_float(b, given)

    def op(op_type: str, *inputs: Value) -> Value:
        return b.op(op_type, *inputs)

    if node.attribute("approximate") == "tanh":
        cube = op("Mul", op("Mul", op("Mul", x, x), x), b.like(0.044715, x))
        inner = op("Tanh", op("Mul", op("Add", x, cube), b.like(math.sqrt(2 / math.pi), x)))
    else:
        inner = op("Erf", op("Div", x, b.like(math.sqrt(2), x)))
    y = op("Mul", op("Mul", x, op("Add", inner, b.like(1, x))), b.like(0.5, x))
    return b.cast(y, given.dtype)


@down("Swish", 24)
def swish(b: Builder, node: Node) -> Value:
    x, alpha = node.typed(), node.attribute("alpha")
    inner = x if alpha == 1 else b.op("Mul", x, b.like(alpha, x))
    return b.op("Mul", x, b.op("Sigmoid", inner))
