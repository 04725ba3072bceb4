"""Checks whether a forward that changes state at each call computes something else after many calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from svexport.errors import VerificationError
from svexport.exporter.agreement import agree
from svexport.exporter.borders import ANYWAY
from svexport.exporter.rounding import Tolerances
from svexport.progress import phase
from svexport.tracing.reach import Place, Reached, bytes_of
from svexport.tracing.state import State, random_state, set_random_state

__all__ = ["refuse_counted"]

COUNTS = (*range(1, 17), 19, 24, 29, 49, 99, 199, 499, 999, 10**4, 10**6)
"""After so many forwards: each of the first, those before round numbers, and many."""

MOST_NUMBERS = 64
"""Counts that bring a counter to a number of the user's source."""

CALLS = 200
"""Forwards that are called where what they change cannot be set to what it will be."""

CALLS_OF_LISTS = 20
"""Likewise where it is but what lists and dicts hold, whose lengths can be."""

LONGEST, MOST_BYTES = 10_000, 2**28
"""Items, and bytes of tensors among them or characters, that are added at most: forward may join them."""


def refuse_counted(
    model: nn.Module,
    inputs: Sequence[Tensor],
    held_to: Tolerances,
    state: State,
    reached: Reached,
    numbers: Callable[[], Iterable[float]],
) -> list[str]:
    """Raises a VerificationError if what forward changes at each call decides what it returns.

    A file has it as it is at first. A warm-up, or a key frame every ten, comes after more forwards than are compared.
    What changes but once is no counter: the size of what is kept, say. Numbers to which each call adds the same, texts,
    lists, dicts and sets that grow or shrink by as much, are what they are after many. Of the rest (generators that go
    on, say) many forwards are called, and of lists and dicts, whose items may differ, a few.

    Args:
        held_to: what results may differ by.
        state: of the model before.
        reached: what forward reaches, as it was after the first.
        numbers: of the user's source.

    Returns:
        notes on what has been tried by calls alone.
    """
    if not reached.changed():
        return []
    try:
        drawn = {key: value for key, value in random_state().items() if key in ("torch", "cuda")}

        def computed() -> Sequence[Tensor]:
            set_random_state(drawn)
            return model(*(t.clone() for t in inputs))  # type: ignore[no-any-return]

        def begin() -> Mapping[str, Place]:
            reached.restore()
            state.restore()
            return reached.again().places

        first, expected = begin(), computed()
        after = [reached.again()]
        for _ in range(2):
            computed()
            after.append(reached.again())
        steps = {name: _step(first, after, name) for name in after[1].differing(after[2])}
        counters = {name: step for name, step in steps.items() if step is not None}
        lists = _growing(after, steps)
        refusal = f"forward changes {', '.join(steps)}, and returns something else"
        way_out = (
            ", which a file cannot. No file was written.\n"
            f"  Pass it as an input and return it, or leave it out of forward. {ANYWAY}"
        )
        for count in _counts(first, counters, lists, numbers) if counters or lists else ():
            places = begin()
            for name, step in counters.items():
                with np.errstate(all="ignore"):
                    places[name].put(places[name].value + step * _fitting(count, step))
            try:
                for grown in lists:
                    grown.go_on(count)
                same = agree(expected, computed(), held_to)
            except Exception:  # noqa: BLE001 - a number that the model never has, or a class that takes no items
                continue
            if not same:
                raise VerificationError(f"{refusal} once that is {count} more{way_out}")
        others = [name for name in steps if name not in counters]
        if not others:
            return []
        in_lists = all(name.startswith(tuple(f"{grown.name}[" for grown in lists)) for name in others)
        calls = CALLS_OF_LISTS if in_lists else CALLS
        phase(f"verifying, {calls} calls")
        begin()
        for call in range(calls):
            if not agree(expected, computed(), held_to):
                raise VerificationError(f"{refusal} at call {call + 1}{way_out}")
        more = min((abs(grown.step) * grown.fitting(LONGEST) for grown in lists), default=0)
        longer = f", and one with {more:,} items more or fewer" if in_lists else ""
        return [f"forward changes {', '.join(others)} at each call; {calls} calls return the same{longer}"]
    finally:
        reached.restore()


class _Growing(NamedTuple):
    """A container to which each call adds ``step`` items, or from which it takes them.

    Attributes:
        start: how many it had before the first call.
        items: those that the last call has added.
        from_left: whether the first are taken, not the last.
    """

    name: str
    container: Any
    start: int
    step: int
    items: list[Any]
    from_left: bool

    def fitting(self, count: int) -> int:
        """How many of ``count`` calls can be simulated at once."""
        size = sum(bytes_of(item) for item in self.items if isinstance(item, (Tensor, np.ndarray)))
        return min(count, LONGEST // abs(self.step), MOST_BYTES // max(size, 1))

    def go_on(self, count: int) -> None:
        """Changes the container as ``count`` more calls would."""
        container, many = self.container, self.fitting(count)
        if self.step < 0:
            gone = min(-self.step * many, len(container))
            for key in [*container][:gone] if self.from_left else [*container][len(container) - gone :]:
                del container[key if isinstance(container, dict) else 0 if self.from_left else -1]
        elif isinstance(container, dict):
            container.update((object(), item) for item in self.items * many)
        elif isinstance(container, set):
            container.update(object() for _ in range(self.step * many))
        else:
            container.extend(self.items * many)


def _growing(after: Sequence[Reached], changed: Iterable[str]) -> list[_Growing]:
    """Containers that grew or shrank by the same amount in each of the last two calls."""
    one, two = ({id(c.container): c.held for c in reached.contents} for reached in after[-3:-1])
    found = []
    for name, container, held in after[-1].contents:
        before, earlier = two.get(id(container)), one.get(id(container))
        if before is None or earlier is None:
            continue
        step = len(held) - len(before)
        if step == 0 or step != len(before) - len(earlier) or (step < 0 and isinstance(container, set)):
            continue
        if isinstance(container, dict) and not any(other.startswith(f"{name}[") for other in changed):
            continue  # attributes of an object
        items = [*held.values()] if isinstance(held, dict) else [*held]
        from_left = step < 0 and bool(items) and next(iter(held)) is not next(iter(before))
        found.append(_Growing(name, container, len(earlier) - step, step, items[len(before) :], from_left))
    return found


def _fitting(count: int, step: Any) -> int:
    """How many of ``count`` steps a text can be extended by."""
    return min(count, MOST_BYTES // len(step)) if isinstance(step, (str, bytes)) else count


def _step(first: Mapping[str, Place], after: Sequence[Reached], name: str) -> Any:
    """The amount by which each of three calls changes a number, a tensor, an array or a text; None if it varies."""
    known = [places[name] for places in (first, *(reached.places for reached in after)) if name in places]
    values = [place.value for place in known]
    if len(known) <= len(after) or known[0].holder is None or len({type(value) for value in values}) > 1:
        return None
    if isinstance(values[0], (str, bytes)):
        _, one, two, three = values
        step = three[len(two) :]
        return step if step and three == two + step and two == one + step else None
    if not isinstance(values[0], (int, float, np.number, np.ndarray, Tensor)) or isinstance(values[0], bool):
        return None
    with suppress(Exception):  # of other shapes, or booleans
        _, one, two, three = values
        step = three - two
        if np.all(np.asarray(abs(step - (two - one)) <= 1e-4 * abs(step))):
            return step
    return None


def _counts(
    first: Mapping[str, Place],
    counters: Mapping[str, Any],
    lists: Sequence[_Growing],
    numbers: Callable[[], Iterable[float]],
) -> Iterable[int]:
    """Those of :data:`COUNTS`, and after which a number or a length is one of the user's, or will be with the next."""
    lengths = [(grown.start, grown.step) for grown in lists]
    for name, step in counters.items():
        value = first[name].value
        if isinstance(value, (str, bytes)):
            lengths.append((len(value), len(step)))
        else:
            lengths.append((np.asarray(value).reshape(-1)[0].item(), np.asarray(step).reshape(-1)[0].item()))
    near = set()
    for start, by in lengths:
        for number in numbers() if by else ():
            near |= {round((number - start) / by) - before for before in (0, 1)}
    return [*COUNTS, *sorted(count for count in near - {*COUNTS} if 0 < count < 10**9)[:MOST_NUMBERS]]
