"""``SvFromChw32``: the body transposes and drops the padding channels."""

from __future__ import annotations

from svexport.ops.from_chw32 import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(b: Builder, x: Value, channels: int) -> Value:
    n, _, h, w, _ = (b.dim(x, axis) for axis in range(5))
    padded = 32 * -(-channels // 32)
    planes = b.reshape(b.transpose(x, (0, 1, 4, 2, 3)), n, padded, h, w)
    return planes if padded == channels else b.slice(planes, 1, 0, channels)


Symbolic(OP, body)
