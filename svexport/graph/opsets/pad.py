"""Pad: axes, pads and values as inputs, modes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Value

MOST_NUMBERS = 2**22
"""Maximum number of positions in a constant."""

moves("Pad")
unchanged("Pad", 13, 21, 23, 24)


@down("Pad", 18)
def _axes(b: Builder, node: Node) -> None:
    """Pads of some axes become pads of all."""
    if node.given(3) is None:
        node.give(*node.inputs[:3])
        return
    axes = node.ints(3)
    rank, inputs, pads = node.rank(), node.inputs, node.ints(1)
    if axes is None:
        node.give(inputs[0], _scattered(b, node), inputs[2])
        return
    axes = [axis % rank for axis in axes]
    if pads is not None:
        full = [0] * (2 * rank)
        for index, axis in enumerate(axes):
            full[axis], full[axis + rank] = pads[index], pads[index + len(axes)]
        node.give(inputs[0], b.ints(*full), inputs[2] if len(inputs) > 2 else None)
        return
    # A zero behind the pads is what the other axes get.
    places = [axes.index(axis) if axis in axes else 2 * len(axes) for axis in range(rank)]
    places += [place if place == 2 * len(axes) else place + len(axes) for place in places]
    with_zero = b.op("Concat", node.input(1), b.ints(0), axis=0)
    node.give(inputs[0], b.op("Gather", with_zero, b.ints(*places), axis=0), inputs[2] if len(inputs) > 2 else None)


def _scattered(b: Builder, node: Node) -> Value:
    """Pads of computed axes at their places among those of all."""
    rank, axes = b.ints(node.rank()), node.input(3)
    axes = axes if node.dtype(3) == TensorProto.INT64 else b.cast(axes, TensorProto.INT64)
    behind = b.op("Add", axes, rank)
    axes = b.op("Where", b.op("Less", axes, b.ints(0)), behind, axes)
    places = b.op("Concat", axes, b.op("Add", axes, rank), axis=0)
    return b.op("ScatterElements", b.ints(*[0] * (2 * node.rank())), places, node.input(1), axis=0)


@down("Pad", 19)
def _wrap(b: Builder, node: Node) -> Value | None:
    return _by_places(b, node) if node.attribute("mode") == "wrap" else None


def _by_places(b: Builder, node: Node) -> Value:
    """Every element of a dimension by its place, which static sizes tell."""
    pads, axes = node.ints(1), node.ints(3) if node.given(3) is not None else None
    if pads is None or (axes is None and node.given(3) is not None):
        node.refuse("its pads are computed")
    mode, x, rank = node.attribute("mode"), node.input(), node.rank()
    axes = list(range(rank)) if axes is None else [axis % rank for axis in axes]
    for axis, before, after in zip(axes, pads, pads[len(axes) :], strict=False):
        if not before and not after:
            continue
        size = node.input().shape[axis]  # type: ignore[index]
        if not size:
            node.refuse(f"mode {mode!r} needs the size of dimension {axis}, which is not known")
        if size + max(0, before) + max(0, after) > MOST_NUMBERS:
            node.refuse(f"the positions of {size:,} elements would have to be listed")
        places = np.arange(max(0, -before), size - max(0, -after))
        places = np.pad(places, (max(0, before), max(0, after)), mode=mode)
        x = b.op("Gather", x, b.constant(places.astype(np.int64)), axis=axis)
    return x


@down("Pad", 11)
def _as_attributes(b: Builder, node: Node) -> Value | None:
    pads, mode, dtype = node.ints(1), node.attribute("mode"), node.dtype()
    if pads is None:
        node.refuse("its pads are computed, but have to be constants there")
    if mode == "constant":
        value = np.zeros((), np.float32) if node.given(2) is None else node.constant(2)
        small = dtype in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
        if value is None or not small or np.float32(value.item()) != value.item():
            return _by_concatenation(b, node, pads)
        node.set(value=float(value.item()))
    elif dtype not in FLOAT_TYPES:
        return _by_places(b, node)
    node.set(pads=pads)
    node.give(node.input())
    return None


def _by_concatenation(b: Builder, node: Node, pads: list[int]) -> Value:
    """Constant blocks on either side, for numbers that the attribute cannot have."""
    node.rank()
    x, dtype, rank = node.input(), node.dtype(), node.rank()
    given = node.given(2)
    fill = b.constant(np.zeros(1, helper.tensor_dtype_to_np_dtype(dtype))) if given is None else b.reshape(given, 1)
    for axis in range(rank):
        before, after = pads[axis], pads[axis + rank]
        size = None if x.shape is None else x.shape[axis]
        if before < 0 or after < 0:
            x = b.slice(x, axis, max(0, -before), min(0, after) or np.iinfo(np.int64).max)
        sides = [_block(b, node, x, axis, max(0, count), fill) for count in (before, after)]
        parts = [part for part in (sides[0], x, sides[1]) if part is not None]
        shape = list(x.shape or [None] * rank)
        shape[axis] = None if size is None else size + before + after
        if len(parts) > 1:
            x = Value(b.op("Concat", *parts, axis=axis).name, dtype, tuple(shape))
    return x


def _block(b: Builder, node: Node, x: Value, axis: int, count: int, fill: Value) -> Value | None:
    if not count:
        return None
    sizes = b.shape(*(count if other == axis else b.dim(x, other) for other in range(node.rank())))
    return b.op("Expand", fill, sizes)
