"""Reshapes that may be given nothing: with sizes that are known of it, too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto

from svexport.graph.integers import Known
from svexport.graph.scope import is_standard
from svexport.graph.walk import attributes_of
from svexport.symbolic._builder import Builder, Dim, Value

__all__ = ["Reshapes", "one_or_none", "reached"]

_Size: TypeAlias = "int | tuple[str, int] | None"
"""A number, an axis of a value, or one that is computed."""

_HANDING_ON = {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
"""Ops that return the sizes that they are given."""


def reached(nodes: Iterable[onnx.NodeProto], first: Iterable[str]) -> set[str]:
    """Values that are computed from nodes of these types."""
    found: set[str] = set()
    kinds = set(first)
    for node in nodes:
        if node.op_type in kinds or found.intersection(node.input) or any(a.HasField("g") for a in node.attribute):
            found.update(node.output)
    return found


class Reshapes:
    """Writes Reshapes that mean something else of nothing, or nothing at all, with others that do not.

    A size of -1 beside one of 0 cannot be found, but often follows from the other sizes of the input. A 0 among
    computed sizes stands before opset 14 for the size of the input at its place, which may be another.

    Args:
        known: of the model.
        reached: values that may be nothing.
    """

    def __init__(self, known: Known, reached: set[str]) -> None:
        self.known, self.reached = known, reached

    def __call__(self, b: Builder, node: onnx.NodeProto, _: Mapping[str, Value]) -> list[Value] | None:
        """In place of a Reshape; None leaves it."""
        given, x, sizes = Value(node.input[0]), self._alike(node.input[0]), self._sizes(node.input[1])
        if x.shape is None or 0 in x.shape or given.name not in self.reached or sizes is None:
            return None
        zeros = [place for place, size in enumerate(sizes) if size == 0]
        if attributes_of(node).get("allowzero") or any(place >= x.rank for place in zeros):
            return None
        sizes = [_size(x, place) if size == 0 else size for place, size in enumerate(sizes)]
        found = _found(b, x, sizes) if -1 in sizes else None
        if found is None and (-1 in sizes or b.opset >= 14 or all(_stays(x, *at) for at in enumerate(sizes))):
            return None
        numbers = [
            found if size == -1 and found is not None else self._number(b, node.input[1], place, size)
            for place, size in enumerate(sizes)
        ]
        copied = [0 if size == (x.name, place) else numbers[place] for place, size in enumerate(sizes)]
        if all(isinstance(number, int) for number in copied):
            return [b.op("Reshape", given, b.shape(*copied))]
        return [_reshape(b, given, numbers)]

    def _alike(self, name: str) -> Value:
        """A value of the same shape: what is squared, or got another type."""
        node = self.known.made_by.get(name)
        while node is not None and node.op_type in ("Cast", "Mul") and len(set(node.input)) == 1:
            name = node.input[0]
            node = self.known.made_by.get(name)
        return self.known.value(name)

    def _number(self, b: Builder, sizes: str, place: int, size: _Size) -> Dim:
        if isinstance(size, int):
            return size
        if size is not None:
            return b.dim(self.known.value(size[0]), size[1])
        return b.op("Gather", Value(sizes, TensorProto.INT64), b.ints(place), axis=0, shape=(1,))

    def _sizes(self, name: str) -> list[_Size] | None:
        """Of a list of sizes each; None where its length is not known."""
        if (array := self.known.array(name)) is not None:
            return [int(size) for size in array.reshape(-1)]
        node = self.known.made_by.get(name)
        if node is not None and is_standard(node, node.op_type):
            sizes = self._made(node)
            if sizes is not None:
                return sizes
        shape = self.known.value(name).shape
        if shape is None or None in shape:
            return None
        return [None] * math.prod(size for size in shape if size is not None)

    def _made(self, node: onnx.NodeProto) -> list[_Size] | None:
        if node.op_type == "Shape" and not node.attribute:
            x = self._alike(node.input[0])
            return None if x.shape is None else [_size(x, axis) for axis in range(x.rank)]
        if node.op_type in _HANDING_ON:
            return self._sizes(node.input[0])
        if node.op_type == "Concat":
            parts = [self._sizes(name) for name in node.input]
            return None if None in parts else [size for part in parts if part is not None for size in part]
        if node.op_type not in ("Gather", "Slice"):
            return None
        sizes = self._sizes(node.input[0])
        places = [self.known.array(name) for name in node.input[1:]]
        if sizes is None or not places or any(place is None for place in places):
            return None
        numbers = [[int(number) for number in place.reshape(-1)] for place in places if place is not None]
        if node.op_type == "Gather":
            return [sizes[place] for place in numbers[0]]
        step = numbers[3][0] if len(numbers) > 3 else 1
        return sizes[numbers[0][0] : numbers[1][0] : step]


def _size(x: Value, axis: int) -> _Size:
    size = None if x.shape is None else x.shape[axis]
    return (x.name, axis) if size is None else size


def _stays(x: Value, place: int, size: _Size) -> bool:
    """Whether a size is right as it is, though it be 0."""
    return isinstance(size, int) or size == (x.name, place)


def _found(b: Builder, x: Value, sizes: Sequence[_Size]) -> Dim | None:
    """What -1 stands for; None where it is found as it is, or cannot be told."""
    axes = [size[1] for size in sizes if isinstance(size, tuple)]
    others = [size for size in sizes if not isinstance(size, int) and (size is None or size[0] != x.name)]
    if not axes or others or len(set(axes)) < len(axes):
        return None
    rest = b.product(*(b.dim(x, axis) for axis in range(x.rank) if axis not in axes))
    return b.quotient(rest, math.prod(size for size in sizes if isinstance(size, int) and size != -1))


def _reshape(b: Builder, x: Value, sizes: Sequence[Dim]) -> Value:
    if b.opset >= 14 or sum(not isinstance(size, int) for size in sizes) < 2:
        return b.reshape(x, *sizes)
    # (n, 1, 1, 1) as (n, 1, n, 1) if n is 0, of which the size at that place is the one that is asked for.
    target = b.shape(*sizes)
    flat = b.op("Reshape", x, b.ints(-1, *[1] * (len(sizes) - 1)))
    return b.op("Reshape", b.op("Expand", flat, one_or_none(b, target)), target)


def one_or_none(b: Builder, sizes: Value) -> Value:
    """0 for each size that is 0, 1 for all others."""
    zero, one = (b.constant(np.array(number, np.int64)) for number in (0, 1))
    return b.op("Where", b.op("Equal", sizes, zero), zero, one)
