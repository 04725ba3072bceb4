"""What is known of every tensor in a model: data type and shape."""

from __future__ import annotations

import onnx

from svexport.graph.nodes import graphs
from svexport.symbolic._builder import Value

__all__ = ["types_of"]


def types_of(model: onnx.ModelProto) -> dict[str, Value]:
    """Every named tensor with the data type and shape the file states: inputs, outputs, initializers, value_info."""
    types: dict[str, Value] = {}
    for graph in graphs(model.graph):
        for info in (*graph.input, *graph.value_info, *graph.output):
            tensor = info.type.tensor_type
            if not tensor.elem_type:
                continue
            shape = None
            if tensor.HasField("shape"):
                shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
            types[info.name] = Value(info.name, tensor.elem_type, shape)
        for tensor in graph.initializer:
            types[tensor.name] = Value(tensor.name, tensor.data_type, tuple(tensor.dims))
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                tensor = node.attribute[0].t
                types[node.output[0]] = Value(node.output[0], tensor.data_type, tuple(tensor.dims))
    return types
