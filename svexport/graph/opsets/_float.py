"""The precision that compositions are computed in."""

from __future__ import annotations

from onnx import TensorProto

from svexport.symbolic._builder import Builder, Value

__all__ = ["at_least_float"]


def at_least_float(b: Builder, x: Value) -> Value:
    """In float32 where it is shorter: what one kernel computes in float32 is not rounded between the nodes either."""
    return x if x.dtype == TensorProto.DOUBLE else b.cast(x, TensorProto.FLOAT)
