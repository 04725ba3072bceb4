"""``SvScatterReduce``: ScatterElements if it has the reduction, otherwise a comparison of all indices and positions."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from svexport.errors import ExportError
from svexport.ops.scatter_reduce import OP, REDUCTIONS
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__ = ["LARGEST", "scatter"]

LARGEST = 2**26
"""The maximum number of elements of a comparison of every index with every position."""

_ONNX = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}
_REDUCE = {"sum": "ReduceSum", "mean": "ReduceSum", "prod": "ReduceProd", "amax": "ReduceMax", "amin": "ReduceMin"}
_NATIVE = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64)


def body(b: Builder, input: Value, dim: int, index: Value, src: Value, reduce: int, include_self: bool) -> Value:
    return scatter(b, input, dim, index, src, REDUCTIONS[reduce], include_self)


def scatter(
    b: Builder, input: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool = True
) -> Value:
    """``torch.scatter_reduce``, computed in float32 for half types and in int64 for small integers."""
    if 0 in (*input.shape, *index.shape):
        return input
    if () in (input.shape, index.shape, src.shape):  # torch treats a scalar as one element
        x, index, src = (b.reshape(v, 1) if v.shape == () else v for v in (input, index, src))
        result = scatter(b, x, 0, index, src, reduce, include_self)
        return result if input.shape else b.reshape(result)
    dim %= input.rank
    wide = TensorProto.FLOAT if input.dtype in FLOAT_TYPES else TensorProto.INT64
    x, src = (b.cast(v, v.dtype if v.dtype in _NATIVE else wide) for v in (input, _cropped(b, src, index)))
    native = b.opset >= (18 if reduce in ("amax", "amin") else 16)
    result = (_elements if native else _compared)(b, x, dim, index, src, reduce, include_self)
    return b.cast(Value(result.name, x.dtype, input.shape), input.dtype)


def _cropped(b: Builder, src: Value, index: Value) -> Value:
    """The part of src that index covers, from the start of each dimension."""
    for axis in range(index.rank):
        size = b.dim(index, axis)
        if isinstance(size, Value):
            src = b.op("Gather", src, b.arange(size), axis=axis)
        elif src.shape is None or src.shape[axis] != size:
            src = b.slice(src, axis, 0, size)
    return Value(src.name, src.dtype, index.shape)


def _neutral(b: Builder, x: Value, reduce: str) -> Value:
    if reduce in ("amax", "amin"):
        if x.dtype in FLOAT_TYPES:
            return b.like(-np.inf if reduce == "amax" else np.inf, x)
        ends = np.iinfo(helper.tensor_dtype_to_np_dtype(x.dtype))
        return b.like(ends.min if reduce == "amax" else ends.max, x)
    return b.like(int(reduce == "prod"), x)


def _mean(b: Builder, total: Value, count: Value) -> Value:
    """``total / count``, rounded down for integers. The count is 1 where no index points, which keeps the total."""
    if total.dtype in FLOAT_TYPES:
        return b.op("Div", total, count)
    quotient = b.op("Div", b.cast(total, TensorProto.DOUBLE), b.cast(count, TensorProto.DOUBLE))
    return b.cast(b.op("Floor", quotient), total.dtype)


def _elements(b: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool) -> Value:
    def filled(number: Value, like: Value) -> Value:
        return b.expand(number, *b.dims(like))

    base = x if include_self else b.op("ScatterElements", x, index, filled(_neutral(b, x, reduce), index), axis=dim)
    result = b.op("ScatterElements", base, index, src, axis=dim, reduction=_ONNX[reduce])
    if reduce != "mean":
        return result
    one = b.like(1, x)
    first = filled(one, x)
    if not include_self:  # 0 where an index points, 1 elsewhere
        first = b.op("ScatterElements", first, index, filled(b.like(0, x), index), axis=dim)
    return _mean(b, result, b.op("ScatterElements", first, index, filled(one, index), axis=dim, reduction="add"))


def _compared(b: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool) -> Value:
    sizes = (*index.shape, x.shape[dim])
    since = 18 if reduce in ("amax", "amin") else 16  # ScatterElements has the reduction
    if None not in sizes and (elements := int(np.prod(sizes, dtype=np.int64))) > LARGEST:
        raise ExportError(
            f"scattering {index.shape} indices into {x.shape[dim]} positions at opset {b.opset} would compare them "
            f"all, which takes {elements:,} elements; export with opset={since} or later"
        )
    if any(i is not None and s is not None and i < s for a, (i, s) in enumerate(zip(index.shape, x.shape)) if a != dim):
        raise ExportError(
            f"scattering with indices of shape {index.shape} into a part of {x.shape} cannot be exported at opset "
            f"{b.opset}; slice the tensor first, or export with opset={since} or later"
        )
    rank = x.rank
    last = [*(axis for axis in range(rank) if axis != dim), dim]
    x, index, src = (b.transpose(v, last) for v in (x, index, src))
    places = b.op("Equal", b.unsqueeze(index, rank), b.arange(b.dim(x, rank - 1)))  # (*, J, S)
    neutral = _neutral(b, x, reduce)
    parts = b.op("Where", places, b.unsqueeze(src, rank), neutral, dtype=x.dtype)
    count = b.reduce_sum(b.cast(places, x.dtype), [rank - 1])
    base = x
    if not include_self:
        base = b.op("Where", b.op("Less", b.like(0, x), count), neutral, x)
    # Concat rejects shapes that do not fit; Add and other elementwise nodes would broadcast them.
    together = b.concat([b.unsqueeze(base, rank - 1), parts], rank - 1)
    result = b.reduce(_REDUCE[reduce], Value(together.name, x.dtype, parts.shape), [rank - 1])
    if reduce == "mean":
        one = b.like(1, x)
        more = one if include_self else b.op("Where", b.op("Less", b.like(0, x), count), b.like(0, x), one)
        result = _mean(b, result, b.op("Add", count, more))
    return b.transpose(Value(result.name, x.dtype, x.shape), np.argsort(last).tolist())


def convert(
    input: TensorInfo, dim: int, index: TensorInfo, src: TensorInfo, reduce: str = "sum", include_self: bool = True
) -> tuple[Any, ...] | None:
    """``aten::scatter_reduce``, ``aten::scatter_add``, and ``aten::scatter``, which has older names of reductions."""
    reduce = {"add": "sum", "multiply": "prod"}.get(reduce, reduce)
    if input.shape is None or index.shape is None or not isinstance(src, TensorInfo):
        return None
    return input, dim, index, src, REDUCTIONS.index(reduce), include_self


Symbolic(OP, body, aten={"scatter_add": convert, "scatter_reduce.two": convert, "scatter.reduce": convert})
