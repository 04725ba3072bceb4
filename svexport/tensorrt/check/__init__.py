"""``svexport.check``: what a TensorRT version will make of a file, told from the file alone.

``nodes``: what becomes of every node. ``placement``: where quantizers stand. ``file``: what concerns the file as a
whole. ``report``: what comes out.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import onnx

from svexport.errors import SvexportError
from svexport.graph.reading import check_whole, damaged, read_model
from svexport.graph.scope import light_copy
from svexport.graph.walk import opset_of
from svexport.tensorrt.check.file import file_findings
from svexport.tensorrt.check.nodes import VERDICTS, Nodes
from svexport.tensorrt.check.placement import placement_findings
from svexport.tensorrt.check.report import SEVERITIES, CheckReport, Finding
from svexport.tensorrt.check.types import known_types
from svexport.tensorrt.support.target import Target

__all__ = ["CheckReport", "Finding", "check"]


def check(model: onnx.ModelProto | str | os.PathLike[str], target: str | Target) -> CheckReport:
    """Tells whether a TensorRT version parses a file, without TensorRT, a GPU or running anything.

    Every node, those in nested graphs and local functions too, is held to what TensorRT's parser is known to take: its
    op, the opset, types, ranks, attributes and which inputs have to be constants. That is read from the parser's
    documentation and sources (see ``svexport.tensorrt.support``), and says nothing of what building the engine or its
    numbers come to; but notes where QuantizeLinear and DequantizeLinear stand in the way of what TensorRT fuses.

    Args:
        model: an ONNX model or the path of one. Weights in other files are not read.
        target: a TensorRT version from ``"8.2"`` on, such as ``"8.4"`` or ``"10.12"``.

    Returns:
        A :class:`CheckReport`; ``report.ok`` is whether nothing was found that TensorRT refuses or takes for something
        else.

    Raises:
        ExportError: if ``target`` is no TensorRT version.
        SvexportError: if the file is missing or is no ONNX model.
    """
    started = time.perf_counter()
    platform = target if isinstance(target, Target) else Target.parse(target)
    if not isinstance(model, (onnx.ModelProto, str, os.PathLike)):
        raise SvexportError(f"expected an ONNX model or the path of one, got a {type(model).__name__}; export it first")
    path = None if isinstance(model, onnx.ModelProto) else Path(model)
    loaded = model if isinstance(model, onnx.ModelProto) else read_model(Path(model), external=False)
    what = "the model" if path is None else str(path)
    check_whole(loaded, what)
    with damaged(what):
        report = _checked(loaded, platform, path, started)
    if not report.ok and loaded.producer_name == "svexport" and not isinstance(target, Target):
        # svexport.export itself asks with the Target that it wrote the file for.
        report.findings.append(_for_another(platform))
    return report


def _for_another(platform: Target) -> Finding:
    """The way out of errors that a file of svexport has where it was exported without this target."""
    version = str(platform).removeprefix("TensorRT ")
    todo = (
        f'if it was exported without: svexport.export(..., target="{version}") writes nodes as this version reads them'
    )
    return Finding(
        "note", "target", "", "", "", f"a file exported with target {version}", "errors in a file of svexport", todo
    )


def _checked(loaded: onnx.ModelProto, platform: Target, path: Path | None, started: float) -> CheckReport:
    light = light_copy(loaded)
    types = known_types(light)
    nodes = Nodes(loaded, platform, types)
    findings = [*file_findings(loaded, light, platform, types, path), *nodes.findings(), *placement_findings(light)]
    return CheckReport(
        source=loaded.graph.name or "model" if path is None else str(path),
        target=str(platform),
        opset=opset_of(loaded),
        ir_version=loaded.ir_version,
        nodes=dict(sorted(nodes.counts.items(), key=lambda item: (-item[1], item[0]))),
        verdicts={verdict: nodes.verdicts[verdict] for verdict in VERDICTS if nodes.verdicts[verdict]},
        findings=sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)),
        seconds=time.perf_counter() - started,
    )
