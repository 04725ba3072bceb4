"""Reduces a model to the smallest part that still fails, by bisection on its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx
from onnx import helper

from svexport.errors import SvexportError
from svexport.graph.nodes import separate_names
from svexport.graph.types import infer_types
from svexport.graph.walk import graphs_of
from svexport.symbolic._builder import Value

__all__ = ["part_of", "reduce"]


def reduce(model: onnx.ModelProto, fails: Callable[[onnx.ModelProto], bool]) -> onnx.ModelProto:
    """The smallest part of a model that fails: no node of it can be removed.

    Values that a part reads from removed nodes become its inputs, with the same names; values that removed nodes read
    become its outputs. Constants stay with the nodes that use them. Halves are removed first, then quarters, down to
    single nodes (delta debugging).

    Args:
        model: the model, which is not changed.
        fails: whether a part shows the failure in question, not just any failure.

    Raises:
        SvexportError: if the model as a whole does not fail.
    """
    if not fails(model):
        raise SvexportError("the file as a whole does not fail that way: there is nothing to reduce")
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    separate_names(whole)
    types = infer_types(whole)
    kept = [i for i, node in enumerate(whole.graph.node) if node.op_type != "Constant"]
    tried: dict[tuple[int, ...], bool] = {}

    def still(numbers: Sequence[int]) -> bool:
        key = tuple(numbers)
        if key not in tried:
            part = part_of(whole, numbers, types)
            tried[key] = part is not None and fails(part)
        return tried[key]

    if not still(kept):
        return whole  # with types stated, or constants sorted, it is another failure
    pieces = 2
    while len(kept) > 1:
        size = max(len(kept) // pieces, 1)
        parts = [kept[i : i + size] for i in range(0, len(kept), size)]
        smaller = next((part for part in parts if len(parts) > 1 and still(part)), None)
        if smaller is not None:
            kept, pieces = smaller, 2
            continue
        rests = ([i for other in parts if other is not part for i in other] for part in parts)
        smaller = next((rest for rest in rests if rest and len(rest) < len(kept) and still(rest)), None)
        if smaller is not None:
            kept, pieces = smaller, max(pieces - 1, 2)
        elif size == 1:
            break
        else:
            pieces = min(pieces * 2, len(kept))
    found = part_of(whole, kept, types)
    assert found is not None  # it was tried
    return found


def part_of(
    model: onnx.ModelProto, numbers: Iterable[int], types: dict[str, Value] | None = None
) -> onnx.ModelProto | None:
    """The nodes with these indices as a model, with the constants that they use; None if a type is unknown.

    Args:
        types: types of the values, from :func:`svexport.graph.types.infer_types`.
    """
    graph = model.graph
    types = infer_types(model) if types is None else types
    chosen = sorted(numbers)
    constants = {n.output[0]: i for i, n in enumerate(graph.node) if n.op_type == "Constant" and n.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    made = {name for i in chosen for name in graph.node[i].output if name}
    used = list(dict.fromkeys(name for i in chosen for name in _reads(graph.node[i]) if name not in made))
    nodes = sorted({*chosen, *(constants[name] for name in used if name in constants)})
    taken = [name for name in used if name not in constants and name not in weights]
    inside = set(chosen)
    wanted = {name for i, node in enumerate(graph.node) if i not in inside for name in _reads(node)}
    wanted |= {value.name for value in graph.output}
    read = {name for i in chosen for name in _reads(graph.node[i])}
    given = {value.name: value for value in (*graph.input, *graph.output)}
    outputs = [name for i in chosen for name in graph.node[i].output if name and (name in wanted or name not in read)]
    infos = {}
    for name in (*taken, *outputs):
        value = types.get(name)
        if name in given:
            infos[name] = given[name]
        elif value is None or not value.dtype or value.shape is None:
            return None
        else:
            infos[name] = helper.make_tensor_value_info(name, value.dtype, value.shape)
    part = onnx.ModelProto()
    part.CopyFrom(onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import))
    part.producer_name, part.producer_version = model.producer_name, model.producer_version
    part.functions.extend(model.functions)
    part.graph.name = graph.name
    part.graph.node.extend(graph.node[i] for i in nodes)
    part.graph.initializer.extend(weights[name] for name in used if name in weights)
    part.graph.input.extend(infos[name] for name in taken)
    part.graph.output.extend(infos[name] for name in outputs)
    left = {name for i in nodes for name in graph.node[i].output} - set(infos)
    part.graph.value_info.extend(value for value in graph.value_info if value.name in left)
    return part


def _reads(node: onnx.NodeProto) -> set[str]:
    """The values that a node reads, including those that its subgraphs read from outside."""
    names = {name for name in node.input if name}
    for graph in graphs_of(node):
        made = {value.name for value in (*graph.input, *graph.initializer)}
        made |= {name for inner in graph.node for name in inner.output}
        for inner in graph.node:
            names |= _reads(inner) - made
        names |= {value.name for value in graph.output} - made
    return names
