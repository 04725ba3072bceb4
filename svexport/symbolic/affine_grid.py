"""``SvAffineGrid``: the body adds the columns of theta, each times the coordinates of its axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.ops.affine_grid import OP
from svexport.symbolic._builder import Builder, Dim, Value, static
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__: list[str] = []


def body(b: Builder, theta: Value, size: Sequence[Dim], align_corners: bool) -> Value:
    dims = len(size) - 2
    precise = b.cast(theta, TensorProto.DOUBLE if theta.dtype == TensorProto.DOUBLE else TensorProto.FLOAT)
    batch = None if theta.shape is None else theta.shape[0]

    def column(index: int) -> Value:  # (N, 1, ..., 1, dims)
        return b.unsqueeze(b.squeeze(b.slice(precise, 2, index, index + 1), 2), *range(1, dims + 1))

    grid = column(dims)
    for index, steps in enumerate(reversed(size[2:])):  # x, the last dimension, comes first
        points = b.reshape(_coordinates(b, steps, align_corners, precise), -1, *[1] * (index + 1))
        grid = b.op("Add", grid, b.op("Mul", column(index), points))
    shape = (batch, *static(*size[2:]), dims)
    return b.cast(Value(grid.name, precise.dtype, shape), theta.dtype)


def _coordinates(b: Builder, steps: Dim, align_corners: bool, like: Value) -> Value:
    """``(2 i - (steps - 1)) / steps``, or divided by ``steps - 1`` with align_corners; 0 for a single step."""
    if isinstance(steps, int):
        last = steps - 1
        return b.constant((2.0 * np.arange(steps) - last) / (max(last, 1) if align_corners else steps), like.dtype)
    size = b.cast(steps, like.dtype)
    final = b.op("Sub", size, b.like(1, like))
    offsets = b.op("Sub", b.op("Mul", b.cast(b.arange(steps), like.dtype), b.like(2, like)), final)
    return b.op("Div", offsets, b.op("Max", final, b.like(1, like)) if align_corners else size)


def convert(theta: TensorInfo, size: Sequence[int | TensorInfo], align_corners: bool) -> tuple[Any, ...]:
    """``aten::affine_grid_generator``."""
    return theta, size, align_corners


Symbolic(OP, body, aten={"affine_grid_generator": convert}, until=20)
