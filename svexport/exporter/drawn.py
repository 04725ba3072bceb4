"""Random numbers that a forward draws: whether its results depend on them, however seldom."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport.errors import VerificationError
from svexport.exporter.agreement import agree
from svexport.exporter.borders import ANYWAY
from svexport.exporter.rounding import Tolerances
from svexport.parity import Parity
from svexport.tracing.source import shown_line, user_line
from svexport.tracing.state import random_state, same_random_state

__all__ = ["refuse_drawn"]

_MOST = 1000
"""Draws of one forward: it may draw until it likes what comes."""

_RARE = 7.0
"""A normal number that hardly comes."""


class _TooMany(Exception):
    """A forward that draws again and again."""


class _Drawn(TorchFunctionMode):
    """Changes what functions return that draw random numbers, and notes lines of the user's that call them."""

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
            if isinstance(tensor, Tensor):  # the result itself: uniform_() writes it
                tensor.detach().copy_(self._change(tensor.detach()))
        return result


def _least(drawn: Tensor) -> Tensor:
    return torch.full_like(drawn, -_RARE) if _is_normal(drawn) else torch.zeros_like(drawn)


def _largest(drawn: Tensor) -> Tensor:
    """Next to one of those up to one; of whole numbers others of them, which are still as many and in their range."""
    if drawn.dtype == torch.bool:
        return torch.ones_like(drawn)
    if not drawn.is_floating_point():
        return drawn.flatten().flip(0).view(drawn.shape)
    return torch.full_like(drawn, _RARE if _is_normal(drawn) else 1 - torch.finfo(drawn.dtype).eps)


def _is_normal(drawn: Tensor) -> bool:
    """Whether numbers may be of both signs, with no bound."""
    return drawn.is_floating_point() and bool((drawn < 0).any())


def refuse_drawn(
    model: nn.Module,
    inputs: Sequence[Tensor],
    held_to: Tolerances,
    restore: Callable[[], None],
    failed: Sequence[Parity],
) -> None:
    """Raises a VerificationError if results depend on random numbers that forward draws.

    A file that was right of what has been drawn is not of others: of a path that is dropped once in a thousand runs.

    Args:
        held_to: what results may differ by.
        restore: undoes what a forward has done to the model.
        failed: comparisons of the file in which it differs, which the error has.
    """
    lines: dict[tuple[str, int, str], None] = {}
    known: Sequence[Tensor] | None = None
    for change in (torch.clone, _least, _largest):
        restore()
        try:
            with _Drawn(change, lines):
                results = model(*(t.clone() for t in inputs))
            known = results if known is None else known
            if agree(known, results, held_to):
                continue
        except Exception:  # noqa: BLE001 - the user's code may raise anything, of numbers that are unlikely
            pass
        if lines:
            where = "".join(f"\n  at {shown_line(*line)}" for line in list(lines)[:5])
            raise VerificationError(
                "forward draws random numbers, on which its results depend; a file draws others, or has those of the "
                f"given inputs. No file was written.{where}\n"
                "  Draw them outside, and pass them as inputs; give dropout and dropped paths training=self.training"
                f". {ANYWAY}",
                list(failed),
            )
