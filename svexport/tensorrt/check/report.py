"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from svexport.report import Report
from svexport.text import number_of, table

__all__ = ["SEVERITIES", "CheckReport", "Finding", "listed"]

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One finding in a file.

    Attributes:
        severity: ``"error"``: TensorRT does not parse the node, or misinterprets it. ``"warning"``: it may do so, or
            the deciding facts are unknown. ``"note"``: further requirements.
        rule: the rule checked, one word.
        op: type of the node; empty for the file as a whole.
        node: the node's name, or its first output.
        where: the nested graph or the function that the node is in; empty for the main graph.
        expected: what TensorRT expects.
        came: what was found instead.
        todo: what to do next.
    """

    severity: str
    rule: str
    op: str
    node: str
    where: str
    expected: str
    came: str
    todo: str


@dataclass(frozen=True, repr=False)
class CheckReport(Report):
    """Result of :func:`svexport.check`; ``print`` shows it as tables, with equal findings in one line.

    Attributes:
        source: the file, or the name of the graph.
        target: ``"TensorRT 8.4"``.
        opset: opset of the default domain.
        ir_version: IR version of the file.
        nodes: number of nodes by type, including nested graphs and functions.
        verdicts: number of nodes by verdict: ``"native"``, ``"plugin"`` (svexport's), ``"body"`` (a local function
            runs it), ``"unknown plugin"`` (a third party's), ``"restricted"`` (it breaks a restriction),
            ``"undecided"``, ``"unsupported"``.
        findings: errors first, in the order of the file.
        seconds: wall time.
    """

    source: str
    target: str
    opset: int
    ir_version: int
    nodes: Mapping[str, int]
    verdicts: Mapping[str, int]
    findings: list[Finding]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity ``error``."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """Findings of severity ``warning``."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-serializable values."""
        return {"ok": self.ok, **asdict(self)}

    def __repr__(self) -> str:
        return f"CheckReport({self.source} for {self.target}: {self.verdict})"

    @property
    def verdict(self) -> str:
        """The verdict in a few words."""
        counts = [(len(self.errors), "error"), (len(self.warnings), "warning")]
        found = ", ".join(number_of(count, name) for count, name in counts if count)
        return found or "no problem found"

    def tables(self) -> list[Any]:
        """The report as rich renderables: a title, a summary, and a table with one row for all equal findings."""
        from rich.text import Text

        header, *rows = self._rows()
        tables: list[Any] = [Text(f"{self.source} for {self.target}: {self.verdict}", "bold"), table((), self._facts())]
        return [*tables, table(header, rows)] if self.findings else tables

    def _title(self) -> str:
        return f"{Path(self.source).name} for {self.target}"

    def html_body(self, picture: Any = None) -> list[str]:
        """The report as pieces of a page: verdict, summary, findings."""
        from svexport import html

        verdict = html.verdict(self.verdict, "ok" if self.ok else "fail")
        header, *rows = self._rows()
        findings = [html.section("Findings", html.table(header, rows))] if rows else []
        return [verdict, html.table((), self._facts()), *findings]

    def _facts(self) -> list[tuple[str, str]]:
        verdicts = ", ".join(f"{count} {name}" for name, count in self.verdicts.items()) or "none"
        return [("opset / IR", f"{self.opset} / {self.ir_version}"), ("nodes", verdicts)]

    def _rows(self) -> list[tuple[str, ...]]:
        """A header, and one row for all findings with the same text and the same node type."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.findings:
            key = finding.severity, finding.op, finding.rule, finding.expected, finding.todo
            groups.setdefault(key, []).append(finding)
        rows: list[tuple[str, ...]] = [("", "op", "count", "expected", "came", "nodes", "what to do")]
        for (severity, op, _, expected, todo), group in groups.items():
            nodes = _first([": ".join(filter(None, (f.where, f.node))) for f in group])
            rows.append((severity, op, str(len(group)), expected, _first([f.came for f in group]), nodes, todo))
        return rows


def _first(texts: Sequence[str]) -> str:
    """The first three different texts, one per line."""
    different = list(dict.fromkeys(texts))
    more = [f"and {len(different) - 3} more"] if len(different) > 3 else []
    return "\n".join(different[:3] + more)


def listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
