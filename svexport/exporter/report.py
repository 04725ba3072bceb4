"""What an export did, and how the file was proven."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from svexport.parity import Parity

__all__ = ["ExportReport", "NodeSource"]


@dataclass(frozen=True)
class NodeSource:
    """One svexport node of the traced model.

    Attributes:
        name: of the node.
        type: ``SvEinsum``, ...
        source: the user's line it came from, empty where unknown.
        lowered: whether the file carries its body instead of the node.
    """

    name: str
    type: str
    source: str
    lowered: bool


@dataclass(frozen=True)
class ExportReport:
    """Result of :func:`svexport.export`; ``print`` shows it as a table.

    Attributes:
        path: the written file.
        model: class name of the exported model.
        opset: of the default domain, read back from the file.
        ir_version: of the file.
        target: TensorRT version it was written for, or None.
        bytes: size of the file with its external data.
        inputs: name -> "float32[1, 3, 224, 224]".
        outputs: likewise.
        nodes: nodes of the file by type.
        traced_nodes: nodes by type as traced, svexport nodes in place.
        lowered_nodes: nodes by type with every svexport node lowered: what a runtime without plugins executes.
        svexport_nodes: each svexport node, with the user's source line.
        parity: one entry per output and run; empty with ``verify=False``.
        seconds: wall time of each stage.
        notes: remarks, such as what the tracer warned of.
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
    seconds: Mapping[str, float]
    notes: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether every output was compared with torch and agreed."""
        return bool(self.parity) and all(p.ok for p in self.parity)

    @property
    def max_abs(self) -> float:
        """The largest absolute difference of all comparisons; NaN where none was made."""
        return max((p.max_abs for p in self.parity), default=float("nan"))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-serialisable values."""
        return {
            **asdict(self),
            "path": str(self.path),
            "parity": [p.to_dict() for p in self.parity],
            "verified": self.verified,
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=110, color_system=None)
        for table in self.tables():
            console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def tables(self) -> list[Any]:
        """The report as rich tables."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        state = "verified" if self.verified else "not verified"
        title = f"{self.model} -> {self.path.name}: {state}"
        summary = Table(title=title, box=box.SIMPLE_HEAD, show_header=False, title_justify="left", title_style="bold")
        summary.add_row("opset / IR", f"{self.opset} / {self.ir_version}" + (f", for {self.target}" if self.target else ""))
        summary.add_row("file", Text(f"{self.path}, {self.bytes / 1e6:.2f} MB"))
        for label, values in (("inputs", self.inputs), ("outputs", self.outputs)):
            summary.add_row(label, Text(", ".join(f"{name} {kind}" for name, kind in values.items())))
        summary.add_row("nodes", ", ".join(f"{kind} {count}" for kind, count in sorted_counts(self.nodes).items()))
        summary.add_row("seconds", ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items()))
        tables = [summary]
        if self.svexport_nodes:
            nodes = Table("svexport node", "type", "in the file", "source", box=box.SIMPLE_HEAD)
            for node in self.svexport_nodes:
                nodes.add_row(*map(Text, (node.name, node.type, "lowered" if node.lowered else "node", node.source)))
            tables.append(nodes)
        if self.parity:
            rows = Table("output", "inputs", "shape", "max abs", "max rel", "cosine", "", box=box.SIMPLE_HEAD)
            for p in self.parity:
                numbers = (f"{p.max_abs:.2e}", f"{p.max_rel:.2e}", f"{p.cosine:.8f}", "ok" if p.ok else "FAIL")
                rows.add_row(*map(Text, (p.name, p.run, str(list(p.shape)), *numbers)))
            tables.append(rows)
        return tables


def sorted_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Node types by falling count, then by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
