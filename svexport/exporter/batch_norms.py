"""Folds batch norms of half models into the preceding convolutions in float32.

The exporter's optimizer does this in half, which rounds each weight several times, and an ``eps`` of 1e-5 too.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values

__all__ = ["join_batch_norms"]

_HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}

_EPSILON = 1e-5
"""ONNX's default."""


def join_batch_norms(model: ir.Model) -> None:
    """Makes one Conv of each Conv of half weights and the BatchNormalization behind it, where all are numbers."""
    graph = model.graph
    if not any(node.op_type == "BatchNormalization" and node.outputs[0].dtype in _HALF for node in graph):
        return
    from onnxscript.optimizer import fold_constants

    fold_constants(model)  # biases of convolutions that have none
    for norm in [node for node in graph if node.op_type == "BatchNormalization"]:
        if "training_mode" in norm.attributes or norm.inputs[0] is None:
            continue
        conv, (output,) = norm.inputs[0].producer(), norm.outputs
        if conv is None or conv.op_type != "Conv" or len(norm.inputs[0].uses()) > 1 or norm.inputs[0].is_graph_output():
            continue
        numbers = [_numbers(value) for value in (*conv.inputs[1:], *norm.inputs[1:])]
        dtype = conv.inputs[1].dtype if conv.inputs[1] else None
        if dtype not in _HALF or any(one is None for one in numbers):
            continue
        kernel, *bias, scale, shift, mean, variance = (one for one in numbers if one is not None)
        epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else _EPSILON
        gain = scale / np.sqrt(variance + np.float32(epsilon))
        parts = {
            "weight": kernel * gain.reshape(-1, *(1,) * (kernel.ndim - 1)),
            "bias": (sum(bias) - mean) * gain + shift,
        }
        made = [_initializer(graph, f"{output.name}_{part}", value, dtype) for part, value in parts.items()]
        joined = ir.node("Conv", [conv.inputs[0], *made], conv.attributes, name=conv.name)
        joined.metadata_props.update(conv.metadata_props)
        replace_nodes_and_values(graph, norm, [norm, conv], [joined], [output], joined.outputs)


def _numbers(value: ir.Value | None) -> np.ndarray | None:
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy().astype(np.float32)


def _initializer(graph: ir.Graph, name: str, numbers: np.ndarray, dtype: ir.DataType) -> ir.Value:
    tensor = ir.tensor(numbers.astype(dtype.numpy()), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=ir.Shape(numbers.shape), type=ir.TensorType(dtype), const_value=tensor)
    graph.initializers[name] = value
    return value
