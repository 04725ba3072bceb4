"""Writing nodes into a graph of the TorchScript exporter, and what its values are known to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.onnx import symbolic_helper

__all__ = ["TorchScriptWriter", "constant_like", "integers_of", "is_floating", "is_not_negative"]

_Value = torch._C.Value
_Own = Callable[..., Any]
_kinds = torch.onnx.JitScalarType


class TorchScriptWriter:
    """Writes nodes of a graph that the TorchScript exporter makes: :class:`svexport.exporter.conversions.Writer`."""

    def __init__(self, g: Any) -> None:
        self._g = g
        self.opset: int = g.opset

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """A node of standard ONNX; attributes are floats, or integers and lists of them."""
        typed = {f"{name}_{'f' if isinstance(value, float) else 'i'}": value for name, value in attributes.items()}
        return self._g.op(op_type, *inputs, outputs=outputs, **typed)

    def constant(self, tensor: torch.Tensor) -> Any:
        """A Constant of a tensor."""
        return self._g.op("Constant", value_t=tensor)

    def dtype(self, value: Any) -> torch.dtype | None:
        """The type of a value; None where it is not known."""
        kind = _kinds.from_value(value, _kinds.UNDEFINED)
        return None if kind == _kinds.UNDEFINED else kind.dtype()

    def rank(self, value: Any) -> int | None:
        """The rank of a value; None where it is not known."""
        return symbolic_helper._get_tensor_rank(value)

    def reduced(self, op_type: str, x: Any, axes: Sequence[int] | None, keepdims: bool) -> Any:
        """A reduction, with axes as attribute or input as the opset has them; over all of them for None."""
        if op_type == "ReduceSum" and axes is not None:
            return symbolic_helper._reducesum_helper(self._g, x, axes_i=list(axes), keepdims_i=int(keepdims))
        given = {} if axes is None else {"axes_i": list(axes)}
        return self._g.op(op_type, x, keepdims_i=int(keepdims), **given)

    def squeezed(self, x: Any, axis: int) -> Any:
        """Without an axis of size 1."""
        return symbolic_helper._squeeze_helper(self._g, x, [axis])

    def unsqueezed(self, x: Any) -> Any:
        """With an axis of size 1 at the end."""
        rank = self.rank(x)
        return symbolic_helper._unsqueeze_helper(self._g, x, [-1 if rank is None else rank])


def is_floating(kind: Any) -> bool:
    """Whether a type is known, and one of floating-point numbers."""
    return kind != _kinds.UNDEFINED and kind.dtype().is_floating_point


def constant_like(g: Any, number: float, kind: Any) -> _Value:
    """A constant of no dimensions, of that type."""
    return g.op("Constant", value_t=torch.tensor(number, dtype=kind.dtype()))


def integers_of(value: _Value) -> list[int]:
    """The numbers of a constant tensor."""
    return symbolic_helper._parse_arg(value, "t").reshape(-1).tolist()


def is_not_negative(value: _Value) -> bool:
    """Whether a number is surely not negative: a size, a place, a constant, or made of those by what keeps them so."""
    node = value.node()
    if node.kind() == "onnx::Constant":
        return bool((torch.as_tensor(symbolic_helper._node_get(node, "value")) >= 0).all())
    if node.kind() in _NOT_NEGATIVE or (node.kind() == "onnx::TopK" and value.offset() == 1):
        return True
    if node.kind() in _OF_THE_FIRST:
        return is_not_negative(next(node.inputs()))
    return node.kind() in _OF_ALL and all(map(is_not_negative, node.inputs()))


_NOT_NEGATIVE = {"onnx::ArgMax", "onnx::ArgMin", "onnx::NonZero", "onnx::Shape"}


_OF_THE_FIRST = {
    *("onnx::Cast", "onnx::Expand", "onnx::Flatten", "onnx::Gather", "onnx::Identity", "onnx::Reshape", "onnx::Slice"),
    *("onnx::Squeeze", "onnx::Tile", "onnx::Transpose", "onnx::Unsqueeze"),
}


_OF_ALL = {"onnx::Add", "onnx::Concat", "onnx::Div", "onnx::Mul", "onnx::Range"}
