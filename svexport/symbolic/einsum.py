"""``SvEinsum``: the body runs the plan with ONNX nodes, never with an Einsum node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.errors import ExportError
from svexport.ops._einsum.labels import parse, split
from svexport.ops._einsum.plan import Diagonal, EinsumPlan, MatMul, Mul, ReduceSum, Reshape, Step, Transpose, plan
from svexport.ops.einsum import OP
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Dim, Value, static
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__: list[str] = []


def body(b: Builder, operands: Sequence[Value], labels: Sequence[int], ranks: Sequence[int]) -> Value:
    values = [replace(x, shape=x.shape or (None,) * rank) for x, rank in zip(operands, ranks, strict=False)]
    chosen = plan(tuple(labels), tuple(ranks), tuple(x.shape or () for x in values))

    def size(label: int) -> Dim:
        operand, dim = chosen.sources[label]
        known = chosen.sizes[label]
        return b.dim(values[operand], dim) if known is None else known

    output = split(labels, ranks)[-1]
    shape = tuple(chosen.sizes[label] for label in output)
    if 0 in chosen.sizes:  # a sum over nothing; ONNX Runtime broadcasts no empty batch of matrices
        return b.expand(b.like(0, values[0]), *map(size, output))
    for step in chosen.steps:
        values.append(_node(b, step, values, chosen, size))
    result = replace(values[-1], shape=shape)
    summed = [label for label, known in enumerate(chosen.sizes) if known is None and label not in output]
    if summed and any(isinstance(step, MatMul) for step in chosen.steps):
        # ONNX Runtime writes only the first matrix of a product that sums over nothing.
        terms = b.squeeze(b.shape(b.product(*map(size, summed))), 0)
        nothing = b.op("Equal", terms, b.constant(np.array(0, np.int64)))
        result = b.op("Where", nothing, b.like(0, values[0]), result)
    return result


def _node(b: Builder, step: Step, values: Sequence[Value], chosen: EinsumPlan, size: Callable[[int], Dim]) -> Value:
    match step:
        case Diagonal(x, dim):
            return _diagonal(b, values[x], dim)
        case ReduceSum(x, axes):
            integers = values[x].dtype is not None and values[x].dtype not in FLOAT_TYPES
            return b.reduce_sum(b.cast(values[x], TensorProto.INT64) if integers else values[x], axes)
        case Transpose(x, perm):
            return b.transpose(values[x], perm)
        case Reshape(x, groups):
            dynamic = [group for group in groups if any(chosen.sizes[label] is None for label in group)]
            if len(dynamic) == 1:  # Reshape infers it as -1, so no size is read at run time
                dims = [-1 if group in dynamic else b.product(*map(size, group)) for group in groups]
                return b.op("Reshape", values[x], b.shape(*dims))
            return b.reshape(values[x], *(b.product(*map(size, group)) for group in groups))
        case MatMul(x, y, summed):
            return b.reduce_sum(b.op("MatMul", values[x], values[y]), summed)
        case Mul(x, y):
            return b.op("And" if values[x].dtype == TensorProto.BOOL else "Mul", values[x], values[y])


def _diagonal(b: Builder, x: Value, dim: int) -> Value:
    """Flattens both dimensions into one and takes every (size + 1)th element, which are the diagonal."""
    dims = b.dims(x)
    size = next((d for d in dims[dim : dim + 2] if isinstance(d, int)), dims[dim])
    flat = b.reshape(x, *dims[:dim], b.product(size, size), *dims[dim + 2 :])
    if isinstance(size, int):
        index = b.constant(np.arange(size, dtype=np.int64) * (size + 1))
    else:
        index = b.op("Mul", b.arange(size), b.op("Add", size, b.ints(1)))
    return b.op("Gather", flat, index, axis=dim, shape=static(*dims[:dim], size, *dims[dim + 2 :]))


def convert(equation: str, operands: Sequence[TensorInfo], *_: Any) -> tuple[Any, ...]:
    """``aten::einsum``; the given contraction path is ignored."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    ranks = []
    for operand, term in zip(operands, terms, strict=True):
        if operand.shape is None and "..." in term:  # from scripted code: only the equation tells the rank
            raise ExportError(
                f"einsum({equation!r}): the rank of an operand is not known where it is traced; write its dimensions "
                "out instead of the ellipsis"
            )
        ranks.append(len(term) if operand.shape is None else len(operand.shape))
    return operands, *parse(equation, tuple(ranks))


Symbolic(OP, body, aten={"einsum": convert})
