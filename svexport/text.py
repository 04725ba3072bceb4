"""Writes reports as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

__all__ = ["number_of", "plain"]


def number_of(count: int, noun: str) -> str:
    """A number with its noun: ``1 layer``, ``2 layers``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def plain(renderables: Sequence[Any], notes: Sequence[str] = ()) -> str:
    """``renderables`` as rich prints them, 110 columns wide and without colours, then one line per note."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=110, color_system=None)
    for renderable in renderables:
        console.print(renderable)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()
