"""Reports the phases of long work to a listener, which shows them; nothing here prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["phase", "phases_to"]

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def phase(name: str) -> None:
    """Reports that a phase of an export begins: ``"tracing"``, ``"verifying, scaled inputs"``."""
    if listener := _listener.get():
        listener(name)


@contextmanager
def phases_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls ``listener`` with each phase that begins inside the context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
