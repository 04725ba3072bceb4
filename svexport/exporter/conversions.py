"""Conversions to ONNX that both exporters get, in place of theirs that say something else than torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = [
    "INTEGERS",
    "Writer",
    "bounded",
    "extreme",
    "extreme_along",
    "integer_power",
    "larger",
    "mean_of_some",
    "place_of_extreme",
    "sorted_along",
]


_FLOAT, _BOOL = 1, 9  # as ONNX numbers its types
INTEGERS = {torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7}
"""Types of integers that torch computes powers of."""


class Writer(Protocol):
    """Writes nodes of a graph; its values are those of an exporter."""

    opset: int

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """The outputs of a new node, a tuple of several."""

    def constant(self, tensor: torch.Tensor) -> Any:
        """A constant."""

    def dtype(self, value: Any) -> torch.dtype | None:
        """Of a value, where it is known."""

    def rank(self, value: Any) -> int | None:
        """Of a value, where it is known."""

    def reduced(self, op_type: str, x: Any, axes: Sequence[int] | None, keepdims: bool) -> Any:
        """A reduction, whose axes are an input from some opset on."""

    def squeezed(self, x: Any, axis: int) -> Any:
        """Without a dimension of size 1."""

    def unsqueezed(self, x: Any) -> Any:
        """With a last dimension of size 1."""


def is_floating(write: Writer, x: Any) -> bool:
    dtype = write.dtype(x)
    return dtype is not None and dtype.is_floating_point


def extreme(write: Writer, op_type: str, x: Any, axes: Sequence[int] | None, keepdims: bool) -> Any:
    """The largest or smallest (ReduceMax, ReduceMin), NaN where one is: what the reductions do with it is open."""
    if write.rank(x) == 0:
        return write("Identity", x)
    result = write.reduced(op_type, x, axes, keepdims)
    if not is_floating(write, x):
        return result
    numbers = write.constant(torch.tensor(0, dtype=write.dtype(x)))
    nans = write("Where", write("IsNaN", x), x, numbers)
    return write("Add", result, write.reduced("ReduceSum", nans, axes, keepdims))


def place_of_extreme(write: Writer, op_type: str, x: Any, axis: int, keepdims: bool) -> Any:
    """Where the largest or smallest is (ArgMax, ArgMin): the first NaN, which comes before all numbers."""
    if write.rank(x) == 0:
        return _first(write)
    numbers = _without_nan(write, x, math.inf if op_type == "ArgMax" else -math.inf)
    return write(op_type, numbers, axis=axis, keepdims=int(keepdims))


def extreme_along(write: Writer, op_type: str, x: Any, axis: int, keepdims: bool) -> tuple[Any, Any]:
    """The largest or smallest along an axis, and where it is."""
    if write.rank(x) == 0:
        return write("Identity", x), _first(write)
    places = place_of_extreme(write, f"Arg{op_type[-3:]}", x, axis, True)
    values = write("GatherElements", x, places, axis=axis)
    return (values, places) if keepdims else (write.squeezed(values, axis), write.squeezed(places, axis))


def sorted_along(write: Writer, x: Any, count: Any, axis: int, largest: bool) -> tuple[Any, Any]:
    """The first of the sorted values along an axis, and where they are; NaN is larger than all numbers."""
    if write.rank(x) == 0:
        return write("Identity", x), _first(write)
    if write.dtype(x) == torch.bool:
        values, places = sorted_along(write, write("Cast", x, to=_FLOAT), count, axis, largest)
        return write("Cast", values, to=_BOOL), places
    attributes = {"axis": axis, "largest": int(largest), "sorted": 1}
    if not is_floating(write, x):
        return write("TopK", x, count, outputs=2, **attributes)
    _, places = write("TopK", _without_nan(write, x, math.inf), count, outputs=2, **attributes)
    return write("GatherElements", x, places, axis=axis), places


def _first(write: Writer) -> Any:
    return write.constant(torch.tensor(0))


def _without_nan(write: Writer, x: Any, number: float) -> Any:
    """An infinity in place of NaN, and the last finite number in place of that infinity."""
    dtype = write.dtype(x)
    if dtype is None or not dtype.is_floating_point:
        return x
    last = write.constant(torch.tensor(math.copysign(torch.finfo(dtype).max, number), dtype=dtype))
    finite = write("Min" if number > 0 else "Max", x, last)
    return write("Where", write("IsNaN", x), write.constant(torch.tensor(number, dtype=dtype)), finite)


def larger(write: Writer, op_type: str, x: Any, y: Any, *, floating: bool | None = None) -> Any:
    """The larger or smaller of two (Max, Min) of one type: of integers, ONNX Runtime compares 32 bits of 64."""
    if is_floating(write, x) if floating is None else floating:
        return write(op_type, x, y)
    return write("Where", write("Less", *((x, y) if op_type == "Max" else (y, x))), y, x)


def bounded(write: Writer, x: Any, low: Any, high: Any) -> Any:
    """Within bounds of its type, each of which may be None: Clip has the largest finite number in place of it."""
    floating = is_floating(write, x)  # which is not known of what was just written
    if low is not None:
        x = larger(write, "Max", x, low, floating=floating)
    return x if high is None else larger(write, "Min", x, high, floating=floating)


def mean_of_some(write: Writer, mean: Any, x: Any, axes: Sequence[int] | None) -> Any:
    """NaN in place of the mean of nothing, of which ONNX Runtime makes 0."""
    if axes:
        lengths = write("Gather", write("Shape", x), write.constant(torch.tensor(list(axes))))
        count = write("ReduceProd", lengths, keepdims=0)
    else:
        count = write("Size", x)
    nothing = write("Equal", count, write.constant(torch.tensor(0)))
    return write("Where", nothing, write.constant(torch.tensor(math.nan, dtype=write.dtype(mean))), mean)


_BITS = 64


def integer_power(write: Writer, x: Any, exponent: Any, kind: torch.dtype) -> Any:
    """A power of integers as torch has it, modulo two to the bits of ``kind``, by products: Pow is of floating-point
    numbers in TensorRT, and of doubles in ONNX Runtime, which are others from 2**53 on.

    Either of ``x`` and ``exponent`` may be an ``int``; an exponent that is one is not negative.
    """
    wide = torch.int64 if kind == torch.int64 or not isinstance(exponent, int) else torch.int32
    one = write.constant(torch.tensor(1, dtype=wide))
    if isinstance(exponent, int):
        result = _by_squaring(write, _cast(write, x, wide), exponent, one)
    else:
        exponent = _cast(write, exponent, wide)
        negative = write("Less", exponent, write.constant(torch.tensor(0)))
        odd = write("Mod", exponent, write.constant(torch.tensor(2)))
        result = _by_bits(write, _cast(write, x, wide), write("Where", negative, odd, exponent), one)
        vanishes = negative if isinstance(x, int) else write("And", negative, _larger_than_one(write, x, one))
        if not isinstance(x, int) or abs(x) != 1:
            result = write("Where", vanishes, write.constant(torch.tensor(0)), result)
    return _cast(write, result, kind, wide)


def _cast(write: Writer, x: Any, kind: torch.dtype, given: torch.dtype | None = None) -> Any:
    if isinstance(x, int) or (given or write.dtype(x)) == kind:
        return x
    return write("Cast", x, to=INTEGERS[kind])


def _larger_than_one(write: Writer, x: Any, one: Any) -> Any:
    """Whether the reciprocal of an integer is no integer (as that of 0 is none)."""
    x = _cast(write, x, torch.int64)
    unit = write("Or", write("Equal", x, one), write("Equal", x, write.constant(torch.tensor(-1))))
    return write("Not", unit)


def _by_squaring(write: Writer, x: Any, exponent: int, one: Any) -> Any:
    """``x`` to a number."""
    result, square = None, x
    while exponent:
        if exponent % 2:
            result = square if result is None else write("Mul", result, square)
        exponent //= 2
        square = write("Mul", square, square) if exponent else square
    return write("Add", write("Sub", x, x), one) if result is None else result


def _by_bits(write: Writer, x: Any, exponent: Any, one: Any) -> Any:
    """The product of the squares, squares of squares and so on that the bits of an exponent from 0 on choose."""
    places = [2 ** min(bit, _BITS - 2) for bit in range(_BITS)]
    digits = write("Mod", write("Div", write.unsqueezed(exponent), write.constant(torch.tensor(places))), _two(write))
    last = [1] * (_BITS - 1) + [2]  # which no digit is: there is no bit of that place
    chosen = write("Equal", digits, write.constant(torch.tensor(last)))
    if isinstance(x, int):
        powers = write.constant(torch.tensor([_wrapped(pow(x, 2**bit, 2**_BITS)) for bit in range(_BITS)]))
    else:
        squares = [write.unsqueezed(x)]
        while len(squares) < _BITS - 1:
            squares.append(write("Mul", squares[-1], squares[-1]))
        powers = write("Concat", *squares, squares[-1], axis=-1 if write.rank(x) is None else write.rank(x))
    factors = write("Where", chosen, powers, one)
    size = _BITS // 2
    while size:  # ReduceProd is of doubles in ONNX Runtime, too
        halves = torch.arange(size), torch.arange(size, 2 * size)
        factors = write("Mul", *(write("Gather", factors, write.constant(half), axis=-1) for half in halves))
        size //= 2
    return write.squeezed(factors, -1)


def _two(write: Writer) -> Any:
    return write.constant(torch.tensor(2))


def _wrapped(number: int) -> int:
    """Of a number from 0 on, that of the same 64 bits with a sign."""
    return number - 2**_BITS if number >= 2 ** (_BITS - 1) else number
