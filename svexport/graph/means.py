"""Means of no elements: NaN in torch, 0 in ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from svexport.graph.integers import Known, constants_of
from svexport.graph.nothing import any_finds
from svexport.graph.scope import is_standard
from svexport.graph.substitute import rewrite
from svexport.graph.types import types_of
from svexport.graph.walk import graphs
from svexport.symbolic._builder import Builder, Value

__all__ = ["write_means"]

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


def write_means(model: onnx.ModelProto, infer: Callable[[], Mapping[str, Value]]) -> None:
    """Rewrites means along axes that may be empty (dynamic, or of size 0) so that they give NaN, in place.

    Args:
        model: a model with unique names of values.
        infer: infers the types of its values; called only if the model does not state those of the means' inputs.
    """
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    means = [node for node in nodes if is_standard(node, "ReduceMean")]
    if not means:
        return
    types: Mapping[str, Value] = types_of(model)
    known = [types[node.input[0]].shape if node.input[0] in types else None for node in means]
    sizes = [size for shape in known if shape is not None for size in shape]
    varies = any_finds(nodes) or any(
        not dim.HasField("dim_value") for value in model.graph.input for dim in value.type.tensor_type.shape.dim
    )
    if not varies and 0 not in sizes:
        return
    if None in known:
        types = infer()
    found = Known(types, {}, constants_of(model))

    def write(b: Builder, node: onnx.NodeProto) -> Value | None:
        x = types.get(node.input[0]) if is_standard(node, "ReduceMean") else None
        if x is None or x.shape is None or x.dtype not in _FLOATS or (reduced := found.axes(node)) is None:
            return None
        axes, keepdims = reduced
        if not any(x.shape[axis] == 0 or (x.shape[axis] is None and varies) for axis in axes):
            return None
        mean = b.reduce("ReduceMean", x, axes, keepdims)
        nothing = b.op("Equal", _count(b, x, axes), b.constant(np.array(0, np.int64)))
        return b.op("Where", nothing, b.like(math.nan, x), mean)

    rewrite(model, "mean", write)


def _count(b: Builder, x: Value, axes: Sequence[int]) -> Value:
    """The number of elements in each mean, a scalar."""
    if len(axes) == len(x.shape or ()):
        return b.op("Size", x, dtype=TensorProto.INT64)
    shape = b.op("Shape", x)
    places = b.constant(np.array(axes[0] if len(axes) == 1 else axes, np.int64))
    lengths = b.op("Gather", shape, places, axis=0)
    return lengths if len(axes) == 1 else b.op("ReduceProd", lengths, keepdims=0)
