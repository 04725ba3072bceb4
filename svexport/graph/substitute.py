"""Replaces nodes by others that a builder makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx
from onnx import helper

from svexport.graph.scope import is_standard
from svexport.graph.walk import graphs, opset_of, refill
from svexport.symbolic._builder import Builder, Value

__all__ = ["Made", "give_outputs", "rewrite", "substitute"]

Made: TypeAlias = "Value | Sequence[Value] | None"
"""What a form makes in place of the outputs of a node; None leaves the node."""


def rewrite(model: onnx.ModelProto, stem: str, form: Callable[[Builder, onnx.NodeProto], Made]) -> None:
    """:func:`substitute` of nodes of ONNX's own domain by a form that writes them with a builder of the model's opset.

    Args:
        stem: begins the names of new values, behind that of the node.
    """
    opset = opset_of(model)

    def build(node: onnx.NodeProto, prefix: str) -> Builder | None:
        builder = Builder(opset, f"{prefix}{stem}_")
        made = form(builder, node) if is_standard(node, node.op_type) else None
        if made is None:
            return None
        give_outputs(builder, [made] if isinstance(made, Value) else made, node)
        return builder

    substitute(model, build)


def substitute(model: onnx.ModelProto, build: Callable[[onnx.NodeProto, str], Builder | None]) -> None:
    """Replaces nodes of a model and of the graphs nested in it, in place; equal constants become one.

    Args:
        model: a model with unique names of values.
        build: called with each node and the prefix for names of new values; returns a builder whose nodes make the
            outputs of the node, or None to leave the node.
    """
    constants: dict[tuple[Any, ...], str] = {}
    used: set[str] = set()
    for graph in graphs(model.graph):
        result: list[onnx.NodeProto] = []
        changed = False
        for node in graph.node:
            name = node.name or (node.output[0] if node.output else "")
            while name in used:  # names of nodes need not be unique, but names of constants must be
                name += "_"
            builder = build(node, f"{name}/")
            if builder is None:
                result.append(node)
                continue
            used.add(name)
            changed = True
            names: dict[str, str] = {}
            for inner_name, tensor in builder.constants.items():
                key = (tensor.data_type, tuple(tensor.dims), tensor.raw_data)
                if key not in constants:
                    constants[key] = inner_name
                    model.graph.initializer.append(tensor)  # in the outermost graph, so that all graphs see it
                    model.graph.initializer[-1].name = inner_name
                names[inner_name] = constants[key]
            for inner in builder.nodes:
                inner.input[:] = [names.get(name, name) for name in inner.input]
                inner.doc_string = node.doc_string
                inner.metadata_props.extend(node.metadata_props)
                result.append(inner)
        if changed:
            refill(graph.node, result)


def give_outputs(builder: Builder, outputs: Sequence[Value], node: onnx.NodeProto) -> None:
    """Gives a builder's values the names of the outputs of a node, in place; trailing outputs may be unused."""
    produced = {name for inner in builder.nodes for name in inner.output}
    renames: dict[str, str] = {}
    for value, name in zip(outputs, node.output, strict=False):
        if not name:
            continue
        if value.name in produced and value.name not in renames:
            renames[value.name] = name
        else:  # an input or constant returned as it is, or one value returned twice
            label = f"{builder.prefix}Identity_{name}"
            builder.nodes.append(helper.make_node("Identity", [value.name], [name], name=label))
    for inner in builder.nodes:
        inner.input[:] = [renames.get(name, name) for name in inner.input]
        inner.output[:] = [renames.get(name, name) for name in inner.output]
