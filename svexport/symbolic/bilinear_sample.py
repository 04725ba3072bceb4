"""``SvBilinearSample``."""

from __future__ import annotations

from onnx import TensorProto

from svexport.ops.bilinear_sample import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._sampling import LINEAR, Sampler
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(b: Builder, image: Value, grid: Value) -> tuple[Value, Value]:
    n, *out = (b.dim(grid, axis) for axis in range(3))
    s = Sampler(b, image, out, LINEAR)
    x = s.coordinates(grid)
    # 0 <= x < last pixel, as "not less than 0 and less than the last": the second comparison is false for NaN.
    not_negative = b.op("Not", s.op("Less", x, s.number(0)))
    within = b.op("And", not_negative, s.op("Less", x, s.size(1, -1)))
    mask = s.combine("Mul", b.cast(within, s.dtype))  # (N, 1, 1, gH, gW)
    output = s.inside(s.where(within, x, s.number(0)))
    inside = b.cast(b.reshape(mask, n, 1, *out), TensorProto.BOOL)
    output = s.where(inside, output, b.constant(0, s.image_dtype))
    return output, b.cast(b.reshape(mask, n, *out, 1), s.image_dtype)


Symbolic(OP, body)
