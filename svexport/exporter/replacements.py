"""The record of what ``svexport.replace`` did to a model, and its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from svexport import html
from svexport.exporter.proof import Proof
from svexport.text import table

__all__ = ["LeftAlone", "Replacement", "op_name", "print_report"]


@dataclass(frozen=True)
class Replacement:
    """A module or a call that is an svexport op in the copy.

    Attributes:
        name: name of the module in the model; ``"forward"`` for calls.
        before: the class or function it was, such as ``torch.nn.modules.normalization.LayerNorm``.
        after: what it is now, such as ``svexport.ops.LayerNorm``.
        source: the line that defines the class, or the line of the call.
        calls: number of calls in the forward.
        max_abs: the largest absolute difference of the two on the model's own activations; NaN if not proven.
        proof: the proof in words: ``"max error 1.2e-07"``, or why there is none.
        gain: the model's speedup from all replacements by this op, if it was measured.
    """

    name: str
    before: str
    after: str
    source: str
    calls: int
    max_abs: float
    proof: str
    gain: str = ""


@dataclass(frozen=True)
class LeftAlone:
    """A module or a call that looked replaceable and was not replaced.

    Attributes:
        name: name of the module in the model; ``"forward"`` for calls.
        kind: its class, or the function.
        source: the line that defines the class, or the line of the call.
        reason: what was expected, and what came.
    """

    name: str
    kind: str
    source: str
    reason: str


def print_report(
    model: str,
    replacements: list[Replacement],
    left_alone: list[LeftAlone],
    outputs: Proof,
    notes: Sequence[str],
) -> None:
    """Prints the report as tables, which are HTML in a notebook."""
    from rich.console import Console
    from rich.text import Text

    tables: list[tuple[str, Sequence[str], list[tuple[str, ...]]]] = []
    if replacements:
        # A class gets one row for all its modules; a call gets its own row.
        groups: dict[tuple[str, str, str], list[Replacement]] = {}
        for r in replacements:
            groups.setdefault((r.before, r.after, r.source), []).append(r)
        rows: list[tuple[str, ...]] = []
        for (before, after, source), group in groups.items():
            worst = min(group, key=lambda r: (r.calls > 0, -r.max_abs))
            calls = str(sum(r.calls for r in group) or "")
            names = _names([r.name for r in group])
            rows.append((names, before, after, _short(source), calls, worst.proof, worst.gain))
        head = ("", "was", "is", "source", "calls", "proof", "as fast")
        shown = len(head) if any(r.gain for r in replacements) else len(head) - 1
        tables.append((f"{model}: replaced", head[:shown], [row[:shown] for row in rows]))
    if left_alone:
        alike: dict[tuple[str, str, str], list[str]] = {}
        for a in left_alone:
            alike.setdefault((a.kind, _short(a.source), a.reason), []).append(a.name)
        rows = [(_names(names), *rest) for rest, names in alike.items()]
        tables.append((f"{model}: left alone", ("", "is", "source", "because"), rows))
    line = "" if replacements else f"{model}: nothing to replace"
    if replacements and (outputs.errors or outputs.fault):
        verdict = outputs.fault or f"max error {outputs.errors[0]:.1e}"
        line = f"{model}, outputs as a whole: {verdict}"
    console = Console(width=None if sys.stdout.isatty() else 160)
    if console.is_jupyter:
        from IPython.display import HTML, display

        body = [html.section(title, html.table(columns, rows)) for title, columns, rows in tables]
        verdict = html.verdict(line, "fail" if outputs.fault else "ok") if line else ""
        display(HTML(html.fragment(*body, verdict, *(f"<p>{escape(note)}</p>" for note in notes))))
        return
    for title, columns, rows in tables:
        made = table(columns, rows, title)
        for column in made.columns:
            column.no_wrap = column.header == "source"  # editors open unwrapped places
        console.print(made)
    if line:
        console.print(Text(line, "red" if outputs.fault else ""))
    for note in notes:
        console.print(Text(note))


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _short(text: str) -> str:
    """The place of a call without the line's code, and a library's file without its folders."""
    return text.partition(": ")[0].rpartition("site-packages/")[2]


def op_name(op: str) -> str:
    """The public name of an op, ``svexport.ops.einsum``."""
    return f"svexport.ops.{op}"
