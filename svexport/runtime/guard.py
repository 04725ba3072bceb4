"""Rejects untrusted ONNX files that could harm the loading process; not every ONNX Runtime does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

from svexport.errors import EngineError

if TYPE_CHECKING:
    import onnx

    from svexport.runtime.engine import TensorSpec

__all__ = ["MAX_NODES", "from_one", "guard"]

MAX_NODES = 500_000
"""The maximum number of nodes after inlining functions, as ONNX Runtime does."""


def guard(model: onnx.ModelProto, folder: str | os.PathLike[str] | None) -> None:
    """Checks that external data lies in ``folder``, that local functions neither recurse nor expand without bound, and
    that no node normalizes an empty tensor.

    Raises:
        EngineError: otherwise.
    """
    from svexport.graph.walk import graphs

    for tensor in _tensors(model):
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), None)
        if location is not None and not _inside(location, folder):
            where = "the folder of the model" if folder else "data_folder, which a model in memory needs"
            raise EngineError(f"the external data of {tensor.name!r} must lie in {where}, got {location!r}")

    empty = [i.name for i in model.graph.input if any(d.HasField("dim_value") and not d.dim_value for d in _shape(i))]
    if empty and any(n.op_type == "InstanceNormalization" for f in (model.graph, *model.functions) for n in f.node):
        raise EngineError(
            f"InstanceNormalization and {empty[0]!r}, which has no elements: with that ONNX Runtime may end the process"
        )
    calls = {(f.domain, f.name, f.overload): [_key(n) for g in graphs(f) for n in g.node] for f in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    try:
        for function in TopologicalSorter(calls).static_order():
            sizes[function] = sum(sizes[called] for called in calls[function]) if function in calls else 1
    except CycleError as error:
        cycle = " -> ".join(key[1] for key in error.args[1])
        raise EngineError(f"local functions must not be recursive, got {cycle}") from error
    total = sum(sizes.get(_key(node), 1) for graph in graphs(model.graph) for node in graph.node)
    if total > MAX_NODES:
        raise EngineError(f"expected at most {MAX_NODES:,} nodes; with its local functions unfolded it has {total:,}")


def from_one(model: onnx.ModelProto, inputs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Adds to the inputs the sizes that ``svexport.export`` has recorded as never 0: with 0, ONNX Runtime computes
    something else, or ends the process."""
    from svexport.graph.saving import FROM_ONE

    lines = (line.partition(FROM_ONE) for line in model.doc_string.splitlines())
    least = frozenset(root for root, said, rest in lines if said and not rest)
    return tuple(replace(spec, from_one=least.intersection(spec.shape or ())) if least else spec for spec in inputs)


def _shape(value: onnx.ValueInfoProto) -> Iterable[onnx.TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim


def _key(node: onnx.NodeProto) -> tuple[str, str, str]:
    return node.domain, node.op_type, node.overload


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    from svexport.graph.walk import graphs

    for root in (model.graph, *model.functions):
        for graph in graphs(root):
            sparse = []
            if graph is not root or root is model.graph:  # a function has no initializers, but its subgraphs may
                yield from graph.initializer
                sparse += graph.sparse_initializer
            for attribute in (a for node in graph.node for a in node.attribute):
                yield from (attribute.t, *attribute.tensors)
                sparse += (attribute.sparse_tensor, *attribute.sparse_tensors)
            yield from (part for tensor in sparse for part in (tensor.values, tensor.indices))


def _inside(location: str, folder: str | os.PathLike[str] | None) -> bool:
    """Whether the location is inside the folder after following links."""
    if folder is None or Path(location).is_absolute():
        return False
    return Path(folder, location).resolve().is_relative_to(Path(folder).resolve())
