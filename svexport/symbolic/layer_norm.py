"""``SvLayerNorm``: the body is ONNX LayerNormalization from opset 17 on, its definition before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.ops.layer_norm import OP
from svexport.symbolic._builder import Builder, Dim, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__ = ["define", "normalize"]


def body(
    b: Builder, x: Value, normalized_shape: Sequence[Dim], weight: Value | None, bias: Value | None, eps: float
) -> Value:
    if weight is None and b.opset >= 17:  # LayerNormalization requires a scale
        if all(isinstance(size, int) for size in normalized_shape):
            weight = b.constant(np.ones(normalized_shape), x.dtype)
        else:
            weight = b.expand(b.like(1, x), *normalized_shape)
    return normalize(b, x, len(normalized_shape), weight, bias, eps)


def normalize(b: Builder, x: Value, dims: int, weight: Value | None, bias: Value | None, eps: float) -> Value:
    """Layer norm of ``x`` over its last ``dims`` dimensions, in float32 at least; the result has the dtype of ``x``."""
    double = x.dtype == TensorProto.DOUBLE  # the node would normalize it in float32
    if b.opset >= 17 and not double:
        inputs = [v and b.cast(v, x.dtype) for v in (x, weight, bias)]
        return b.op("LayerNormalization", *inputs, axis=-dims, epsilon=eps, shape=x.shape)
    return define(b, x, dims, weight, bias, eps)


def define(b: Builder, x: Value, dims: int, weight: Value | None, bias: Value | None, eps: float) -> Value:
    """:func:`normalize` by the definition of LayerNormalization, at any opset."""
    double = x.dtype == TensorProto.DOUBLE
    precise = TensorProto.DOUBLE if double else TensorProto.FLOAT
    y = b.cast(x, precise)
    axes = range(-dims, 0)
    centred = b.op("Sub", y, b.reduce("ReduceMean", y, axes, keepdims=True))
    # ONNX Runtime and TensorRT fuse the pattern with Pow. For float64 avoid it: ONNX Runtime's fusion drops eps there.
    power = b.op("Mul", centred, centred) if double else b.op("Pow", centred, b.like(2, y))
    variance = b.reduce("ReduceMean", power, axes, keepdims=True)
    y = b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, b.like(eps, y))))
    if weight is not None:
        y = b.op("Mul", y, b.cast(weight, precise))
    if bias is not None:
        y = b.op("Add", y, b.cast(bias, precise))
    return b.cast(y, x.dtype)


def convert(
    input: TensorInfo,
    normalized_shape: Sequence[int | TensorInfo],
    weight: TensorInfo | None,
    bias: TensorInfo | None,
    eps: float,
    *_: Any,
) -> tuple[Any, ...] | None:
    """``aten::layer_norm``; its last argument only selects a kernel. ``(x.shape[-1],)`` arrives as computed sizes."""
    if input.shape is None:
        return None
    sizes = input.shape[-len(normalized_shape) :]
    return input, [s if known is None else known for s, known in zip(normalized_shape, sizes)], weight, bias, eps


Symbolic(OP, body, aten={"layer_norm": convert}, until=16)
