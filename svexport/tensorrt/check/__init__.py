"""``svexport.check``: predicts what a TensorRT version does with a file, from the file alone.

``nodes``: the verdict on every node. ``placement``: the positions of quantizers. ``file``: the file as a whole.
``report``: the result.
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

    It compares every node, including those in nested graphs and local functions, with what TensorRT's parser is known
    to support: op, opset, types, ranks, attributes and inputs that must be constants. This knowledge comes from the
    parser's documentation and sources (see ``svexport.tensorrt.support``). It does not cover building the engine or
    numerical results, but notes where QuantizeLinear and DequantizeLinear prevent TensorRT's fusions.

    Args:
        model: an ONNX model or the path of one. Weights in other files are not read.
        target: a TensorRT version from ``"8.2"`` on, such as ``"8.4"`` or ``"10.12"``.

    Returns:
        A :class:`CheckReport`; ``report.ok`` is True if nothing was found that TensorRT refuses or misinterprets.

    Raises:
        ExportError: if ``target`` is not a TensorRT version.
        SvexportError: if the file is missing or is not an ONNX model.
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
        # svexport.export passes the Target that it wrote the file for; other callers pass a string.
        report.findings.append(_for_another(platform))
    return report


def _for_another(platform: Target) -> Finding:
    """Advice for errors in a file that svexport exported without this target."""
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
