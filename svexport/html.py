"""Reports as HTML: self-contained pages, tables, and pictures that follow the reader's light or dark theme."""

from __future__ import annotations

import io
import math
import os
import re
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svexport.errors import SvexportError
from svexport.parity import HISTOGRAM_RANGE, Parity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["drawing", "error_figure", "fragment", "layer_figure", "node_figure", "note", "page", "section", "table", "write"]

_STYLE = """
.svexport { color-scheme: light dark; --ink: #1b1f24; --soft: #667080; --line: #d9dee5; --good: #1a7f4b; --bad: #c62f3b;
  --wash: #fdecee; color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
@media (prefers-color-scheme: dark) { .svexport { --ink: #e6e9ee; --soft: #98a3b3; --line: #333b47; --good: #5fd08f;
  --bad: #ff7b82; --wash: #3a1d22; } }
body.svexport { background: Canvas; max-width: 64rem; margin: 2.5rem auto; padding: 0 1.5rem; }
.svexport h1 { font-size: 1.5rem; font-weight: 650; margin: 0 0 1rem; overflow-wrap: anywhere; }
.svexport h2 { font-size: 1.05rem; font-weight: 650; margin: 2rem 0 .5rem; }
.svexport .scroll { overflow-x: auto; }
.svexport table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; color: var(--ink); }
.svexport th { color: var(--soft); font-weight: 500; }
.svexport th, .svexport td { padding: .3rem 1.4rem .3rem .4rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; background: none; }
.svexport .number { text-align: right; white-space: nowrap; }
.svexport .marked td { background: var(--wash); }
.svexport .ok { color: var(--good); font-weight: 600; }
.svexport .fail { color: var(--bad); font-weight: 600; }
.svexport .note { color: var(--soft); margin: .4rem 0; }
.svexport svg { display: block; max-width: 100%; height: auto; color: var(--ink); margin: .5rem 0; }
.svexport svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
"""


def page(title: str, *body: str) -> str:
    """A whole page, without scripts and without anything loaded from elsewhere; ``body`` is HTML, ``title`` plain text."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f'<body class="svexport">\n<h1>{escape(title)}</h1>\n' + "\n".join(body) + "\n</body>\n</html>\n"
    )


def fragment(*body: str) -> str:
    """The same for the output cell of a notebook: a ``div`` that styles nothing but itself."""
    return f'<div class="svexport">\n<style>{_STYLE}</style>\n' + "\n".join(body) + "\n</div>"


def section(title: str, *body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(body)


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, marked: Collection[int] = ()) -> str:
    """A table of plain values: columns of numbers flush right, ``ok`` and ``FAIL`` in colour, no head without headers.

    Args:
        headers: one per column; empty for none.
        rows: of values, shown with ``str``.
        marked: indices of rows to stand out.
    """
    numeric = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]

    def cell(tag: str, value: Any, column: int) -> str:
        kind = {"ok": "ok", "FAIL": "fail"}.get(str(value), "number" if numeric[column : column + 1] == [True] else "")
        return f"<{tag}{f' class={kind!r}' if kind else ''}>{escape(str(value))}</{tag}>"

    head = "".join(cell("th", header, i) for i, header in enumerate(headers))
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(cell("td", value, i) for i, value in enumerate(row))
        lines.append(f"<tr{' class=marked' if index in marked else ''}>{cells}</tr>")
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n' + "\n".join(lines) + "\n</table></div>"


def _is_number(value: Any) -> bool:
    return re.fullmatch(r"[-+]?(\d[\d,]*\.?\d*(e[-+]?\d+)?|inf|nan)", str(value)) is not None


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file beside its place and renames it there: never half of one.

    Raises:
        SvexportError: if it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(beside, 0o666 & ~_umask())  # mkstemp's files are private
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as error:
        raise SvexportError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Pictures. Text and axes are drawn in _INK, which becomes the page's own text colour.
_INK, _FAINT = "#010203", "#8b95a3"
_BEFORE, _AFTER, _WARN, _BAD = "#a3aebd", "#3b82f6", "#e5a13a", "#e5484d"
_FLOOR = 10.0 ** HISTOGRAM_RANGE[0]
"""Where zero stands on a logarithmic axis of errors."""


@contextmanager
def drawing() -> Iterator[None]:
    """matplotlib's own defaults and our style; figures are made and saved inside. The caller's settings come back."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that its fonts lack: the reader's may have them
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "text.parse_math": False,
                "font.size": 10,
                "text.color": _INK,
                "axes.labelcolor": _INK,
                "axes.edgecolor": _FAINT,
                "axes.titlesize": 10,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "xtick.color": _FAINT,
                "ytick.color": _FAINT,
                "xtick.labelcolor": _INK,
                "ytick.labelcolor": _INK,
                "xtick.minor.size": 0,
                "ytick.minor.size": 0,
                "legend.frameon": False,
            }
        )
        yield


def errors(parities: Sequence[Parity], atol: float) -> str:
    """:func:`error_figure` as SVG for a page; a note where matplotlib is missing."""
    return _picture("Absolute errors of each output", error_figure, parities, atol)
