"""What is known of every tensor in a model: data type and shape."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import helper
from onnxscript import optimizer

from svexport.graph.nodes import graphs
from svexport.logging import logger, quiet
from svexport.symbolic._builder import Value

__all__ = ["infer_types", "types_of"]


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


def infer_types(model: onnx.ModelProto) -> dict[str, Value]:
    """:func:`types_of` with all that shape inference adds, arithmetic on static shapes folded first."""
    folded = ir.serde.deserialize_model(model)
    try:
        with quiet("onnxscript.optimizer"):
            optimizer.fold_constants(folded, onnx_shape_inference=True)
        model = ir.serde.serialize_model(folded)
    except Exception as error:  # noqa: BLE001 - a library's; without it less may be known
        logger.debug("constant folding failed, inferring without: {}", error)
    reshaped: dict[str, Value] = {}  # by a computed target, which tells at least the rank: enough to infer more
    while True:
        model = onnx.shape_inference.infer_shapes(model)
        types = types_of(model)
        types |= {name: value for name, value in reshaped.items() if types[name].shape is None}
        known = len(reshaped)
        for graph in graphs(model.graph):
            for node in graph.node:
                if node.op_type != "Reshape" or types.get(node.output[0], _UNKNOWN).shape is not None:
                    continue
                data, target = (types.get(name, _UNKNOWN) for name in node.input)
                if data.dtype is not None and target.shape and target.shape[0] is not None:
                    shape = (None,) * target.shape[0]
                    reshaped[node.output[0]] = Value(node.output[0], data.dtype, shape)
                    graph.value_info.append(helper.make_tensor_value_info(node.output[0], data.dtype, shape))
        if len(reshaped) == known:
            return types


_UNKNOWN = Value("")
