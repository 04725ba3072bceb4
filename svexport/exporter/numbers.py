"""Translates Python arithmetic on dynamic sizes to nodes; Python's floats are doubles.

``int(height * 0.7)`` is 62 for 90 in Python, and 63 in float32. A float that is a quotient of whole numbers is kept as
this pair, and rounding it is an integer division. Other floats are computed in DOUBLE, starting from the sizes. Tensors
that use such a float get it in FLOAT.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

__all__ = ["TRANSLATIONS", "floor_divided"]

_KEY = "svexport.number"
_BITS = 20
"""Maximum bits of numerator and denominator of a constant kept as a pair: products with sizes fit in 64 bits."""

_INT, _FLOAT, _DOUBLE = (int(d) for d in (ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE))


class _Pair(NamedTuple):
    """A whole number over a positive one.

    Attributes:
        exact: whether a double has the quotient without rounding, so that it may be computed with.
    """

    numerator: Any
    denominator: Any
    exact: bool


class _Number:
    """A float of Python: as a pair, and in DOUBLE, which is made when it is asked for."""

    def __init__(self, double: Callable[[], Any], pair: _Pair | None = None) -> None:
        self._make, self._made, self.pair = double, None, pair

    @property
    def double(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


def _op(op_type: str, *inputs: Any, **attributes: Any) -> Any:
    from onnxscript import opset18

    return getattr(opset18, op_type)(*inputs, **attributes)


def _constant(value: float, dtype: torch.dtype) -> Any:
    return _op("Constant", value=ir.tensor(torch.tensor(value, dtype=dtype)))


def _is_float(x: Any) -> bool:
    if isinstance(x, (int, float)):
        return isinstance(x, float)
    return x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _integer(x: Any) -> Any:
    """A whole number as INT64."""
    return _constant(x, torch.int64) if isinstance(x, int) else x


def _number(x: Any) -> _Number:
    """The known facts about an operand."""
    if isinstance(x, (int, float)):
        short = None
        if math.isfinite(x):
            fraction = Fraction(x)
            if max(abs(fraction.numerator), fraction.denominator) < 1 << _BITS:
                short = _Pair(fraction.numerator, fraction.denominator, exact=True)
        return _Number(lambda: _constant(x, torch.float64), short)
    known = x.meta.get(_KEY)
    if known is not None:
        return known  # type: ignore[no-any-return]
    pair = None if _is_float(x) else _Pair(x, 1, exact=True)
    return _Number(lambda: _op("Cast", x, to=_DOUBLE), pair)


def _float(number: _Number) -> Any:
    """A float as other nodes take it, which remembers what it is."""
    value = _op("Cast", number.double, to=_FLOAT)
    value.meta[_KEY] = number
    return value


def _times(a: Any, b: Any) -> Any:
    """The product of two whole numbers, each a node or a number of Python."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if 1 in (a if isinstance(a, int) else 0, b if isinstance(b, int) else 0):
        return b if isinstance(a, int) and a == 1 else a
    return _op("Mul", _integer(a), _integer(b))


def _both_exact(a: _Number, b: _Number) -> bool:
    return a.pair is not None and b.pair is not None and a.pair.exact and b.pair.exact


def _mul(x: Any, y: Any) -> Any:
    if not (_is_float(x) or _is_float(y)):
        return _op("Mul", _integer(x), _integer(y))
    a, b, pair = _number(x), _number(y), None
    if a.pair and b.pair and _both_exact(a, b):
        pair = _Pair(_times(a.pair[0], b.pair[0]), _times(a.pair[1], b.pair[1]), exact=True)
    return _float(_Number(lambda: _op("Mul", a.double, b.double), pair))


def _truediv(x: Any, y: Any) -> Any:
    a, b, pair = _number(x), _number(y), None
    divisor = b.pair[0] if b.pair else None
    positive = divisor > 0 if isinstance(divisor, int) else divisor is not None and _not_negative(divisor)
    if a.pair and b.pair and _both_exact(a, b) and positive:
        numerator, denominator = _times(a.pair[0], b.pair[1]), _times(a.pair[1], b.pair[0])
        halves = isinstance(denominator, int) and denominator & (denominator - 1) == 0
        pair = _Pair(numerator, denominator, exact=halves)
    return _float(_Number(lambda: _op("Div", a.double, b.double), pair))


def _sum(op_type: str) -> Callable[[Any, Any], Any]:
    def added(x: Any, y: Any) -> Any:
        if not (_is_float(x) or _is_float(y)):
            return _op(op_type, _integer(x), _integer(y))
        a, b, pair = _number(x), _number(y), None
        if a.pair and b.pair and _both_exact(a, b):
            terms = _times(a.pair[0], b.pair[1]), _times(b.pair[0], a.pair[1])
            total = _op(op_type, *map(_integer, terms))
            pair = _Pair(total, _times(a.pair[1], b.pair[1]), exact=True)
        return _float(_Number(lambda: _op(op_type, a.double, b.double), pair))

    return added


def _rounded(op_type: str, divided: Callable[[_Pair], Any] | None) -> Callable[..., Any]:
    """To a whole number, from a pair by ``divided``."""

    def rounded(x: Any, digits: int | None = None) -> Any:
        if digits is not None:
            raise NotImplementedError("round() of a dynamic size to a number of digits")
        if not _is_float(x):
            return x
        number = _number(x)
        if number.pair and divided is not None:
            return divided(number.pair)
        value = _op(op_type, number.double) if op_type else number.double
        return _op("Cast", value, to=_INT)

    return rounded


def _floor(pair: _Pair) -> Any:
    return _integer(pair.numerator) if _is_one(pair) else floor_divided(pair.numerator, pair.denominator)


def _ceil(pair: _Pair) -> Any:
    if _is_one(pair):
        return _integer(pair.numerator)
    more = _op("Sub", _integer(pair.denominator), _constant(1, torch.int64))
    return floor_divided(_op("Add", _integer(pair.numerator), more), pair.denominator)


def _trunc(pair: _Pair) -> Any:
    if _is_one(pair):
        return _integer(pair.numerator)
    return _op("Div", _integer(pair.numerator), _integer(pair.denominator))  # of integers it is rounded to zero


def _is_one(pair: _Pair) -> bool:
    return isinstance(pair.denominator, int) and pair.denominator == 1


def floor_divided(x: Any, y: Any) -> Any:
    """``x // y`` of whole numbers. The exporter's own rounds towards zero, which is another in ``-(-size // 8)``."""
    if _is_float(x) or _is_float(y):
        quotient = _op("Div", _number(x).double, _number(y).double)
        return _float(_Number(lambda: _op("Floor", quotient)))
    x, y = _integer(x), _integer(y)
    if _not_negative(x) and _not_negative(y):
        return _op("Div", x, y)
    return _op("Div", _op("Sub", x, _op("Mod", x, y)), y)


def _not_negative(size: Any) -> bool:
    """Whether a number is surely not negative: a size, or made of some by what keeps it so."""
    if isinstance(size, (int, float)):
        return size >= 0
    node = size.producer() if hasattr(size, "producer") else None
    if node is None:
        return False
    if node.op_type == "Constant":
        value = node.attributes["value"].as_tensor() if "value" in node.attributes else None
        return value is not None and bool((value.numpy() >= 0).all())
    if node.op_type in ("Shape", "Size"):
        return True
    inputs = node.inputs[:1] if node.op_type in _OF_THE_FIRST else node.inputs
    return node.op_type in _OF_THE_FIRST | _OF_ALL and all(map(_not_negative, inputs))


_OF_THE_FIRST = {"Cast", "Gather", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
_OF_ALL = {"Add", "Div", "Mul", "Max", "Min", "Mod"}


def _power(x: Any, y: Any) -> Any:
    if not (_is_float(x) or _is_float(y)):
        return _op("Pow", _integer(x), _integer(y))
    a, b = _number(x), _number(y)
    return _float(_Number(lambda: _op("Pow", a.double, b.double)))


def _mod(x: Any, y: Any) -> Any:
    if not (_is_float(x) or _is_float(y)):
        return _op("Mod", _integer(x), _integer(y))
    a, b = _number(x), _number(y)

    def rest() -> Any:
        """The remainder with the sign of the divisor."""
        value, zero = _op("Mod", a.double, b.double, fmod=1), _constant(0.0, torch.float64)
        other = _op("Less", _op("Mul", value, b.double), zero)
        return _op("Where", other, _op("Add", value, b.double), value)

    return _float(_Number(rest))


def _root(x: Any) -> Any:
    number = _number(x)
    return _float(_Number(lambda: _op("Sqrt", number.double)))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    operator.add: _sum("Add"),
    operator.floordiv: floor_divided,
    operator.mod: _mod,
    operator.mul: _mul,
    operator.pow: _power,
    operator.sub: _sum("Sub"),
    operator.truediv: _truediv,
    math.ceil: _rounded("Ceil", _ceil),
    math.floor: _rounded("Floor", _floor),
    math.trunc: _rounded("", _trunc),
    round: _rounded("Round", None),
    torch.sym_float: lambda x: _float(_number(x)),
    **({torch.sym_sqrt: _root} if hasattr(torch, "sym_sqrt") else {}),
}
"""Translations by the function that torch.export records."""
