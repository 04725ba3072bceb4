"""The down-converter: a model of a newer opset as one of an older opset that computes exactly the same."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import onnx

from svexport.errors import UnsupportedError
from svexport.graph.nodes import separate_names
from svexport.graph.opsets.converter import Converter
from svexport.graph.opsets.known import Known
from svexport.graph.scope import drop_unused, light_copy, used_names
from svexport.graph.types import types_of
from svexport.graph.walk import STANDARD, graphs, opset_of
from svexport.logging import logger

__all__ = ["FAMILIES", "LOWEST", "convert", "convert_in_place"]

LOWEST = 9
"""The lowest opset that models are converted to."""

FAMILIES = (
    *("shape", "pad", "constant", "index", "reduce", "elementwise", "control"),
    *("activation", "norm", "pool", "resize", "sample", "product", "quantize", "attention", "signal", "recurrent"),
    *("loss", "random", "text", "cast"),
)
"""The files of rules in this folder, by what their ops do."""

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")


def convert(model: onnx.ModelProto | str | Path, opset: int = 11, path: str | Path | None = None) -> onnx.ModelProto:
    """Writes a model of any opset at a lower one, so that it computes exactly the same.

    Args:
        model: an ONNX model or the path of one; it is not changed.
        opset: of the default domain, 9 or later. Nodes of other domains stay; local functions are converted.
        path: where to write the result, if anywhere.

    Returns:
        A new model.

    Raises:
        UnsupportedError: if the opset is higher than the model's, or if nodes have no exact form at it: the message
            names them, says why, and what the lowest opset is that has one.
    """
    if isinstance(model, onnx.ModelProto):
        converted = onnx.ModelProto()
        converted.CopyFrom(model)
    else:
        converted = onnx.load(str(model))
    convert_in_place(converted, opset)
    if path is not None:
        from svexport.exporter.export import write

        write(converted, Path(path))
    return converted


def convert_in_place(model: onnx.ModelProto, opset: int) -> None:
    """:func:`convert` for a model that may be changed. On an error it is left half converted."""
    before = opset_of(model)
    if not LOWEST <= opset <= before:
        higher = "; onnx.version_converter.convert_version goes up" if opset > before else ""
        raise UnsupportedError(f"expected an opset from {LOWEST} to the model's own, {before}, got {opset}{higher}")
    if opset == before:
        return
    separate_names(model)
    used = [(graph, used_names(graph)) for graph in graphs(model.graph)]
    taken = {name for graph in graphs(model.graph) for node in graph.node for name in (*node.output, node.name)}
    taken.update(value.name for g in graphs(model.graph) for value in (*g.input, *g.initializer, *g.value_info))
    converter = Converter(taken, opset)
    converter.graph(model.graph, before, _known(model))
    if converter.refused:
        raise _refusal(converter, before, opset)
    for graph, names in reversed(used):
        drop_unused(graph, names)
    for entry in model.opset_import:
        if entry.domain in STANDARD:
            entry.version = opset
    model.ir_version = max(4, min(model.ir_version, 8 if opset < 20 else 10))


def _known(model: onnx.ModelProto) -> Known:
    """What the model states and shape inference adds. Initializers that a caller may override decide nothing."""
    light = light_copy(model)
    overridable = {value.name for value in model.graph.input}
    fixed = [tensor for tensor in light.graph.initializer if tensor.name not in overridable]
    del light.graph.initializer[:]
    light.graph.initializer.extend(fixed)
    try:
        light = onnx.shape_inference.infer_shapes(light, data_prop=True)
    except Exception as error:  # noqa: BLE001 - a library's; without it less is known
        logger.debug("no types are inferred: {}", error)
    kinds = {}
    for graph in graphs(light.graph):
        for info in (*graph.input, *graph.value_info, *graph.output):
            kind = info.type.WhichOneof("value")
            if kind not in ("tensor_type", None):
                kinds[info.name] = kind.removesuffix("_type")
    return Known(types_of(light), model.ir_version, kinds)


def _refusal(converter: Converter, before: int, opset: int) -> UnsupportedError:
    """Names the nodes that decide how far down the model goes first."""
    refused = sorted(converter.refused, key=lambda one: -one.opset)
    lines = "\n  ".join(map(str, refused[:8]))
    more = f"\n  and {len(refused) - 8} more" if len(refused) > 8 else ""
    return UnsupportedError(
        f"the model (opset {before}) has no exact form at opset {opset}; the lowest that has one is {refused[0].opset}:"
        f"\n  {lines}{more}"
    )
