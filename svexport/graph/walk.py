"""Walks the graphs of a model, and reads the opset and the attributes of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
from onnx import AttributeProto, helper

from svexport.errors import UnsupportedError

__all__ = ["STANDARD", "attributes_of", "graphs", "graphs_of", "opset_of", "refill", "remove_attribute"]

STANDARD = "", "ai.onnx"
"""The names of the default domain."""


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and every graph nested in its nodes (If, Loop, Scan), outermost first."""
    yield graph
    for node in graph.node:
        for nested in graphs_of(node):
            yield from graphs(nested)


def graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that are attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def opset_of(model: onnx.ModelProto) -> int:
    """The opset of the default domain.

    Raises:
        UnsupportedError: if the model imports none.
    """
    for entry in model.opset_import:
        if entry.domain in STANDARD:
            return entry.version
    raise UnsupportedError("expected a model that imports the default ONNX domain; this one imports none")


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by name, as Python values."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def remove_attribute(node: onnx.NodeProto, name: str) -> None:
    """Removes an attribute if the node has it, so that its default applies."""
    for attribute in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(attribute)


def refill(field: Any, items: Iterable[Any]) -> None:
    """Replaces all items of a repeated field, such as ``graph.node``, by others, which may be some of its own."""
    kept = list(items)
    del field[:]
    field.extend(kept)
