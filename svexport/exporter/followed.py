"""Sizes as numbers that record how Python compares, rounds and transforms them."""

from __future__ import annotations

import math
import operator
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from svexport.exporter.rounded import nearest_unlike
from svexport.tracing.source import caller, is_library, is_own, user_line

__all__ = ["MOST_OF_A_LINE", "Place", "Rounding", "Sizes", "Turn", "Values", "formula", "is_found", "made_at", "plain"]

MOST_OF_A_LINE = 8
"""Comparisons of one line that are kept, as where layers of one kind share it."""

Values = Mapping[Hashable, int]
Place = tuple[Any, ...]
"""Of a comparison: its line, where in that, and how many were there before."""


@dataclass(frozen=True)
class Turn:
    """A comparison of sizes, or a number made of them, which compares with itself: it turns where that is another.

    Attributes:
        line: the user's: path, number and function.
        own: whether that line itself compares, not torch's code below it.
        number: that Python took; None of a comparison.
        truth: what came out.
        test: what would, of other sizes.
    """

    line: tuple[str, int, str]
    own: bool
    number: Any
    truth: bool
    test: Callable[[Values], bool]


@dataclass(frozen=True)
class Rounding:
    """A float made of sizes that Python rounds to a whole number.

    Attributes:
        line: the user's: path, number and function.
        before: the float, of other sizes.
        after: the whole number.
        half: whether borders are halves between whole numbers.
    """

    line: tuple[str, int, str]
    before: Callable[[Values], float]
    after: Callable[[Values], Any]
    half: bool = False


class Sizes:
    """The sizes that Python gets in one run, and what it compares them with.

    Attributes:
        roots: of the dynamic sizes of the inputs.
        values: all sizes, by where they are from.
        turns: comparisons, by where they are.
        roundings: of floats, by where they are.
        nearest: whether a file may take other pixels than torch, by where these are taken.
        reads: lines of the user's that get sizes.
    """

    def __init__(self, roots: Mapping[str, int], axes: Sequence[Mapping[int, Any]]) -> None:
        """``axes`` has the dynamic :class:`Size` of each input's axes."""
        self.roots = dict(roots)
        self.values: dict[Hashable, int] = {root: size for root, size in roots.items()}  # noqa: C416 - of another type
        self.turns: dict[Place, Turn] = {}
        self.roundings: dict[Place, Rounding] = {}
        self.nearest: dict[Place, Turn] = {}
        self.reads: dict[tuple[str, int, str], None] = {}
        self.outside: CodeType | None = None
        self._axes = axes
        self._counts: Counter[Any] = Counter()

    def of(self, shape: Iterable[int], origin: Any, found: bool = False) -> torch.Size:
        """The shape of a tensor of that origin, with sizes that know where they are from."""
        self._look(caller(sys._getframe(3)), origin)
        return torch.Size([self.size(size, origin, axis, found) for axis, size in enumerate(shape)])

    def size(self, size: int, origin: Any, axis: int, found: bool = False) -> int:
        """The size of an axis in this run, from that of the given inputs and what it came from."""
        if origin is None:
            return size
        if origin[0] == "known":
            dynamic = self._axes[origin[1]].get(axis) if origin[1] < len(self._axes) else None
            if dynamic is None:
                return size
            formula = dynamic.size(_number_of(dynamic.root))
            return _Int.made(size, lambda v: dynamic.size(v[dynamic.root]), self, formula)
        place = (origin, axis)
        self.values[place] = size
        return _Int.made(size, lambda v: v[place], self, _number_of(place), found)

    def take(self, number: Any, name: str, depth: int = 2) -> None:
        """Notes that Python took a plain number, by a function of that name."""
        value = plain(number)
        self.note(name, True, lambda v: made_at(number, v) == value, depth + 1, number)

    def _look(self, frame: FrameType, origin: Any) -> None:
        """Notes a line of the user's that gets sizes."""
        code = frame.f_code
        if is_library(code.co_filename) or code is self.outside:
            return
        if origin is not None and (origin[0] != "known" or self._dynamic(origin)):
            self.reads.setdefault((code.co_filename, frame.f_lineno, code.co_name))

    def _dynamic(self, origin: Any) -> bool:
        return origin[1] < len(self._axes) and bool(self._axes[origin[1]])

    def rounds(
        self, name: str, before: Callable[[Values], float], after: Callable[[Values], Any], half: bool, depth: int
    ) -> None:
        """Notes that Python rounds a float to a whole number, by a function of that name."""
        frame = sys._getframe(depth)
        if self.outside is None or is_own(frame.f_code.co_filename):
            return
        line = user_line(frame, self.outside)
        if line is not None:
            self.roundings.setdefault((frame.f_code, frame.f_lasti, name), Rounding(line, before, after, half))

    def steps(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notes that ``torch.arange`` counts steps of floats, which it rounds up."""
        names = ("end",) if len(args) == 1 else ("start", "end", "step")
        given = {"start": 0, "step": 1, **kwargs, **dict(zip(names, args, strict=False))}
        start, end, step = (given.get(name) for name in ("start", "end", "step"))
        numbers = [x for x in (start, end, step) if isinstance(x, (int, float))]
        if len(numbers) < 3 or not any(isinstance(x, float) for x in numbers) or not any(map(_is_of_sizes, numbers)):
            return

        def count(values: Values) -> float:
            return (made_at(end, values) - made_at(start, values)) / made_at(step, values)  # type: ignore[no-any-return]

        self.rounds("arange", count, lambda values: math.ceil(count(values)), False, depth=3)

    def resizes(self, shape: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notes that ``F.interpolate`` takes the nearest pixels of a tensor of that shape."""
        names = ("size", "scale_factor", "mode")
        given = {"size": None, "mode": "nearest", **dict(zip(names, args[1:], strict=False)), **kwargs}
        size = given["size"]
        if given["mode"] != "nearest" or size is None:
            return
        spatial = list(shape)[2:]
        wanted = list(size) if isinstance(size, (list, tuple)) else [size] * len(spatial)
        for axis, (old, new) in enumerate(zip(spatial, wanted, strict=False)):
            if _is_of_sizes(old) or _is_of_sizes(new):
                self._nearest(axis, old, new)

    def _nearest(self, axis: int, old: Any, new: Any) -> None:
        line = user_line(sys._getframe(3), self.outside) if self.outside is not None else None
        if line is not None:
            self.nearest.setdefault((line, axis), Turn(line, False, None, False, lambda v: _others(old, new, v)))

    def note(self, name: str, truth: bool, test: Callable[[Values], bool], depth: int, number: Any = None) -> None:
        """Keeps a comparison that forward made ``depth`` frames up: line, truth, and the test on other sizes."""
        frame = caller(sys._getframe(depth))
        file = frame.f_code.co_filename
        if self.outside is None or is_own(file):
            return
        line = user_line(frame, self.outside)
        if line is None:
            return
        where = (line, frame.f_code, frame.f_lasti, name)
        self._counts[where] += 1
        if self._counts[where] <= MOST_OF_A_LINE:
            own = not is_library(file)
            place = line, frame.f_code, frame.f_lasti, name, self._counts[where]
            self.turns[place] = Turn(line, own, number, truth, test)


class _Number:
    """What :class:`Sizes` gave, or what Python computed of it: a plain number, but for what it tells of itself.

    Attributes:
        at: what it is of other sizes.
        formula: stands for how it was computed, the same for the same arithmetic of the same sizes, whatever these are;
            None where that is no arithmetic that tracers follow.
        found: whether values decide it.
    """

    at: Callable[[Values], Any]
    sizes: Sizes
    formula: Any
    found: bool

    @classmethod
    def made(
        cls, value: Any, at: Callable[[Values], Any], sizes: Sizes, formula: Any = None, found: bool = False
    ) -> Any:
        number = cls(value)  # type: ignore[call-arg]
        number.at, number.sizes, number.formula, number.found = at, sizes, formula, found
        return number


class _Int(_Number, int):
    pass


class _Float(_Number, float):
    pass


def plain(value: Any) -> Any:
    """The number itself, without what follows it."""
    if isinstance(value, _Int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _Float) else value


def made_at(value: Any, values: Values) -> Any:
    """The value that a number would have at other sizes; anything else is returned unchanged."""
    return value.at(values) if isinstance(value, _Number) else value


def _others(old: Any, new: Any, values: Values) -> bool:
    return nearest_unlike(made_at(old, values), made_at(new, values))


def _is_of_sizes(value: Any) -> bool:
    return isinstance(value, _Number)


def is_found(value: Any) -> bool:
    """Whether a number is how many a mask found, or was computed of that."""
    return isinstance(value, _Number) and value.found


def formula(value: Any) -> Any:
    """A number by how it was computed of sizes, where tracers follow that; None of any other."""
    return value.formula if isinstance(value, _Number) else None


def _made(function: Callable[..., Any], operands: tuple[Any, ...], sizes: Sizes) -> Any:
    """Applies a function to numbers and records the result."""
    value = function(*map(plain, operands))
    kind: type[_Number] | None = {int: _Int, float: _Float}.get(type(value))
    if kind is None:
        return value
    followed, found = _formula(function, operands), any(map(is_found, operands))

    def at(values: Values) -> Any:
        return function(*(made_at(operand, values) for operand in operands))

    if function in _ROUNDING and any(isinstance(operand, float) for operand in operands[: _ROUNDING[function]]):
        divided = function in (operator.floordiv, operator.mod)

        def before(values: Values) -> float:
            first, *rest = (made_at(operand, values) for operand in operands)
            return first / rest[0] if divided else first

        sizes.rounds(function.__name__, before, at, function is round, depth=3)
    return kind.made(value, at, sizes, followed, found)


def _formula(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    if function not in _FOLLOWED:
        return None
    of = [o.formula if isinstance(o, _Number) else o for o in operands]
    if any(o is None for o in of):
        return None
    try:
        return hash((function.__name__, *of)) if function in _GROWING else function(*of)
    except (ArithmeticError, TypeError, ValueError):  # of numbers that stand for others
        return None


def _number_of(place: Hashable) -> int:
    """A number that stands for the size at a place, whatever that is."""
    return 1009 + zlib.crc32(repr(place).encode()) % 100003


def _binary(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            if isinstance(other, (list, tuple, str)):  # repeated
                self.sizes.take(self, "repeated")
            return NotImplemented
        return _made(function, (other, self) if swapped else (self, other), self.sizes)

    return method


def _unary(function: Callable[..., Any], number: bool) -> Callable[..., Any]:
    def method(self: Any, *rest: Any) -> Any:
        made = _made(function, (self, *rest), self.sizes)
        if number:
            self.sizes.take(made, function.__name__)
            return plain(made)
        return made

    return method


def _comparing(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        truth = function(plain(self), plain(other))
        self.sizes.note(function.__name__, truth, lambda v: function(made_at(self, v), made_at(other, v)), 2)
        return truth

    return method


def _truth(self: Any) -> bool:
    truth = bool(plain(self))
    self.sizes.note("bool", truth, lambda v: bool(made_at(self, v)), 2)
    return truth


def _divided(self: Any, other: Any) -> Any:
    return self // other, self % other


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OF_INTS = ("and_", "or_", "xor", "lshift", "rshift")
_COMPUTING: tuple[Callable[..., Any], ...] = (abs, math.ceil, math.floor, math.trunc, operator.neg, round)
_TAKING: tuple[Callable[..., Any], ...] = (float, format, hash, int, repr, str)

_ROUNDING: dict[Callable[..., Any], int] = {int: 1, math.ceil: 1, math.floor: 1, math.trunc: 1, round: 1}
_ROUNDING |= {operator.floordiv: 2, operator.mod: 2}
"""Functions that round floats, with how many of their operands may be one."""

_FOLLOWED = {abs, operator.neg, *(getattr(operator, name) for name in _ARITHMETIC + _OF_INTS)}
_GROWING = {operator.pow, operator.lshift}

for _kind in (_Int, _Float):
    for _name in _ARITHMETIC + (_OF_INTS if _kind is _Int else ()):
        _function = getattr(operator, _name)
        setattr(_kind, f"__{_name.strip('_')}__", _binary(_function, swapped=False))
        setattr(_kind, f"__r{_name.strip('_')}__", _binary(_function, swapped=True))
    for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
        setattr(_kind, f"__{_name}__", _comparing(getattr(operator, _name)))
    for _function in _COMPUTING + _TAKING:
        setattr(_kind, f"__{_function.__name__}__", _unary(_function, number=_function in _TAKING))
    _kind.__bool__ = _truth  # type: ignore[attr-defined, method-assign]
    _kind.__divmod__ = _divided  # type: ignore[attr-defined, method-assign]
