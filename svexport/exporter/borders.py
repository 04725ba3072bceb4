"""Python numbers from dynamic sizes: comparisons, numbers computed from sizes, and the sizes at which they change."""

from __future__ import annotations

import itertools
import math
from collections import ChainMap, Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from torch import Tensor

from svexport.errors import ExportError
from svexport.exporter.followed import MOST_OF_A_LINE, Place, Rounding, Sizes, Turn, Values, made_at, plain
from svexport.exporter.inputs import FAR_SIZE, Resized
from svexport.exporter.sizes_of_file import SizesOfFile, unlike
from svexport.tracing.source import around, near, raising_line, shown_line

__all__ = ["ANYWAY", "MOST_RUNS", "WITHOUT_NUMBERS", "Borders", "refuse_beyond"]

TRIES = 6
"""Sizes that are tried to turn one comparison."""

MOST_BEFORE = 16
"""Comparisons before one, which are to come out as they did."""

MOST_RUNS = 24
"""Maximum runs per verification that turn comparisons."""

NEAR = 128
"""Sizes up to this one are asked where a number that Python takes passes one of the source."""

MOST_NUMBERS = 24
"""Maximum runs per verification with sizes that are numbers in the source."""

NEXT = 1e-6
"""Relative, as far as a float may be from where it would be rounded to another number, which others compute it to."""

MOST_ROUNDED = 16
"""Maximum runs per verification with sizes at which a float that Python rounds is close to a border."""

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
"""Advice on what to write instead of numbers computed from dynamic sizes."""

Run = tuple[str, list[Tensor]]


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
                changed = {r: n for r, n in run.roots.items() if n != self._first[place][1].roots[r]}
                if 1 not in changed.values():  # of one element a sum is its mean: both ways may compute the same
                    del self._open[place]
                if turn.own and turn.number is None:
                    self.turned[turn.line] = ", ".join(f"{r}={n}" for r, n in changed.items())

    def fails(self, error: BaseException) -> None:
        """Notes that the model raised: where a comparison was to turn that it raises for, there is no other side."""
        if (line := raising_line(error)) is not None:
            self._open = {p: None for p in self._open if not near(self._first[p][0].line, line)}

    def runs(self) -> Iterator[Iterator[Run]]:
        """Each with sizes that are to turn a comparison which has always come out the same in those before."""
        while self._left and (wanted := self._next()) is not None:
            self._left -= 1
            yield self._resized.at(wanted, self._most)

    def runs_near_numbers(self, numbers: Callable[[], Iterable[float]], keys: bool) -> Iterator[Iterator[Run]]:
        """Each with a size that makes a number of the user's source of what Python took, or one more.

        That may be a range of steps one step longer; with ``keys`` also something that is looked up by a size, which is
        that number, or twice that.
        """
        taken = [found for place, found in self._first.items() if found[0].number is not None and self._varying(*found)]
        reads = any(run.reads for run in self._runs)
        wanted: dict[tuple[str, int], None] = {}
        known = sorted(set(numbers())) if taken or reads or keys else []
        for number in known:
            for root, (low, high) in self._resized.ranges.items():
                if number >= self._resized.given[root] and low <= number < high and number == int(number):
                    wanted.setdefault((root, int(number) + 1))
        for number in around(n * k for n in known for k in (1, max(n, 1))) if taken else ():
            for turn, run in taken[:MOST_OF_A_LINE]:
                for root in self._resized.ranges:
                    wanted |= dict.fromkeys((root, size) for size in self._reaching(number, turn, run, root))
        for size in (int(n) * k for k in (1, 2) for n in known if keys and n == int(n)):
            for root, (low, high) in self._resized.ranges.items():
                if self._resized.given[root] < size <= high and low <= size:
                    wanted.setdefault((root, size))
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
                sizes = self._resized.others(root, run.roots[root], 1, ROUNDED_UP_TO)  # type: ignore[union-attr]
                near = itertools.takewhile(lambda size: size <= ROUNDED_UP_TO, sizes)
                for size in itertools.islice(filter(turns, near), 2):
                    yield self._resized.at({root: size}, self._most)

    def _next_to_borders(self, rounding: Rounding, run: Sizes, root: str, file: SizesOfFile) -> Iterator[int]:
        asked = _Asked(run.values)
        with suppress(Exception):
            rounding.before(asked)
        known = {place: self._known(place, run, root) for place in asked.places}
        found: dict[int, tuple[float, int]] = {}
        sizes_to_ask = self._resized.others(root, run.roots[root], 1, ROUNDED_UP_TO)
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
        below = plain(taken) < number
        crossing = Turn(turn.line, turn.own, taken, below, lambda v: made_at(taken, v) < number)
        turns = self._turns(crossing, run, root, self._varying(turn, run))
        yield from itertools.islice(filter(turns, self._resized.others(root, run.roots[root], 1, NEAR)), 1)

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
        for root, sizes in self._searches(place, turn, run, varying):
            for size in sizes:
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

    def _searches(
        self, place: Place, turn: Turn, run: Sizes, varying: set[Hashable]
    ) -> Iterator[tuple[str, Iterator[int]]]:
        """Of each root the sizes at which a comparison should come out the other way: first one at which forward comes
        to it at all, as far as those before it say; then all, and those that keep what the given size is divided by."""
        turns = {root: self._turns(turn, run, root, varying) for root in run.roots}
        before = self._before(place, run)
        for root, n in run.roots.items() if before else ():
            others = [self._turns(other, run, root, places) for other, places in before]
            near = itertools.islice(filter(turns[root], self._resized.others(root, n)), FAR_SIZE)
            kept = (size for size in near if not any(other(size) for other in others))
            yield root, itertools.islice(kept, 1)
        for step in (lambda n: 1, lambda n: n & -n, lambda n: n):
            for root, n in run.roots.items():
                yield root, filter(turns[root], self._resized.others(root, n, step(n) or 1))

    def _before(self, place: Place, run: Sizes) -> list[tuple[Turn, set[Hashable]]]:
        """The last of the user's comparisons before one, with the sizes that each is of."""
        earlier = itertools.takewhile(lambda other: other != place, run.turns)
        own = [turn for turn in map(run.turns.__getitem__, earlier) if turn.own][-MOST_BEFORE:]
        return [(turn, varying) for turn in own if (varying := self._varying(turn, run))]

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
        f"takes the same branches for all. No file was written.{where}\n"
        f"  {WITHOUT_NUMBERS}, as torch.export.Dim({symbol!r}, min=..., max=...) on one side of it. {ANYWAY}"
    )
