"""``SvIndexAdd``: the body is a scatter with the index repeated for every element of a row."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from svexport.ops.index_add import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo
from svexport.symbolic.scatter_reduce import scatter

__all__: list[str] = []


def body(b: Builder, input: Value, dim: int, index: Value, source: Value, alpha: float) -> Value:
    dim %= input.rank
    column = b.reshape(
        b.cast(index, TensorProto.INT64), *(b.dim(source, i) if i == dim else 1 for i in range(input.rank))
    )
    indices = b.expand(column, *b.dims(source))
    if alpha != 1:
        source = b.op("Mul", source, b.like(alpha, source))
    return scatter(b, input, dim, indices, source, "sum")


def convert(
    input: TensorInfo, dim: int, index: TensorInfo, source: TensorInfo, alpha: float = 1, *_: None
) -> tuple[Any, ...] | None:
    """``aten::index_add``."""
    return (input, dim, index, source, alpha) if input.shape and source.shape else None


Symbolic(OP, body, aten={"index_add": convert})
