"""``SvInverseEx``: the body of ``SvInverse``, and whether all of its elements are finite."""

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
    result = inverse(b, wide(b, A, n), n)  # half types overflow before it does
    return b.cast(result, A.dtype), failed(b, result)


def failed(b: Builder, inverse: Value) -> Value:
    """1 for every matrix with an element that is infinite or NaN, else 0; int32."""
    finite = b.op("Less", b.op("Abs", inverse), b.like(np.inf, inverse), dtype=TensorProto.BOOL, shape=inverse.shape)
    worst = b.reduce("ReduceMin", b.cast(finite, TensorProto.FLOAT), [inverse.rank - 2, inverse.rank - 1])
    return b.cast(b.op("Sub", b.like(1, worst), worst, dtype=worst.dtype, shape=worst.shape), TensorProto.INT32)


def convert(A: TensorInfo, *_: bool) -> tuple[TensorInfo, int]:
    """``aten::linalg_inv_ex``, whose last argument has torch raise errors."""
    return A, size_of(A, "torch.linalg.inv_ex")


Symbolic(OP, body, aten={"linalg_inv_ex": convert})
