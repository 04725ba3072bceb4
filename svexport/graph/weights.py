"""Moves the weights of svexport nodes from inputs to attributes."""

from __future__ import annotations

import onnx
from onnx import AttributeProto, TensorProto, numpy_helper

from svexport.errors import UnsupportedError
from svexport.graph.nodes import svexport_nodes, symbolic_of, weight_attributes
from svexport.graph.scope import constants_in, drop_unused
from svexport.graph.walk import attributes_of, graphs

__all__ = ["hold_weights"]


def hold_weights(model: onnx.ModelProto) -> None:
    """Turns the weights of svexport nodes into TENSOR attributes, for the ops that name their weights, in place.

    Raises:
        UnsupportedError: if the model computes one of them.
    """
    constants: dict[str, TensorProto] = {}
    copies: dict[str, str] = {}
    for graph in graphs(model.graph):
        constants |= constants_in(graph)
        # The exporter uses Identity to give one tensor several names.
        copies |= {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity"}
    for node in svexport_nodes(model):
        attributes = attributes_of(node)
        names = weight_attributes(symbolic_of(node).op, attributes)
        if not names or names[0] in attributes:
            continue
        first = len(node.input) - len(names)
        for name, source in zip(names, node.input[first:], strict=True):
            given = source
            while source in copies:
                source = copies[source]
            if source not in constants:
                raise UnsupportedError(
                    f"{name} of node {node.name!r} (svexport::{node.op_type}) cannot be an attribute: the model "
                    f"computes {given!r}; export with weights='inputs', or make it a parameter"
                )
            tensor = constants[source]
            if not tensor.raw_data:  # raw_data is what exporters write, and what equal constants are compared by
                tensor = numpy_helper.from_array(numpy_helper.to_array(tensor))
            node.attribute.append(AttributeProto(name=name, type=AttributeProto.TENSOR, t=tensor))
            node.attribute[-1].t.name = name
        del node.input[first:]
    drop_unused(model.graph, before={*constants, *copies})
