"""Bilinear interpolation along one axis, zero outside; shared by the bodies that gather whole rows."""

from __future__ import annotations

from onnx import TensorProto

from svexport.symbolic._builder import Builder, Value

__all__ = ["INDEX", "corners"]

INDEX = TensorProto.INT32
"""The data type of indices."""


def corners(b: Builder, x: Value, size: Value) -> list[tuple[Value, Value]]:
    """The two pixels around each coordinate: (index, weight) of the lower and of the upper one.

    Both are 0 for a pixel outside ``0 .. size - 1``, and for a NaN coordinate.

    Args:
        x: pixel coordinates along the axis, 0 being the centre of the first pixel.
        size: number of pixels along the axis, in the data type of ``x``; it broadcasts against ``x``.
    """
    zero, one = b.like(0, x), b.like(1, x)
    lower = b.op("Floor", x, shape=x.shape)
    fraction = b.op("Sub", x, lower, shape=x.shape)

    def corner(pixel: Value, weight: Value) -> tuple[Value, Value]:
        low = b.op("Greater", pixel, b.like(-1, x), dtype=TensorProto.BOOL)
        inside = b.op("And", low, b.op("Less", pixel, size, dtype=TensorProto.BOOL))
        index = b.op("Where", inside, pixel, zero, dtype=x.dtype, shape=x.shape)
        return b.cast(index, INDEX), b.op("Where", inside, weight, zero, dtype=x.dtype, shape=x.shape)

    upper = b.op("Add", lower, one, shape=x.shape)
    return [corner(lower, b.op("Sub", one, fraction, shape=x.shape)), corner(upper, fraction)]
