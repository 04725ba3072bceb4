"""The report of a build: the engine's layers, and the nodes that each computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from svexport.report import Report
from svexport.tensorrt.check.report import CheckReport
from svexport.text import number_of, table
from svexport.untrusted import parse_json

__all__ = ["BuildReport", "Layer", "read_layers"]

_SHOWN = 20


@dataclass(frozen=True)
class Layer:
    """A layer of an engine, as reported by TensorRT's inspector.

    Attributes:
        name: name in the engine.
        kind: ``"CaskConvolution"``, ``"Reformat"``, ``"PluginV3"``; empty if the engine stores only names.
        nodes: nodes of the file that it computes; several if they were fused.
        tactic: name of the tactic; empty if it is not reported.
        inputs: type and format of each input.
        outputs: likewise.
    """

    name: str
    kind: str = ""
    nodes: tuple[str, ...] = ()
    tactic: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def reformat(self) -> bool:
        """Whether it only changes type or format."""
        return self.kind.lower() in ("reformat", "shuffle_reformat") or self.name.startswith("Reformatting CopyNode")

    @property
    def remedy(self) -> str:
        """How to avoid this reformat layer."""
        if not self.reformat:
            return ""
        before, after = " ".join(self.inputs), " ".join(self.outputs)
        types = [set(re.findall(r"FP32|FP16|BF16|INT8|INT32|INT64|FP8|Int8|Float|Half", t)) for t in (before, after)]
        if types[0] != types[1]:
            return "one type on both sides: export with dtype=, or keep=, so that its neighbours agree"
        if "Network Input" in self.name or "input" in self.name.lower().split():
            return "an input in the format that the first layer reads"
        return "neighbours that take one format; docs/tensorrt.md has the formats of the plugins"


def read_layers(text: str) -> list[Layer]:
    """Parses the layers from an inspector's JSON; an empty list if it has an unknown form."""
    try:
        found = parse_json(text).get("Layers", [])
    except (ValueError, AttributeError):
        return []
    return [_layer(entry) for entry in found if isinstance(entry, (str, dict))]


def _layer(entry: str | dict[str, Any]) -> Layer:
    if isinstance(entry, str):
        return Layer(entry)
    metadata = str(entry.get("Metadata", ""))
    return Layer(
        name=str(entry.get("Name", "")),
        kind=str(entry.get("LayerType", "")),
        nodes=tuple(dict.fromkeys(re.findall(r"\[ONNX Layer: ([^\]]*)\]", metadata))),
        tactic=str(entry.get("TacticName") or entry.get("TacticValue") or ""),
        inputs=tuple(_format(tensor) for tensor in entry.get("Inputs", [])),
        outputs=tuple(_format(tensor) for tensor in entry.get("Outputs", [])),
    )


def _format(tensor: Any) -> str:
    return str(tensor.get("Format/Datatype", tensor.get("Datatype", ""))) if isinstance(tensor, dict) else str(tensor)


@dataclass(frozen=True, repr=False)
class BuildReport(Report):
    """The report of :func:`svexport.build`; ``print`` shows it as tables.

    Attributes:
        source: the file it was built from.
        path: the engine's file.
        tensorrt: the TensorRT version that built it.
        device: the GPU.
        bytes: size of the plan.
        profiles: the sizes it is built for, each as ``"images 1x3x8x8 / 4x3x8x8 / 8x3x8x8"``.
        plugins: how each svexport node of the file runs, by name: ``"C++"``, ``"AOT"`` or ``"JIT"``.
        layers: layers of the engine.
        sources: by node name, the line of the model that the node came from.
        seconds: wall time of each stage.
        trtexec: the command that builds the same engine without Python.
        notes: assumptions, and TensorRT's warnings.
        check: result of the check before the build.
    """

    source: str
    path: Path | None
    tensorrt: str
    device: str
    bytes: int
    profiles: list[str]
    plugins: Mapping[str, str]
    layers: list[Layer]
    sources: Mapping[str, str]
    seconds: Mapping[str, float]
    trtexec: str
    notes: list[str] = field(default_factory=list)
    check: CheckReport | None = None

    @property
    def reformats(self) -> list[Layer]:
        """Layers that only change a tensor's type or format."""
        return [layer for layer in self.layers if layer.reformat]

    @property
    def fused(self) -> list[Layer]:
        """Layers that compute several nodes."""
        return [layer for layer in self.layers if len(layer.nodes) > 1]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-serializable values."""
        layers = [{**asdict(layer), "reformat": layer.reformat, "remedy": layer.remedy} for layer in self.layers]
        path = None if self.path is None else str(self.path)
        check = None if self.check is None else self.check.to_dict()
        return {**asdict(self), "path": path, "layers": layers, "check": check}

    def __repr__(self) -> str:
        return f"BuildReport({self.source} -> {self.path}: {len(self.layers)} layers, TensorRT {self.tensorrt})"

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.trtexec}"

    def tables(self) -> list[Any]:
        """The report as rich renderables: a summary, plugins, reformats."""
        name = self.path.name if self.path else "an engine in memory"
        tables: list[Any] = [table((), self._facts(), f"{self.source} -> {name}")]
        for header, rows in self._lists():
            more = len(rows) - _SHOWN
            tables.append(table(header, [*rows[:_SHOWN], *[(f"and {more} more", "", "")] * (more > 0)]))
        return tables

    def _title(self) -> str:
        return f"{self.source} by TensorRT {self.tensorrt}"

    def html_body(self, picture: Any = None) -> list[str]:
        """The report as pieces of a page: summary, plugins, reformats, layers, notes."""
        from svexport import html

        body = [html.table((), [*self._facts(), ("trtexec", self.trtexec)])]
        for header, rows in self._lists():
            body.append(html.section(f"{header[0].capitalize()}s", html.table(header, rows)))
        header = ("layer", "kind", "nodes", "tactic", "inputs", "outputs")
        layers = [
            (one.name, one.kind, ", ".join(one.nodes), one.tactic, _joined(one.inputs), _joined(one.outputs))
            for one in self.layers
        ]
        body.append(html.section("Layers", html.folded(f"all {len(layers)} layers", html.table(header, layers))))
        if self.notes:
            body.append(html.section("Notes", *map(html.note, self.notes)))
        return body

    def _lists(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """A header and rows of each list that is not empty: nodes that became plugins, reformats."""
        plugins: list[tuple[str, ...]] = [(n, kind, self.sources.get(n, "")) for n, kind in self.plugins.items()]
        reformats: list[tuple[str, ...]] = [
            (layer.name, f"{_joined(layer.inputs)} -> {_joined(layer.outputs)}", layer.remedy)
            for layer in self.reformats
        ]
        lists: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
            (("node", "plugin", "source"), plugins),
            (("reformat", "from and to", "removed by"), reformats),
        ]
        return [(header, rows) for header, rows in lists if rows]

    def _facts(self) -> list[tuple[str, str]]:
        kinds = [number_of(len(self.layers), "layer")]
        kinds += [f"{len(self.fused)} of several nodes"] if self.fused else []
        kinds += [number_of(len(self.reformats), "reformat")] if self.reformats else []
        return [
            ("built by", f"TensorRT {self.tensorrt} on {self.device}"),
            ("plan", f"{self.bytes / 1e6:.2f} MB, {', '.join(kinds)}"),
            ("sizes", "\n".join(self.profiles) or "as in the file"),
            ("seconds", ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())),
        ]


def _joined(formats: Sequence[str]) -> str:
    return ", ".join(formats) or "?"
