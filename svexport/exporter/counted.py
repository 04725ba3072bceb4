"""Checks whether a forward that changes something at each call computes something else after many calls."""

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
"""Numbers of forwards after which results are compared: each of the first, those before round numbers, and many."""

MOST_NUMBERS = 64
"""Most counts that bring a counter to a number in the user's source."""

CALLS = 200
"""Number of forwards that are called if the changed state cannot be set to its later value."""

CALLS_OF_LISTS = 20
"""Number of forwards if only the items of lists and dicts cannot be set; their lengths can."""

LONGEST, MOST_BYTES = 10_000, 2**28
"""Most items, and most bytes of tensors or characters, that are added to a container, because forward may join them."""


def refuse_counted(
    model: nn.Module,
    inputs: Sequence[Tensor],
    held_to: Tolerances,
    state: State,
    reached: Reached,
    numbers: Callable[[], Iterable[float]],
) -> list[str]:
    """Raises VerificationError if results depend on what forward changes at each call.

    A file holds the initial state. A warm-up, or a key frame every ten, shows after more forwards than are compared.
    What changes only once, such as a cached size, is no counter. Numbers to which each call adds the same, and texts,
    lists, dicts and sets that grow or shrink evenly, are set to their values after many calls. For the rest, such as
    generators, many forwards are called; for lists and dicts, whose items may differ, a few.

    Args:
        held_to: tolerances of the results.
        state: the state of the model before.
        reached: what forward reaches, as it was after the first call.
        numbers: gives the numbers in the user's source.

    Returns:
        Notes on what was tried by calls alone.
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
            ", which a file cannot do. No file was written.\n"
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
            except Exception:  # noqa: BLE001 - the model may never have this number, or a class takes no items
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
        longer = f", and so does one with {more:,} items more or fewer" if in_lists else ""
        return [f"forward changes {', '.join(others)} at each call; {calls} calls return the same result{longer}"]
    finally:
        reached.restore()


class _Growing(NamedTuple):
    """A container to which each call adds ``step`` items, or from which it removes them if ``step`` is negative.

    Attributes:
        start: number of items before the first call.
        items: the items that the last call added.
        from_left: whether the first items are removed, not the last.
    """

    name: str
    container: Any
    start: int
    step: int
    items: list[Any]
    from_left: bool

    def fitting(self, count: int) -> int:
        """How many of ``count`` calls can be applied at once within the limits."""
        size = sum(bytes_of(item) for item in self.items if isinstance(item, (Tensor, np.ndarray)))
        return min(count, LONGEST // abs(self.step), MOST_BYTES // max(size, 1))

    def go_on(self, count: int) -> None:
        """Changes the container as ``count`` more calls would, within the limits."""
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
    """The containers that grew or shrank by the same number in each of the last two calls."""
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
    """How many of ``count`` times a text can be extended within the limits."""
    return min(count, MOST_BYTES // len(step)) if isinstance(step, (str, bytes)) else count


def _step(first: Mapping[str, Place], after: Sequence[Reached], name: str) -> Any:
    """What each of three calls adds to a number, a tensor, an array or a text; None if it is not the same."""
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
    with suppress(Exception):  # shapes may differ, or values be bool
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
    """:data:`COUNTS`, and counts after which a number or length equals one in the user's source, or will next."""
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
