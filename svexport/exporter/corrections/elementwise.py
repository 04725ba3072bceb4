"""Arithmetic, as the TorchScript exporter writes it: corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from svexport.exporter.corrections.writer import constant_like, is_floating

__all__ = ["ELEMENTWISE"]

_Value = torch._C.Value
_Own = Callable[..., Any]
_kinds = torch.onnx.JitScalarType


def _promoted(g: Any, own: _Own, *values: _Value) -> Any:
    """Integers and booleans as floating-point numbers where the result is one: the exporter's own leaves them as they
    are, or makes doubles of them and numbers (``arange(4) + 0.5``), and of the rest."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
    if is_floating(kind):
        values = (*(_floating(g, value, kind) for value in values[:2]), *values[2:])
    return own(g, *values)


def _floating(g: Any, value: _Value, kind: Any) -> Any:
    """What is of integers or booleans, as ``kind``."""
    mine = _kinds.from_value(value, _kinds.UNDEFINED)
    if mine == _kinds.UNDEFINED or is_floating(mine) or mine.dtype().is_complex:
        return value
    return g.op("Cast", value, to_i=kind.onnx_type())


def _unary(op_type: str) -> Callable[..., Any]:
    """A function that ONNX has, and the exporter lacks."""
    return lambda g, own, self: _promoted(g, lambda g, self: g.op(op_type, self), self)


def _softplus(g: Any, own: _Own, self: _Value, beta: _Value, threshold: _Value) -> Any:
    """The exporter's own forgets the threshold."""
    result = own(g, self, beta, threshold)
    factor, limit = (symbolic_helper._maybe_get_const(v, "f") for v in (beta, threshold))
    kind = _kinds.from_value(self, _kinds.UNDEFINED)
    if limit >= 12 or not is_floating(kind):  # from there on both are the same number
        return result
    scaled = g.op("Mul", self, constant_like(g, factor, kind))
    return g.op("Where", g.op("Greater", scaled, constant_like(g, limit, kind)), self, result)


def _rounded(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Integers are round."""
    kind = _kinds.from_value(self, _kinds.FLOAT)
    return own(g, self, *rest) if is_floating(kind) else g.op("Identity", self)


_OF_FLOATS = (
    *("acos", "add", "asin", "atan", "cos", "erf", "exp", "fmod", "log", "log1p", "log2", "mul", "outer", "reciprocal"),
    *("rsqrt", "rsub", "sigmoid", "sin", "sqrt", "sub", "tan", "tanh"),
)

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": _promoted for name in _OF_FLOATS},
    **{f"aten::{name}": _rounded for name in ("ceil", "floor", "round")},
    **{f"aten::{name}": _unary(name.capitalize()) for name in ("acosh", "asinh", "atanh", "cosh", "sinh")},
    "aten::softplus": _softplus,
}
