"""``SvEinsum``: the body runs the plan with ONNX nodes; there never is an Einsum among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.ops.einsum import OP, Diagonal, MatMul, Mul, ReduceSum, Reshape, Step, Transpose, parse, plan, split
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Dim, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__: list[str] = []


def body(b: Builder, operands: Sequence[Value], labels: Sequence[int], ranks: Sequence[int]) -> Value:
    values = [replace(x, shape=x.shape or (None,) * rank) for x, rank in zip(operands, ranks, strict=False)]
    chosen = plan(tuple(labels), tuple(ranks), tuple(x.shape or () for x in values))
    sizes: list[Dim] = [
        b.dim(values[operand], dim) if size is None else size
        for size, (operand, dim) in zip(chosen.sizes, chosen.sources, strict=True)
    ]
    output = split(labels, ranks)[-1]
    shape = tuple(chosen.sizes[label] for label in output)
    if 0 in chosen.sizes:  # a sum over nothing; ONNX Runtime broadcasts no empty batch of matrices
        return b.op("Expand", b.like(0, values[0]), b.shape(*(sizes[label] for label in output)), shape=shape)
    for step in chosen.steps:
        values.append(_node(b, step, values, sizes))
    return replace(values[-1], shape=shape)


def _node(b: Builder, step: Step, values: Sequence[Value], sizes: Sequence[Dim]) -> Value:
    match step:
        case Diagonal(x, dim):
            return _diagonal(b, values[x], dim)
        case ReduceSum(x, axes):
            known_float = values[x].dtype is None or values[x].dtype in FLOAT_TYPES
            return b.reduce_sum(values[x] if known_float else b.cast(values[x], TensorProto.INT64), axes)
        case Transpose(x, perm):
            return b.transpose(values[x], perm)
        case Reshape(x, groups):
            return b.reshape(values[x], *(b.product(*(sizes[label] for label in group)) for group in groups))
        case MatMul(x, y, summed):
            return b.reduce_sum(b.op("MatMul", values[x], values[y]), summed)
        case Mul(x, y):
            return b.op("And" if values[x].dtype == TensorProto.BOOL else "Mul", values[x], values[y])


def _diagonal(b: Builder, x: Value, dim: int) -> Value:
    """Both dimensions flattened into one, of which every (size + 1)th element is on the diagonal."""
    dims = [b.dim(x, i) for i in range(x.rank)]
    size = next((d for d in dims[dim : dim + 2] if isinstance(d, int)), dims[dim])
    flat = b.reshape(x, *dims[:dim], b.product(size, size), *dims[dim + 2 :])
    if isinstance(size, int):
        index = b.constant(np.arange(size, dtype=np.int64) * (size + 1))
    else:
        index = b.op("Mul", b.arange(size), b.op("Add", size, b.ints(1)))
    shape = tuple(d if isinstance(d, int) else None for d in (*dims[:dim], size, *dims[dim + 2 :]))
    return b.op("Gather", flat, index, axis=dim, shape=shape)


def convert(equation: str, operands: Sequence[TensorInfo], *_: Any) -> tuple[Any, ...] | None:
    """``aten::einsum``; its contraction path is chosen anew."""
    if any(x.shape is None for x in operands):
        return None
    labels, ranks = parse(equation, tuple(len(x.shape or ()) for x in operands))
    return (operands, labels, ranks) if labels else None  # scalars alone: an attribute cannot be empty


Symbolic(OP, body, aten={"einsum": convert})
