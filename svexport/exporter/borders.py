"""Python code on dynamic sizes: its comparisons and numbers, and the sizes at which a comparison changes."""

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
"""Most sizes tried to make one comparison come out the other way."""

MOST_BEFORE = 16
"""Number of preceding comparisons that are to come out as before, so that forward reaches the one to turn."""

MOST_RUNS = 24
"""Most runs of one verification that are to turn comparisons."""

NEAR = 128
"""Sizes up to this one are considered to find where a number that Python takes passes a number in the source."""

MOST_NUMBERS = 24
"""Most runs of one verification with sizes that come from numbers in the source."""

NEXT = 1e-6
"""Relative distance from a rounding border within which another runtime may round a float to the other side."""

MOST_ROUNDED = 16
"""Most runs of one verification with sizes at which a float that Python rounds is next to a rounding border."""

MOST_ASKED = 128
"""Most sizes for which the file's own numbers are computed."""

MOST_LOOKED_UP = 20_000
"""Limit on lookups of sizes when a float is computed at other sizes."""

ROUNDED_UP_TO = 1024
"""Sizes up to this one are considered for floats that are rounded."""

ANYWAY = "svexport.export(..., verify=False) writes the file anyway"

WITHOUT_NUMBERS = (
    "Use sizes only as sizes (pad and slice by them, compare them in a tensor and choose by torch.where), give the "
    "model a fixed number instead of a dynamic size, or declare the dynamic size"
)
"""Advice: what to write instead of numbers made of dynamic sizes."""

Run = tuple[str, list[Tensor]]


class Borders:
    """Finds sizes on both sides of each comparison of dynamic sizes that Python made.

    Attributes:
        turned: for each line that compares, the sizes at which it came out the other way.
    """

    def __init__(self, resized: Resized, most: int) -> None:
        """``most`` is the largest number of elements in a run."""
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
        """A record for another run, with the roots of its inputs' sizes."""
        return Sizes(self._resized.roots(inputs), self._resized.axes)

    def add(self, run: Sizes) -> None:
        """Adds a run that has been compared."""
        self._runs.append(run)
        for rounded, rounding in run.roundings.items():
            self._roundings.setdefault(rounded, (rounding, run))
        for place, turn in run.turns.items():
            if place not in self._first:
                self._first[place] = turn, run
                self._open[place] = None
            elif turn.truth != self._first[place][0].truth and place in self._open:
                changed = {r: n for r, n in run.roots.items() if n != self._first[place][1].roots[r]}
                if 1 not in changed.values():  # the sum of one element is its mean: both branches may agree
                    del self._open[place]
                if turn.own and turn.number is None:
                    self.turned[turn.line] = ", ".join(f"{r}={n}" for r, n in changed.items())

    def fails(self, error: BaseException) -> None:
        """Notes that the model raised: a comparison that guards the raising line has no other side to compare."""
        if (line := raising_line(error)) is not None:
            self._open = {p: None for p in self._open if not near(self._first[p][0].line, line)}

    def runs(self) -> Iterator[Iterator[Run]]:
        """Yields runs with sizes that should turn a comparison which has come out the same in all earlier runs."""
        while self._left and (wanted := self._next()) is not None:
            self._left -= 1
            yield self._resized.at(wanted, self._most)

    def runs_near_numbers(self, numbers: Callable[[], Iterable[float]], keys: bool) -> Iterator[Iterator[Run]]:
        """Yields runs with a size at which a number that Python took equals a number in the user's source, or one more.

        One more may make a range one step longer. With ``keys``, also runs whose size is such a number or twice it, for
        tables that are looked up by a size.
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
        """Yields runs with a size at which a Python float is next to a rounding border.

        Sizes at which the file computes another number come first, then some of each kind: slightly below the border,
        slightly above it, exactly on it.
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
        """Yields runs with a size at which ONNX's Resize may take other nearest pixels than torch."""
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
            with suppress(Exception):  # for example a division by zero
                number = rounding.before(values) - 0.5 * rounding.half  # type: ignore[arg-type]
                if abs(number - round(number)) <= NEXT * max(abs(number), 1.0):
                    found[size] = number - round(number), int(rounding.after(values))  # type: ignore[arg-type]
        if len({after for _, after in found.values()}) < 2:  # it does not vary with this size
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
        """Dynamic sizes less than :data:`NEAR` from the given ones, changed alone and all together, nearest first."""
        given = self._resized.given
        for by in (sign * n for n in range(1, NEAR) for sign in (1, -1)):
            alone = [{root: size + by} for root, size in given.items()]
            together = {root: size + by for root, size in given.items()}
            for sizes in alone if len(alone) == 1 else (*alone, together):
                if all(max(self._resized.ranges[r][0], 1) <= n <= self._resized.ranges[r][1] for r, n in sizes.items()):
                    yield sizes

    def _reaching(self, number: float, turn: Turn, run: Sizes, root: str) -> Iterator[int]:
        """The nearest size of ``root`` at which the number that Python took should equal ``number``, or pass it."""
        taken = turn.number
        below = plain(taken) < number
        crossing = Turn(turn.line, turn.own, taken, below, lambda v: made_at(taken, v) < number)
        turns = self._turns(crossing, run, root, self._varying(turn, run))
        yield from itertools.islice(filter(turns, self._resized.others(root, run.roots[root], 1, NEAR)), 1)

    def other_way(self, run: Sizes) -> list[tuple[str, int, str]]:
        """The user's lines whose comparison of sizes comes out differently in this run than on the given inputs."""
        given = self._runs[0].turns if self._runs else {}
        return list(dict.fromkeys(t.line for p, t in run.turns.items() if p in given and given[p].truth != t.truth))

    def rounded(self, run: str) -> tuple[str, int, str] | None:
        """The user's line that rounds a float of sizes, if the run of this name was made for it."""
        return self._rounded.get(run)

    def reads(self, run: Sizes) -> list[tuple[str, int, str]]:
        """The user's lines that read sizes, in a run whose sizes are not the given ones."""
        return [] if run.roots == self._resized.given else list(run.reads)

    def beyond(self) -> list[Turn]:
        """The user's comparisons that turn only at sizes too large to try."""
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
        """Sizes at which the comparison should come out the other way; None if no size to try turns it."""
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
        """For each root, sizes at which a comparison should come out the other way. First one at which the preceding
        comparisons come out as before, so that forward reaches it; then any; then multiples that keep divisibility."""
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
        """The user's last comparisons before a place, each with the sizes that it depends on."""
        earlier = itertools.takewhile(lambda other: other != place, run.turns)
        own = [turn for turn in map(run.turns.__getitem__, earlier) if turn.own][-MOST_BEFORE:]
        return [(turn, varying) for turn in own if (varying := self._varying(turn, run))]

    def _varying(self, turn: Turn, run: Sizes) -> set[Hashable]:
        """The sizes that a comparison depends on, without those that are equal in all runs."""
        asked = _Asked(run.values)
        try:
            turn.test(asked)
        except Exception:  # noqa: BLE001 - numbers too deep for recursion
            return set()
        return {p for p in asked.places if p in run.roots or self._varies(p, run.values[p])}

    def _varies(self, place: Hashable, value: int) -> bool:
        return any(run.values.get(place, value) != value for run in self._runs)

    def _turns(self, turn: Turn, run: Sizes, root: str, varying: Iterable[Hashable]) -> Callable[[int], bool]:
        """A function that tells whether a comparison should come out the other way at a size of ``root``."""
        known = {place: self._known(place, run, root) for place in varying}

        def turns(size: int) -> bool:
            expected = {place: _on_a_line(sizes, size) for place, sizes in known.items()}
            try:
                return turn.test(ChainMap(expected, run.values)) != turn.truth  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 - for example a division by zero
                return False

        return turns

    def _known(self, place: Hashable, run: Sizes, root: str) -> dict[int, int]:
        """Values of a size by the size of ``root``: from runs that differ in ``root`` alone, if there are enough."""
        if place in run.roots:
            n = run.roots[place]  # type: ignore[index]
            return {0: 0, 1: 1} if place == root else {n: n}
        runs = [other for other in self._runs if place in other.values]
        known = {r.roots[root]: r.values[place] for r in runs if _alone(r, run, root)}
        if len(known) < 2:
            known |= {r.roots[root]: r.values[place] for r in runs}
        return known | {run.roots[root]: run.values[place]}


def _on_a_line(known: Mapping[int, int], size: int) -> int:
    """Linear interpolation or extrapolation from the two nearest known values, rounded."""
    if size in known or len(known) < 2:
        return known[size if size in known else next(iter(known))]
    a, b = sorted(known, key=lambda n: abs(n - size))[:2]
    return known[a] + math.floor((known[b] - known[a]) * (size - a) / (b - a) + 0.5)


def _alone(one: Sizes, other: Sizes, root: str) -> bool:
    return all(n == other.roots[r] for r, n in one.roots.items() if r != root)


class _Asked(dict[Hashable, int]):
    """Sizes that record which of them were read, and how many reads there were."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.places: set[Hashable] = set()
        self.count = 0

    def __getitem__(self, place: Hashable) -> int:
        self.count += 1
        self.places.add(place)
        return super().__getitem__(place)


def refuse_beyond(turns: Sequence[Turn], symbol: str) -> NoReturn:
    """Raises an ExportError that names the lines which branch differently at sizes too large to try."""
    where = "".join(f"\n  at {shown_line(*line)}" for line in dict.fromkeys(turn.line for turn in turns))
    raise ExportError(
        "forward compares dynamic sizes, and the comparison comes out the other way only for inputs too large to try; "
        f"a file takes the same branches for all inputs. No file was written.{where}\n"
        f"  {WITHOUT_NUMBERS}, as torch.export.Dim({symbol!r}, min=..., max=...) on one side of it. {ANYWAY}"
    )
