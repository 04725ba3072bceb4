"""Sizes in Python: comparisons of dynamic sizes, the numbers made of them, and the sizes at which they turn."""

from __future__ import annotations

import itertools
import math
import operator
import sys
import zlib
from collections import ChainMap, Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from svexport.errors import ExportError
from svexport.exporter.inputs import Resized
from svexport.exporter.rounded import nearest_unlike
from svexport.exporter.sizes_of_file import SizesOfFile, unlike
from svexport.tracing.source import around, caller, is_library, is_own, near, raising_line, shown_line, user_line

__all__ = ["Borders", "Sizes", "Turn", "formula", "is_found", "refuse_beyond"]

MOST_OF_A_LINE = 8
"""Comparisons of one line that are kept, as where layers of one kind share it."""

TRIES = 6
"""Sizes that are tried to turn one comparison."""

MOST_RUNS = 24
"""Of one verification, to turn comparisons."""

NEAR = 128
"""Sizes up to this one are asked where a number that Python takes passes one of the source."""

MOST_NUMBERS = 24
"""Of one verification, with sizes that are numbers of the source."""

FAR = 4096
"""Sizes up to this one are asked one by one where a comparison turns, then those around powers of two."""

NEXT = 1e-6
"""Relative, as far as a float may be from where it would be rounded to another number, which others compute it to."""

MOST_ROUNDED = 16
"""Of one verification, with sizes at which a float that Python rounds is next to where that goes."""

MOST_ASKED = 128
"""Sizes of which it is asked what a file makes of them."""

MOST_LOOKED_UP = 20_000
"""Sizes that are asked for to compute a float at others."""

ROUNDED_UP_TO = 1024
"""Sizes up to this one are asked where a float is rounded."""

ANYWAY = "svexport.export(..., verify=False) writes the file anyway"

WITHOUT_NUMBERS = (
    "Compute with the sizes alone (pad and slice by them, torch.where of a comparison as a tensor), give the model a "
    "size as a number of its own instead of a dynamic one, or declare the dynamic size"
)
"""What to write instead of numbers made of dynamic sizes."""

Run = tuple[str, list[Tensor]]
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
        value = _plain(number)
        self.note(name, True, lambda v: _at(number, v) == value, depth + 1, number)

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
            return (_at(end, values) - _at(start, values)) / _at(step, values)  # type: ignore[no-any-return]

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


def _plain(value: Any) -> Any:
    if isinstance(value, _Int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _Float) else value


def _at(value: Any, values: Values) -> Any:
    return value.at(values) if isinstance(value, _Number) else value


def _others(old: Any, new: Any, values: Values) -> bool:
    return nearest_unlike(_at(old, values), _at(new, values))


def _is_of_sizes(value: Any) -> bool:
    return isinstance(value, _Number)


def is_found(value: Any) -> bool:
    """Whether a number is how many a mask found, or was computed of that."""
    return isinstance(value, _Number) and value.found


def formula(value: Any) -> Any:
    """A number by how it was computed of sizes, where tracers follow that; None of any other."""
    return value.formula if isinstance(value, _Number) else None


def _made(function: Callable[..., Any], operands: tuple[Any, ...], sizes: Sizes) -> Any:
    """What a function makes of numbers."""
    value = function(*map(_plain, operands))
    kind: type[_Number] | None = {int: _Int, float: _Float}.get(type(value))
    if kind is None:
        return value
    followed, found = _formula(function, operands), any(map(is_found, operands))

    def at(values: Values) -> Any:
        return function(*(_at(operand, values) for operand in operands))

    if function in _ROUNDING and any(isinstance(operand, float) for operand in operands[: _ROUNDING[function]]):
        divided = function in (operator.floordiv, operator.mod)

        def before(values: Values) -> float:
            first, *rest = (_at(operand, values) for operand in operands)
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
            return _plain(made)
        return made

    return method


def _comparing(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        truth = function(_plain(self), _plain(other))
        self.sizes.note(function.__name__, truth, lambda v: function(_at(self, v), _at(other, v)), 2)
        return truth

    return method


def _truth(self: Any) -> bool:
    truth = bool(_plain(self))
    self.sizes.note("bool", truth, lambda v: bool(_at(self, v)), 2)
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


class Borders:
    """Finds sizes on both sides of each comparison that Python made of dynamic ones.

    Attributes:
        turned: lines that compare, by the sizes at which each came out the other way.
    """

    def __init__(self, resized: Resized, most: int) -> None:
        """``most`` elements may be tried."""
        self._resized, self._most = resized, most
        self._runs: list[Sizes] = []
        self._first: dict[Place, tuple[Turn, Sizes]] = {}
        self._roundings: dict[Place, tuple[Rounding, Sizes]] = {}
        self._tries: Counter[Place] = Counter()
        self._open: dict[Place, None] = {}
        self._beyond: dict[Place, None] = {}
        self._asked: set[tuple[tuple[str, int], ...]] = set()
        self._left = MOST_RUNS
        self._rounded: dict[str, tuple[str, int, str]] = {}
        self.turned: dict[tuple[str, int, str], str] = {}

    def new_run(self, inputs: Sequence[Tensor]) -> Sizes:
        """The symbols of another run, by the sizes of its inputs."""
        return Sizes(self._resized.roots(inputs), self._resized.axes)

    def add(self, run: Sizes) -> None:
        """A run that has been compared."""
        self._runs.append(run)
        for rounded, rounding in run.roundings.items():
            self._roundings.setdefault(rounded, (rounding, run))
        for place, turn in run.turns.items():
            if place not in self._first:
                self._first[place] = turn, run
                self._open[place] = None
            elif turn.truth != self._first[place][0].truth and place in self._open:
                del self._open[place]
                if turn.own and turn.number is None:
                    changed = {r: n for r, n in run.roots.items() if n != self._first[place][1].roots[r]}
                    self.turned.setdefault(turn.line, ", ".join(f"{r}={n}" for r, n in changed.items()))

    def fails(self, error: BaseException) -> None:
        """Notes that the model raised: where a comparison was to turn that it raises for, there is no other side."""
        if (line := raising_line(error)) is not None:
            self._open = {p: None for p in self._open if not near(self._first[p][0].line, line)}

    def runs(self) -> Iterator[Iterator[Run]]:
        """Each with sizes that are to turn a comparison which has always come out the same in those before."""
        while self._left and (wanted := self._next()) is not None:
            self._left -= 1
            yield self._resized.at(wanted, self._most)

    def runs_near_numbers(self, numbers: Callable[[], Iterable[float]]) -> Iterator[Iterator[Run]]:
        """Each with a size that makes a number of the user's source of what Python took, or one more.

        That may be a key, or a range of steps one step longer.
        """
        taken = [found for place, found in self._first.items() if found[0].number is not None and self._varying(*found)]
        reads = any(run.reads for run in self._runs)
        wanted: dict[tuple[str, int], None] = {}
        known = sorted(set(numbers())) if taken or reads else []
        for number in known:
            for root, (low, high) in self._resized.ranges.items():
                if number >= self._resized.given[root] and low <= number < high and number == int(number):
                    wanted.setdefault((root, int(number) + 1))
        for number in around(n * k for n in known for k in (1, max(n, 1))) if taken else ():
            for turn, run in taken[:MOST_OF_A_LINE]:
                for root in self._resized.ranges:
                    wanted |= dict.fromkeys((root, size) for size in self._reaching(number, turn, run, root))
        left = MOST_NUMBERS
        for root, size in wanted:
            if left and not self._resized.too_large({root: size}, self._most):
                left -= 1
                yield self._resized.at({root: size}, self._most)

    def runs_at_roundings(self, file: SizesOfFile) -> Iterator[Iterator[Run]]:
        """Each with a size at which a float of Python is next to where it would be rounded to another number.

        First where what the file computes of sizes is another there, then some of each kind: a little less, a little
        more, exactly there.
        """
        left = MOST_ROUNDED
        for rounding, run in list(self._roundings.values())[:MOST_OF_A_LINE]:
            for root in run.roots:
                for size in self._next_to_borders(rounding, run, root, file):
                    if left:
                        left -= 1
                        self._rounded[f"{root}={size}"] = rounding.line
                        yield self._resized.at({root: size}, self._most)

    def runs_of_nearest(self) -> Iterator[Iterator[Run]]:
        """Each with a size at which ONNX's Resize may take other nearest pixels than torch."""
        run = self._runs[0] if self._runs else None
        for turn in list(run.nearest.values())[:MOST_OF_A_LINE] if run is not None else ():
            for root in run.roots:  # type: ignore[union-attr]
                turns = self._turns(turn, run, root, self._varying(turn, run))  # type: ignore[arg-type]
                sizes = self._candidates(root, run.roots[root], 1, ROUNDED_UP_TO)  # type: ignore[union-attr]
                near = itertools.takewhile(lambda size: size <= ROUNDED_UP_TO, sizes)
                for size in itertools.islice(filter(turns, near), 2):
                    yield self._resized.at({root: size}, self._most)

    def _next_to_borders(self, rounding: Rounding, run: Sizes, root: str, file: SizesOfFile) -> Iterator[int]:
        asked = _Asked(run.values)
        with suppress(Exception):
            rounding.before(asked)
        known = {place: self._known(place, run, root) for place in asked.places}
        found: dict[int, tuple[float, int]] = {}
        sizes_to_ask = self._candidates(root, run.roots[root], 1, ROUNDED_UP_TO)
        for size in itertools.islice(sizes_to_ask, MOST_LOOKED_UP // max(asked.count, 1)):
            if size > ROUNDED_UP_TO or self._resized.too_large({root: size}, self._most):
                continue
            values = ChainMap({place: _on_a_line(sizes, size) for place, sizes in known.items()}, run.values)
            with suppress(Exception):  # divided by zero, say
                number = rounding.before(values) - 0.5 * rounding.half  # type: ignore[arg-type]
                if abs(number - round(number)) <= NEXT * max(abs(number), 1.0):
                    found[size] = number - round(number), int(rounding.after(values))  # type: ignore[arg-type]
        if len({after for _, after in found.values()}) < 2:  # of another size than this one
            return
        wanted = dict.fromkeys(
            itertools.islice(self._unlike(root, {n: after for n, (_, after) in found.items()}, file), 3)
        )
        for kind in (lambda off: off < 0, lambda off: off > 0, lambda off: off == 0):
            wanted |= dict.fromkeys(itertools.islice((n for n, (off, _) in found.items() if kind(off)), 2))
        yield from wanted

    def _unlike(self, root: str, python: Mapping[int, int], file: SizesOfFile) -> Iterator[int]:
        sizes = list(python)[:MOST_ASKED]
        given = self._resized.given
        its = {size: numbers for size in sizes if (numbers := file.at({**given, root: size}))}
        yield from unlike(list(its), [python[size] for size in its], list(its.values()))

    def near(self) -> Iterator[dict[str, int]]:
        """Dynamic sizes that are less than :data:`NEAR` off the given ones, each alone, and all: the nearest first."""
        given = self._resized.given
        for by in (sign * n for n in range(1, NEAR) for sign in (1, -1)):
            alone = [{root: size + by} for root, size in given.items()]
            together = {root: size + by for root, size in given.items()}
            for sizes in alone if len(alone) == 1 else (*alone, together):
                if all(max(self._resized.ranges[r][0], 1) <= n <= self._resized.ranges[r][1] for r, n in sizes.items()):
                    yield sizes

    def _reaching(self, number: float, turn: Turn, run: Sizes, root: str) -> Iterator[int]:
        """The nearest size of ``root`` at which what Python took should be on the other side of a number, or be it."""
        taken = turn.number
        below = _plain(taken) < number
        crossing = Turn(turn.line, turn.own, taken, below, lambda v: _at(taken, v) < number)
        turns = self._turns(crossing, run, root, self._varying(turn, run))
        yield from itertools.islice(filter(turns, self._candidates(root, run.roots[root], 1, NEAR)), 1)

    def other_way(self, run: Sizes) -> list[tuple[str, int, str]]:
        """Lines of the user's that compare sizes, which come out another way in a run than on the given inputs."""
        given = self._runs[0].turns if self._runs else {}
        return list(dict.fromkeys(t.line for p, t in run.turns.items() if p in given and given[p].truth != t.truth))

    def rounded(self, run: str) -> tuple[str, int, str] | None:
        """The user's line that rounds a float of sizes, for which a run of that name was."""
        return self._rounded.get(run)

    def reads(self, run: Sizes) -> list[tuple[str, int, str]]:
        """Lines of the user's that ask for sizes, in a run of other ones than are given."""
        return [] if run.roots == self._resized.given else list(run.reads)

    def beyond(self) -> list[Turn]:
        """Comparisons of the user's that turn at sizes only that are too large to try."""
        turns = [self._first[place][0] for place in self._beyond if place in self._open]
        return [turn for turn in turns if turn.own and turn.number is None]

    def _next(self) -> dict[str, int] | None:
        for place in list(self._open):
            turn, run = self._first[place]
            wanted = None if self._tries[place] >= TRIES else self._turning(place, turn, run)
            if wanted is not None:
                self._tries[place] += 1
                return wanted
        return None

    def _turning(self, place: Place, turn: Turn, run: Sizes) -> dict[str, int] | None:
        """Sizes at which it should come out the other way; none of what is the same at all sizes."""
        varying = self._varying(turn, run)
        if not varying:
            del self._open[place]
            return None
        changed = {r: n for r, n in run.roots.items() if n != self._resized.given[r]}
        large = False
        for step in (lambda n: 1, lambda n: n & -n, lambda n: n):
            for root, n in run.roots.items():
                turns = self._turns(turn, run, root, varying)
                for size in filter(turns, self._candidates(root, n, step(n) or 1)):
                    wanted = {**changed, root: size}
                    key = tuple(sorted(wanted.items()))
                    if key in self._asked:
                        continue
                    if self._resized.too_large(wanted, self._most):
                        large = True
                        break
                    self._asked.add(key)
                    return wanted
        if large and not self._tries[place]:
            self._beyond[place] = None
        self._tries[place] = TRIES
        return None

    def _candidates(self, root: str, n: int, step: int, far: int = FAR) -> Iterator[int]:
        """Sizes by how far they are from one."""
        low, high = self._resized.ranges[root]
        near = sorted(range(max(low, 1), int(min(high, far)) + 1), key=lambda size: abs(size - n))
        powers = (size for exponent in range(12, 31) for size in (2**exponent, 2**exponent + 1, 3 * 2**exponent // 2))
        yield from (size for size in (*near, *powers) if size % step == 0 and low <= size <= high and size != n)

    def _varying(self, turn: Turn, run: Sizes) -> set[Hashable]:
        """The sizes that a comparison is of, but for those that are the same in all runs."""
        asked = _Asked(run.values)
        try:
            turn.test(asked)
        except Exception:  # noqa: BLE001 - numbers too deep for recursion
            return set()
        return {p for p in asked.places if p in run.roots or self._varies(p, run.values[p])}

    def _varies(self, place: Hashable, value: int) -> bool:
        return any(run.values.get(place, value) != value for run in self._runs)

    def _turns(self, turn: Turn, run: Sizes, root: str, varying: Iterable[Hashable]) -> Callable[[int], bool]:
        """Whether a comparison should come out the other way at a size of ``root``."""
        known = {place: self._known(place, run, root) for place in varying}

        def turns(size: int) -> bool:
            expected = {place: _on_a_line(sizes, size) for place, sizes in known.items()}
            try:
                return turn.test(ChainMap(expected, run.values)) != turn.truth  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 - divided by zero, say
                return False

        return turns

    def _known(self, place: Hashable, run: Sizes, root: str) -> dict[int, int]:
        """A size by that of ``root``; in runs that differ by nothing else, if there are any."""
        if place in run.roots:
            n = run.roots[place]  # type: ignore[index]
            return {0: 0, 1: 1} if place == root else {n: n}
        runs = [other for other in self._runs if place in other.values]
        known = {r.roots[root]: r.values[place] for r in runs if _alone(r, run, root)}
        if len(known) < 2:
            known |= {r.roots[root]: r.values[place] for r in runs}
        return known | {run.roots[root]: run.values[place]}


def _on_a_line(known: Mapping[int, int], size: int) -> int:
    """Between, or beyond, the nearest two that are known."""
    if size in known or len(known) < 2:
        return known[size if size in known else next(iter(known))]
    a, b = sorted(known, key=lambda n: abs(n - size))[:2]
    return known[a] + math.floor((known[b] - known[a]) * (size - a) / (b - a) + 0.5)


def _alone(one: Sizes, other: Sizes, root: str) -> bool:
    return all(n == other.roots[r] for r, n in one.roots.items() if r != root)


class _Asked(dict[Hashable, int]):
    """Sizes that know which of them were asked for, and how often any was."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.places: set[Hashable] = set()
        self.count = 0

    def __getitem__(self, place: Hashable) -> int:
        self.count += 1
        self.places.add(place)
        return super().__getitem__(place)


def refuse_beyond(turns: Sequence[Turn], symbol: str) -> NoReturn:
    """Raises an ExportError that names the lines which go another way at other sizes."""
    where = "".join(f"\n  at {shown_line(*line)}" for line in dict.fromkeys(turn.line for turn in turns))
    raise ExportError(
        "forward compares dynamic sizes, which come out the other way only where inputs are too large to try; a file "
        f"has one way for all. No file was written.{where}\n"
        f"  {WITHOUT_NUMBERS}, as torch.export.Dim({symbol!r}, min=..., max=...) on one side of it. {ANYWAY}"
    )
