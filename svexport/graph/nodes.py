"""Reading and writing svexport nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

from svexport.errors import UnsupportedError
from svexport.graph.walk import attributes_of, graphs
from svexport.ops._op import DOMAIN, Op
from svexport.symbolic import SYMBOLICS
from svexport.symbolic._builder import Value
from svexport.symbolic._symbolic import COMPUTED, Symbolic

__all__ = [
    "beyond_plugin",
    "rename",
    "separate_names",
    "set_attributes",
    "svexport_nodes",
    "symbolic_of",
]

PLUGIN_ATTRIBUTES = {"plugin_namespace": DOMAIN, "plugin_version": "1"}
"""Attributes of every node by which TensorRT's parser looks up a plugin creator."""


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames values where they are produced or used, in nested graphs too, except the graph's own outputs."""
    if not names:
        return
    for one in graphs(graph):
        for node in one.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        outputs = () if one is graph else one.output
        for value in (*one.input, *outputs, *one.initializer, *one.value_info):
            value.name = names.get(value.name, value.name)


def separate_names(model: onnx.ModelProto) -> None:
    """Renames values of nested graphs until one name means one value in the whole model, in place.

    Sibling graphs (the branches of an If) may each use the same name for a value of their own.
    """
    made = [
        {value.name for value in (*g.input, *g.initializer)}.union(*(node.output for node in g.node)) - {""}
        for g in graphs(model.graph)
    ]
    taken: set[str] = set().union(*made)
    if len(taken) == sum(map(len, made)):
        return
    met: set[str] = set()
    for graph, own in zip(graphs(model.graph), made, strict=True):
        names: dict[str, str] = {}
        for name in sorted(own & met):
            names[name] = next(new for i in itertools.count(1) if (new := f"{name}_{i}") not in taken)
            taken.add(names[name])
        rename(graph, names)
        for output in graph.output:
            output.name = names.get(output.name, output.name)
        met |= own


def svexport_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node in svexport's domain, in nested graphs too."""
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.domain == DOMAIN:
                yield node


def symbolic_of(node: onnx.NodeProto) -> Symbolic:
    """The symbolic of a node.

    Raises:
        UnsupportedError: if this svexport has no op of that name.
    """
    if node.op_type not in SYMBOLICS:
        raise UnsupportedError(
            f"node {node.name!r} is svexport::{node.op_type}, which this svexport does not have "
            f"(it has {', '.join(sorted(SYMBOLICS))}); the file was written by a newer svexport: upgrade it"
        )
    return SYMBOLICS[node.op_type]


def beyond_plugin(node: onnx.NodeProto) -> bool:
    """Whether the plugin of the node's op cannot run the node."""
    return symbolic_of(node).op.beyond_plugin(attributes_of(node))


def set_attributes(node: onnx.NodeProto, op: Op, values: Sequence[Any]) -> None:
    """Writes all attributes of a node in schema order, then those of the plugin; none is left to a default."""
    del node.attribute[:]
    for argument, value in zip(op.attributes, values, strict=True):
        if argument.kind == "int":
            attribute = helper.make_attribute(argument.name, int(value))
        elif argument.kind == "float":
            attribute = helper.make_attribute(argument.name, float(value))
        else:
            convert, kind = (int, AttributeProto.INTS) if argument.kind == "ints" else (float, AttributeProto.FLOATS)
            attribute = helper.make_attribute(argument.name, [convert(v) for v in value], attr_type=kind)
        node.attribute.append(attribute)
    for name, text in PLUGIN_ATTRIBUTES.items():
        node.attribute.append(helper.make_attribute(name, text))


def weight_attributes(op: Op, attributes: Mapping[str, Any]) -> list[str]:
    """The names of a node's weights as attributes; empty for an op without weights."""
    return [] if op.weight_names is None else [name.replace(".", "_") for name in op.weight_names(attributes)]


def arguments_of(node: onnx.NodeProto, op: Op, types: dict[str, Value]) -> list[Any]:
    """A node's inputs (typed) and attributes as the op's arguments, in schema order.

    Raises:
        UnsupportedError: on a missing attribute or a wrong number of inputs.
    """
    attributes = attributes_of(node)
    for argument in op.attributes:
        if argument.name not in attributes:
            raise UnsupportedError(
                f"node {node.name!r} (svexport::{node.op_type}) lacks the attribute {argument.name!r}; "
                f"it should have {', '.join(a.name for a in op.attributes)}"
            )
    computed = sum(np.ravel(attributes[a.name]).tolist().count(COMPUTED) for a in op.attributes if a.symbolic)
    inputs = node.input[: len(node.input) - computed]
    tensors = [types.get(name, Value(name)) if name else None for name in inputs]
    try:
        weights = weight_attributes(op, attributes)
        if weights and weights[0] in attributes:
            tensors += [Value(n, attributes[n].data_type, tuple(attributes[n].dims)) for n in weights]
        arguments = op.bind(tensors, attributes)
    except ValueError as error:
        raise UnsupportedError(f"node {node.name!r} (svexport::{node.op_type}) {error}") from error
    rest = node.input[len(inputs) :]
    sizes = (replace(types.get(name, Value(name)), dtype=TensorProto.INT64, shape=(1,)) for name in rest)
    for index, argument in enumerate(op.arguments):
        if argument.symbolic:
            value = arguments[index]
            filled = [next(sizes) if size == COMPUTED else size for size in np.ravel(value).tolist()]
            arguments[index] = filled[0] if argument.kind == "int" else filled
    return arguments
