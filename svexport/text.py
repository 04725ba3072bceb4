"""Numbers, dtypes, shapes and tables as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from rich.table import Table

__all__ = ["dtype_text", "number_of", "plain", "shape_text", "table"]


def dtype_text(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Iterable[Any]) -> str:
    """Sizes, with ``?`` for those that are not known."""
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def number_of(count: int, noun: str) -> str:
    """A number with its noun: ``1 layer``, ``2 layers``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> Table:
    """A rich table; long cells are broken into lines, not cut.

    Args:
        header: names of the columns; empty for a table of facts, without a header.
        rows: plain text, or rich's own with a style.
        title: a line above the table.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    heading = Text(title, "bold") if title else None
    made = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, show_header=bool(header))
    for name in header:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


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
