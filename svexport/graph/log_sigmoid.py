"""Logarithms of sigmoids, of which ONNX Runtime's are 17 % off at -15 and 0 below -18."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import onnx
from onnx import TensorProto

from svexport.graph.scope import drop_unused, is_standard
from svexport.graph.substitute import rewrite
from svexport.graph.walk import graphs
from svexport.symbolic._builder import Builder, Value

__all__ = ["write_log_sigmoids"]

_ZERO_BELOW = -88.7228
"""Where torch's sigmoid is 0, and its logarithm minus infinity: ``exp`` of more is infinite in float32."""


def write_log_sigmoids(model: onnx.ModelProto, infer: Callable[[], Mapping[str, Value]]) -> None:
    """``log(sigmoid(x))`` of float32 as ``-softplus(-x)``, in place.

    Args:
        model: with unique names of values.
        infer: the types of its values, asked for only where there are such nodes.
    """
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    given = {node.output[0]: node.input[0] for node in nodes if is_standard(node, "Sigmoid")}
    if not any(is_standard(node, "Log") and node.input[0] in given for node in nodes):
        return
    types = infer()

    def write(b: Builder, node: onnx.NodeProto) -> Value | None:
        x = types.get(given.get(node.input[0], "")) if is_standard(node, "Log") else None
        if x is None or x.dtype != TensorProto.FLOAT:
            return None
        result = b.op("Neg", b.op("Softplus", b.op("Neg", x)))
        below = b.op("Less", x, b.like(_ZERO_BELOW, x))
        return b.op("Where", below, b.like(-math.inf, x), result)

    rewrite(model, "log_sigmoid", write)
    for graph in graphs(model.graph):
        drop_unused(graph, set(given))
