"""Conversions to ONNX for both exporters; they replace conversions that compute something else than torch.

Each is called with a :class:`Writer` and torch's arguments: values of a graph, and Python numbers if they are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["CONVERSIONS", "ELEMENTWISE", "TYPES", "WHOLE", "Writer"]


INTEGERS = {torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7}
"""Types of integers that torch computes powers of, as ONNX numbers them."""
WHOLE = {*INTEGERS, torch.bool}
TYPES = {**INTEGERS, torch.float32: 1, torch.bool: 9, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}


class Writer(Protocol):
    """Writes nodes of a graph; its values are those of an exporter."""

    opset: int

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """The outputs of a new node, a tuple of several; attributes are floats, or integers and lists of them."""

    def constant(self, tensor: torch.Tensor) -> Any:
        """A constant."""

    def dtype(self, value: Any) -> torch.dtype | None:
        """The data type of a value, if it is known."""

    def rank(self, value: Any) -> int | None:
        """The rank of a value, if it is known."""

    def typed(self, x: Any, kind: torch.dtype | None) -> Any:
        """A number or a tensor as a tensor of a type; for None, of any."""
        if isinstance(x, (bool, int, float)):
            return self.constant(torch.tensor(x, dtype=kind))
        return x if kind in (None, self.dtype(x)) else self("Cast", x, to=TYPES[kind])

    def reduced(self, op_type: str, x: Any, axes: Sequence[int] | None, keepdims: bool) -> Any:
        """A reduction, whose axes are an input from some opset on; over all for None. Of one number, that number."""
        if self.rank(x) == 0:
            return self("Identity", x)
        if axes is None or (self.opset < 18 and op_type != "ReduceSum"):
            given: dict[str, Any] = {} if axes is None else {"axes": list(axes)}
            return self(op_type, x, keepdims=int(keepdims), **given)
        return self(op_type, x, self.constant(torch.tensor(list(axes))), keepdims=int(keepdims))

    def squeezed(self, x: Any, *axes: int) -> Any:
        """Without dimensions of size 1."""
        return self("Squeeze", x, self.constant(torch.tensor(axes)))

    def unsqueezed(self, x: Any) -> Any:
        """With a last dimension of size 1."""
        return self("Unsqueeze", x, self.constant(torch.tensor([-1])))


def _is_floating(write: Writer, x: Any) -> bool:
    dtype = write.dtype(x)
    return dtype is not None and dtype.is_floating_point


def _with_places(convert: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """``convert``, which makes values and their places, of masks too, and of single numbers."""

    def function(write: Writer, x: Any, *rest: Any, **given: Any) -> tuple[Any, Any]:
        if write.rank(x) == 0:
            return write("Identity", x), write.constant(torch.tensor(0))
        if write.dtype(x) != torch.bool:
            return convert(write, x, *rest, **given)
        values, places = convert(write, write.typed(x, torch.float32), *rest, **given)
        return write.typed(values, torch.bool), places

    return function


@_with_places
def _sorted_along(write: Writer, x: Any, count: Any, axis: int, largest: bool) -> tuple[Any, Any]:
    """The first of the sorted values along an axis, and where they are; NaN is larger than all numbers."""
    numbers = _without_nan(write, x, math.inf)
    values, places = write("TopK", numbers, count, outputs=2, axis=axis, largest=int(largest), sorted=1)
    return (values if numbers is x else write("GatherElements", x, places, axis=axis)), places


def _without_nan(write: Writer, x: Any, number: float) -> Any:
    """An infinity in place of NaN, and the last finite number in place of that infinity."""
    dtype = write.dtype(x)
    if dtype is None or not dtype.is_floating_point:
        return x
    last = write.typed(math.copysign(torch.finfo(dtype).max, number), dtype)
    finite = write("Min" if number > 0 else "Max", x, last)
    return write("Where", write("IsNaN", x), write.typed(number, dtype), finite)


def _larger(write: Writer, op_type: str, x: Any, y: Any, kind: torch.dtype | None) -> Any:
    """The larger or smaller of two (Max, Min) of one type: of integers, ONNX Runtime compares 32 bits of 64."""
    if kind == torch.bool:
        return write("Or" if op_type == "Max" else "And", x, y)
    if kind is not None and kind.is_floating_point:
        return write(op_type, x, y)
    return write("Where", write("Less", *((x, y) if op_type == "Max" else (y, x))), y, x)


_BITS = 64


def _integer_power(write: Writer, x: Any, exponent: Any, kind: torch.dtype) -> Any:
    """A power of integers as torch has it, modulo two to the bits of ``kind``, by products: Pow is of floating-point
    numbers in TensorRT, and of doubles in ONNX Runtime, which are others from 2**53 on.

    Either of ``x`` and ``exponent`` may be an ``int``; an exponent that is one is not negative.
    """
    wide = torch.int64 if kind == torch.int64 or not isinstance(exponent, int) else torch.int32
    x, one = write.typed(x, wide), write.typed(1, wide)
    if isinstance(exponent, int):
        result = _by_squaring(write, x, exponent, one)
    else:
        zero, minus_one, two = (write.constant(torch.tensor(number)) for number in (0, -1, 2))
        exponent = write.typed(exponent, wide)
        negative = write("Less", exponent, zero)
        result = _by_bits(write, x, write("Where", negative, write("Mod", exponent, two), exponent), one)
        unit = write("Or", write("Equal", x, one), write("Equal", x, minus_one))  # whose reciprocal is an integer
        result = write("Where", write("And", negative, write("Not", unit)), zero, result)
    return result if kind == wide else write.typed(result, kind)


def _by_squaring(write: Writer, x: Any, exponent: int, one: Any) -> Any:
    """``x`` to a number."""
    if exponent < 2:
        return x if exponent else write("Add", write("Sub", x, x), one)
    root = _by_squaring(write, x, exponent // 2, one)
    square = write("Mul", root, root)
    return write("Mul", square, x) if exponent % 2 else square


def _by_bits(write: Writer, x: Any, exponent: Any, one: Any) -> Any:
    """The product of the squares, squares of squares and so on that the bits of an exponent from 0 on choose."""
    places = [2 ** min(bit, _BITS - 2) for bit in range(_BITS)]
    digits = write("Div", write.unsqueezed(exponent), write.constant(torch.tensor(places)))
    digits = write("Mod", digits, write.constant(torch.tensor(2)))
    last = [1] * (_BITS - 1) + [2]  # which no digit is: there is no bit of that place
    chosen = write("Equal", digits, write.constant(torch.tensor(last)))
    squares = [write.unsqueezed(x)]
    while len(squares) < _BITS - 1:
        squares.append(write("Mul", squares[-1], squares[-1]))
    powers = write("Concat", *squares, squares[-1], axis=-1 if write.rank(x) is None else write.rank(x))
    factors = write("Where", chosen, powers, one)
    for size in (32, 16, 8, 4, 2, 1):  # ReduceProd is of doubles in ONNX Runtime, too
        halves = torch.arange(size), torch.arange(size, 2 * size)
        factors = write("Mul", *(write("Gather", factors, write.constant(half), axis=-1) for half in halves))
    return write.squeezed(factors, -1)


# ------------------------------------------------------------------ as torch has their arguments


def _result_type(write: Writer, x: Any, y: Any) -> torch.dtype:
    """torch's result type of tensors and numbers."""

    def like(v: Any) -> Any:
        if isinstance(v, (bool, int, float)):
            return v
        rank = write.rank(v)
        return torch.empty([1] * (1 if rank is None else rank), dtype=write.dtype(v) or torch.float32)

    return torch.result_type(like(x), like(y))


def _clamp(write: Writer, x: Any, min: Any = None, max: Any = None) -> Any:
    """Clip has the largest finite number in place of a bound that is none, or that is NaN."""
    kind = write.dtype(x)
    low, high = (bound if bound is None else write.typed(bound, kind) for bound in (min, max))
    if isinstance(min, (int, float)) and isinstance(max, (int, float)) and _is_floating(write, x):
        return write("Clip", x, low, high)
    x = x if low is None else _larger(write, "Max", x, low, kind)
    return x if high is None else _larger(write, "Min", x, high, kind)


def _mean(
    write: Writer, x: Any, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: int | None = None
) -> Any:
    if dtype not in (None, -1):
        x = write("Cast", x, to=dtype)
    return write.reduced("ReduceMean", x, list(dim) if dim else None, keepdim)


def _log_sum_exp(write: Writer, x: Any, dim: Sequence[int], keepdim: bool = False) -> Any:
    """Of numbers less their largest one: ReduceLogSumExp of ONNX Runtime takes none out behind a first infinity, and
    what is below -88 then for nothing."""
    kind = write.dtype(x) or torch.float32
    kind = kind if kind.is_floating_point else torch.float32
    x = write.typed(x, kind)
    if write.rank(x) == 0:
        return write("Identity", x)
    axes = list(dim) or None
    last = torch.finfo(kind).max
    bounds = (write.typed(bound, kind) for bound in (-last, last))
    largest = write("Clip", write.reduced("ReduceMax", x, axes, True), *bounds)  # no infinity less itself
    total = write.reduced("ReduceSum", write("Exp", write("Sub", x, largest)), axes, True)
    result = write("Add", write("Log", total), largest)
    return result if keepdim else write.squeezed(result, *(axes or range(write.rank(x) or 0)))


def _power(write: Writer, x: Any, exponent: Any) -> Any:
    kind = _result_type(write, x, exponent)
    if kind in INTEGERS:
        return _integer_power(write, x, exponent, kind)
    return write("Pow", *(write.typed(v, kind) for v in (x, exponent)))


def _floor_divide(write: Writer, x: Any, y: Any) -> Any:
    """Divides by the exact remainder. The exporters' own conversion rounds the quotient: 2 // 0.4 (4) becomes 5."""
    kind = _result_type(write, x, y)
    x, y = write.typed(x, kind), write.typed(y, kind)
    if kind in INTEGERS:
        quotient = write("Div", x, y)
        if kind == torch.uint8:
            return quotient
        zero = write.typed(0, kind)
        opposite = write("Equal", write("Less", x, zero), write("Greater", y, zero))
        less = write("And", opposite, write.typed(write("Mod", x, y), torch.bool))
        return write("Sub", quotient, write.typed(less, kind))
    one, half, zero = (write.typed(number, kind) for number in (1, 0.5, 0))
    rest, opposite = _exact_rest(write, x, y, zero)
    quotient = write("Div", write("Sub", x, rest), y)  # whole, but for rounding
    quotient = write("Where", opposite, write("Sub", quotient, one), quotient)
    whole = write("Floor", quotient)
    larger = write("Greater", write("Sub", quotient, whole), half)
    whole = write("Where", larger, write("Add", whole, one), whole)
    return write("Where", write("Equal", y, zero), write("Div", x, y), whole)


def _remainder(write: Writer, x: Any, y: Any) -> Any:
    """The remainder with the sign of ``y``. The exporters' own comes from a rounded quotient: 0 for 2 % 0.4."""
    kind = _result_type(write, x, y)
    x, y = write.typed(x, kind), write.typed(y, kind)
    if kind in INTEGERS:
        return write("Mod", x, y)
    rest, opposite = _exact_rest(write, x, y, write.typed(0, kind))
    return write("Where", opposite, write("Add", rest, y), rest)


def _exact_rest(write: Writer, x: Any, y: Any, zero: Any) -> tuple[Any, Any]:
    """A remainder of the sign of ``x``, and whether ``y`` has the other."""
    rest = write("Mod", x, y, fmod=1)
    signs = (("Less", "Greater"), ("Greater", "Less"))
    return rest, write("Or", *(write("And", write(a, rest, zero), write(b, y, zero)) for a, b in signs))


def _negated(write: Writer, x: Any) -> Any:
    """ONNX negates no unsigned integers."""
    if write.dtype(x) != torch.uint8:
        return write("Neg", x)
    all_of_them = write.typed(256, torch.int32)
    less = write("Sub", all_of_them, write.typed(x, torch.int32))
    return write.typed(write("Mod", less, all_of_them), torch.uint8)


def _truth(of_all: bool) -> Callable[..., Any]:
    """Whether any is true, by the largest, which of nothing is negative or 0 and the exporter's own takes for true; or
    all are, where none is not: the smallest of nothing depends on ONNX Runtime's version."""

    def convert(write: Writer, x: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
        found = write.typed(x, torch.bool)
        if write.rank(x) == 0:
            found = write("Identity", found)
        else:
            axes = [dim] if isinstance(dim, int) else list(dim or ()) or None
            sought = write("Not", found) if of_all else found
            largest = write.reduced("ReduceMax", write.typed(sought, torch.int64), axes, keepdim)
            found = write("Greater", largest, write.constant(torch.tensor(0)))
            found = write("Not", found) if of_all else found
        return write.typed(found, torch.uint8) if write.dtype(x) == torch.uint8 else found

    return convert


def _sort(write: Writer, x: Any, dim: int = -1, descending: bool = False) -> Any:
    size = write("Gather", write("Shape", x), write.constant(torch.tensor([dim]))) if write.rank(x) else None
    return _sorted_along(write, x, size, dim, descending)


def _topk(write: Writer, x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    one = write.constant(torch.tensor([k if isinstance(k, int) else 1]))
    count = one if isinstance(k, int) else write("Reshape", write.typed(k, torch.int64), one)
    return _sorted_along(write, x, count, dim, largest)


def _extremes(name: str) -> dict[str, Callable[..., Any]]:
    """The largest or smallest (Max, Min), and where it is."""
    small = name.lower()

    def along_all(write: Writer, x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        """NaN where one is: what the reductions do with it is open.

        Of masks, by numbers: ONNX reduces none before opset 20, and TensorRT at none.
        """
        reduce, axes = f"Reduce{name}", list(dim) or None
        if write.dtype(x) == torch.bool and write.rank(x) != 0:
            return write.typed(write.reduced(reduce, write.typed(x, torch.float32), axes, keepdim), torch.bool)
        result = write.reduced(reduce, x, axes, keepdim)
        if not _is_floating(write, x) or write.rank(x) == 0:
            return result
        zero = write.typed(0, write.dtype(x))
        nans = write("Where", write("IsNaN", x), x, zero)
        return write("Add", result, write.reduced("ReduceSum", nans, axes, keepdim))

    @_with_places
    def along(write: Writer, x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        places = place(write, x, dim, True)
        values = write("GatherElements", x, places, axis=dim)
        return (values, places) if keepdim else (write.squeezed(values, dim), write.squeezed(places, dim))

    def place(write: Writer, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        """The first NaN, which comes before all numbers."""
        if write.rank(x) == 0:
            return write.constant(torch.tensor(0))
        if dim is not None:
            worst = math.inf if name == "Max" else -math.inf
            numbers = write.typed(x, torch.float32) if write.dtype(x) == torch.bool else _without_nan(write, x, worst)
            return write(f"Arg{name}", numbers, axis=dim, keepdims=int(keepdim))
        flat = write("Reshape", x, write.constant(torch.tensor([-1])))
        found = place(write, flat, 0)
        shape = write.constant(torch.tensor([1] * (write.rank(x) or 0)))
        return write("Reshape", found, shape) if keepdim else found

    return {
        f"aten::{small}": along_all,
        f"aten::{small}.dim": along,
        f"aten::a{small}": along_all,
        f"aten::arg{small}": place,
        f"aten::{small}imum": lambda write, x, y: _larger(write, name, x, y, write.dtype(x)),
    }


_OF_ELEMENTS: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": _clamp for name in ("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor")},
    **{f"aten::clamp_max{form}": lambda write, x, max: _clamp(write, x, None, max) for form in ("", ".Tensor")},
    **{f"aten::floor_divide{form}": _floor_divide for form in ("", ".Scalar")},
    "aten::hardtanh": lambda write, x, min_val=-1, max_val=1: _clamp(write, x, min_val, max_val),
    **{f"aten::mean{form}": _mean for form in ("", ".dim")},
    "aten::neg": _negated,
    **{f"aten::pow.{form}": _power for form in ("Scalar", "Tensor_Scalar", "Tensor_Tensor")},
    "aten::relu": lambda write, x: write("Relu", x) if _is_floating(write, x) else _clamp(write, x, 0),
    "aten::relu6": lambda write, x: _clamp(write, x, 0, 6),
    **{f"aten::remainder.{form}": _remainder for form in ("Scalar", "Scalar_Tensor", "Tensor")},
}

CONVERSIONS: dict[str, Callable[..., Any]] = {
    **_OF_ELEMENTS,
    **_extremes("Max"),
    **_extremes("Min"),
    **{f"aten::all{form}": _truth(True) for form in ("", ".dim", ".dims")},
    **{f"aten::any{form}": _truth(False) for form in ("", ".dim", ".dims")},
    "aten::logsumexp": _log_sum_exp,
    "aten::sort": _sort,
    "aten::sort.stable": lambda write, x, *, stable=None, **given: _sort(write, x, **given),  # as TopK is anyway
    "aten::topk": _topk,
}
"""Conversions by ATen overload."""

ELEMENTWISE = frozenset(_OF_ELEMENTS) | {"aten::maximum", "aten::minimum"}
"""Functions that compute in the type of their result."""
