"""Input values in Python: detects when Python code depends on them, and refuses it."""

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
"""Maximum numbers of the user's source that values are set to."""

Line = tuple[str, int, str]
"""Path, number and function."""

_TRUTHS = {"True", "False"}

MOST_PLACES = 32
"""Truths that a line takes, one after another, of which each is tried to be the other one."""

MOST_DRAWN = 200
"""Random values that a line is given, where nothing follows from those before."""

MOST_COUNTED = 33
"""So many are found by all functions together, and then by each, from none on; and around numbers of the source."""

LEAST_COUNTS = 12
"""Of those, of a model however large."""

MOST_CALLS = 3000
"""Of functions of torch, to take random values, or find other numbers of elements, in turn."""


class Unproven:
    """What may follow from values of inputs in Python, beside what has been compared.

    Args:
        model: whose forward it is.
        inputs_of: runs that torch computed, by name.
        ways: that forward went with them, by name.
        compared: ways on which a file computes what torch does.
        held: parameters and buffers of the model.
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
        """Lines that take values of inputs out of tensors, from which something follows that has not been compared.

        What follows is seen where a line is made to get another value: functions called, or given, anything else.
        Nothing does where the value is only printed, kept, or checked by an assertion. A branch has been compared if
        both its ways have been gone, each time that one run comes there. ``guarded`` leaves out what ``torch.export``
        has seen to.
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
        """Whether a truth that a line takes has been both, in what has been compared."""
        taken = [way.taken.get(line, []) for way in self._compared]
        return {truths[place] for truths in taken if place < len(truths)} >= _TRUTHS

    def _decides(self, run: str, line: Line, place: int | None) -> bool:
        """Whether something follows in a run from the value that a line takes there."""
        numbers: list[float] = []
        whiches = range(1)
        if place is None:
            numbers = around(user_numbers(self._model, self._inputs_of[run]))[:MOST_NUMBERS]
            drawn = min(MOST_DRAWN, MOST_CALLS // max(self._ways[run].length, 1))
            whiches = range(OTHERS + len(numbers) + drawn)
        return any(self._follows(run, Forced(line, which, place), numbers) for which in whiches)

    def counts(self) -> list[Exit]:
        """Lines that get sizes of what was found by values, where forward goes a way that has not been compared once
        others are found: none, some, all, or around a number of the user's source."""
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
        """Whether forward goes a way that has not been compared when a line gets another value out of a tensor, or
        finds another number of them; not where the model has none for it."""
        usual = self._ways[run]
        arguments = [t.clone() for t in self._inputs_of[run]]
        way = Way(arguments, self._held, forced=forced, count=count, most=2 * usual.length + 100, numbers=numbers)
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with way:
                    results = self._model(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            if forced is None or isinstance(error, ForcedError):  # which nobody has caught
                return isinstance(error, TooLong)
            refusal = None if isinstance(error, TooLong) else raising_line(error)
            return refusal is None or (way.leaves(usual) and not near(forced.line, refusal))
        way.end(results)
        return not any(way.same_flow(other) for other in self._compared)


def user_numbers(model: nn.Module, inputs: Sequence[Tensor]) -> set[float]:
    """Numbers of the user's source, around which values and sizes may decide."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with numbers_of_users() as numbers:
                model(*(t.clone() for t in inputs))
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return set()
    return numbers


def refuse_valueless(results: Iterable[Tensor]) -> None:
    """Raises an ExportError of results that tracing has left no values for."""
    if any(isinstance(t, FakeTensor) for t in results):
        raise ExportError(
            "forward computes with a tensor that it keeps outside of the model from call to call, in a global for "
            "instance, where tracing has left one without values; pass it as an input, and return it. No file was "
            "written"
        )


def refuse_unfollowed(error: Exception, own: SvexportError | None) -> NoReturn:
    """Raises an error of a forward as one of svexport's: ``own`` if it fails as it is, else what followed its tensors.

    ``torch.cond`` and the like compile their branches, which no mode sees.
    """
    if isinstance(error, SvexportError):
        raise error
    if own is not None:  # tracers compute with tensors that have no values, and took it
        raise own from error
    frames = ((frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__))
    lines = [(code.co_filename, number, code.co_name) for code, number in frames if not is_library(code.co_filename)]
    what = (str(error).strip() or "no message").splitlines()[0]
    raise UnsupportedError(
        f"the model cannot be verified: forward fails while its tensors are followed ({type(error).__name__}: {what})"
        + "".join(f"\n  at {shown_line(*line)}" for line in lines[-1:])
        + "\n  Instead of torch.cond and other functions that compile what they call: compute both ways and choose by "
        "torch.where. verify=False writes the file as it is, unproven."
    ) from error


def refuse_values(unproven: Sequence[Exit], names: Sequence[str]) -> NoReturn:
    """Raises an ExportError that names the inputs, and the lines that take values of them."""
    inputs = [names[index] for index in sorted(frozenset().union(*(e.inputs for e in unproven))) if index < len(names)]
    where = "".join(f"\n  at {shown_line(*e.line)}" for e in unproven[:5])
    raise ExportError(
        f"forward takes values of {', '.join(inputs)} out of tensors, and goes on by them; a file would have those of "
        f"the given inputs for all. No file was written.{where}\n"
        "  Keep them tensors: compute both ways and choose by torch.where, multiply with a mask, torch.gather what an "
        f"index says; or make constants of these inputs: svexport.export(..., freeze={inputs!r}). {ANYWAY}"
    )
