"""Shows the phase of long work on a terminal, and nothing in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from svexport.progress import phases_to


@contextmanager
def status(what: str) -> Iterator[None]:
    """Shows a line with a spinner, ``what`` and its current phase."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what) as line, phases_to(lambda phase: line.update(f"{what}: {phase}")):
        yield
