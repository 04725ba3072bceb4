"""Forwards that count themselves: whether they compute something else after many."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from svexport.errors import VerificationError
from svexport.exporter.agreement import agree
from svexport.exporter.borders import ANYWAY
from svexport.exporter.rounding import Tolerances
from svexport.tracing.state import State

__all__ = ["refuse_counted"]

COUNTS = (*range(1, 17), 19, 24, 29, 49, 99, 199, 499, 999, 10**4, 10**6)
"""After so many forwards: each of the first, those before round numbers, and many."""


def refuse_counted(model: nn.Module, inputs: Sequence[Tensor], held_to: Tolerances, state: State) -> None:
    """Raises a VerificationError if a whole number that forward changes in its model decides what it returns.

    A file has it as it is at first. A warm-up, or a key frame every ten, comes after more forwards than are compared.
    One that changes but once is no counter: the size of what is kept, say.

    Args:
        held_to: what results may differ by.
        state: of the model before, with which ``counters`` differ that forwards have changed since.
    """
    if not state.counters():
        return

    def computed() -> Sequence[Tensor]:
        return model(*(t.clone() for t in inputs))  # type: ignore[no-any-return]

    state.restore()
    expected = computed()
    once = state.counters()
    computed()
    counters = {name: c for name, c in state.counters().items() if name in once and c.now != once[name].now}
    for count in COUNTS if counters else ():
        state.restore()
        for counter in counters.values():
            counter.advance(count)
        try:
            same = agree(expected, computed(), held_to)
        except Exception:  # noqa: BLE001 - a number that the model never has
            continue
        if not same:
            raise VerificationError(
                f"forward changes {', '.join(counters)} of the model, and returns something else once that is {count} "
                "more, which a file cannot. No file was written.\n"
                f"  Pass it as an input and return it, or leave it out of forward. {ANYWAY}"
            )
