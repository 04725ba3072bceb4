"""Axes: counted from the front if an opset takes no negative ones, attributes if it takes no inputs."""

from __future__ import annotations

from svexport.graph.opsets.rules import Node
from svexport.symbolic._builder import Builder, Value

__all__ = ["axes_to_attribute", "axis_of", "from_front", "nonnegative_indices"]


def from_front(node: Node, rank: int | None = None) -> None:
    """Counts ``axis`` or ``axes`` of a node that stays from the front.

    Args:
        rank: that the axes are of; None: of the first input.
    """
    for name in ("axis", "axes"):
        value = node.attribute(name) if node.has(name) else None
        if value is None:
            continue
        axes = value if isinstance(value, list) else [value]
        if any(axis < 0 for axis in axes):
            count = node.rank() if rank is None else rank
            axes = [axis + count if axis < 0 else axis for axis in axes]
            node.set(**{name: axes if isinstance(value, list) else axes[0]})


def axis_of(node: Node, default: int, index: int = 0) -> int:
    """The attribute ``axis``, counted from the front of an input; of an unknown rank where it is not negative."""
    axis = int(node.attribute("axis", default))
    return axis + node.rank(index) if axis < 0 else axis


def axes_to_attribute(node: Node, index: int = 1) -> bool:
    """Makes an input of axes the attribute of that name; False where the node has no axes, or an empty list.

    Raises:
        Refusal: where they are computed.
    """
    if node.given(index) is None:
        node.give(*node.inputs[:index])
        return False
    axes = node.ints(index)
    if axes is None:
        node.refuse("its axes are computed, but have to be constants there")
    inputs = node.inputs
    node.give(*inputs[:index])
    if axes:
        node.set(axes=axes)
    return bool(axes)


def nonnegative_indices(b: Builder, node: Node, index: int, size: Value | int | None) -> Value:
    """Indices counted from the front, which an older op wants.

    Args:
        index: of the input.
        size: of the dimension that they are of: a number, or an int64 tensor of one.
    """
    indices = node.input(index)
    known = node.constant(index)
    if known is not None:
        if not (known < 0).any():
            return indices
        if isinstance(size, int):
            return b.constant((known + size * (known < 0)).astype(known.dtype))
    if size is None:
        node.refuse("its indices may be negative, and the size that they count from is not known")
    dtype = node.dtype(index)
    zero = b.constant(0, dtype)
    length = b.constant(size, dtype) if isinstance(size, int) else b.cast(size, dtype)
    negative = b.op("Less", indices, zero)
    return b.op("Where", negative, b.op("Add", indices, length), indices)
