"""Checks whether the results of a forward depend on random numbers that it draws, however rarely."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport.errors import VerificationError
from svexport.exporter.agreement import agree
from svexport.exporter.borders import ANYWAY
from svexport.exporter.rounding import Tolerances
from svexport.parity import Parity
from svexport.tracing.source import is_library, is_standard, shown_line, user_line
from svexport.tracing.state import random_state, same_random_state

__all__ = ["refuse_drawn"]

_MOST = 1000
"""Most draws of one forward, which may draw until a number fits."""

_RARE = 7.0
"""A normal number that is hardly ever drawn."""


_WORDS = 624
"""State words of Python's and NumPy's Mersenne Twister, which returns each once, tempered, before it makes new ones."""

_LEAST_WORD, _LARGEST_WORD = 0, 0x12DD9BB3
"""The state words that give 0 and 2^32 - 1."""


class _TooMany(Exception):
    """A forward draws more often than :data:`_MOST`."""


class _Drawn(TorchFunctionMode):
    """Changes the results of functions that draw random numbers, and notes the user's lines that call them."""

    def __init__(self, change: Callable[[Tensor], Tensor], lines: dict[tuple[str, int, str], None]) -> None:
        super().__init__()
        self._change, self._lines, self._count = change, lines, 0

    def __enter__(self) -> _Drawn:
        self._outside = sys._getframe(1).f_code
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = random_state()
        result = func(*args, **(kwargs or {}))
        if same_random_state(before, random_state()):
            return result
        self._count += 1
        if self._count > _MOST:
            raise _TooMany
        if line := user_line(sys._getframe(1), self._outside):
            self._lines.setdefault(line)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor):  # in place, as for uniform_()
                tensor.detach().copy_(self._change(tensor.detach()))
        return result


def _least(drawn: Tensor) -> Tensor:
    return torch.full_like(drawn, -_RARE) if _is_normal(drawn) else torch.zeros_like(drawn)


def _largest(drawn: Tensor) -> Tensor:
    """The largest numbers: just below 1 for numbers up to 1. Integers are those drawn, reversed, to keep the range."""
    if drawn.dtype == torch.bool:
        return torch.ones_like(drawn)
    if not drawn.is_floating_point():
        return drawn.flatten().flip(0).view(drawn.shape)
    return torch.full_like(drawn, _RARE if _is_normal(drawn) else 1 - torch.finfo(drawn.dtype).eps)


def _is_normal(drawn: Tensor) -> bool:
    """Whether numbers may have both signs, and no bound."""
    return drawn.is_floating_point() and bool((drawn < 0).any())


def _draw_of(word: int) -> None:
    """Makes Python and NumPy draw the least or the largest number next. The last word differs, so later numbers vary,
    and code that waits for another number gets it."""
    words = (*[word] * (_WORDS - 1), 1)
    random.setstate((3, (*words, 0), None))
    if isinstance(np.random.get_state(), tuple):  # the Mersenne Twister
        np.random.set_state(("MT19937", np.array(words, np.uint32), 0, 0, 0.0))


def _of_others() -> Any:
    """The states of Python's and NumPy's generators, in a form that can be compared."""
    state = np.random.get_state()
    return random.getstate(), repr(state) if isinstance(state, dict) else (state[1].tobytes(), *state[2:])


@contextmanager
def _lines_that_draw(lines: dict[tuple[str, int, str], None]) -> Iterator[None]:
    """Notes the user's lines during which Python or NumPy draws."""
    state = _of_others()
    last: dict[FrameType, tuple[str, int, str]] = {}

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal state
        code = frame.f_code
        if is_library(code.co_filename) or is_standard(code.co_filename):
            return None
        now = _of_others()
        if now != state and frame in last:
            lines.setdefault(last[frame])
        state = now
        last[frame] = code.co_filename, frame.f_lineno, code.co_name
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def refuse_drawn(
    model: nn.Module,
    inputs: Sequence[Tensor],
    held_to: Tolerances,
    restore: Callable[[], None],
    failed: Sequence[Parity],
) -> None:
    """Raises VerificationError if results depend on random numbers that forward draws.

    A file that agrees for the numbers drawn so far may be wrong for others, as with a path dropped once in 1000 runs.

    Args:
        held_to: tolerances of the results.
        restore: undoes the changes of a forward to the model.
        failed: comparisons in which the file differs, for the error.
    """
    lines: dict[tuple[str, int, str], None] = {}
    known: Sequence[Tensor] | None = None
    others = False  # whether Python or NumPy draws
    for change, word in ((torch.clone, None), (_least, _LEAST_WORD), (_largest, _LARGEST_WORD)):
        restore()
        if word is not None:
            _draw_of(word)
        before = _of_others()
        try:
            with _Drawn(change, lines):
                results = model(*(t.clone() for t in inputs))
            known = results if known is None else known
            if agree(known, results, held_to):
                continue
        except Exception:  # noqa: BLE001 - the user's code may raise anything for unlikely numbers
            pass
        finally:
            others |= before != _of_others()
        if others:
            restore()
            with suppress(Exception), _lines_that_draw(lines):
                model(*(t.clone() for t in inputs))
        if lines or others:
            where = "".join(f"\n  at {shown_line(*line)}" for line in list(lines)[:5])
            raise VerificationError(
                "forward draws random numbers, and its results depend on them; a file draws other numbers, or repeats "
                f"those of the export. No file was written.{where}\n"
                "  Draw them outside, and pass them as inputs; give dropout and drop path training=self.training"
                f". {ANYWAY}",
                list(failed),
            )
