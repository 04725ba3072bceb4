"""``SvInverseEx``: the body of ``SvInverse``, and a test that all elements of the result are finite."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from svexport.ops.inverse_ex import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo
from svexport.symbolic.inverse import body as inverse
from svexport.symbolic.inverse import size_of, wide

__all__ = ["failed"]


def body(b: Builder, A: Value, n: int) -> tuple[Value, Value]:
    result = inverse(b, wide(b, A, n), n)  # in float32: half types overflow earlier
    return b.cast(result, A.dtype), failed(b, result)


def failed(b: Builder, inverse: Value) -> Value:
    """1 for every matrix with an infinite or NaN element, otherwise 0; int32."""
    finite = b.op("Less", b.op("Abs", inverse), b.like(np.inf, inverse))
    worst = b.reduce("ReduceMin", b.cast(finite, TensorProto.FLOAT), [inverse.rank - 2, inverse.rank - 1])
    return b.cast(b.op("Sub", b.like(1, worst), worst), TensorProto.INT32)


def convert(A: TensorInfo, *_: bool) -> tuple[TensorInfo, int]:
    """``aten::linalg_inv_ex``; its last argument, which makes torch raise errors, is ignored."""
    return A, size_of(A, "torch.linalg.inv_ex")


Symbolic(OP, body, aten={"linalg_inv_ex": convert})
