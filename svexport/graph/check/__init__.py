"""``svexport.check``: what a TensorRT version will make of a file, told from the file alone.

``nodes``: what becomes of every node. ``file``: what concerns the file as a whole. ``report``: what comes out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto

from svexport.errors import SvexportError
from svexport.graph.check.file import file_findings
from svexport.graph.check.nodes import VERDICTS, Nodes
from svexport.graph.check.report import SEVERITIES, CheckReport, Finding
from svexport.graph.check.types import known_types
from svexport.graph.scope import light_copy
from svexport.graph.walk import STANDARD, graphs, opset_of
from svexport.tensorrt.support.target import Target

__all__ = ["CheckReport", "Finding", "check"]

_MAX_BYTES = 2**31 - 1


def check(model: onnx.ModelProto | str | os.PathLike[str], target: str) -> CheckReport:
    """Tells whether a TensorRT version parses a file, without TensorRT, a GPU or running anything.

    Every node, those in nested graphs and local functions too, is held to what TensorRT's parser is known to take: its
    op, the opset, types, ranks, attributes and which inputs have to be constants. That is read from the parser's
    documentation and sources (see ``svexport.tensorrt.support``), and says nothing of what building the engine or its
    numbers come to.

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
    platform = Target.parse(target)
    if not isinstance(model, (onnx.ModelProto, str, os.PathLike)):
        raise SvexportError(f"expected an ONNX model or the path of one, got a {type(model).__name__}; export it first")
    path = None if isinstance(model, onnx.ModelProto) else Path(model)
    loaded = model if isinstance(model, onnx.ModelProto) else _load(Path(model))
    _check_whole(loaded, "the model" if path is None else str(path))
    light = light_copy(loaded)
    types = known_types(light)
    nodes = Nodes(loaded, platform, types)
    findings = [*file_findings(loaded, light, platform, types, path), *nodes.findings()]
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


def _load(path: Path) -> onnx.ModelProto:
    if path.is_dir():
        raise SvexportError(f"expected an ONNX file, got the folder {path}")
    if not path.is_file():
        raise SvexportError(f"no such file: {path}")
    if path.stat().st_size > _MAX_BYTES:
        raise SvexportError(
            f"{path} has {path.stat().st_size} bytes, and nothing reads a protobuf above 2 GiB, TensorRT's parser "
            "included; save its weights beside it: onnx.save(..., save_as_external_data=True)"
        )
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise SvexportError(f"{path} is not a valid ONNX file: {str(error) or type(error).__name__}") from error


def _check_whole(model: onnx.ModelProto, what: str) -> None:
    """Whether there is all that a check needs: bytes that are something else may well be parsed as a model of nothing.

    Raises:
        SvexportError: naming what is missing.
    """
    missing = [name for name in ("ir_version", "graph") if not model.HasField(name)]
    if not any(entry.domain in STANDARD for entry in model.opset_import):
        missing.append("opset of the default domain")
    if missing:
        raise SvexportError(f"{what} is not a valid ONNX file: it has no {' and no '.join(missing)}")
    if any(isinstance(name, bytes) for name in _names(model)):  # which protobuf makes of what is no UTF-8
        raise SvexportError(f"{what} is not a valid ONNX file: it has names that are no text")
    known = set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
    for graph in graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_type not in known or min(tensor.dims, default=0) < 0:
                raise SvexportError(
                    f"{what} is not a valid ONNX file: the initializer {tensor.name!r} has data type "
                    f"{tensor.data_type} and dimensions {list(tensor.dims)}"
                )


def _names(model: onnx.ModelProto) -> Iterator[str | bytes]:
    yield model.graph.name
    yield from (entry.domain for entry in model.opset_import)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
    bodies = [onnx.GraphProto(node=function.node) for function in model.functions]
    for graph in (inner for outer in (model.graph, *bodies) for inner in graphs(outer)):
        for node in graph.node:
            yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
            yield from (attribute.name for attribute in node.attribute)
        yield from (value.name for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer))
