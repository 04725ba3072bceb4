"""Fourier transforms as products with a matrix of waves, and windows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from svexport.graph.opsets._float import at_least_float
from svexport.graph.opsets.rules import Node, down
from svexport.symbolic._builder import Builder, Dim, Value, static

__all__: list[str] = []

_INT64, _FLOAT = TensorProto.INT64, TensorProto.FLOAT

_LARGEST = 2**22
"""Maximum number of elements stored in the file; larger tables are computed by the graph."""


@down("DFT", 20)
def dft_20(b: Builder, node: Node) -> Value | None:
    """The axis was an attribute, and what is one-sided was never inverted."""
    axis = -2 if node.given(2) is None else node.constant(2)
    if axis is None:
        node.refuse("its axis is not constant")
    axis = int(np.asarray(axis).item()) % node.rank()
    if node.attribute("inverse") and node.attribute("onesided"):
        return _transformed(b, node, axis)
    node.give(node.input(0), node.given(1))
    node.set(axis=axis)
    return None


@down("DFT", 17)
def dft_17(b: Builder, node: Node) -> Value:
    return _transformed(b, node, node.attribute("axis") % node.rank())


def _scalar(b: Builder, node: Node, index: int) -> Dim | None:
    """A size that an input tells; None where it is absent."""
    value = node.given(index)
    if value is None:
        return None
    if (ints := node.ints(index)) is not None:
        return ints[0]
    flat = b.op("Reshape", node.typed(index), b.ints(1), shape=(1,))
    return b.cast(flat, _INT64)


def _transformed(b: Builder, node: Node, axis: int) -> Value:
    """A DFT, along an axis that is put before the last."""
    rank = node.rank()
    given = node.typed()
    x = at_least_float(b, given)
    perm = [i for i in range(rank - 1) if i != axis] + [axis, rank - 1]
    x = b.transpose(x, perm)
    inverse, onesided = bool(node.attribute("inverse")), bool(node.attribute("onesided"))
    size = b.dim(x, -2)
    length = _scalar(b, node, 1)
    if length is None:
        length = size
        if inverse and onesided:
            length = 2 * (size - 1) if isinstance(size, int) else b.op("Mul", b.op("Sub", size, b.ints(1)), b.ints(2))
    y = _dft(b, node, x, length, inverse, onesided)
    return b.cast(b.transpose(y, [perm.index(i) for i in range(rank)]), given.dtype)


def _dft(b: Builder, node: Node, x: Value, length: Dim, inverse: bool, onesided: bool) -> Value:
    """``(..., n, 1 | 2)`` -> ``(..., k, 2)``, or ``(..., k, 1)`` for the inverse of what is one-sided."""
    parts = b.dim(x, -1)
    if not isinstance(parts, int) or parts not in (1, 2):
        node.refuse("whether its numbers are real or complex is not known: the last size is neither 1 nor 2")
    real = inverse and onesided
    if isinstance(length, int):
        half: Dim = length // 2 + 1
    else:
        half = b.op("Add", b.shape(b.quotient(length, 2)), b.ints(1))
    limit = half if real else length
    size = b.dim(x, -2)
    if not (isinstance(size, int) and isinstance(limit, int) and size <= limit):  # what is beyond does not count
        x = _first(b, x, limit)
    rows = b.dim(x, -2)
    columns = half if onesided and not inverse else length
    matrix = _matrix(b, rows, columns, length, parts, inverse, real, x)
    *dims, _, _ = b.dims(x)
    y = b.op("MatMul", b.reshape(x, *dims, b.product(rows, parts)), matrix)
    y = replace(y, shape=static(*dims, b.product(columns, 1 if real else 2)))
    return b.reshape(y, *dims, columns, 1 if real else 2)


def _first(b: Builder, x: Value, count: Dim) -> Value:
    """At most so many along the axis before the last."""
    if isinstance(count, int):
        return b.slice(x, x.rank - 2, 0, count)
    shape = (*(x.shape or ())[:-2], None, (x.shape or ())[-1])
    return b.op("Slice", x, b.ints(0), count, b.ints(x.rank - 2), shape=shape)


def _matrix(
    b: Builder, rows: Dim, columns: Dim, length: Dim, parts: int, inverse: bool, real: bool, like: Value
) -> Value:
    """``(rows * parts, columns * 2)``, or as many columns where the result is ``real``."""
    match rows, columns, length:
        case int(), int(), int() if rows * columns * parts * 2 <= _LARGEST:
            return b.constant(_static_matrix(rows, columns, length, parts, inverse, real), like.dtype)
    n, k, size = b.unsqueeze(b.arange(rows), 1), b.arange(columns), b.shape(length)
    turns = b.op("Mod", b.op("Mul", n, k), size)
    count = b.cast(size, like.dtype)
    angle = b.op("Div", b.cast(turns, like.dtype), count)
    angle = b.op("Mul", angle, b.like(2 * math.pi, like))
    cos, sin = (b.op(wave, angle) for wave in ("Cos", "Sin"))
    if real:  # all but the first and the middle one stand for two
        edge = b.op("Equal", b.op("Mul", n, b.ints(2)), size)
        edge = b.op("Or", edge, b.op("Equal", n, b.ints(0)))
        count = b.op("Mul", count, b.op("Where", edge, b.like(1, like), b.like(0.5, like)))
    if inverse:
        cos, sin = (b.op("Div", x, count) for x in (cos, sin))
    minus = b.op("Neg", sin)
    if real:
        blocks = [[cos], [minus]][:parts]
    else:
        blocks = ([[cos, sin], [minus, cos]] if inverse else [[cos, minus], [sin, cos]])[:parts]
    lines = [replace(b.concat([b.unsqueeze(x, 2) for x in block], 2), shape=(None,) * 3) for block in blocks]
    stacked = replace(b.concat([b.unsqueeze(line, 1) for line in lines], 1), dtype=like.dtype, shape=(None,) * 4)
    return b.reshape(stacked, b.product(rows, parts), b.product(columns, 1 if real else 2))


def _static_matrix(rows: int, columns: int, length: int, parts: int, inverse: bool, real: bool) -> np.ndarray:
    """:func:`_matrix` of static sizes."""
    n = np.arange(rows)
    length = max(length, 1)
    angle = np.outer(n, np.arange(columns)) % length * (2 * math.pi / length)
    cos, sin = np.cos(angle), np.sin(angle)
    if real:
        twice = np.where((n == 0) | (2 * n == length), 1.0, 2.0)[:, None]
        blocks = [[cos * twice], [-sin * twice]][:parts]
    else:
        blocks = ([[cos, sin], [-sin, cos]] if inverse else [[cos, -sin], [sin, cos]])[:parts]
    stacked = np.stack([np.stack(block, -1) for block in blocks], 1).reshape(rows * parts, -1)
    return stacked / length if inverse else stacked


@down("STFT", 17)
def stft(b: Builder, node: Node) -> Value:
    """Frames of the signal, gathered; the transform of each, weighted by the window."""
    node.rank()
    given = node.typed()
    x = at_least_float(b, given)
    step, window = _scalar(b, node, 1), node.given(2)
    assert step is not None
    length = _scalar(b, node, 3)
    if length is None:
        length = b.dim(x, 1)
        if window is not None:
            node.rank(2)
            length = b.dim(window, 0)
    size = b.dim(x, 1)
    if isinstance(size, int) and isinstance(length, int) and isinstance(step, int):
        count: Dim = (size - length) // step + 1
    else:
        free = b.op("Sub", b.shape(size), b.shape(length))
        count = b.op("Add", b.op("Div", free, b.shape(step)), b.ints(1))
    starts = b.op("Mul", b.arange(count), b.shape(step))
    index = b.op("Add", b.unsqueeze(starts, 1), b.arange(length))
    frames = b.op("Gather", x, index, axis=1, shape=static(b.dim(x, 0), count, length, b.dim(x, 2)))
    if window is not None:
        weights = b.cast(node.typed(2), x.dtype)
        frames = b.op("Mul", frames, b.unsqueeze(weights, 1))
    return b.cast(_dft(b, node, frames, length, False, bool(node.attribute("onesided"))), given.dtype)


# ------------------------------------------------------------------ windows

_COSINES = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}
"""``a0 - a1 cos(t) + a2 cos(2 t)``."""


@down("HannWindow HammingWindow BlackmanWindow", 17)
def window_17(b: Builder, node: Node) -> Value:
    a0, a1, a2 = _COSINES[node.proto.op_type]
    dtype = node.attribute("output_datatype")
    size, lost = _scalar(b, node, 0), 0 if node.attribute("periodic") else 1
    assert size is not None
    if isinstance(size, int) and size <= _LARGEST:
        with np.errstate(invalid="ignore"):
            angle = np.arange(size) * 2 * math.pi / np.float64(size - lost)
        return b.constant(a0 - a1 * np.cos(angle) + a2 * np.cos(2 * angle), dtype)
    span = b.cast(b.op("Sub", b.shape(size), b.ints(lost)), _FLOAT)
    turn = b.op("Div", b.constant(np.float32(2 * math.pi)), span)
    angle = b.op("Mul", b.cast(b.arange(size), _FLOAT), turn)
    y = b.op("Sub", b.like(a0, angle), b.op("Mul", b.op("Cos", angle), b.like(a1, angle)))
    if a2:
        twice = b.op("Cos", b.op("Mul", angle, b.like(2, angle)))
        y = b.op("Add", y, b.op("Mul", twice, b.like(a2, angle)))
    return b.cast(y, dtype)


@down("MelWeightMatrix", 17)
def mel_weight_matrix(b: Builder, node: Node) -> Value:
    """A constant, as its inputs are."""
    inputs = [node.constant(i) for i in range(5)]
    if any(array is None for array in inputs):
        node.refuse("its inputs are not constant")
    names = [f"x{i}" for i in range(5)]
    alone = helper.make_node("MelWeightMatrix", names, ["y"], **node.attributes())
    graph = helper.make_graph([alone], "alone", [helper.make_empty_tensor_value_info(n) for n in names], [])
    graph.output.append(helper.make_empty_tensor_value_info("y"))
    (matrix,) = ReferenceEvaluator(graph, opsets={"": 17}).run(None, dict(zip(names, inputs)))
    return b.constant(matrix, node.attribute("output_datatype"))
