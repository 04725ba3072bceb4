"""The down-converter: converts a model to an older opset, with exactly the same results."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from svexport.errors import SvexportError, UnsupportedError
from svexport.graph.bodies import ir_version
from svexport.graph.nodes import separate_names
from svexport.graph.opsets.converter import Converter, Refused, names_in
from svexport.graph.opsets.functions import convert_functions, inlined
from svexport.graph.opsets.known import known_of
from svexport.graph.opsets.rules import BROKEN
from svexport.graph.saving import check_place, write
from svexport.graph.scope import drop_unused, sort_nodes, used_names
from svexport.graph.walk import STANDARD, graphs, opset_of
from svexport.ops._op import DOMAIN

__all__ = ["FAMILIES", "LOWEST", "convert", "convert_in_place"]

LOWEST = 9
"""The lowest opset that models are converted to."""

HIGHEST = 24
"""The highest that they are converted from."""

FAMILIES = (
    *("shape", "pad", "constant", "index", "reduce", "elementwise", "control", "activation", "norm", "pool", "boxes"),
    *("resize", "sample", "product", "quantize", "attention", "signal", "recurrent", "loss", "random", "text", "cast"),
)
"""The files of rules in this folder, by what their ops do."""

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")


def convert(model: onnx.ModelProto | str | Path, opset: int = 11, path: str | Path | None = None) -> onnx.ModelProto:
    """Converts a model to a lower opset; the result computes exactly the same.

    Args:
        model: an ONNX model or the path of one; it is not changed.
        opset: opset of the default domain, 9 or later. Nodes of other domains are kept, local functions are converted,
            and the bodies of svexport nodes are written again.
        path: where to write the result, if anywhere.

    Returns:
        A new model.

    Raises:
        UnsupportedError: if the opset is higher than the model's, or if nodes have no exact form in it: the message
            names them, and gives the reason and the lowest opset with an exact form.
        SvexportError: if the file does not exist, or the model is not valid.
    """
    if path is not None:
        check_place(Path(path))
    if isinstance(model, onnx.ModelProto):
        converted = onnx.ModelProto()
        converted.CopyFrom(model)
    else:
        converted = _loaded(Path(model))
    convert_in_place(converted, opset)
    if path is not None:
        write(converted, Path(path))
    return converted


def _loaded(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise SvexportError(f"expected the path of an ONNX file, and there is none at {path}")
    try:
        return onnx.load(str(path))
    except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
        raise SvexportError(f"{path} is not an ONNX file that can be read: {error}") from error


def convert_in_place(model: onnx.ModelProto, opset: int) -> None:
    """:func:`convert` for a model that may be changed. On an error it is left half converted."""
    before = opset_of(model)
    if isinstance(opset, bool) or not isinstance(opset, int):
        raise UnsupportedError(f"opset must be an integer from {LOWEST} to the model's own, {before}, got {opset!r}")
    if not LOWEST <= opset <= before:
        higher = "; onnx.version_converter.convert_version goes up" if opset > before else ""
        raise UnsupportedError(f"expected an opset from {LOWEST} to the model's own, {before}, got {opset}{higher}")
    known = min(HIGHEST, onnx.defs.onnx_opset_version())
    if before > known:
        raise UnsupportedError(f"expected a model of an opset up to {known}, got one of opset {before}")
    if opset == before:
        return
    _check_attributes(model)
    sort_nodes(model)
    try:
        _convert(model, before, opset)
    except BROKEN as error:
        raise UnsupportedError(
            f"the model is not as ONNX defines it: {type(error).__name__}: {error}; onnx.checker.check_model tells more"
        ) from error


_AXES = ("axis", "axes", "batch_dims", "batch_axis", "time_axis")


def _check_attributes(model: onnx.ModelProto) -> None:
    """Shape inference of the library does not survive some numbers that are none of a valid model."""
    bodies = [onnx.GraphProto(node=function.node) for function in model.functions]
    for graph in (inner for outer in (model.graph, *bodies) for inner in graphs(outer)):
        for node in graph.node:
            for attribute in node.attribute:
                axes = (attribute.i, *attribute.ints) if attribute.name in _AXES else ()
                parts = attribute.i if attribute.name == "num_outputs" else len(node.output)
                first = 0 if attribute.name == "batch_dims" else -64
                if not all(first <= axis < 64 for axis in axes) or parts != len(node.output):
                    raise UnsupportedError(
                        f"node {node.name or next(iter(node.output), '')!r} ({node.op_type}) has {attribute.name} "
                        f"{attribute.i or list(attribute.ints)}, which is not as ONNX defines it"
                    )


def _convert(model: onnx.ModelProto, before: int, opset: int) -> None:
    with_bodies = any(function.domain == DOMAIN for function in model.functions)
    if with_bodies:
        from svexport.graph.bodies import attach, state_types, strip

        state_types(model)
        strip(model)
    original = None
    if model.functions:
        original = onnx.ModelProto()
        original.CopyFrom(model)
    refused = _converted(model, before, opset)
    if refused and original is not None:  # a function may have a form where its calls are
        model.CopyFrom(inlined(original))
        refused = _converted(model, before, opset)
    if refused:
        raise _refusal(refused, before, opset)
    if with_bodies:
        attach(model)


def _converted(model: onnx.ModelProto, before: int, opset: int) -> list[Refused]:
    """Converts graph and functions in place; returns the nodes that have no form."""
    separate_names(model)
    used = [(graph, used_names(graph)) for graph in graphs(model.graph)]
    known = known_of(model)
    converter = Converter(names_in(model.graph), opset)
    converter.graph(model.graph, before, known)
    all_of = [converter, *convert_functions(model, opset, known)]
    for graph, names in reversed(used):
        drop_unused(graph, names)
    for entry in model.opset_import:
        if entry.domain in STANDARD:
            entry.version = opset
    lowest = 8 if model.functions else 4  # from which on initializers need not be inputs
    if opset < 23:  # which has types of a later one
        model.ir_version = max(lowest, min(model.ir_version, ir_version(opset)))
    return [refused for each in all_of for refused in each.refused]


def _refusal(refused: Sequence[Refused], before: int, opset: int) -> UnsupportedError:
    """Names the nodes that decide how far down the model goes first."""
    ordered = sorted(refused, key=lambda one: -one.opset)
    lines = "\n  ".join(map(str, ordered[:8]))
    more = f"\n  and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return UnsupportedError(
        f"the model (opset {before}) has no exact form at opset {opset}; the lowest that has one is {ordered[0].opset}:"
        f"\n  {lines}{more}"
    )
