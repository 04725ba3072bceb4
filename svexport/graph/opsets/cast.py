"""Cast and CastLike."""

from __future__ import annotations

from onnx import TensorProto

from svexport.graph.opsets.rules import Node, down, schema_of
from svexport.symbolic._builder import Builder, Value, dtype_name

__all__: list[str] = []


@down("Cast", 24, 23, 21, 19, 13)
def cast(b: Builder, node: Node) -> None:
    """Only types fall away, and with them what is said of their rounding."""
    _demand(node, node.attribute("to"), b.opset)
    if b.opset < 24:
        node.remove("round_mode")
    if b.opset < 19:
        node.remove("saturate")


@down("CastLike", 24, 23, 21, 19, 15)
def cast_like(b: Builder, node: Node) -> Value:
    """To the type of another tensor, which is known."""
    x, dtype = node.input(), node.dtype(1)
    _demand(node, dtype, b.opset)
    saturate = node.attribute("saturate") if b.opset >= 19 else None
    return b.op("Cast", x, to=dtype, saturate=saturate)


def _demand(node: Node, dtype: int, opset: int) -> None:
    """Refuses to cast to a type of which an opset has no tensors."""
    schema = schema_of("Cast", opset)
    assert schema is not None
    made = next(c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == "T2")
    if f"tensor({TensorProto.DataType.Name(dtype).lower()})" not in made:
        node.refuse(f"there are no tensors of {dtype_name(dtype)} there")
