"""``SvInverse``: the body is unrolled Gauss-Jordan elimination and one Newton step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import TensorProto

from svexport.errors import ExportError, UnsupportedError
from svexport.ops.inverse import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__ = ["eliminate", "product", "size_of", "wide"]

LARGEST = 16
"""The largest size of a matrix; it takes about 200 nodes."""


def body(b: Builder, A: Value, n: int) -> Value:
    if n == 0:
        return A
    x = wide(b, A, n)
    guess = eliminate(b, x)
    # A Newton step, X + X (I - A X), restores the accuracy lost to rows of different scales.
    residual = b.op("Sub", b.constant(np.eye(n), x.dtype), product(b, x, guess))
    return b.cast(b.op("Add", guess, product(b, guess, residual)), A.dtype)


def wide(b: Builder, A: Value, n: int) -> Value:
    """Matrices of a known size, in float32 at least."""
    if n > LARGEST:
        raise UnsupportedError(f"inverse and solve take matrices of at most {LARGEST} rows in a file, got {n}")
    A = replace(A, shape=(*A.shape[:-2], n, n))
    return b.cast(A, TensorProto.DOUBLE if A.dtype == TensorProto.DOUBLE else TensorProto.FLOAT)


def eliminate(b: Builder, A: Value) -> Value:
    """The inverse by Gauss-Jordan elimination of ``[A | I]`` with partial pivoting.

    Rows are not swapped. The pivot of a column is chosen among the rows not used yet, and rows are ordered at the end.
    """
    rank, n = A.rank, A.shape[-1]
    rows, columns = rank - 2, rank - 1
    batch = A.shape[:-2]
    identity = b.expand(b.constant(np.eye(n), A.dtype), *b.dims(A))
    m = replace(b.concat([A, identity], columns), dtype=A.dtype, shape=(*batch, n, 2 * n))
    numbers = b.constant(np.arange(n).reshape(n, 1))
    zero = b.like(0, A)
    pivots: list[Value] = []
    used = None
    for k in range(n):
        column = b.slice(m, columns, k, k + 1)  # (*, n, 1)
        size = b.op("Abs", column)
        if used is not None:
            size = b.op("Where", used, b.like(-1, A), size)
        largest = b.op("ArgMax", size, axis=rows, keepdims=1)
        chosen = b.op("Equal", numbers, largest, shape=column.shape)  # (*, n, 1)
        used = chosen if used is None else b.op("Or", used, chosen)
        row = b.reduce_sum(b.op("Where", chosen, m, zero), [rows], keepdims=True)
        row = b.op("Div", row, b.slice(row, columns, k, k + 1))  # (*, 1, 2n)
        m = b.op("Where", chosen, row, b.op("Sub", m, b.op("Mul", column, row)))
        pivots.append(chosen)
    # Row k of the result is the one chosen for column k: (*, n rows, n columns, 1) selects from (*, n rows, 1, n).
    order = replace(b.concat(pivots, columns), shape=(*batch, n, n))
    ordered = b.op("Where", b.unsqueeze(order, rank), b.unsqueeze(b.slice(m, columns, n, 2 * n), rank - 1), zero)
    return b.reduce_sum(ordered, [rows])


def product(b: Builder, x: Value, y: Value) -> Value:
    """``x @ y`` by elementwise products and a sum, in full precision; TensorRT runs MatMul in TF32."""
    products = b.op("Mul", b.unsqueeze(x, x.rank), b.unsqueeze(y, y.rank - 2))
    return b.reduce_sum(products, [products.rank - 2])


def size_of(A: TensorInfo, name: str) -> int:
    """The static size of square matrices.

    Raises:
        ExportError: if it is dynamic or larger than :data:`LARGEST`.
    """
    n = next((size for size in (A.shape or ())[-2:] if size is not None), None)
    if n is None or n > LARGEST:
        raise ExportError(
            f"{name} expects matrices of a static size of at most {LARGEST}, "
            f"got {'a dynamic one' if n is None else n}; "
            "leave their last two dimensions out of dynamic_shapes"
        )
    return n


def convert(A: TensorInfo) -> tuple[TensorInfo, int]:
    """``aten::linalg_inv`` and ``aten::inverse``."""
    return A, size_of(A, "torch.linalg.inv")


Symbolic(OP, body, aten={"linalg_inv": convert, "inverse": convert})
