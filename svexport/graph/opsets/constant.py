"""Constants, and ops that make tensors from sizes: Constant, ConstantOfShape, Range, EyeLike."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.graph.scope import constant_value
from svexport.symbolic._builder import Builder, Value

unchanged("Constant", 13, 19, 21, 23, 24)
unchanged("ConstantOfShape", 21, 23, 24)


@down("Constant", 12)
def _constant(b: Builder, node: Node) -> None:
    """Numbers, lists and strings as tensors."""
    if node.has("value") or node.has("sparse_value"):
        return
    tensor = constant_value(node.proto)
    if tensor is None:
        text = node.attribute("value_string") if node.has("value_string") else node.attribute("value_strings")
        tensor = numpy_helper.from_array(np.array(text, object))
    node.remove("value_int", "value_ints", "value_float", "value_floats", "value_string", "value_strings")
    node.set(value=tensor)


@down("Constant", 11)
def _sparse(b: Builder, node: Node) -> None:
    """A sparse tensor as a dense one."""
    if not node.has("sparse_value"):
        return
    sparse: onnx.SparseTensorProto = node.attribute("sparse_value")
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    size = math.prod(sparse.dims)
    if size > MOST_NUMBERS:
        node.refuse(f"it is sparse, and as a dense tensor it would have {size:,} numbers")
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    node.remove("sparse_value")
    node.set(value=numpy_helper.from_array(dense))


MOST_NUMBERS = 2**22
"""Maximum elements of a sparse constant that is written as a dense one."""


@down("ConstantOfShape", 20)
def _constant_of_shape(b: Builder, node: Node) -> Value | None:
    value = node.attribute("value")
    if value is None or value.data_type != TensorProto.BFLOAT16:
        return None
    number = float(numpy_helper.to_array(value).astype(np.float32).item())
    filled = b.op("ConstantOfShape", node.input(), value=helper.make_tensor("", TensorProto.FLOAT, [1], [number]))
    return b.op("Cast", filled, to=TensorProto.BFLOAT16)


@down("EyeLike", 22)
def _eye_like(b: Builder, node: Node) -> Value | None:
    wanted = node.attribute("dtype") or node.dtype()
    x = node.input()
    if TensorProto.BFLOAT16 not in (wanted, node.dtype()):
        return None
    if node.dtype() == TensorProto.BFLOAT16:
        x = b.cast(x, TensorProto.FLOAT)
    wide = TensorProto.FLOAT if wanted == TensorProto.BFLOAT16 else wanted
    made = b.ops("EyeLike", x, outputs=1, dtype=wide, k=node.attribute("k"))[0]
    return b.cast(Value(made.name, wide), wanted)


@down("Range", 11)
def _range(b: Builder, node: Node) -> Value:
    start, limit, delta = (node.input(index) for index in range(3))
    numbers = [node.constant(index) for index in range(3)]
    if all(number is not None for number in numbers):
        first, last, step = (number.item() for number in numbers)  # type: ignore[union-attr]
        count = max(math.ceil((last - first) / step), 0)
        if count <= MOST_NUMBERS:
            dtype = numbers[0].dtype  # type: ignore[union-attr]
            return b.constant((first + np.arange(count) * step).astype(dtype))
    dtype = node.dtype()
    wide = TensorProto.DOUBLE
    distance = b.cast(b.op("Sub", limit, start), wide)
    count = b.op("Ceil", b.op("Div", distance, b.cast(delta, wide)))
    count = b.op("Max", count, b.like(0, count))
    places = b.arange(b.reshape(b.cast(count, TensorProto.INT64), 1))
    return b.op("Add", start, b.op("Mul", b.cast(places, dtype), delta))
