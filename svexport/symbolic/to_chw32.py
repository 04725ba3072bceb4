"""``SvToChw32``: the body pads the channels and transposes."""

from __future__ import annotations

from onnx import TensorProto

from svexport.ops.to_chw32 import OP
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Dim, Value
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(b: Builder, x: Value, pool: int) -> Value:
    dtype = x.dtype
    if pool:
        y = x if dtype in FLOAT_TYPES else b.cast(x, TensorProto.FLOAT)
        sizes = x.shape and (*x.shape[:2], *(s and s // 2 for s in x.shape[2:]))
        x = b.cast(b.op("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2], shape=sizes), dtype)
    n, c, h, w = (b.dim(x, axis) for axis in range(4))
    blocks: Dim
    padding: Dim
    if isinstance(c, int):
        blocks, padding = -(-c // 32), -c % 32
    else:
        blocks = b.quotient(b.op("Add", c, b.ints(31), shape=(1,)), 32)
        padding = b.op("Sub", b.shape(b.product(blocks, 32)), c, shape=(1,))
    if padding != 0:  # by Concat: Pad does not support int8 before opset 11
        zeros = b.expand(b.like(0, x), n, padding, h, w)
        x = b.op("Concat", x, zeros, axis=1)
    return b.transpose(b.reshape(x, n, blocks, 32, h, w), (0, 1, 3, 4, 2))


Symbolic(OP, body)
