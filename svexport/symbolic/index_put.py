"""``SvIndexPut``: the body is a scatter into the flattened indexed dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.errors import ExportError
from svexport.ops.index_put import OP
from svexport.symbolic._builder import Builder, Dim, Value, static
from svexport.symbolic._symbolic import Symbolic, TensorInfo
from svexport.symbolic.scatter_reduce import scatter

__all__: list[str] = []


def body(
    b: Builder, input: Value, indices: Sequence[Value], values: Value, dims: Sequence[int], accumulate: int
) -> Value:
    values = b.cast(values, input.dtype)
    if not accumulate and len(indices) == 1 and indices[0].dtype == TensorProto.BOOL and values.shape == ():
        mask, rank = indices[0], input.rank
        before, after = range(dims[0]), range(dims[0] + mask.rank, rank)
        mask = b.unsqueeze(mask, *before, *after) if before or after else mask
        return b.op("Where", mask, values, input, dtype=input.dtype, shape=input.shape)
    dims, indices = _without_masks(b, dims, indices)
    rest = [axis for axis in range(input.rank) if axis not in dims]
    sizes = b.dims(input)

    # One index into the flattened dimensions, with the shape that the indices broadcast to.
    place: Value | None = None
    for dim, index in zip(dims, indices):
        index = b.cast(index, TensorProto.INT64)
        size = b.shape(sizes[dim])
        negative = b.op("Less", index, b.ints(0))
        index = b.op("Where", negative, b.op("Add", index, size), index)
        place = index if place is None else b.op("Add", b.op("Mul", place, size), index)
    rank = max(index.rank for index in indices)
    counted = [b.dim(replace(place, shape=_broadcast(indices)), axis) for axis in range(rank)]

    # Adjacent indexed dimensions stand at the first of them in the values, non-adjacent ones at the front.
    front = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    target: list[Dim] = [sizes[axis] for axis in rest]
    target[front:front] = counted
    if values.shape != tuple(target):
        values = b.expand(values, *target)
    order = [*range(front, front + rank), *range(front), *range(front + rank, len(target))]
    values = replace(values, shape=static(*target))

    row = b.product(*(sizes[axis] for axis in rest))
    count = b.product(*counted)
    if 0 in (row, count):
        return input
    source = b.reshape(b.transpose(values, order), count, row)
    flat = b.reshape(b.transpose(input, [*dims, *rest]), b.product(*(sizes[dim] for dim in dims)), row)
    place = b.reshape(place, count, 1)
    if not accumulate and b.opset >= 11:
        result = b.op("ScatterND", flat, place, source, shape=flat.shape)
    else:
        repeated = b.expand(place, count, row)
        if accumulate:
            result = scatter(b, flat, 0, repeated, source, "sum")
        else:
            result = b.op("Scatter", flat, repeated, source, axis=0, shape=flat.shape)
    result = b.reshape(result, *(sizes[axis] for axis in (*dims, *rest)))
    return b.transpose(result, np.argsort([*dims, *rest]).tolist())


def _without_masks(b: Builder, positions: Sequence[int], indices: Sequence[Value]) -> tuple[list[int], list[Value]]:
    """Dimensions and their indices. A mask becomes one index per dimension that it has: where it is true."""
    dims: list[int] = []
    found: list[Value] = []
    more = 0
    for position, index in zip(positions, indices):
        if index.dtype != TensorProto.BOOL:
            dims.append(position + more)
            found.append(index)
            continue
        if not index.rank:
            raise ExportError("index_put with a mask without dimensions cannot be exported; use torch.where")
        dims += range(position + more, position + more + index.rank)
        places = b.op("NonZero", index, dtype=TensorProto.INT64, shape=(index.rank, None))
        found += [b.squeeze(b.slice(places, 0, i, i + 1), 0) for i in range(index.rank)]
        more += index.rank - 1
    return dims, found


def _broadcast(indices: Sequence[Value]) -> tuple[int | None, ...]:
    rank = max(index.rank for index in indices)
    padded = [(1,) * (rank - index.rank) + index.shape for index in indices]
    return tuple(next((s for s in sizes if s != 1), 1) for sizes in zip(*padded))


def convert(
    input: TensorInfo, indices: Sequence[TensorInfo | None], values: TensorInfo, accumulate: bool = False, *_: None
) -> tuple[Any, ...] | None:
    """``aten::index_put``. The exporter's own conversion supports no masks mixed with indices, no dimensions between
    indices and no values that broadcast, and leaves ranks unknown."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if not input.shape or not given or any(info.shape is None for info in (*given, values)):
        return None
    return input, given, values, dims, int(accumulate)


Symbolic(OP, body, aten={"index_put": convert}, until=20)
