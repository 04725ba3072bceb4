"""``SvGridSample``: gathers and weights, at every opset.

A GridSample node would be shorter from opset 16 on (5-D: 20), but none is to be relied on:

* ONNX Runtime's (1.31, CPU, opsets 16 to 20) equals torch at ordinary coordinates only. At NaN, infinity and 1e30 it
  reads the first pixels of the image with zeros too, and with border at either end; at 1e10 bilinear is zero whatever
  the padding; bicubic is finite where a coordinate, and so torch, is not.
* TensorRT silently reads the modes that opset 20 renamed as nearest.

So the body gathers elements of the image as it is: in ONNX Runtime faster than rows of an NHWC copy at any number of
channels, measured in ``benchmarks/grid_sample_body.py``, and nothing is transposed but the grid.

It equals torch's CPU kernels at NaN and infinite coordinates too, with two limits. A point reflected from beyond 2**24
pixels, on which those kernels do not agree, gets some pixel of the image. And with border and reflection, a pixel that
is not finite also reaches points on the edge of the image to which it contributes with weight zero.
"""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from svexport.ops.grid_sample import BICUBIC, BILINEAR, BORDER, NEAREST, OP, REFLECTION, ZEROS
from svexport.symbolic import _sampling
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._sampling import Sampler
from svexport.symbolic._symbolic import Symbolic

__all__ = ["sampled"]

_TAPS = {BILINEAR: _sampling.LINEAR, NEAREST: _sampling.NEAREST, BICUBIC: _sampling.CUBIC}


def body(b: Builder, image: Value, grid: Value, mode: int, padding: int, align_corners: int, scale: float) -> Value:
    if image.dtype == TensorProto.INT8:
        precise = TensorProto.DOUBLE if grid.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
        values = _sampling.values(b, image, scale, precise)
        return b.cast(sampled(b, values, grid, mode, padding, align_corners), grid.dtype)
    return sampled(b, image, grid, mode, padding, align_corners)


def sampled(b: Builder, image: Value, grid: Value, mode: int, padding: int, align_corners: int) -> Value:
    """What torch samples of an image in floating point."""
    s = Sampler(b, image, [b.dim(grid, axis) for axis in range(1, grid.rank - 1)], _TAPS[mode])
    lost = 1 if align_corners else 0  # -1..1 spans the centres of the outer pixels, or else their far edges
    shifted = s.op("Add", s.coordinates(grid), s.number(1))
    x = s.op("Mul", shifted, s.size(0.5, -0.5 * lost))  # counted from where the image is reflected
    mirrored = mode == BICUBIC and s.static is not None  # then the image is, under the taps of a point within it
    if padding == REFLECTION and (mode != BICUBIC or mirrored):
        x = s.reflect(x, s.op("Mul", shifted, s.number(0.25)), s.size(2, -2 * lost))
        if mirrored:
            return s.mirrored(x, edges=not align_corners)
    if not align_corners:
        x = s.op("Sub", x, s.number(0.5))
    volume = s.axes == 3  # torch's 5-D kernel takes NaN for a coordinate on the other side
    if padding == ZEROS:
        return s.zeros(s.clip(x, s.number(-2), s.size()) if volume else x, clipped=volume)
    if mode != BICUBIC:
        return s.inside(s.clip(x, s.number(0), s.size(1, -1), nan_is_high=volume))
    # Bicubic continues the image under its taps, where others move the point.
    first, fraction = s.split(x)
    if padding == BORDER and s.static:
        return s.padded("edge", first, fraction)
    edge = 0.5 if padding == REFLECTION and not align_corners else 0
    positions = s.positions(first, edge)
    if padding == REFLECTION:
        period = s.size(2, -2 * lost)
        positions = s.reflect(positions, s.op("Div", positions, s.op("Max", period, s.number(1))), period)
    if edge:
        positions = s.op("Sub", positions, s.number(edge))
    index = s.tap_index(s.clip(positions, s.number(0), s.size(1, -1)))
    return s.finish(image, index, fraction)


def convert(image: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> list[Any]:
    return [image, grid, mode, padding, align_corners, 1.0]


Symbolic(OP, body, aten=dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), convert))
