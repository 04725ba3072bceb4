"""Arithmetic, comparisons and bounds, as the TorchScript exporter writes them: corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from svexport.exporter.conversions import (
    bounded,
    integer_power,
)
from svexport.exporter.corrections.writer import TorchScriptWriter, constant_like, is_floating, is_not_negative

__all__ = ["ELEMENTWISE", "arithmetic"]

_Value = torch._C.Value
_Own = Callable[..., Any]
_kinds = torch.onnx.JitScalarType


def _floor_divide(g: Any, own: _Own, self: _Value, other: _Value) -> Any:
    """The exporter's own rounds towards zero, and the quotient of floating-point numbers to a whole one."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.INT64)
    floating = kind.dtype().is_floating_point
    exact = kind if floating else _kinds.INT64
    x, y = (v if _kinds.from_value(v) == exact else g.op("Cast", v, to_i=exact.onnx_type()) for v in (self, other))
    if floating:
        return _floor_divided(g, x, y, kind)
    result = g.op("Div", x, y)
    if not (is_not_negative(self) and is_not_negative(other)):  # one less where the rest and the divisor differ in sign
        rest = g.op("Sub", x, g.op("Mul", result, y))
        less = g.op("Less", g.op("Mul", rest, y), g.op("Constant", value_t=torch.tensor(0)))
        result = g.op("Sub", result, g.op("Cast", less, to_i=exact.onnx_type()))
    return result if kind == exact else g.op("Cast", result, to_i=kind.onnx_type())


def _floor_divided(g: Any, x: _Value, y: _Value, kind: Any) -> _Value:
    """By the exact remainder, as :func:`svexport.exporter.exact._floor_divided`."""
    one, half, zero = (constant_like(g, number, kind) for number in (1, 0.5, 0))
    rest, opposite = _exact_rest(g, x, y, kind)
    quotient = g.op("Div", g.op("Sub", x, rest), y)
    quotient = g.op("Where", opposite, g.op("Sub", quotient, one), quotient)
    whole = g.op("Floor", quotient)
    larger = g.op("Greater", g.op("Sub", quotient, whole), half)
    whole = g.op("Where", larger, g.op("Add", whole, one), whole)
    return g.op("Where", g.op("Equal", y, zero), g.op("Div", x, y), whole)


def _exact_rest(g: Any, x: _Value, y: _Value, kind: Any) -> tuple[_Value, _Value]:
    """A remainder of the sign of ``x``, and whether ``y`` has the other."""
    zero = constant_like(g, 0, kind)
    rest = g.op("Mod", x, y, fmod_i=1)
    signs = (("Less", "Greater"), ("Greater", "Less"))
    return rest, g.op("Or", *(g.op("And", g.op(one, rest, zero), g.op(other, y, zero)) for one, other in signs))


def _remainder(g: Any, own: _Own, self: _Value, other: _Value) -> Any:
    """The exporter's own is what a rounded quotient of floating-point numbers leaves."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
    if not is_floating(kind):
        return arithmetic(g, own, self, other)
    x, y = (v if _kinds.from_value(v) == kind else g.op("Cast", v, to_i=kind.onnx_type()) for v in (self, other))
    rest, opposite = _exact_rest(g, x, y, kind)
    return g.op("Where", opposite, g.op("Add", rest, y), rest)


def _clamp(g: Any, own: _Own, self: _Value, low: _Value, high: _Value) -> Any:
    return _bounded(g, self, low, high) or own(g, self, low, high)


def _clamp_min(g: Any, own: _Own, self: _Value, low: _Value) -> Any:
    return _bounded(g, self, low, None) or own(g, self, low)


def _clamp_max(g: Any, own: _Own, self: _Value, high: _Value) -> Any:
    return _bounded(g, self, None, high) or own(g, self, high)


def _bounded(g: Any, self: _Value, low: _Value | None, high: _Value | None) -> Any:
    """Clip is wrong of large integers; with one bound it makes infinities finite.

    Never does it make floating-point numbers of integers, as such bounds do. None where its own is right.
    """
    mine, kind = (_kinds.from_value(v, _kinds.UNDEFINED) for v in (self, g.original_node.output()))
    if _kinds.UNDEFINED in (mine, kind):
        return None
    bounds = [None if b is None or symbolic_helper._is_none(b) else b for b in (low, high)]
    numbers = all(b is not None and b.node().kind() == "onnx::Constant" for b in bounds)
    if numbers and mine == kind and mine.dtype().is_floating_point:
        return None
    x, low, high = (
        v if v is None or (v is self and mine == kind) else g.op("Cast", v, to_i=kind.onnx_type())
        for v in (self, *bounds)
    )
    return bounded(TorchScriptWriter(g), x, low, high)


def arithmetic(g: Any, own: _Own, self: _Value, other: _Value, *rest: _Value) -> Any:
    """The exporter's own makes doubles of constant integers and numbers (``arange(4) + 0.5``), and of the rest."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
    if is_floating(kind):
        self, other = (_floating(g, value, kind) for value in (self, other))
    return own(g, self, other, *rest)


def _floating(g: Any, value: _Value, kind: Any) -> Any:
    """What is of integers or booleans, as ``kind``."""
    mine = _kinds.from_value(value, _kinds.UNDEFINED)
    if mine == _kinds.UNDEFINED or is_floating(mine) or mine.dtype().is_complex:
        return value
    return g.op("Cast", value, to_i=kind.onnx_type())


def _power(g: Any, own: _Own, self: _Value, exponent: _Value) -> Any:
    """Of integers by products."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
    if kind == _kinds.UNDEFINED or is_floating(kind) or kind.dtype().is_complex:
        return own(g, self, exponent)
    base, times = map(_number, (self, exponent))
    if isinstance(base, int) and isinstance(times, int):
        base = self
    return integer_power(TorchScriptWriter(g), base, times, kind.dtype())


def _number(value: _Value) -> Any:
    """A constant of one integer as such."""
    constant = symbolic_helper._maybe_get_const(value, "t")
    single = isinstance(constant, torch.Tensor) and not constant.dim() and not constant.dtype.is_floating_point
    return int(constant) if single and int(constant) >= 0 else value


def _softplus(g: Any, own: _Own, self: _Value, beta: _Value, threshold: _Value) -> Any:
    """The exporter's own forgets the threshold."""
    result = own(g, self, beta, threshold)
    factor, limit = (symbolic_helper._maybe_get_const(v, "f") for v in (beta, threshold))
    kind = _kinds.from_value(self, _kinds.UNDEFINED)
    if limit >= 12 or not is_floating(kind):  # from there on both are the same number
        return result
    scaled = g.op("Mul", self, constant_like(g, factor, kind))
    return g.op("Where", g.op("Greater", scaled, constant_like(g, limit, kind)), self, result)


def _promoted(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Of integers and booleans as floating-point numbers, which the exporter's own leaves as they are."""
    return own(g, _floating(g, self, _kinds.from_value(g.original_node.output(), _kinds.FLOAT)), *rest)


def _rounded(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Integers are round."""
    kind = _kinds.from_value(self, _kinds.FLOAT)
    return own(g, self, *rest) if is_floating(kind) else g.op("Identity", self)


def _unary(op_type: str) -> Callable[..., Any]:
    """A function that ONNX has, and the exporter lacks."""

    def convert(g: Any, own: _Own, self: _Value) -> Any:
        kind = _kinds.from_value(g.original_node.output(), _kinds.FLOAT)
        return g.op(op_type, _floating(g, self, kind))

    return convert


def _integers_within(*numbers: float | None) -> Callable[..., Any]:
    """Of integers by comparisons, as of ``clamp``, between these numbers or those that are given."""

    def convert(g: Any, own: _Own, self: _Value, *given: _Value) -> Any:
        kind = _kinds.from_value(self, _kinds.UNDEFINED)
        if kind == _kinds.UNDEFINED or is_floating(kind):
            return own(g, self, *given)
        bounds = numbers or [symbolic_helper._parse_arg(value, "f") for value in given]
        low, high = (None if n is None else constant_like(g, n, kind) for n in bounds)
        return bounded(TorchScriptWriter(g), self, low, high)

    return convert


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": arithmetic for name in ("add", "fmod", "mul", "outer", "rsub", "sub")},
    **{
        f"aten::{name}": _promoted
        for name in (
            "acos",
            "asin",
            "atan",
            "cos",
            "erf",
            "exp",
            "log",
            "reciprocal",
            "rsqrt",
            "sigmoid",
            "sin",
            "sqrt",
        )
    },
    **{f"aten::{name}": _promoted for name in ("log1p", "log2", "tan", "tanh")},
    **{f"aten::{name}": _rounded for name in ("ceil", "floor", "round")},
    **{f"aten::{name}": _unary(name.capitalize()) for name in ("acosh", "asinh", "atanh", "cosh", "sinh")},
    "aten::clamp": _clamp,
    "aten::clamp_max": _clamp_max,
    "aten::clamp_min": _clamp_min,
    "aten::floor_divide": _floor_divide,
    "aten::hardtanh": _integers_within(),
    "aten::pow": _power,
    "aten::remainder": _remainder,
    "aten::relu": _integers_within(0, None),
    "aten::relu6": _integers_within(0, 6),
    "aten::softplus": _softplus,
}
