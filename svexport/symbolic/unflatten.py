"""``SvUnflatten``: the body is one Reshape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svexport.ops.unflatten import OP
from svexport.symbolic._builder import Builder, Dim, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__: list[str] = []


def body(b: Builder, input: Value, dim: int, sizes: Sequence[Dim]) -> Value:
    dims = b.dims(input)
    dim %= input.rank
    sizes = list(sizes)
    if -1 in sizes:
        inferred = sizes.index(-1)
        sizes.pop(inferred)
        known = b.product(*sizes)
        sizes.insert(inferred, b.quotient(dims[dim], known))
    return b.reshape(input, *dims[:dim], *sizes, *dims[dim + 1 :])


def convert(input: TensorInfo, dim: int, sizes: Sequence[int | TensorInfo], *_: None) -> tuple[Any, ...] | None:
    """``aten::unflatten``."""
    return None if input.shape is None else (input, dim, sizes)


Symbolic(OP, body, aten={"unflatten": convert}, until=20)
