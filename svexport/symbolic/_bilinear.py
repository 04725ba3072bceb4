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
    lower = b.op("Floor", x)
    fraction = b.op("Sub", x, lower)

    def corner(pixel: Value, weight: Value) -> tuple[Value, Value]:
        low = b.op("Greater", pixel, b.like(-1, x))
        inside = b.op("And", low, b.op("Less", pixel, size))
        index = b.op("Where", inside, pixel, zero)
        return b.cast(index, INDEX), b.op("Where", inside, weight, zero)

    upper = b.op("Add", lower, one)
    return [corner(lower, b.op("Sub", one, fraction)), corner(upper, fraction)]
