"""``SvQuantize``: the body is QuantizeLinear if that supports the case, its definition otherwise."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from svexport.ops.quantize import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic

__all__ = ["linear", "native", "step_like"]


def step_like(b: Builder, x: Value, scale: float, scales: Value | None, axis: int, dtype: int) -> Value:
    """The scale as a tensor that broadcasts against ``x``."""
    if scales is None:
        return b.constant(scale, dtype)
    scales = b.cast(scales, dtype)
    return b.unsqueeze(scales, *range(1, x.rank - axis)) if scales.rank and axis + 1 < x.rank else scales


def native(b: Builder, scales: Value | None, dtype: int) -> bool:
    """Whether QuantizeLinear and DequantizeLinear support the case: float32; several scales only from opset 13 on."""
    known = scales is None or not scales.rank or (b.opset >= 13 and scales.shape != (None,))  # as many zero points
    return b.opset >= 10 and known and dtype == TensorProto.FLOAT


def linear(b: Builder, op_type: str, x: Value, scale: float, scales: Value | None, axis: int, dtype: int) -> Value:
    """QuantizeLinear or DequantizeLinear with zero point 0 and a result of the given dtype."""
    step = b.constant(scale, TensorProto.FLOAT) if scales is None else b.cast(scales, TensorProto.FLOAT)
    inputs = [x, step]
    # From opset 21 on ONNX Runtime 1.31 cannot load DequantizeLinear with a zero point before MaxPool, Reshape and
    # others, and gives an omitted one the type of the input; before 21 it takes an omitted one for uint8.
    if op_type == "QuantizeLinear" or b.opset < 21:
        inputs.append(b.constant(np.zeros(step.shape or (), np.int8)))
    return b.op(op_type, *inputs, axis=axis if step.rank else None, dtype=dtype, shape=x.shape)


def body(b: Builder, x: Value, scale: float, scales: Value | None, axis: int, restricted: int) -> Value:
    precise = TensorProto.DOUBLE if x.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
    y, step = b.cast(x, precise), step_like(b, x, scale, scales, axis, precise)
    if native(b, scales, precise):
        if restricted:  # QuantizeLinear saturates at -128
            lowest = b.like(-127 * scale, y) if scales is None else b.op("Mul", step, b.like(-127, y))
            y = b.op("Max", y, lowest)
        return linear(b, "QuantizeLinear", y, scale, scales, axis, TensorProto.INT8)
    y = b.clip(b.op("Div", y, step), -127.0 if restricted else -128.0, 127.0)
    if b.opset >= 11:
        y = b.op("Round", y)
    else:  # near 1.5 * 2**p the last of p bits is worth 1, so the addition rounds, half to even
        large = b.like(1.5 * 2.0 ** (52 if precise == TensorProto.DOUBLE else 23), y)
        y = b.op("Sub", b.op("Add", y, large), large)
    return b.cast(y, TensorProto.INT8)


Symbolic(OP, body)
