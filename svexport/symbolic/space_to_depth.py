"""``SvSpaceToDepth``: the body is one transpose between two reshapes."""

from __future__ import annotations

from svexport.errors import UnsupportedError
from svexport.ops.space_to_depth import OP
from svexport.symbolic._builder import Builder, Dim, Value
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(b: Builder, x: Value) -> Value:
    n, c, h, w = (b.dim(x, axis) for axis in range(4))

    def half(size: Dim) -> Dim:
        if isinstance(size, Value):
            return b.op("Div", size, b.ints(2), shape=(1,))
        if size % 2:
            raise UnsupportedError(f"space_to_depth expects even H and W, got {x.shape}; pad to a multiple of 2")
        return size // 2

    h, w = half(h), half(w)
    blocks = b.transpose(b.reshape(x, n, c, h, 2, w, 2), (0, 5, 3, 1, 2, 4))
    return b.reshape(blocks, n, b.product(c, 4), h, w)


Symbolic(OP, body)
