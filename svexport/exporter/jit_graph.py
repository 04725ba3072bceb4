"""Access to the TorchScript exporter's graph: writes nodes into it, and reads what is known of its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.onnx import symbolic_helper

from svexport.exporter.conversions import Writer
from svexport.symbolic._symbolic import TensorInfo

__all__ = ["GraphWriter", "constant_of", "kinds_of", "read", "schema_of"]

_Value = torch._C.Value
_kinds = torch.onnx.JitScalarType


class GraphWriter(Writer):
    """Writes nodes of a graph that the TorchScript exporter makes."""

    def __init__(self, g: Any) -> None:
        self._g = g
        self.opset: int = g.opset

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """The outputs of a new node; attributes may be texts, too."""
        typed = {f"{name}_{_letter(value)}": value for name, value in attributes.items()}
        return self._g.op(op_type, *inputs, outputs=outputs, **typed)

    def constant(self, tensor: Tensor) -> Any:
        """A constant."""
        return self._g.op("Constant", value_t=tensor)

    def dtype(self, value: Any) -> torch.dtype | None:
        """The data type of a value, if it is known."""
        kind = _kinds.from_value(value, _kinds.UNDEFINED)
        return None if kind == _kinds.UNDEFINED else kind.dtype()

    def rank(self, value: Any) -> int | None:
        """The rank of a value, if it is known."""
        return symbolic_helper._get_tensor_rank(value)


def _letter(value: Any) -> str:
    """The suffix that tells the exporter the type of an attribute, or of the elements of a list."""
    return {float: "f", str: "s"}.get(type(value[0] if isinstance(value, list) else value), "i")


def schema_of(node: torch._C.Node) -> Any:
    """The schema of an aten node."""
    if (schema := node.schema()) != "(no schema)":
        schemas = [torch._C.parse_schema(schema)]
    else:  # the exporter has made tensors of its lists of numbers
        schemas = torch._C._jit_get_schemas_for_operator(node.kind())
    return next(s for s in schemas if len(s.arguments) == node.inputsSize())


def kinds_of(schema: Any) -> list[str]:
    """The kind of each argument of an aten function: ``"tensor"``, ``"tensors"`` or ``"constant"``."""
    types = (str(a.type) for a in schema.arguments)
    return ["constant" if "Tensor" not in t else "tensors" if t.startswith("List") else "tensor" for t in types]


def read(value: _Value, kind: str) -> Any:
    """A traced value as an argument: a Python constant, :class:`TensorInfo` (also of computed numbers), or a list."""
    if kind == "tensors":
        return [read(v, "tensor") for v in symbolic_helper._unpack_list(value)]
    node = value.node()
    if node.mustBeNone():
        return None
    if kind == "tensor":
        type_: Any = value.type()
        sizes = type_.varyingSizes() if isinstance(type_, torch._C.TensorType) else None
        return TensorInfo(value, None if sizes is None else tuple(sizes))
    if node.kind() == "prim::ListConstruct":
        return [read(v, "constant") for v in node.inputs()]
    if node.kind() == "onnx::Constant":
        constant = symbolic_helper._node_get(node, "value")
        return constant.tolist() if isinstance(constant, Tensor) else constant
    if node.kind() == "prim::Constant":
        return node.output().toIValue()
    return TensorInfo(value, ())


def constant_of(value: _Value) -> Any:
    """A number, a truth or a list of numbers; None of what is computed."""
    found = read(value, "constant")
    computed = any(isinstance(one, TensorInfo) for one in (found if isinstance(found, list) else [found]))
    return None if computed else found
