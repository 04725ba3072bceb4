"""``SvSpaceToDepth``: the body is one transpose between two reshapes."""

from __future__ import annotations

from svexport.errors import UnsupportedError
from svexport.ops.space_to_depth import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(b: Builder, x: Value) -> Value:
    n, c, h, w = (b.dim(x, axis) for axis in range(4))
    if any(isinstance(size, int) and size % 2 for size in (h, w)):
        raise UnsupportedError(f"space_to_depth expects even H and W, got {x.shape}; pad to a multiple of 2")
    h, w = b.quotient(h, 2), b.quotient(w, 2)
    blocks = b.transpose(b.reshape(x, n, c, h, 2, w, 2), (0, 5, 3, 1, 2, 4))
    return b.reshape(blocks, n, b.product(c, 4), h, w)


Symbolic(OP, body)
