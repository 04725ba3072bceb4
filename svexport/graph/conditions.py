"""Replaces an If by the branch it takes, where static sizes decide the condition."""

from __future__ import annotations

import onnx
from onnx import helper

from svexport.graph.nodes import rename, separate_names
from svexport.graph.scope import drop_unused, is_standard, used_inside, used_names
from svexport.graph.types import infer_values
from svexport.graph.walk import STANDARD, graphs, refill

__all__ = ["take_decided_branches"]


def take_decided_branches(model: onnx.ModelProto, standard: onnx.ModelProto) -> bool:
    """Replaces each If whose condition static sizes and constants decide by the branch that it always takes.

    TensorRT wants both branches to have one shape; the TorchScript exporter writes Ifs on squeezed sizes or ranks.

    Args:
        model: the model, changed in place.
        standard: the same model in standard ONNX, from which values are inferred.

    Returns:
        Whether any If was replaced; the conditions of others may be decided now.
    """
    if not any(is_standard(node, "If") for graph in graphs(model.graph) for node in graph.node):
        return False
    values = infer_values(standard)
    decided = {name: bool(value.item()) for name, value in values.items() if value.size == 1}
    separate_names(model)
    changed = False
    for graph in reversed(list(graphs(model.graph))):  # innermost first: replacing an If copies the graphs inside
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
            refill(graph.node, nodes)
            drop_unused(graph, before)
            _forget(graph, stale)
    return changed


def _forget(graph: onnx.GraphProto, stale: set[str]) -> None:
    """Removes the stated types of an If's outputs, and of what standard nodes compute from them, in place."""
    for node in graph.node:
        if node.domain in STANDARD and not stale.isdisjoint([*node.input, *used_inside(node)]):
            stale.update(node.output)
    kept = [info for info in graph.value_info if info.name not in stale]
    refill(graph.value_info, kept)


def _body(branch: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes of a branch, renamed so that they produce the outputs of the If."""
    made = {name for inner in branch.node for name in inner.output}
    names: dict[str, str] = {}
    copies = []
    for inner, outer in zip(branch.output, node.output, strict=True):
        if inner.name in made and inner.name not in names:
            names[inner.name] = outer
        else:  # a value from outside of the branch, or one returned twice
            copies.append(helper.make_node("Identity", [names.get(inner.name, inner.name)], [outer]))
            copies[-1].name = f"{node.name or outer}/Identity_{len(copies)}"
    del branch.output[:]
    rename(branch, names)
    return [*branch.node, *copies]
