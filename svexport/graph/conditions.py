"""Resolves conditions that static sizes decide: the branch taken replaces its If."""

from __future__ import annotations

import onnx
from onnx import helper

from svexport.graph.nodes import rename, separate_names
from svexport.graph.scope import drop_unused, is_standard, used_inside, used_names
from svexport.graph.types import infer_values
from svexport.graph.walk import STANDARD, graphs

__all__ = ["take_decided_branches"]


def take_decided_branches(model: onnx.ModelProto, standard: onnx.ModelProto) -> bool:
    """Replaces each If whose condition follows from static sizes and constants by the branch that is always taken.

    TensorRT requires branches of one shape, and the TorchScript exporter writes Ifs on squeezed dimensions or ranks.

    Args:
        model: the model, changed in place.
        standard: the same model in standard ONNX, from which values are inferred.

    Returns:
        Whether any was replaced; others may be decided then.
    """
    if not any(is_standard(node, "If") for graph in graphs(model.graph) for node in graph.node):
        return False
    values = infer_values(standard)
    decided = {name: bool(value.item()) for name, value in values.items() if value.size == 1}
    separate_names(model)
    changed = False
    for graph in reversed(list(graphs(model.graph))):  # innermost first: what holds a graph copies it
        before, nodes, any_here = used_names(graph), [], False
        stale: set[str] = set()
        for node in graph.node:
            if not is_standard(node, "If") or node.input[0] not in decided:
                nodes.append(node)
                continue
            any_here = True
            wanted = "then_branch" if decided[node.input[0]] else "else_branch"
            branch = next(attribute.g for attribute in node.attribute if attribute.name == wanted)
            graph.initializer.extend(branch.initializer)
            nodes += _body(branch, node)
            stale.update(node.output)
        if any_here:
            changed = True
            del graph.node[:]
            graph.node.extend(nodes)
            drop_unused(graph, before)
            _forget(graph, stale)
    return changed


def _forget(graph: onnx.GraphProto, stale: set[str]) -> None:
    """Takes off the stated types of values of two branches, and of what standard nodes make of them, in place."""
    for node in graph.node:
        if node.domain in STANDARD and not stale.isdisjoint([*node.input, *used_inside(node)]):
            stale.update(node.output)
    kept = [info for info in graph.value_info if info.name not in stale]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _body(branch: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes of a branch, with the outputs of the If."""
    made = {name for inner in branch.node for name in inner.output}
    names: dict[str, str] = {}
    copies = []
    for inner, outer in zip(branch.output, node.output, strict=True):
        if inner.name in made and inner.name not in names:
            names[inner.name] = outer
        else:  # what comes from around the If, or is returned twice
            copies.append(helper.make_node("Identity", [names.get(inner.name, inner.name)], [outer]))
            copies[-1].name = f"{node.name or outer}/Identity_{len(copies)}"
    del branch.output[:]
    rename(branch, names)
    return [*branch.node, *copies]
