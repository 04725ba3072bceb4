"""``SvFastSigmoid``: the body is its formula, in float32 for half tensors too."""

from __future__ import annotations

from onnx import TensorProto

from svexport.ops.fast_sigmoid import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(b: Builder, x: Value) -> Value:
    y = b.cast(x, TensorProto.DOUBLE if x.dtype == TensorProto.DOUBLE else TensorProto.FLOAT)
    tail = b.op("Div", b.like(0.4875, y), b.op("Add", b.op("Mul", y, y), b.like(0.975, y)))
    left = b.op("Less", y, b.like(0, y))
    return b.cast(b.op("Where", left, tail, b.op("Sub", b.like(1, y), tail)), x.dtype)


Symbolic(OP, body)
