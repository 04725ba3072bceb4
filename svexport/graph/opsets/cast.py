"""Cast and CastLike."""

from __future__ import annotations

from onnx import TensorProto

from svexport.graph.opsets.rules import Node, down
from svexport.graph.opsets.types import takes
from svexport.symbolic._builder import Builder, Value, dtype_name

__all__: list[str] = []


@down("Cast", 24, 23, 21, 19, 13)
def cast(b: Builder, node: Node) -> None:
    """Only types fall away, and with them what is said of their rounding."""
    to = node.attribute("to")
    if not takes("Cast", b.opset, "T2", to):
        node.refuse(f"there are no tensors of {dtype_name(to)} there")
    if b.opset < 24:
        node.remove("round_mode")
    if b.opset < 19:
        node.remove("saturate")


@down("CastLike", 25, 24, 23, 21, 19)
def cast_like_types(b: Builder, node: Node) -> Value:
    return _cast_like(b, node)


@down("CastLike", 15)
def cast_like(b: Builder, node: Node) -> Value:
    return _cast_like(b, node)


def _cast_like(b: Builder, node: Node) -> Value:
    """To the type of another tensor, which is known."""
    saturate = node.attribute("saturate") if node.version >= 19 else None
    x, dtype = node.input(), node.dtype(1)
    return b.op("Cast", x, to=dtype, saturate=saturate, dtype=dtype, shape=x.shape)
