"""Ops that gather and scatter: Gather, GatherElements, GatherND, Scatter and their kin, OneHot, Compress."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from svexport.errors import ExportError
from svexport.graph.opsets.axes import axis_of, from_front, nonnegative_indices
from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.rules import Node, down, refused, unchanged
from svexport.symbolic._builder import Builder, Dim, Value
from svexport.symbolic.fold import fold
from svexport.symbolic.scatter_reduce import scatter

moves("Compress Gather GatherElements GatherND NonZero OneHot ReverseSequence Scatter ScatterElements ScatterND Unique")

unchanged("Gather GatherElements GatherND NonZero ScatterElements ScatterND", 13)
unchanged("Scatter", 11)  # deprecated: ScatterElements took its place
refused("Unique", 11, "no older op finds the equal elements of a tensor")

INT64 = TensorProto.INT64


@down("Compress", 11)
def _compress(b: Builder, node: Node) -> None:
    from_front(node)


@down("OneHot", 11)
def _one_hot(b: Builder, node: Node) -> None:
    if node.attribute("axis") < -1:
        from_front(node, node.rank() + 1)
    indices, dtype = node.constant(0), node.dtype(0)
    if indices is not None and not (indices < 0).any():
        return
    # What counts from the end of the depth, or lies before its begin, where nothing is on.
    depth, zero = b.cast(b.reshape(node.input(1), 1), dtype), b.constant(0, dtype)
    placed = nonnegative_indices(b, node, 0, Value(depth.name, dtype, (1,)))
    placed = b.op("Where", b.op("Less", placed, zero), depth, placed)
    if not node.rank(0):
        placed = b.reshape(placed)
    inputs = node.inputs
    node.give(placed, *inputs[1:])


# ---------------------------------------------------------------- Gather


@down("Gather", 11)
def _gather(b: Builder, node: Node) -> None:
    from_front(node)
    indices = node.constant(1)
    if indices is not None and not (indices < 0).any():
        return
    node.rank()
    data = node.input()
    node.give(data, nonnegative_indices(b, node, 1, b.dim(data, node.attribute("axis"))))


@down("GatherND", 12)
def _gather_batches(b: Builder, node: Node) -> Value | None:
    """The places within the batch join the indices."""
    batches = node.attribute("batch_dims")
    node.remove("batch_dims")
    if not batches:
        return None
    node.rank(0)
    rank = node.rank(1)
    indices = node.input(1)
    lead = [b.dim(indices, axis) for axis in range(rank - 1)]
    parts = []
    for axis in range(batches):
        place = b.arange(lead[axis])
        place = b.unsqueeze(place, *(other for other in range(rank) if other != axis))
        parts.append(b.expand(place, *lead, 1))
    return b.op("GatherND", node.input(), b.op("Concat", *parts, indices, axis=rank - 1))


@down("GatherND", 11)
def _gather_rows(b: Builder, node: Node) -> Value:
    rows, places, _ = _as_rows(b, node)
    return b.op("Gather", rows, places, axis=0)


def _as_rows(b: Builder, node: Node) -> tuple[Value, Value, list[Dim]]:
    """What an index of GatherND or ScatterND stands for as one number.

    Returns:
        The data with the indexed dimensions as one; the indices, without their last dimension; the sizes of the other
        dimensions of the data.
    """
    data, indices = node.input(0), node.input(1)
    rank = node.rank(0)
    width = indices.shape[-1] if node.rank(1) else None  # type: ignore[index]
    if width is None:
        node.refuse("the number of dimensions that it indexes is not known")
    sizes = [b.dim(data, axis) for axis in range(rank)]
    strides = [b.product(*sizes[axis + 1 : width]) for axis in range(width)]
    limit, zero = b.shape(*sizes[:width]), b.ints(0)
    negative = b.op("Less", indices, zero)
    indices = b.op("Where", negative, b.op("Add", indices, limit), indices, dtype=INT64)
    steps = b.op("Mul", indices, b.shape(*strides))
    places = b.reduce_sum(Value(steps.name, INT64, node.input(1).shape), [node.rank(1) - 1])
    rest = sizes[width:]
    rows = b.reshape(data, b.product(*sizes[:width]), *rest)
    return rows, places, rest


@down("GatherElements", 11)
def _gather_elements(b: Builder, node: Node) -> Value:
    rank = node.rank(0)
    data, places = node.input(), _places(b, node, axis_of(node, 0))
    line = b.reshape(data, b.product(*(b.dim(data, axis) for axis in range(rank))))
    return b.op("Gather", line, places, axis=0) if rank else data


def _places(b: Builder, node: Node, axis: int) -> Value:
    """Flat indices of the elements that GatherElements and ScatterElements address."""
    data, rank = node.input(), node.rank(0)
    node.rank(1)
    indices = b.cast(nonnegative_indices(b, node, 1, b.dim(data, axis)), INT64)
    sizes = [b.dim(data, other) for other in range(rank)]
    place: Value | None = None
    for other in range(rank):
        number = indices
        if other != axis:
            number = b.arange(b.dim(node.input(1), other))
            number = b.unsqueeze(number, *(each for each in range(rank) if each != other))
        number = b.op("Mul", number, b.shape(b.product(*sizes[other + 1 :])))
        place = number if place is None else b.op("Add", place, number)
    return Value((place or indices).name, INT64, node.input(1).shape)


# ---------------------------------------------------------------- Scatter

_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _reduction(node: Node) -> str | None:
    """The reduction of updates, by torch's name, if the version below does not have it; else the node stays."""
    reduction = node.attribute("reduction")
    if node.version == 18 and reduction not in ("max", "min"):
        return None
    if reduction == "none":
        node.remove("reduction")
        return None
    return _REDUCE[reduction]


@down("ScatterElements", 18, 16)
def _reduce_elements(b: Builder, node: Node) -> Value | None:
    reduction = _reduction(node)
    if reduction is None:
        return None
    axis, data, updates = axis_of(node, 0), node.input(), node.input(2)
    node.rank(0)
    node.rank(1)
    node.dtype()
    try:
        if _is_narrow(data, node.input(1), axis):
            sizes = [b.dim(data, other) for other in range(node.rank())]
            count = b.product(*(b.dim(node.input(1), other) for other in range(node.rank(1))))
            line, places = b.reshape(data, b.product(*sizes)), b.reshape(_places(b, node, axis), count)
            return b.reshape(scatter(b, line, 0, places, b.reshape(updates, count), reduction), *sizes)
        indices = nonnegative_indices(b, node, 1, b.dim(data, axis))
        indices = Value(b.cast(indices, INT64).name, INT64, node.input(1).shape)
        return scatter(b, data, axis, indices, updates, reduction)
    except ExportError as error:
        node.refuse(str(error))


def _is_narrow(data: Value, indices: Value, axis: int) -> bool:
    """Whether indices leave elements out of other dimensions than that which they index."""
    sizes = enumerate(zip(data.shape or (), indices.shape or (), strict=False))
    return any(size is not None and have is not None and have < size for i, (size, have) in sizes if i != axis)


@down("ScatterND", 18, 16)
def _reduce_nd(b: Builder, node: Node) -> Value | None:
    reduction = _reduction(node)
    if reduction is None:
        return None
    rows, places, updates, sizes = _lines(b, node)
    try:
        return b.reshape(scatter(b, rows, 0, places, updates, reduction), *sizes)
    except ExportError as error:
        node.refuse(str(error))


@down("ScatterElements", 11)
def _scatter_elements(b: Builder, node: Node) -> Value:
    node.rank()
    axis, data = axis_of(node, 0), node.input()
    indices = nonnegative_indices(b, node, 1, b.dim(data, axis))
    return b.op("Scatter", data, indices, node.input(2), axis=axis)


@down("ScatterND", 11)
def _scatter_nd(b: Builder, node: Node) -> Value:
    rows, places, updates, sizes = _lines(b, node)
    return b.reshape(b.op("Scatter", rows, places, updates, axis=0), *sizes)


def _lines(b: Builder, node: Node) -> tuple[Value, Value, Value, Sequence[Dim]]:
    """A ScatterND as one of elements along dimension 0.

    Returns:
        The data (P, R), the indices (N, R), the updates (N, R), and the sizes of the data.
    """
    rows, places, rest = _as_rows(b, node)
    node.dtype()
    data, indices, updates = (node.input(index) for index in range(3))
    width = b.product(*rest)
    count = b.product(*(b.dim(indices, axis) for axis in range(node.rank(1) - 1)))
    sizes = [b.dim(data, axis) for axis in range(node.rank())]
    lines = b.reshape(rows, b.product(*sizes[: len(sizes) - len(rest)]), width)
    column = b.expand(b.reshape(places, count, 1), count, width)
    return lines, column, b.reshape(updates, count, width), sizes


# ---------------------------------------------------------------- blocks and sequences


@down("Col2Im", 18)
def _columns_to_image(b: Builder, node: Node) -> Value:
    image, block = node.ints(1), node.ints(2)
    if image is None or block is None:
        node.refuse("the shape of its image or of its blocks is computed")
    count = len(block)
    dilations, pads, strides = (node.attribute(name) for name in ("dilations", "pads", "strides"))
    pads = pads or [0] * (2 * count)
    if pads[:count] != pads[count:]:
        node.refuse("its pads differ on the two sides")
    node.rank()
    node.dtype()
    return fold(b, node.input(), image, block, dilations or [1] * count, pads[:count], strides or [1] * count)


@down("ReverseSequence", 10)
def _reverse_sequence(b: Builder, node: Node) -> Value:
    """ReverseSequence: gathers every step by its position in the flattened sequences."""
    rank, x = node.rank(), node.input()
    time, batch = node.attribute("time_axis"), node.attribute("batch_axis")
    order = [batch, time, *range(2, rank)]
    x = b.transpose(x, order)
    n, t, *rest = (b.dim(x, axis) for axis in range(rank))
    step = b.arange(t)
    lengths = b.unsqueeze(Value(node.input(1).name, INT64, (None,)), 1)
    backward = b.op("Sub", b.op("Sub", lengths, b.ints(1)), step)
    inside = b.op("Less", step, lengths)
    places = b.op("Where", inside, backward, step)
    first = b.op("Mul", b.arange(n), b.shape(t))
    places = b.op("Add", places, b.unsqueeze(first, 1))
    gathered = b.op("Gather", b.reshape(x, b.product(n, t), *rest), places, axis=0)
    return b.transpose(Value(gathered.name, x.dtype, (None,) * rank), np.argsort(order).tolist())
