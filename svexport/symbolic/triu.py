"""``SvTriu``: the body compares row and column indices; the mask is a constant if the sizes are static."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.ops.triu import OP
from svexport.symbolic._builder import Builder, Dim, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__ = ["keep"]


_MASK = 2**22
"""The maximum number of elements of a constant mask."""


def body(b: Builder, input: Value, diagonal: Dim, upper: bool) -> Value:
    kept = keep(b, b.dim(input, -2), b.dim(input, -1), diagonal, upper)
    if input.dtype == TensorProto.BOOL:
        return b.op("And", input, kept)
    return b.op("Where", kept, input, b.like(0, input))


def keep(b: Builder, rows: Dim, columns: Dim, diagonal: Dim, upper: bool) -> Value:
    """A mask of the matrix elements that belong to the triangle."""
    if isinstance(rows, int) and isinstance(columns, int) and isinstance(diagonal, int) and rows * columns <= _MASK:
        ones = np.ones((rows, columns), bool)
        return b.constant(np.triu(ones, diagonal) if upper else np.tril(ones, diagonal))
    column = b.arange(columns)
    row = b.unsqueeze(b.op("Add", b.arange(rows), b.shape(diagonal)), 1)
    outside = b.op("Less", *((column, row) if upper else (row, column)))
    return b.op("Not", outside)


def convert(upper: bool, input: TensorInfo, diagonal: int | TensorInfo) -> tuple[Any, ...] | None:
    """``aten::triu`` and ``aten::tril``."""
    return None if input.shape is None else (input, diagonal, upper)


Symbolic(OP, body, aten={"triu": partial(convert, True), "tril": partial(convert, False)}, until=13)
