"""``SvUnfold``: the body gathers the windows, or reshapes if they do not overlap and leave no gaps."""

from __future__ import annotations

from typing import Any

import numpy as np

from svexport.ops.unfold import OP
from svexport.symbolic._builder import Builder, Dim, Value, static
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__: list[str] = []


def body(b: Builder, input: Value, dimension: int, size: int, step: int) -> Value:
    rank = input.rank
    dimension %= rank
    dims = b.dims(input)
    length = dims[dimension]
    count: Dim
    if isinstance(length, int):
        count = (length - size) // step + 1
    else:
        last = b.op("Div", b.op("Sub", length, b.ints(size), shape=(1,)), b.ints(step), shape=(1,))
        count = b.op("Add", last, b.ints(1), shape=(1,))
    if step == size and isinstance(count, int):
        kept = input if count * size == length else b.slice(input, dimension, 0, count * size)
        windows = b.reshape(kept, *dims[:dimension], count, size, *dims[dimension + 1 :])
    else:
        inside = b.constant(np.arange(size, dtype=np.int64))
        start = b.op("Mul", b.unsqueeze(b.arange(count), 1), b.ints(step))
        shape = static(*dims[:dimension], count, size, *dims[dimension + 1 :])
        windows = b.op("Gather", input, b.op("Add", start, inside), axis=dimension, shape=shape)
    others = [i for i in range(rank + 1) if i != dimension + 1]
    return b.transpose(windows, [*others, dimension + 1])


def convert(input: TensorInfo, dimension: int, size: int, step: int) -> tuple[Any, ...] | None:
    """``aten::unfold``."""
    numbers = (dimension, size, step)
    return (input, *numbers) if input.shape and all(isinstance(n, int) for n in numbers) else None


Symbolic(OP, body, aten={"unfold": convert}, until=20)
