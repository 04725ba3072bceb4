"""Ops that change or read shapes: Reshape, Squeeze, Split, Slice, Shape, DepthToSpace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, helper

from svexport.graph.opsets.axes import axis_of, from_front
from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.pad import MOST_NUMBERS
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic.triu import keep

moves("Concat DepthToSpace Expand Flatten Identity Reshape Shape Size Slice SpaceToDepth Split Squeeze Tile")
moves("Transpose Trilu Unsqueeze")

unchanged("Concat DepthToSpace Expand Slice SpaceToDepth Tile", 13)
unchanged("Transpose", 13, 21, 23, 24)
unchanged("Squeeze Unsqueeze", 21, 23, 24)
unchanged("Reshape", 13, 19, 21, 23, 24)
unchanged("Flatten", 13, 21, 23, 24)
unchanged("Shape Size", 13, 19, 21, 23, 24)

INT64 = TensorProto.INT64
LAST = np.iinfo(np.int64).max


@down("Concat Flatten Split Squeeze", 11)
def _axis_from_front(b: Builder, node: Node) -> None:
    from_front(node)


@down("Unsqueeze", 11)
def _unsqueeze_from_front(b: Builder, node: Node) -> None:
    axes = node.attribute("axes") or []
    if any(axis < 0 for axis in axes):
        from_front(node, node.rank() + len(axes))


@down("Squeeze Unsqueeze", 13)
def _axes_as_attribute(b: Builder, node: Node) -> Value | None:
    if node.given(1) is None:
        node.give(node.input())
        return None
    axes = node.ints(1)
    if axes is None:
        output = node.output()
        shape = None if output is None else output.shape
        if shape is None or shape.count(None) > 1 or 0 in shape:
            node.refuse("its axes are computed, but have to be constants there")
        return b.op("Reshape", node.input(), b.ints(*(-1 if size is None else size for size in shape)))
    if not axes and node.proto.op_type == "Squeeze":
        node.refuse("its list of axes is empty, which runtimes read as no axis or as all")
    node.set(axes=axes)
    node.give(node.input())
    return None


# ---------------------------------------------------------------- Reshape


@down("Reshape", 14)
def _reshape(b: Builder, node: Node) -> Value | None:
    if not node.attribute("allowzero"):
        node.remove("allowzero")
        return None
    x, target = node.input(), node.ints(1)
    output = node.output()
    shape = None if output is None else output.shape
    node.remove("allowzero")
    if target is not None and 0 not in target:
        return None
    if target is not None:
        return _empty(b, node, target)
    if shape is not None and shape.count(None) <= 1 and 0 not in shape:  # exact of a size of zero too
        node.give(x, b.ints(*(-1 if size is None else size for size in shape)))
        return None
    if shape is not None and None not in shape:
        return _empty(b, node, shape)  # type: ignore[arg-type]
    # Sizes are taken not to be zero. Where one is, ONNX Runtime refuses to run what would come out in another shape.
    return None


def _empty(b: Builder, node: Node, shape: Sequence[int]) -> Value:
    """An empty tensor of a shape."""
    fill = helper.make_tensor("", node.dtype(), [1], np.zeros(1, helper.tensor_dtype_to_np_dtype(node.dtype())))
    return b.op("ConstantOfShape", b.ints(*shape), value=fill, dtype=node.dtype())


# ---------------------------------------------------------------- Split


@down("Split", 18)
def _split_num_outputs(b: Builder, node: Node) -> None:
    count = len(node.proto.output)
    if not node.has("num_outputs"):
        return
    node.remove("num_outputs")
    x = node.input()
    size = None if x.shape is None else x.shape[axis_of(node, 0)]
    if (
        size is not None
    ):  # written out also where the parts are equal: ONNX Runtime takes Splits for one by inputs alone
        part = -(-size // count)
        if part * (count - 1) > size:
            node.refuse(f"{size} elements do not make {count} parts of {part}")
        node.give(x, b.ints(*[part] * (count - 1), size - part * (count - 1)))
        return
    if x.shape is None:
        node.rank()
    length = b.dim(x, axis_of(node, 0))
    part_of = b.op("Div", b.op("Add", b.shape(length), b.ints(count - 1)), b.ints(count))
    last = b.op("Sub", b.shape(length), b.op("Mul", part_of, b.ints(count - 1)))
    node.give(x, b.op("Concat", *[part_of] * (count - 1), last, axis=0))


@down("Split", 13)
def _split_as_attribute(b: Builder, node: Node) -> list[Value] | None:
    if node.given(1) is None:
        node.give(node.input())
        return None
    sizes = node.ints(1)
    if sizes is not None:
        node.set(split=sizes)
        node.give(node.input())
        return None
    outputs = [node.output(index) for index in range(len(node.proto.output))]
    axis = axis_of(node, 0)
    shapes = [None if value is None or value.shape is None else value.shape[axis] for value in outputs]
    if None not in shapes:
        node.set(split=shapes)
        node.give(node.input())
        return None
    x, parts, end = node.input(), [], b.ints(0)
    for index in range(len(outputs)):
        start, size = end, b.slice(node.input(1), 0, index, index + 1)
        end = b.op("Add", start, size)
        parts.append(b.op("Slice", x, start, end, b.ints(axis)))
    return parts


# ---------------------------------------------------------------- Slice


@down("Slice", 11)
def _slice_from_front(b: Builder, node: Node) -> None:
    axes = node.ints(3)
    if axes is not None and any(axis < 0 for axis in axes):
        inputs = node.inputs
        array = np.array([axis % node.rank() for axis in axes], helper.tensor_dtype_to_np_dtype(node.dtype(3)))
        node.give(*inputs[:3], b.constant(array), *inputs[4:])


@down("Slice", 10)
def _slice_as_attributes(b: Builder, node: Node) -> Value | None:
    x, starts, ends = node.input(), node.ints(1), node.ints(2)
    steps = [1] if node.given(4) is None else node.ints(4)
    axes = list(range(len(starts or ()))) if node.given(3) is None else node.ints(3)
    if axes is None or steps is None:
        node.refuse("its axes or steps are computed, but have to be constants there")
    if starts is None or ends is None:
        return _slice_computed(b, node, axes, steps)
    if all(step == 1 for step in steps):
        node.give(x)
        node.set(axes=axes, starts=starts, ends=ends)
        return None
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step == 1:
            x = b.op("Slice", x, axes=[axis], starts=[start], ends=[end])
        else:
            x = b.op("Gather", x, _places(b, node, axis, start, end, step), axis=axis)
    return x


def _places(b: Builder, node: Node, axis: int, start: int, end: int, step: int) -> Value:
    """The indices that a slice with a step takes."""
    size = node.input().shape[axis] if node.input().shape is not None else None  # type: ignore[index]
    if size is None:
        if step == -1 and start == -1 and end < -LAST // 2:
            node.rank()
            count = b.dim(node.input(), axis)
            return b.op("Sub", b.op("Sub", b.shape(count), b.ints(1)), b.arange(count), dtype=INT64)
        node.refuse("it has steps, which need a known size there")
    if size > MOST_NUMBERS:
        node.refuse(f"the positions of {size:,} elements would have to be listed")
    return b.constant(np.arange(size, dtype=np.int64)[slice(*_bounds(start, end, step, size))])


def _bounds(start: int, end: int, step: int, size: int) -> tuple[int | None, int | None, int]:
    """Bounds of the Python slice that equals the op's: they are clamped, and negative ones count from the end."""
    start, end = (bound + size if bound < 0 else bound for bound in (start, end))
    if step > 0:
        return min(max(start, 0), size), min(max(end, 0), size), step
    start = min(max(start, 0), size - 1)
    return start, None if end < 0 else min(end, size - 1), step


def _slice_computed(b: Builder, node: Node, axes: Sequence[int], steps: Sequence[int]) -> Value:
    """A slice of one axis: gathers the elements from start to end by computed indices."""
    if len(axes) != 1 or steps != [1] * len(steps):
        node.refuse("its bounds are computed, but have to be constants there")
    node.rank()
    x, size = node.input(), b.shape(b.dim(node.input(), axes[0]))
    zero = b.ints(0)

    def clamped(index: int) -> Value:
        bound = b.cast(node.input(index), INT64) if node.dtype(index) != INT64 else node.input(index)
        bound = b.op("Where", b.op("Less", bound, zero), b.op("Add", bound, size), bound)
        bound = b.op("Where", b.op("Less", bound, zero), zero, bound)
        return b.op("Where", b.op("Less", size, bound), size, bound)

    start, end = clamped(1), clamped(2)
    count = b.op("Sub", end, start)
    count = b.op("Where", b.op("Less", count, zero), zero, count)
    return b.op("Gather", x, b.op("Add", b.arange(count), start), axis=axes[0])


# ---------------------------------------------------------------- Shape, DepthToSpace, Trilu


@down("Shape", 15)
def _shape_part(b: Builder, node: Node) -> Value | None:
    start, end = node.attribute("start"), node.attribute("end")
    node.remove("start", "end")
    x = node.input()
    if not start and end is None:
        return None
    part = None if x.shape is None else x.shape[slice(*_bounds(start, LAST if end is None else end, 1, len(x.shape)))]
    if part is not None and None not in part:
        return b.ints(*part)  # type: ignore[arg-type]
    return b.slice(b.op("Shape", x), 0, start, LAST if end is None else end)


@down("DepthToSpace", 11)
def _depth_to_space(b: Builder, node: Node) -> Value | None:
    if node.attribute("mode") != "CRD":
        node.remove("mode")
        return None
    node.rank()
    x, block = node.input(), node.attribute("blocksize")
    n, c, h, w = (b.dim(x, axis) for axis in range(4))
    channels = b.quotient(c, block * block)
    x = b.reshape(x, n, channels, block, block, h, w)
    x = b.transpose(x, [0, 1, 4, 2, 5, 3])
    return b.reshape(x, n, channels, b.product(h, block), b.product(w, block))


@down("Trilu", 14)
def _trilu(b: Builder, node: Node) -> Value:
    node.rank()
    x, diagonal = node.input(), 0
    if node.given(1) is not None:
        number = node.constant(1)
        diagonal = b.reshape(node.input(1), 1) if number is None else int(number.item())  # type: ignore[assignment]
    kept = keep(b, b.dim(x, -2), b.dim(x, -1), diagonal, bool(node.attribute("upper")))
    if node.dtype() == TensorProto.BOOL:
        return b.op("And", x, kept)
    return b.op("Where", kept, x, b.like(0, x))


@down("CenterCropPad", 18)
def _center_crop_pad(b: Builder, node: Node) -> Value:
    """Pads, of which negative ones crop; quotients are rounded towards zero, and the larger half is behind."""
    x, axes, target = node.input(), node.attribute("axes"), node.ints(1)
    rank = node.rank()
    axes = list(range(rank)) if axes is None else [axis % rank for axis in axes]
    have = [b.dim(x, axis) for axis in axes]
    if target is not None and all(isinstance(size, int) for size in have):
        pads = [0] * (2 * rank)
        for axis, size, wanted in zip(axes, have, target, strict=True):
            pads[axis] = int((wanted - size) / 2)  # type: ignore[operator]
            pads[axis + rank] = wanted - size - pads[axis]  # type: ignore[operator]
        return b.op("Pad", x, b.ints(*pads))
    more = b.op("Sub", b.cast(node.input(1), INT64) if node.dtype(1) != INT64 else node.input(1), b.shape(*have))
    before = b.op("Div", more, b.ints(2))
    both = b.op("Concat", before, b.op("Sub", more, before), b.ints(0), axis=0)
    first = [axes.index(axis) if axis in axes else -1 for axis in range(rank)]
    places = [*first, *(place + len(axes) if place >= 0 else -1 for place in first)]
    return b.op("Pad", x, b.op("Gather", both, b.ints(*(place % (2 * len(axes) + 1) for place in places)), axis=0))
