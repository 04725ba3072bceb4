"""``SvAddBiasResidualLayerNorm``: additions and a layer norm, in float32 for half tensors too."""

from __future__ import annotations

from onnx import TensorProto

from svexport.ops.add_bias_residual_layer_norm import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic
from svexport.symbolic.layer_norm import normalize

__all__: list[str] = []


def body(
    b: Builder, x: Value, bias: Value, residual: Value, weight: Value, norm_bias: Value, eps: float, extra: Value | None
) -> tuple[Value, Value]:
    precise = TensorProto.DOUBLE if x.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
    s = b.cast(x, precise)
    for term in (bias, residual, extra):
        if term is not None:
            s = b.op("Add", s, b.cast(term, precise))
    y = normalize(b, s, 1, weight, norm_bias, eps)
    return b.cast(y, x.dtype), b.cast(s, x.dtype)


Symbolic(OP, body)
