"""``SvDequantize``: the body is DequantizeLinear if that supports the case, a product otherwise."""

from __future__ import annotations

from onnx import TensorProto

from svexport.ops.dequantize import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic
from svexport.symbolic.quantize import linear, native, step_like

__all__: list[str] = []


def body(b: Builder, q: Value, scale: float, scales: Value | None, axis: int, dtype: int) -> Value:
    precise = TensorProto.DOUBLE if dtype == TensorProto.DOUBLE else TensorProto.FLOAT
    if native(b, scales, precise):
        y = linear(b, "DequantizeLinear", q, scale, scales, axis, precise)
    else:
        y = b.op("Mul", b.cast(q, precise), step_like(b, q, scale, scales, axis, precise))
    return b.cast(y, dtype)


Symbolic(OP, body)
