"""Reports as HTML: self-contained pages and notebook output, readable in light and dark themes."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
import secrets
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svexport.errors import SvexportError
from svexport.ops._op import OPS
from svexport.parity import HISTOGRAM_RANGE, Parity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from svexport.runtime.where import Where

__all__ = [
    "Link",
    "blank",
    "check_place",
    "cut",
    "drawing",
    "error_figure",
    "folded",
    "fragment",
    "image",
    "layer_figure",
    "node_figure",
    "note",
    "page",
    "picture",
    "section",
    "table",
    "verdict",
    "where_figure",
    "write",
]

_STYLE = Path(__file__).with_name("page.css").read_text("utf-8")
_SCRIPT = Path(__file__).with_name("page.js").read_text("utf-8")

# A page follows the reader's theme.
_PAGE = """
body.svexport { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6472; --line: #d9dee5; --good: #00694d;
  --bad: #b3381a; --warn: #8a5a00; --info: #0062a3; --wash: #fdeee8; color: var(--ink); background: Canvas;
  max-width: 64rem; margin: 2.5rem auto; padding: 0 1.5rem; }
@media (prefers-color-scheme: dark) { body.svexport { --ink: #e6e9ee; --soft: #98a3b3; --line: #333b47; --good: #4fd3a5;
  --bad: #ff8f6b; --warn: #f0b429; --info: #6cb6ff; --wash: #3a231d; } }
.svexport a { color: inherit; text-underline-offset: .2em; }
.svexport input { font: inherit; margin: .5rem 0 0; padding: .2rem .5rem; max-width: 100%; box-sizing: border-box;
  color: inherit; background: Field; border: 1px solid var(--soft); border-radius: .3rem; }
.svexport th[tabindex] { cursor: pointer; }
.svexport th[aria-sort=ascending]::after { content: " \\2191"; }
.svexport th[aria-sort=descending]::after { content: " \\2193"; }
@media (min-width: 44.01rem) { .svexport .narrow { display: none; } }
@media (max-width: 44rem) {
  body.svexport { margin: 1.5rem auto; padding: 0 .9rem; }
  .svexport .wide { display: none; }
  .svexport .scroll thead { display: none; }
  .svexport .scroll table, .svexport .scroll tbody { display: block; }
  .svexport .scroll tr { display: flex; flex-wrap: wrap; gap: 0 1.2rem; padding: .5rem .4rem;
    border-bottom: 1px solid var(--line); }
  .svexport .scroll tr[hidden] { display: none; }
  .svexport .scroll .marked { background: var(--wash); }
  .svexport .scroll td { border: 0; padding: .1rem 0; text-align: left; min-width: 0; overflow-wrap: anywhere; }
  .svexport .scroll td:empty { display: none; }
  .svexport .scroll td[data-label]::before { content: attr(data-label) " "; color: var(--soft); font-weight: 400; }
  .svexport .scroll .ok, .svexport .scroll .fail, .svexport .scroll .error, .svexport .scroll .warning,
  .svexport .scroll .info { order: -1; }
}
"""

# A notebook has its own theme: text inherits its colour, and other colours are readable on black and on white.
_NOTEBOOK = """
.svexport { --soft: #7c8798; --line: #8b95a355; --good: #0d9a73; --bad: #e0552b; --warn: #b07a00; --info: #2f86d6;
  --wash: #e0552b26; color: inherit; font-size: 13.5px; }
.svexport h2 { margin: 1.25rem 0 .4rem; }
"""


@dataclass(frozen=True)
class Link:
    """A table value that links to the element with the id ``to``."""

    text: str
    to: str

    def __str__(self) -> str:
        return self.text


def page(title: str, *body: str) -> str:
    """A whole page; ``body`` is HTML, ``title`` plain text.

    It loads no external resources, and runs only :file:`page.js`, which sorts and searches its tables.
    """
    allowed = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{_PAGE}</style>\n</head>\n"
        f'<body class="svexport">\n<h1>{_broken(title)}</h1>\n' + "\n".join(body) + "\n"
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def fragment(*body: str) -> str:
    """As :func:`page`, for the output cell of a notebook: a ``div`` that styles only itself.

    Notebook viewers, including git hosts, drop styles and SVG: anything that must be visible there has to be a table
    or an :func:`image`.
    """
    return f'<div class="svexport">\n<style>{_STYLE}{_NOTEBOOK}</style>\n' + "\n".join(body) + "\n</div>"


def section(title: str, *body: str) -> str:
    """A heading, escaped, followed by HTML."""
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(body)


def folded(summary: str, *body: str) -> str:
    """HTML that is hidden until the reader unfolds it."""
    return f"<details><summary>{escape(summary)}</summary>\n" + "\n".join(body) + "\n</details>"


def note(text: str) -> str:
    """A paragraph of class ``note`` with escaped text."""
    return f'<p class="note">{_broken(text)}</p>'


def verdict(text: str, kind: str) -> str:
    """A paragraph with escaped text, in the colour and with the sign of ``"ok"``, ``"fail"`` or ``"warning"``."""
    return f'<p class="{kind}">{_broken(text)}</p>'


def _broken(text: str) -> str:
    """``text`` escaped; long names may break after dots, slashes and underscores, commands only between options."""
    names = re.sub(r"[\w./]{21,}", lambda name: re.sub(r"(?<=[./_])(?=\w)", "<wbr>", name[0]), escape(text))
    if re.search(r" --\w", text) is None:
        return names
    return " ".join(f'<span class="word">{word}</span>' for word in names.split(" "))


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, marked: Collection[int] = ()) -> str:
    """A table of plain values: columns of numbers and shapes flush right, verdicts and severities with colour and sign.

    On a narrow page every row is a block of values, each with its heading, with the verdict first. Long names may break
    after dots, slashes and underscores.

    Args:
        headers: one per column; empty for no head.
        rows: rows of values, shown with ``str``; a :class:`Link` links to an element of the page.
        marked: indices of highlighted rows.
    """
    numeric = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]

    def cell(tag: str, value: Any, column: int) -> str:
        kind = "number" if numeric[column : column + 1] == [True] else ""
        kind = _KINDS.get(str(value), kind) if tag == "td" else kind
        text = _broken(str(value))
        if isinstance(value, Link):
            text = f'<a href="#{escape(value.to)}">{text}</a>'
        label = f' data-label="{escape(headers[column])}"' if tag == "td" and headers and headers[column] else ""
        return f"<{tag}{f' class={kind}' if kind else ''}{label}>{text}</{tag}>"

    lines = []
    if headers:
        lines.append(f"<thead><tr>{''.join(cell('th', header, i) for i, header in enumerate(headers))}</tr></thead>")
    lines.append("<tbody>")
    for index, row in enumerate(rows):
        cells = "".join(cell("td", value, i) for i, value in enumerate(row))
        lines.append(f"<tr{' class=marked' if index in marked else ''}>{cells}</tr>")
    lines.append("</tbody>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


_KINDS = {"ok": "ok", "FAIL": "fail", "error": "error", "warning": "warning", "note": "info"}
"""CSS classes of cells that hold a verdict or a severity."""


def _is_number(value: Any) -> bool:
    return re.fullmatch(r"[-+]?(\d[\d,]*\.?\d*(e[-+]?\d+)?|inf|nan)|\[[\d, ]*\]", str(value)) is not None


def check_place(path: str | os.PathLike[str]) -> None:
    """Checks, before long work, that a page can be written to ``path``. It creates nothing.

    Raises:
        SvexportError: if no page can be written there.
    """
    path = Path(path)
    if path.is_dir():
        raise SvexportError(f"expected the path of a file, got the folder {path}; add a file name")
    if path.exists() and not path.is_file():  # a pipe or a device; renaming would replace it
        raise SvexportError(f"expected the path of a file, got {path}, which is no regular file; choose another place")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SvexportError(f"cannot write {path}: {folder} is no folder that can be written to; choose another place")


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file under another name and renames it, so that it is never incomplete.

    Raises:
        SvexportError: if it cannot be written.
    """
    check_place(path)
    path = Path(path)
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise SvexportError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


# Pictures. Text and axes are drawn in _INK, which becomes the page's own text colour.
_INK, _FAINT = "#010203", "#8b95a3"
_BEFORE, _AFTER, _WARN, _BAD = "#a3aebd", "#3b82f6", "#e5a13a", "#e5484d"
_DPI = 120
_WIDE, _NARROW = 9.0, 3.9
"""Widths of a picture in inches, on a normal page and on one of 400 pixels."""
_PAD = 0.12
"""Margin in inches: a browser's font may be wider than the one that the layout is computed with."""
_FLOOR = 10.0 ** HISTOGRAM_RANGE[0]
"""The position of zero on a logarithmic axis of errors."""


@contextmanager
def drawing(salt: str = "", width: float = _WIDE) -> Iterator[None]:
    """Sets matplotlib's defaults and our style for making and saving figures; restores the caller's settings.

    ``salt`` makes the ids of one SVG differ from those of others on the same page; ``width``, in inches, is used by
    :func:`blank`.
    """
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing glyphs: the reader's fonts may have them
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": salt,
                "text.parse_math": False,
                "font.size": 10,
                "figure.figsize": (width, width),
                "figure.constrained_layout.w_pad": _PAD,
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


def picture(description: str, draw: Callable[..., Figure], *args: Any) -> str:
    """``draw(*args)`` as SVG, one for wide and one for narrow pages; without matplotlib, a line that says so."""
    drawn = [_svg(description, draw, args, *size) for size in (("wide", _WIDE), ("narrow", _NARROW))]
    return _not_drawn(description) if None in drawn else "\n".join(map(str, drawn))


def _svg(description: str, draw: Callable[..., Figure], args: Sequence[Any], kind: str, width: float) -> str | None:
    """A picture ``width`` inches wide in a ``div`` of class ``kind``; a page shows one of the kinds."""
    options = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
    drawn = _saved(f"{description} {kind}", draw, args, width, **options)
    if drawn is None:
        return None
    svg = drawn.decode("utf-8")
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # these would repeat on a page; ids that are referred to are hashes
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)
    svg = re.sub(r"\n\s*", "\n", svg).strip()
    return f'<div class="{kind}">{svg}</div>'


def image(description: str, draw: Callable[..., Figure], *args: Any) -> str:
    """``draw(*args)`` as PNG on white, for notebook output; without matplotlib, a line that says so."""
    drawn = _saved(description, draw, args, format="png", dpi=_DPI, facecolor="white")
    if drawn is None:
        return _not_drawn(description)
    from PIL import Image  # matplotlib's own dependency

    stream = io.BytesIO()
    with Image.open(io.BytesIO(drawn)) as pixels:
        pixels.convert("RGB").quantize(32).save(stream, "PNG", optimize=True)  # a quarter of the bytes
        width = pixels.width * 96 / _DPI  # a page has 96 pixels an inch
    source = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"
    return f'<img alt="{escape(description)}" width="{width:.0f}" src="{source}">'


def _saved(
    salt: str, draw: Callable[..., Figure], args: Sequence[Any], width: float = _WIDE, **options: Any
) -> bytes | None:
    try:
        with drawing(f"{draw.__name__} {salt}", width):
            stream = io.BytesIO()
            draw(*args).savefig(stream, **options)
    except ImportError:
        return None
    return stream.getvalue()


def _not_drawn(description: str) -> str:
    return note(f"{description}: not drawn, because matplotlib is not installed (pip install matplotlib)")


def blank(height: float) -> Figure:
    """A figure without axes, ``height`` inches high and with the width given to :func:`drawing`."""
    import matplotlib
    from matplotlib.figure import Figure

    return Figure(figsize=(matplotlib.rcParams["figure.figsize"][0], height), layout="constrained")


def error_figure(parities: Sequence[Parity], atol: float) -> Figure:
    """A histogram of absolute errors, one row per output with its runs added up, for the worst eight outputs.

    Bars right of the tolerance line are red if the output failed, amber if ``rtol`` lets them pass.
    """
    names = list(dict.fromkeys(p.name for p in parities))
    worst = {name: max(p.max_rel for p in parities if p.name == name) for name in names}
    shown = sorted(sorted(names, key=lambda name: -worst[name])[:8], key=names.index)
    low, high = HISTOGRAM_RANGE
    figure = blank(0.6 + 1.05 * len(shown))
    rows: list[Axes] = list(figure.subplots(len(shown), squeeze=False, sharex=True)[:, 0]) if shown else []
    passed = False
    for axes, name in zip(rows, shown, strict=True):
        runs = [p for p in parities if p.name == name]
        counts = [sum(column) for column in zip(*(p.histogram for p in runs), strict=True)]
        ok = all(p.ok for p in runs)
        beyond = _WARN if ok else _BAD
        edges = range(low, high)
        colours = [_AFTER if 10.0**edge < atol * 0.999 else beyond for edge in edges]
        passed |= any(count and colour == _WARN for count, colour in zip(counts, colours, strict=True))
        axes.bar([edge + 0.5 for edge in edges], counts, width=0.86, color=colours)
        axes.set_yscale("log")
        axes.set_ylim(0.5, 3 * max(10, *counts))
        axes.minorticks_off()
        top = 10 ** int(math.log10(max(10, *counts)))
        axes.set_yticks([1, top], ["1", f"{top:,}"])
        axes.set_xlim(low, high)
        ticks = range(low, high + 1, 2)
        labels = ["" if index % 2 else f"1e{decade}" for index, decade in enumerate(ticks)]
        axes.set_xticks(ticks, ["0", *labels[1:]])  # the first bin holds the zeros
        axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        largest = max(p.max_abs for p in runs)
        verdict = (f"max {largest:.1e}" if largest else "exact") + ("" if ok else ", outside")
        axes.set_title(cut(name, verdict), loc="left")
        axes.set_title(verdict, loc="right", color=_INK if ok else _BAD)
        if atol > 0:
            axes.axvline(math.log10(atol), color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    if shown:
        label = f"absolute error (dashed: atol {atol:g})" + _more(len(names) - len(shown))
        rows[-1].set_xlabel(label + "\namber: beyond atol, within rtol" * passed)
        figure.supylabel("elements", fontsize=10)
    return figure


def node_figure(
    before: Mapping[str, int], after: Mapping[str, int], labels: tuple[str, str] = ("before", "after")
) -> Figure:
    """Two counts of nodes by type side by side: ours, the most frequent others up to sixteen, the sum of the rest."""
    ours = {op.node_type for op in OPS.values()}
    kinds = sorted({*before, *after}, key=lambda k: (k not in ours, -max(before.get(k, 0), after.get(k, 0)), k))
    rest = kinds[16:] if len(kinds) > 17 else []
    kinds = kinds[: len(kinds) - len(rest)]
    names = [cut(kind) for kind in kinds] + [f"{len(rest)} other types"] * bool(rest)
    figure = blank(0.9 + 0.36 * len(names))
    axes = figure.subplots()
    for counts, label, colour, offset in zip((before, after), labels, (_BEFORE, _AFTER), (-0.19, 0.19), strict=True):
        values = [counts.get(kind, 0) for kind in kinds] + [sum(counts.get(kind, 0) for kind in rest)] * bool(rest)
        places = [index + offset for index in range(len(names))]
        bars = axes.barh(places, values, height=0.36, color=colour, label=f"{label}: {sum(counts.values())} nodes")
        axes.bar_label(bars, [str(value) if value else "" for value in values], padding=3, fontsize=9, color=_INK)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.06, y=0.02)
    figure.legend(loc="outside upper left")
    return figure


def layer_figure(layers: Sequence[Parity], atol: float) -> Figure:
    """The largest error of each layer in order of execution; red outside the tolerance, the first of these is named."""
    from matplotlib.ticker import MaxNLocator

    figure = blank(2.8)
    axes: Axes = figure.subplots()
    heights = [min(max(p.max_abs, _FLOOR), 1e12) for p in layers]
    axes.plot(heights, color=_FAINT, linewidth=1, zorder=1)
    axes.scatter(range(len(layers)), heights, s=16, color=[_AFTER if p.ok else _BAD for p in layers], zorder=2)
    first = next((index for index, p in enumerate(layers) if not p.ok), None)
    if first is not None:
        axes.axvline(first, color=_BAD, linewidth=1, alpha=0.5, zorder=0)
        align = "right" if first > 0.6 * len(layers) else "left"
        name = f"\u00a0{cut(layers[first].name)}\u00a0"
        axes.text(first, 0.93, name, transform=axes.get_xaxis_transform(), ha=align, color=_BAD)
    axes.set_yscale("log")
    axes.set_ylim(min(*heights, atol or heights[0]) / 3, max(*heights, atol, _FLOOR) * 30)
    if atol > 0:
        axes.axhline(atol, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if value > 1.5 * _FLOOR else "0"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.6)
    axes.set_xlabel(f"layers as they run (dashed: atol {atol:g})")
    axes.set_ylabel("largest absolute error")
    return figure


def signal_figure(series: Mapping[str, Sequence[float]]) -> Figure:
    """Signal-to-noise ratio of each layer in decibels, in order of execution, one line per precision."""
    from matplotlib.ticker import MaxNLocator

    figure = blank(2.8)
    axes: Axes = figure.subplots()
    for number, (name, values) in enumerate(series.items()):
        shown = [value if math.isfinite(value) else math.nan for value in values]
        colour = (_AFTER, _BAD, _INK, _FAINT)[number % 4]
        axes.plot(shown, color=colour, linewidth=1, marker="o", markersize=3.5, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.6)
    axes.set_xlabel("layers in order of execution")
    axes.set_ylabel("signal over noise, dB")
    axes.legend(loc="best")
    return figure


def ranking_figure(names: Sequence[str], alone: Sequence[float], rest: Sequence[float], whole: float) -> Figure:
    """The loss with only one layer quantized, as bars, and the loss with that layer and all above it unquantized."""
    figure = blank(1.7 + 0.24 * len(names))
    axes: Axes = figure.subplots()
    places = range(len(names))
    axes.barh(places, alone, height=0.6, color=_FAINT, label="it alone quantized")
    axes.plot(rest, places, color=_BAD, linewidth=1, marker="o", markersize=3.5, label="all below it quantized")
    axes.axvline(whole, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label="all quantized")
    axes.set_yticks(places, list(map(cut, names)))
    axes.invert_yaxis()
    axes.set_xlabel("lost")
    figure.legend(loc="outside upper left")
    return figure


def where_figure(where: Where) -> Figure:
    """The largest error at each index of every axis, one strip of colours per axis."""
    axes = [axis for axis, size in enumerate(where.shape) if size > 1] or [0]
    errors = [max(error, _FLOOR) for axis in axes for error in where.largest[axis]]
    high = math.log10(min(max(errors), 1e12))
    low = max(min(math.log10(min(error, 1e12)) for error in errors), high - 6)
    figure = blank(0.7 + 0.55 * len(axes))
    rows: list[Axes] = list(figure.subplots(len(axes), squeeze=False)[:, 0])
    for row, axis in zip(rows, axes, strict=True):
        size = where.shape[axis]
        strip = [math.log10(min(max(error, _FLOOR), 1e12)) for error in where.largest[axis]]
        shown = row.imshow([strip], aspect="auto", cmap="cividis", vmin=low, vmax=max(high, low + 0.1),
                           extent=(-0.5, size - 0.5, 0, 1), interpolation="nearest")  # fmt: skip
        row.set_yticks([0.5], [f"axis {axis}"])
        row.tick_params(axis="y", length=0)
        row.set_xticks(sorted({0, size // 2, size - 1}))
    bar = figure.colorbar(shown, ax=rows, fraction=0.04, pad=0.02)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"1e{value:.0f}" if abs(value - round(value)) < 0.05 else "")
    if math.floor(high) - math.ceil(low) < 1:  # not two decades to name: the ends, then
        bar.set_ticks([low, max(high, low + 0.1)], labels=[f"{10**end:.1e}" for end in (low, max(high, low + 0.1))])
    bar.outline.set_visible(False)
    rows[-1].set_xlabel("index; the largest absolute error there")
    return figure


def cut(name: str, beside: str = "") -> str:
    """Its end, as much as fits beside what is drawn, or in one line with another text."""
    import matplotlib

    width = matplotlib.rcParams["figure.figsize"][0]
    most = int(min(5 * width, 9 * width - len(beside) - 2))
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _more(count: int) -> str:
    return f"; {count} more outputs, all closer" if count > 0 else ""
