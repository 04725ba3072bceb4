"""Reductions, ArgMax and ArgMin, CumSum, TopK."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets.axes import axes_to_attribute, axis_of, from_front
from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Value
from svexport.symbolic.scatter_reduce import LARGEST

moves("ArgMax ArgMin ReduceMax ReduceMin TopK")

_REDUCTIONS = "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare"

unchanged(_REDUCTIONS, 13)
unchanged("ReduceMax ReduceMin", 12, 20)
unchanged("ArgMax ArgMin", 13)
unchanged("CumSum", 14)
unchanged("TopK", 24)

INT64 = TensorProto.INT64


@down(_REDUCTIONS, 18)
@down("ReduceSum", 13)
def _axes(b: Builder, node: Node) -> Value | None:
    none = bool(node.attribute("noop_with_empty_axes"))
    node.remove("noop_with_empty_axes")
    return None if axes_to_attribute(node) or not none else _of_no_axes(b, node)


def _of_no_axes(b: Builder, node: Node) -> Value:
    """A reduction without axes, which sums nothing."""
    x = node.input()
    match node.proto.op_type:
        case "ReduceL1" | "ReduceL2":
            return b.op("Abs", x)
        case "ReduceSumSquare":
            return b.op("Mul", x, x)
        case "ReduceLogSum":
            return b.op("Log", x)
    return x


@down(f"{_REDUCTIONS} ReduceSum ArgMax ArgMin", 11)
def _from_front(b: Builder, node: Node) -> None:
    from_front(node)


@down("ArgMax ArgMin", 12)
def _last_index(b: Builder, node: Node) -> Value | None:
    """The last place is the first one from behind."""
    last = node.attribute("select_last_index")
    node.remove("select_last_index")
    if not last:
        return None
    node.rank()
    axis, x = axis_of(node, 0), node.input()
    whole = np.iinfo(np.int64).min
    behind = b.op("Slice", x, b.ints(-1), b.ints(whole), b.ints(axis), b.ints(-1))
    place = b.op(node.proto.op_type, behind, axis=axis, keepdims=int(node.attribute("keepdims")))
    length = b.op("Sub", b.shape(b.dim(x, axis)), b.ints(1))
    scalar = b.squeeze(length, 0)
    return b.op("Sub", scalar, place)


@down("CumSum", 11)
def _sums(b: Builder, node: Node) -> Value:
    """Every element of a line beside every place that it counts for."""
    axes = node.ints(1)
    if axes is None:
        node.refuse("its axis is computed")
    x, rank = node.input(), node.rank()
    axis = axes[0] % rank
    size = b.dim(x, axis)
    static = None if x.shape is None or None in x.shape else math.prod(x.shape) * x.shape[axis]  # type: ignore[arg-type,operator]
    if static is not None and static > LARGEST:
        node.refuse(f"comparing every element with every position takes {static:,} elements")
    order = [*(other for other in range(rank) if other != axis), axis]
    lines = b.unsqueeze(b.transpose(x, order), rank - 1)  # (*, 1, S)
    source = b.arange(size)
    place = b.unsqueeze(source, 1)
    earlier, later = (place, source) if node.attribute("reverse") else (source, place)
    counts = b.op("Less", earlier, later)  # (place, source)
    if not node.attribute("exclusive"):
        counts = b.op("Not", b.op("Less", later, earlier))
    if node.dtype() not in FLOAT_TYPES:  # sums of int64 are rounded beyond 2**53, products of matrices are not
        summands = b.transpose(b.cast(counts, x.dtype), [1, 0])
        products = b.op("MatMul", b.transpose(x, order), summands, dtype=x.dtype, shape=(None,) * rank)
        return b.transpose(products, np.argsort(order).tolist())
    parts = b.op("Where", counts, lines, b.like(0, x))
    sums = b.reduce_sum(parts, [rank])
    return b.transpose(sums, np.argsort(order).tolist())


@down("TopK", 11)
def _smallest(b: Builder, node: Node) -> list[Value] | None:
    """The smallest are the largest of the negated. Sorted results are right where any order is."""
    largest, x, dtype = node.attribute("largest"), node.input(), node.dtype()
    node.remove("largest", "sorted")
    from_front(node)
    if largest and dtype in FLOAT_TYPES:
        return None
    if dtype in (INT64, TensorProto.UINT64):
        node.refuse("no older op sorts 64-bit integers")
    wide = dtype if dtype in FLOAT_TYPES else TensorProto.DOUBLE
    x = b.cast(x, wide)
    values, places = b.ops(
        "TopK", x if largest else b.op("Neg", x), node.input(1), outputs=2, axis=node.attribute("axis", -1)
    )
    values = Value(values.name, wide)
    if not largest:
        values = b.op("Neg", values)
    return [b.cast(values, dtype), places]


@down("TopK", 10)
def _number_as_attribute(b: Builder, node: Node) -> None:
    number = node.ints(1)
    if number is None:
        output = node.output()
        size = None if output is None or output.shape is None else output.shape[axis_of(node, -1)]
        if size is None:
            node.refuse("its K is computed, but has to be a constant there")
        number = [size]
    node.set(k=number[0])
    node.give(node.input())
