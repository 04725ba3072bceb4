"""``SvInterpolate``: the body is ``rows @ input @ columns``; the two matrices are constant if the sizes are static."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.ops.interpolate import OP
from svexport.symbolic._builder import Builder, Dim, Value, static
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__: list[str] = []


def body(
    b: Builder, input: Value, size: Sequence[Dim], bicubic: bool, align_corners: bool, scales: Sequence[int]
) -> Value:
    factors = [numerator / denominator for numerator, denominator in zip(scales[::2], scales[1::2])]
    old = [b.dim(input, 2), b.dim(input, 3)]
    new = size or [_scaled(b, d, scale) for d, scale in zip(old, factors)]
    batch, channels = input.shape[:2]
    if 0 in (batch, channels):  # ONNX Runtime cannot broadcast a matrix to an empty batch
        return b.expand(b.like(0, input), b.dim(input, 0), b.dim(input, 1), *new)
    scale_h, scale_w = factors or (None, None)
    rows = _matrix(b, old[0], new[0], scale_h, False, bicubic, align_corners, input)
    columns = _matrix(b, old[1], new[1], scale_w, True, bicubic, align_corners, input)
    return b.op("MatMul", rows, b.op("MatMul", input, columns), shape=(batch, channels, *static(*new)))


def _scaled(b: Builder, size: Dim, scale: float) -> Dim:
    """``size * scale``, computed in double and truncated, as in torch."""
    if isinstance(size, int):
        return int(size * scale)
    product = b.op("Mul", b.cast(size, TensorProto.DOUBLE), b.constant(np.float64(scale)))
    return b.cast(product, TensorProto.INT64)


def _matrix(
    b: Builder, old: Dim, new: Dim, scale: float | None, turned: bool, bicubic: bool, align_corners: bool, like: Value
) -> Value:
    """A matrix ``(new, old)``, or its transpose: for each new pixel the filter around its centre, widened by the scale.

    Source: ``_compute_indices_min_size_weights_aa`` of ATen/native/cpu/UpSampleKernel.cpp.
    """
    if isinstance(old, int) and isinstance(new, int):
        matrix = _static_matrix(old, new, scale, bicubic, align_corners)
        return b.constant(matrix.T if turned else matrix, like.dtype)

    def do(op_type: str, *inputs: Value | float) -> Value:
        values = (x if isinstance(x, Value) else b.constant(x, TensorProto.FLOAT) for x in inputs)
        return b.op(op_type, *values, dtype=TensorProto.FLOAT)

    old_size, new_size = (b.cast(b.shape(d), TensorProto.FLOAT) for d in (old, new))
    if align_corners:
        steps = do("Sub", new_size, 1)  # none: the ratio is 0
        wide = do("Mul", do("Sub", old_size, 1), do("Min", steps, 1))
        ratio_value = do("Div", wide, do("Max", steps, 1))
    else:
        ratio_value = do("Div", 1, b.constant([scale], TensorProto.FLOAT)) if scale else do("Div", old_size, new_size)
    rows = b.unsqueeze(b.cast(b.arange(new), TensorProto.FLOAT), 1)
    centre_value = do("Mul", do("Add", rows, 0.5), ratio_value)
    columns = do("Add", b.cast(b.arange(old), TensorProto.FLOAT), 0.5)
    x = do("Div", do("Abs", do("Sub", columns, centre_value)), do("Max", ratio_value, 1))
    if bicubic:
        far = do("Mul", do("Sub", do("Mul", do("Add", do("Mul", do("Sub", x, 5), x), 8), x), 4), -0.5)
        far = do("Where", do("Less", x, 2), far, 0)
        near = do("Add", do("Mul", do("Sub", do("Mul", x, 1.5), 2.5), do("Mul", x, x)), 1)
        weights = do("Where", do("Less", x, 1), near, far)
    else:
        weights = do("Max", do("Sub", 1, x), 0)
    weights = Value(weights.name, TensorProto.FLOAT, (None, None))
    normal = b.op("Div", weights, b.reduce_sum(weights, [1], keepdims=True))
    return b.cast(b.transpose(normal, [1, 0]) if turned else normal, like.dtype)


def _static_matrix(old: int, new: int, scale: float | None, bicubic: bool, align_corners: bool) -> np.ndarray:
    """:func:`_matrix` for static sizes."""
    if align_corners:
        ratio = (old - 1) / (new - 1) if new > 1 else 0.0
    else:
        ratio = 1 / scale if scale else old / new
    centre = ratio * (np.arange(new)[:, None] + 0.5)
    x = np.abs(np.arange(old) + 0.5 - centre) / max(ratio, 1.0)
    if bicubic:
        far = np.where(x < 2, -0.5 * (((x - 5) * x + 8) * x - 4), 0)
        weights = np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, far)
    else:
        weights = np.maximum(1 - x, 0)
    return weights / weights.sum(1, keepdims=True)


def convert(
    bicubic: bool, input: TensorInfo, size: Sequence[int | TensorInfo] | None, align_corners: bool, *scales: Any
) -> tuple[Any, ...] | None:
    """``aten::_upsample_bilinear2d_aa`` and ``_upsample_bicubic2d_aa``, with a scale per axis or a list of scales."""
    if input.shape is None:
        return None
    factors = scales[0] or () if len(scales) == 1 else scales
    numbers = [number for f in factors if f is not None for number in _fraction(f).as_integer_ratio()]
    return input, size or [], bicubic, align_corners, numbers


def _fraction(number: float) -> Fraction:
    """A double as a fraction, as exact as attributes can hold. The TorchScript exporter rounds 0.7 to float32."""
    simple = Fraction(number).limit_denominator(1000)
    if float(np.float32(number)) == number == float(np.float32(float(simple))):
        return simple
    return Fraction(number).limit_denominator(2**31 - 1)


Symbolic(
    OP,
    body,
    aten={"_upsample_bilinear2d_aa": partial(convert, False), "_upsample_bicubic2d_aa": partial(convert, True)},
)
