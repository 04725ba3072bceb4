"""Simplification of models: onnxscript's general passes, then idle nodes, space to depth, weights and Transposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from svexport.graph.idle import remove_idle
from svexport.graph.merge import merge_weights
from svexport.graph.scope import constants_as_tensors, light_copy
from svexport.graph.space_to_depth import fuse_space_to_depth
from svexport.graph.transposes import remove_transposes
from svexport.graph.walk import graphs, refill
from svexport.logging import logger, quiet

__all__ = ["simplify"]


def simplify(model: onnx.ModelProto | str | Path, *, plugins: bool = False) -> onnx.ModelProto:
    """Folds constants, shares equal nodes and initializers and drops unused ones (by onnxscript), removes nodes that
    change nothing (:mod:`svexport.graph.idle`), turns strided slices into one space to depth, merges constant factors
    and sums behind linear nodes into their weights (:mod:`svexport.graph.merge`), and removes Transposes
    (:mod:`svexport.graph.transposes`).

    Opset, IR version, names of inputs and outputs, svexport nodes and local functions stay as they are.

    Args:
        model: an ONNX model or the path of one; it is not changed.
        plugins: whether space to depth of images becomes an ``svexport::SvSpaceToDepth``, not yet with a body, instead
            of standard nodes.

    Returns:
        A new model.
    """
    simplified = _by_library(model if isinstance(model, onnx.ModelProto) else onnx.load(str(model)))
    remove_idle(simplified)
    fuse_space_to_depth(simplified, node=plugins)
    merge_weights(simplified)
    remove_transposes(simplified)
    remove_idle(simplified)
    return simplified


def _by_library(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model simplified by onnxscript, or an unchanged copy if the result would be invalid.

    onnxscript's rewrite rules are left out: they fuse weights, and some write nodes that old opsets lack.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.functions[:]  # keeps the library from inlining them
    try:
        with quiet("onnx_ir", "onnxscript"):
            graph = ir.from_proto(copy)
            fold_constants(graph, onnx_shape_inference=True)
            common.DeduplicateInitializersPass()(graph)
            common.CommonSubexpressionEliminationPass()(graph)
            common.RemoveUnusedNodesPass()(graph)
            copy = ir.to_proto(graph)
        constants_as_tensors(copy)
        _remove_remarks(copy)
        copy.functions.extend(model.functions)
        onnx.checker.check_model(light_copy(copy))
        if _signature(copy) != _signature(model):
            raise ValueError("inputs or outputs are not what they were")
    except Exception as error:  # noqa: BLE001 - whatever becomes of an unusual model, there is one to go on with
        logger.warning("not simplified by onnxscript: {}", (str(error) or type(error).__name__).splitlines()[0])
        copy.CopyFrom(model)
    return copy


def _signature(model: onnx.ModelProto) -> tuple[Any, ...]:
    values = ((value.name, value.type.tensor_type.elem_type) for value in (*model.graph.input, *model.graph.output))
    versions = ((entry.domain, entry.version) for entry in model.opset_import)
    return model.ir_version, tuple(versions), tuple(values)


def _remove_remarks(model: onnx.ModelProto) -> None:
    """Removes the optimizer's notes on where constants came from, and types without a rank, in place."""
    for graph in graphs(model.graph):
        for item in (*graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
            kept = [entry for entry in item.metadata_props if not entry.key.startswith("pkg.onnxscript.")]
            if len(kept) < len(item.metadata_props):
                refill(item.metadata_props, kept)
        half = ("tensor_type", False)
        typed = [
            v for v in graph.value_info if (v.type.WhichOneof("value"), v.type.tensor_type.HasField("shape")) != half
        ]
        refill(graph.value_info, typed)
