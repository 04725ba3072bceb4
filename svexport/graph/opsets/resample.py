"""Resize as a composition: gathers pixels along one axis after the other, weights and adds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets._numbers import Number, Numbers
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Dim, Value

__all__ = ["Axis", "Kernel", "places", "resample"]


@dataclass(frozen=True)
class Kernel:
    """The attributes of a Resize, in the words of opset 19; ``nearest`` may also be "simple", the rule of opset 10."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0


@dataclass(frozen=True)
class Axis:
    """One axis that is resized.

    Attributes:
        dim: which.
        old, new: its size before and after.
        scale: the factor that the coordinates follow, ``(1,)``, where it is no whole ``new / old``.
        roi: start and end of the region that is taken, for "tf_crop_and_resize".
    """

    dim: int
    old: Dim
    new: Dim
    scale: Number
    roi: tuple[Number, Number] | None = None


def resample(b: Builder, x: Value, axes: Sequence[Axis], kernel: Kernel) -> Value:
    """Every axis resized, one after the other."""
    dtype = x.dtype
    if kernel.mode != "nearest" and dtype != TensorProto.DOUBLE:
        x = b.cast(x, TensorProto.FLOAT)
    y = x
    outside = []
    for axis in axes:
        y, beyond = _along(b, y, axis, kernel)
        outside += [] if beyond is None else [beyond]
    for mask in outside:
        y = b.op("Where", mask, b.like(kernel.extrapolation, y), y)
    if dtype not in FLOAT_TYPES and kernel.antialias and kernel.mode != "nearest":
        y = b.op("Floor", b.op("Add", y, b.like(0.5, y)))
    return b.cast(y, dtype)


def places(b: Builder, axis: Axis, kernel: Kernel) -> Number:
    """Which pixel each new one takes along an axis; nearest."""
    do = Numbers(b)
    return _inside(do, _nearest(do, _coordinates(do, axis, kernel), axis, kernel), axis)


def _along(b: Builder, x: Value, axis: Axis, kernel: Kernel) -> tuple[Value, Value | None]:
    """``x`` resized along one axis, and where its coordinates left the image: to broadcast, if that matters."""
    do = Numbers(b)
    at = _coordinates(do, axis, kernel)
    beyond = None
    if kernel.coordinates == "tf_crop_and_resize":
        mask = do("Or", do("Less", at, 0.0), do("Greater", at, do("Sub", do.size(axis.old), 1.0)))
        if isinstance(mask, Value) or mask.any():
            beyond = _trailing(b, mask, 1, x.rank - axis.dim - 1)
    sizes = list(x.shape or ())
    sizes[axis.dim] = axis.new if isinstance(axis.new, int) else None
    if kernel.mode == "nearest":
        index = _index(b, _inside(do, _nearest(do, at, axis, kernel), axis))
        return b.op("Gather", x, index, axis=axis.dim, shape=sizes), beyond
    first = do("Floor", at)
    offsets = _offsets(do, axis, kernel)
    positions = do("Add", do.column(first), offsets)
    weights = _weights(do, do("Sub", offsets, do.column(do("Sub", at, first))), axis, kernel)
    if kernel.exclude_outside:
        out = do("Or", do("Less", positions, 0.0), do("Greater", positions, do("Sub", do.size(axis.old), 1.0)))
        weights = do("Where", out, 0.0, weights)
    if kernel.exclude_outside or kernel.antialias:
        weights = do("Div", weights, do.sums(weights))
    taps = None if isinstance(offsets, Value) else offsets.size
    gathered = b.op("Gather", x, _index(b, _inside(do, positions, axis)), axis=axis.dim)
    gathered = replace(gathered, shape=(*sizes[: axis.dim + 1], taps, *sizes[axis.dim + 1 :]))
    factors = _trailing(b, weights, 2, x.rank - axis.dim - 1)
    weighted = b.op("Mul", gathered, b.cast(factors, x.dtype))
    return b.reduce_sum(weighted, [axis.dim + 1]), beyond


def _coordinates(do: Numbers, axis: Axis, kernel: Kernel) -> Number:
    i, old, new = do.count(axis.new), do.size(axis.old), do.size(axis.new)
    how = kernel.coordinates
    if how == "asymmetric":
        return do("Div", i, axis.scale)
    if how == "tf_half_pixel_for_nn":
        return do("Div", do("Add", i, 0.5), axis.scale)
    if how in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric"):
        x = do("Div", do("Add", i, 0.5), axis.scale)
        if how == "half_pixel_symmetric":
            adjustment = do("Div", new, do("Mul", axis.scale, old))
            x = do("Add", x, do("Mul", do("Div", old, 2.0), do("Sub", 1.0, adjustment)))
        x = do("Sub", x, 0.5)
        return do("Where", do("Greater", new, 1.0), x, 0.0) if how == "pytorch_half_pixel" else x
    last, steps = do("Sub", old, 1.0), do("Sub", new, 1.0)
    if how == "align_corners":  # of a single pixel i is 0
        return do("Div", do("Mul", i, last), do("Max", steps, 1.0))
    assert axis.roi is not None
    start, end = axis.roi
    span = do("Mul", do("Sub", end, start), last)
    many = do("Add", do("Mul", start, last), do("Div", do("Mul", i, span), do("Max", steps, 1.0)))
    one = do("Mul", do("Mul", do("Add", start, end), 0.5), last)
    return do("Where", do("Greater", new, 1.0), many, one)


def _nearest(do: Numbers, x: Number, axis: Axis, kernel: Kernel) -> Number:
    match kernel.nearest:
        case "floor":
            return do("Floor", x)
        case "ceil":
            return do("Ceil", x)
        case "round_prefer_ceil":
            return do("Floor", do("Add", x, 0.5))
        case "simple":  # before opset 11: what ONNX Runtime does, and the tests of that time want
            return do("Where", do("Less", axis.scale, 1.0), do("Ceil", x), do("Floor", x))
    return do("Ceil", do("Sub", x, 0.5))


def _inside(do: Numbers, position: Number, axis: Axis) -> Number:
    return do("Max", do("Min", position, do("Sub", do.size(axis.old), 1.0)), 0.0)


def _stretched(do: Numbers, axis: Axis, kernel: Kernel) -> Number:
    """The factor that narrows the filter's argument: the scale with antialiasing when reducing, otherwise 1."""
    return do("Min", axis.scale, 1.0) if kernel.antialias else np.ones(1, np.float32)


def _offsets(do: Numbers, axis: Axis, kernel: Kernel) -> Number:
    """The taps, counted from the pixel at or before a coordinate: ``(1, taps)``."""
    reach = 1.0 if kernel.mode == "linear" else 2.0
    start = do("Add", do("Floor", do("Div", -reach, _stretched(do, axis, kernel))), 1.0)
    if isinstance(start, Value):
        count = do("Sub", 2.0, do("Mul", start, 2.0))
        assert isinstance(count, Value)
        return do.row(do("Add", do.count(do.b.cast(count, TensorProto.INT64)), start))
    return np.arange(start.item(), 2 - start.item(), dtype=np.float32)[None]


def _weights(do: Numbers, distance: Number, axis: Axis, kernel: Kernel) -> Number:
    """The weight of every tap, from its distance to the coordinate."""
    x = do("Abs", do("Mul", distance, _stretched(do, axis, kernel)))
    if kernel.mode == "linear":
        return do("Max", do("Sub", 1.0, x), 0.0)
    a = kernel.cubic
    near = do("Add", do("Mul", do("Mul", do("Sub", do("Mul", x, a + 2), a + 3), x), x), 1.0)
    far = do("Sub", do("Mul", do("Add", do("Mul", do("Sub", do("Mul", x, a), 5 * a), x), 8 * a), x), 4 * a)
    return do("Where", do("Greater", x, 1.0), do("Where", do("Less", x, 2.0), far, 0.0), near)


def _index(b: Builder, positions: Number) -> Value:
    if isinstance(positions, Value):
        return b.cast(positions, TensorProto.INT64)
    return b.constant(positions.astype(np.int64))


def _trailing(b: Builder, x: Number, rank: int, count: int) -> Value:
    """With so many dimensions of one element added behind."""
    if isinstance(x, Value):
        return b.unsqueeze(replace(x, shape=(None,) * rank), *range(rank, rank + count)) if count else x
    return b.constant(x.reshape(*x.shape, *[1] * count))
