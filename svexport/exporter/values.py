"""Values of inputs that Python reads: finds what depends on them, and refuses it."""

from __future__ import annotations

import io
import traceback
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from svexport.errors import ExportError, SvexportError, UnsupportedError
from svexport.exporter.borders import ANYWAY
from svexport.exporter.way import OTHERS, UNGUARDED, Exit, Forced, ForcedError, TooLong, Way
from svexport.tracing.source import around, is_library, near, numbers_of_users, raising_line, shown_line

__all__ = ["Unproven", "refuse_unfollowed", "refuse_valueless", "refuse_values", "user_numbers"]

MOST_NUMBERS = 48
"""Most numbers from the user's source that are tried as values."""

Line = tuple[str, int, str]
"""Path, line number and function."""

_TRUTHS = {"True", "False"}

MOST_PLACES = 32
"""Most truth values read by one line that are each tried negated."""

MOST_DRAWN = 200
"""Most random values that a line is made to read, after all other values have changed nothing."""

MOST_COUNTED = 33
"""Numbers of found elements that are tried: 0 up to this, besides those near the found one and in the user's source.

All functions that find elements are made to find that many at once, then each alone."""

LEAST_COUNTS = 12
"""Numbers of found elements that are tried at least, however many torch calls the model makes."""

MOST_CALLS = 3000
"""Torch calls that one line's random values may take in all, and those that other numbers of elements may take."""


class Unproven:
    """Finds what may depend on values of inputs in Python, beyond what has been compared.

    Args:
        model: the model.
        inputs_of: inputs of the runs that torch computed, by run.
        ways: the ways that forward took, by run.
        compared: the ways on which the file agreed with torch.
        held: the model's parameters and buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs_of: Mapping[str, Sequence[Tensor]],
        ways: Mapping[str, Way],
        compared: Collection[Way],
        held: Sequence[Tensor],
    ) -> None:
        self._model, self._inputs_of, self._ways = model, inputs_of, ways
        self._compared, self._held = compared, held

    def values(self, guarded: bool) -> list[Exit]:
        """Lines that read values of inputs from tensors, with consequences that have not been compared.

        A value has consequences if forcing another one changes the functions called, or their arguments. It has none
        if the value is only printed, kept, or checked by an assertion. A branch has been compared if both of its sides
        have been taken, for each time that one run comes to it. ``guarded`` leaves out what ``torch.export``
        guards.
        """
        known: set[tuple[Any, int | None]] = set()
        found_unproven: dict[Any, Exit] = {}
        for run, way in self._ways.items():
            for line, found in way.exits.items():
                if line in found_unproven or (guarded and found.name not in UNGUARDED):
                    continue
                taken = way.taken.get(line, [])
                places = range(min(len(taken), MOST_PLACES)) if set(taken) <= _TRUTHS else (None,)
                for place in [place for place in places if (line, place) not in known]:
                    known.add((line, place))
                    if (place is None or not self._both(line, place)) and self._decides(run, line, place):
                        found_unproven[line] = found
                        break
        return list(found_unproven.values())

    def _both(self, line: Line, place: int) -> bool:
        """Whether a truth value that a line reads has been both True and False in compared runs."""
        taken = [way.taken.get(line, []) for way in self._compared]
        return {truths[place] for truths in taken if place < len(truths)} >= _TRUTHS

    def _decides(self, run: str, line: Line, place: int | None) -> bool:
        """Whether the value that a line reads has consequences in a run."""
        numbers: list[float] = []
        whiches = range(1)
        if place is None:
            numbers = around(user_numbers(self._model, self._inputs_of[run]))[:MOST_NUMBERS]
            drawn = min(MOST_DRAWN, MOST_CALLS // max(self._ways[run].length, 1))
            whiches = range(OTHERS + len(numbers) + drawn)
        return any(self._follows(run, Forced(line, which, place), numbers) for which in whiches)

    def counts(self) -> list[Exit]:
        """Lines that read sizes which depend on values, if forward takes a way that has not been compared when another
        number of elements is found: none, some, all, or about a number in the user's source."""
        known: set[Any] = set()
        for run, way in self._ways.items():
            new = [found for line, found in way.counts.items() if line not in known]
            known |= way.counts.keys()
            if not new:
                continue
            wanted = around(user_numbers(self._model, self._inputs_of[run]))
            numbers = [int(n) for n in wanted if 0 <= n == int(n)][:MOST_NUMBERS]
            near = [n + by for n in way.finds for by in (-1, 1) if n + by >= 0]
            counts = dict.fromkeys([0, *near, *numbers, *range(MOST_COUNTED)])
            apart = range(len(way.finds)) if len(way.finds) > 1 else ()
            forced = [(place, count) for place in (None, *apart) for count in counts]
            most = max(MOST_CALLS // way.length, LEAST_COUNTS)
            if any(self._follows(run, count=count) for count in forced[:most]):
                return new
        return []

    def _follows(
        self,
        run: str,
        forced: Forced | None = None,
        numbers: Sequence[float] = (),
        count: tuple[int | None, int] | None = None,
    ) -> bool:
        """Whether forward takes a way that has not been compared if a line reads another value from a tensor, or
        another number of elements is found. An error that refuses the value does not count."""
        usual = self._ways[run]
        arguments = [t.clone() for t in self._inputs_of[run]]
        way = Way(arguments, self._held, forced=forced, count=count, most=2 * usual.length + 100, numbers=numbers)
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with way:
                    results = self._model(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            if forced is None or isinstance(error, ForcedError):  # the model did not catch it
                return isinstance(error, TooLong)
            refusal = None if isinstance(error, TooLong) else raising_line(error)
            return refusal is None or (way.leaves(usual) and not near(forced.line, refusal))
        way.end(results)
        return not any(way.same_flow(other) for other in self._compared)


def user_numbers(model: nn.Module, inputs: Sequence[Tensor]) -> set[float]:
    """Numbers in the user's source, near which values and sizes may branch."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with numbers_of_users() as numbers:
                model(*(t.clone() for t in inputs))
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return set()
    return numbers


def refuse_valueless(results: Iterable[Tensor]) -> None:
    """Raises an ExportError if tracing has left results without values."""
    if any(isinstance(t, FakeTensor) for t in results):
        raise ExportError(
            "forward keeps a tensor outside of the model between calls, in a global for instance, and tracing has left "
            "one without values there; pass it as an input, and return it. No file was written"
        )


def refuse_unfollowed(error: Exception, own: SvexportError | None) -> NoReturn:
    """Raises a forward's error as svexport's: ``own`` if the plain forward fails too, else that modes cannot follow it.

    For example, ``torch.cond`` compiles its branches, which no mode sees.
    """
    if isinstance(error, SvexportError):
        raise error
    if own is not None:  # tracers, whose tensors have no values, accepted the model
        raise own from error
    frames = ((frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__))
    lines = [(code.co_filename, number, code.co_name) for code, number in frames if not is_library(code.co_filename)]
    what = (str(error).strip() or "no message").splitlines()[0]
    raise UnsupportedError(
        f"the model cannot be verified: forward fails while its tensors are followed ({type(error).__name__}: {what})"
        + "".join(f"\n  at {shown_line(*line)}" for line in lines[-1:])
        + "\n  Use no torch.cond or other function that compiles what it calls: compute both ways and choose by "
        "torch.where. verify=False writes the file as it is, unproven."
    ) from error


def refuse_values(unproven: Sequence[Exit], names: Sequence[str]) -> NoReturn:
    """Raises an ExportError that names the inputs, and the lines that read their values."""
    inputs = [names[index] for index in sorted(frozenset().union(*(e.inputs for e in unproven))) if index < len(names)]
    where = "".join(f"\n  at {shown_line(*e.line)}" for e in unproven[:5])
    raise ExportError(
        f"forward takes values of {', '.join(inputs)} out of tensors, and its results depend on them; a file would use "
        f"those of the given inputs for all inputs. No file was written.{where}\n"
        "  Keep the values in tensors: compute both ways and choose by torch.where, multiply by a mask, or "
        f"torch.gather by an index; or make these inputs constants: svexport.export(..., freeze={inputs!r}). {ANYWAY}"
    )
