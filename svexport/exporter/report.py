"""The report of an export: what it did, and how the file was proven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from svexport import html
from svexport.exporter.typed import KeptCall
from svexport.parity import Parity
from svexport.report import Report
from svexport.tensorrt.check.report import CheckReport
from svexport.text import number_of, table

__all__ = ["ExportReport", "Faults", "NodeSource"]


MOST_SHOWN = 20
"""Upper bound on the missed faults that tables show."""

_UNLIKE = ("scaled", "hundredfold", "searched", "zero", "zeros")
"""Runs whose errors are large where the numbers are."""


@dataclass(frozen=True)
class NodeSource:
    """One svexport node of the traced model.

    Attributes:
        name: the node's name.
        type: the node's type: ``SvGridSample``, ...
        source: the user's line that it came from; empty if unknown.
        lowered: whether the file carries its body instead of the node.
    """

    name: str
    type: str
    source: str
    lowered: bool


@dataclass(frozen=True)
class Faults:
    """How many single faults of a file its verification would notice.

    Attributes:
        planted: the number of faults planted.
        noticed: those that a default verification notices, with its inputs and tolerances.
        found: those of the others that searched inputs reveal, or holding outputs to torch's own rounding.
        missed: the rest, each as what is wrong and the user's line or module; some change nothing on any input.
        searched: the number of searched inputs on which the file agrees with torch.
    """

    planted: int
    noticed: int
    found: int
    missed: list[str] = field(default_factory=list)
    searched: int = 0

    def __str__(self) -> str:
        return (
            f"{self.noticed + self.found} of {self.planted} planted faults noticed, "
            f"{self.noticed} by a default verification; {self.searched} searched inputs agree"
        )


@dataclass(frozen=True, repr=False)
class ExportReport(Report):
    """Result of :func:`svexport.export`; ``print`` shows it as tables, a notebook as tables and pictures.

    Attributes:
        path: the written file.
        model: class name of the exported model.
        opset: opset of the default domain, read back from the file.
        ir_version: IR version of the file.
        target: TensorRT version it was written for, or None.
        bytes: size of the file with its external data.
        inputs: name -> "float32[1, 3, 224, 224]".
        outputs: likewise.
        nodes: nodes of the file by type.
        traced_nodes: nodes by type as traced, svexport nodes in place.
        lowered_nodes: nodes by type with every svexport node lowered: what a runtime without plugins executes.
        svexport_nodes: each svexport node, with the user's source line.
        parity: one entry per output and run; empty with ``verify=False``.
        rtol: relative tolerance of the comparison.
        atol: absolute tolerance for outputs whose largest number is 1 or more; ``parity`` has that of each output.
        seconds: wall time of each stage; ``verify`` is the part of it after the file was written.
        notes: remarks, such as warnings of the tracer.
        skipped: runs that were not compared, and why: ``zeros: what torch computes there is not finite``.
        verify: ``"default"``, ``"quick"``, ``"thorough"`` or ``"none"``.
        faults: faults that ``verify="thorough"`` planted, and which were noticed; None in other modes.
        check: the check of the file for the target; None without a target.
        kept: calls that stay float32 in a half model, each with its line and reason (``keep``).
    """

    path: Path
    model: str
    opset: int
    ir_version: int
    target: str | None
    bytes: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    nodes: Mapping[str, int]
    traced_nodes: Mapping[str, int]
    lowered_nodes: Mapping[str, int]
    svexport_nodes: list[NodeSource]
    parity: list[Parity]
    rtol: float
    atol: float
    seconds: Mapping[str, float]
    notes: list[str] = field(default_factory=list)
    check: CheckReport | None = None
    skipped: list[str] = field(default_factory=list)
    verify: str = "default"
    faults: Faults | None = None
    kept: list[KeptCall] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether every output was compared with torch, on more than the given inputs, and agreed."""
        return self.verify in ("default", "thorough") and bool(self.parity) and all(p.ok for p in self.parity)

    @property
    def max_abs(self) -> float:
        """The largest absolute difference on inputs like the given ones, not zeros or scaled ones; NaN without any."""
        return max((p.max_abs for p in self.parity if p.run.split()[0] not in _UNLIKE), default=float("nan"))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-serializable values."""
        return {
            **asdict(self),
            "path": str(self.path),
            "parity": [p.to_dict() for p in self.parity],
            "check": self.check and self.check.to_dict(),
            "verified": self.verified,
        }

    def __repr__(self) -> str:
        state = f"verified, largest absolute error {self.max_abs:.1e}" if self.verified else "not verified"
        return f"ExportReport({self.model} -> {self.path} at opset {self.opset}: {state})"

    def tables(self) -> list[Any]:
        """The report as rich tables."""
        state = "verified" if self.verified else "not verified"
        tables: list[Any] = [table((), self._facts(), f"{self.model} -> {self.path.name}: {state}")]
        lists = (self._node_rows(), self._kept_rows(), self._parity_rows())
        tables += [table(header, rows) for header, *rows in filter(None, lists)]
        if self.check is not None and not self.check.ok:
            tables += self.check.tables()
        return tables

    def _title(self) -> str:
        return f"{self.model} at opset {self.opset}"

    def html_body(self, picture: Callable[..., str] = html.picture) -> list[str]:
        """The report as pieces of a page: verdict, parity, nodes, details; ``picture`` draws."""
        verdict = "Not compared with torch (verify=False)"
        kind = "ok" if self.verified else "warning" if all(p.ok for p in self.parity) else "fail"
        parity = []
        if self.parity:
            outputs, runs = (list(dict.fromkeys(getattr(p, key) for p in self.parity)) for key in ("name", "run"))
            verdict = "Verified" if self.verified else "Not verified"
            if self.verify == "quick":
                verdict = "Not verified, only compared (verify='quick')"
            verdict += f": {number_of(len(outputs), 'output')} on {', '.join(runs)} inputs"
            verdict += f", largest absolute error {self.max_abs:.1e}"
            if any(run.split()[0] in _UNLIKE for run in runs):
                verdict += " on those like the given ones"
            header, *rows = self._parity_rows()
            errors = picture("errors of each output", html.error_figure, self.parity, self.atol)
            parity = [html.section("Parity with torch", errors, html.table(header, rows))]
        counts = self.traced_nodes, self.lowered_nodes, ("as traced", "lowered to standard ONNX")
        nodes = [picture("nodes by type", html.node_figure, *counts)]
        if self.svexport_nodes:
            header, *rows = self._node_rows()
            lines = Counter(row[1:] for row in rows)  # one line of the source makes a node in each layer
            nodes.append(html.table(("count", *header[1:]), [(count, *line) for line, count in lines.items()]))
            nodes.append(html.folded("each by name", html.table(header, rows)))
        kept = self._kept_rows()
        return [
            html.verdict(verdict, kind),
            *parity,
            html.section("Nodes", *nodes),
            *([html.section("Float32 in a half model", html.table(kept[0], kept[1:]))] if kept else []),
            *([html.section(f"Checked for {self.check.target}", *self.check.html_body())] if self.check else []),
            html.section("Details", html.table((), self._facts())),
            *([html.section("Notes", *map(html.note, self.notes))] if self.notes else []),
        ]

    def _facts(self) -> list[tuple[str, str]]:
        platform = f", for {self.target}" if self.target else ""
        facts = [
            ("opset / IR", f"{self.opset} / {self.ir_version}{platform}"),
            ("file", f"{self.path}, {self.bytes / 1e6:.2f} MB"),
            ("inputs", ", ".join(f"{name} {kind}" for name, kind in self.inputs.items())),
            ("outputs", ", ".join(f"{name} {kind}" for name, kind in self.outputs.items())),
            ("nodes", ", ".join(f"{kind} {count}" for kind, count in sorted_counts(self.nodes).items())),
        ]
        if self.parity:
            facts.append(("tolerances", f"rtol {self.rtol:g}, atol {self.atol:g}"))
            facts.append(("compared on", ", ".join(dict.fromkeys(p.run for p in self.parity)) + " inputs"))
        if self.skipped:
            facts.append(("not compared on", "; ".join(self.skipped)))
        if self.faults is not None:
            facts.append(("faults", str(self.faults)))
            facts += [("", f"missed: {fault}") for fault in self.faults.missed[:MOST_SHOWN]]
            if (more := len(self.faults.missed) - MOST_SHOWN) > 0:
                facts.append(("", f"and {more} more (report.faults.missed)"))
        return [*facts, ("seconds", ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items()))]

    def _node_rows(self) -> list[tuple[str, ...]]:
        """A header and one row per svexport node; empty without such nodes."""
        rows = [(n.name, n.type, "lowered" if n.lowered else "node", n.source) for n in self.svexport_nodes]
        return [("svexport node", "type", "in the file", "source"), *rows] if rows else []

    def _kept_rows(self) -> list[tuple[str, ...]]:
        """A header and one row per call that stays float32; empty without such calls."""
        rows = [(one.function, one.module, one.reason, one.source) for one in self.kept]
        return [("in float32", "module", "why", "source"), *rows] if rows else []

    def _parity_rows(self) -> list[tuple[str, ...]]:
        """A header and one row per comparison; empty without comparisons."""
        rows = []
        for p in self.parity:
            numbers = f"{p.max_abs:.2e}", f"{p.max_rel:.2e}", f"{p.cosine:.8f}"
            rows.append((p.name, p.run, str(list(p.shape)), *numbers, "ok" if p.ok else "FAIL"))
        return [("output", "inputs", "shape", "max abs", "max rel", "cosine", ""), *rows] if rows else []


def sorted_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of node types, sorted by descending count, then by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
