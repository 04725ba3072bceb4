"""What all reports have in common: they print themselves as tables, show themselves in notebooks, and become pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from svexport.text import plain

__all__ = ["Printed", "Report"]


class Printed:
    """A result that ``print`` shows as tables.

    Attributes:
        notes: remarks, which are printed below the tables.
    """

    notes: Sequence[str] = ()

    def tables(self) -> list[Any]:
        """The result as rich renderables."""
        raise NotImplementedError

    def __str__(self) -> str:
        return plain(self.tables(), self.notes)


class Report(Printed):
    """A result that is also a page, and shows itself in a notebook."""

    def _title(self) -> str:
        """The title of the page."""
        raise NotImplementedError

    def html_body(self, picture: Callable[..., str] = ...) -> list[str]:
        """The result as pieces of a page; ``picture`` draws the figures, if there are any."""
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the result as one page that contains its pictures.

        Raises:
            SvexportError: if it cannot be written.
        """
        from svexport import html  # on first use: it needs torch, which a check of a file does not

        html.write(path, html.page(self._title(), *self.html_body()))

    def _repr_html_(self) -> str:
        from svexport import html

        return html.fragment(*self.html_body(html.image))
