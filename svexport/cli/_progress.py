"""What long work is at, on a terminal; in a pipe nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from svexport.progress import phases_to


@contextmanager
def status(what: str) -> Iterator[None]:
    """A line with a spinner: ``what``, and its phase."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what) as line, phases_to(lambda phase: line.update(f"{what}: {phase}")):
        yield
