"""``SvMsDeformAttn``: the body gathers rows of all levels at once; a row is one head's channels of one pixel."""

from __future__ import annotations

from onnx import TensorProto

from svexport.ops.ms_deform_attn import OP
from svexport.symbolic._bilinear import INDEX, corners
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._sampling import values
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(
    b: Builder,
    value: Value,
    spatial_shapes: Value,
    level_start_index: Value,
    sampling_locations: Value,
    attention_weights: Value,
    scale: float,
) -> Value:
    int8 = value.dtype == TensorProto.INT8
    dtype = attention_weights.dtype if int8 else value.dtype
    precise = TensorProto.DOUBLE if TensorProto.DOUBLE in (dtype, sampling_locations.dtype) else TensorProto.FLOAT
    n, s, m, d = (b.dim(value, axis) for axis in range(4))
    queries, levels, points = (b.dim(sampling_locations, axis) for axis in (1, 3, 4))
    if 0 in (levels, points):  # an empty sum: ONNX Runtime would write the first matrix only
        return b.expand(b.constant(0, dtype), n, queries, b.product(m, d))
    samples = b.product(levels, points)
    every = b.product(m, samples)

    # Samples have the layout (N, Lq, M*L*P): per-level and per-head numbers are small tables along the last dimension,
    # and a runtime's inner loops are long.
    def table(x: Value) -> Value:  # (L, 1) or (M, 1, 1) -> (M*L*P,)
        return b.reshape(b.expand(x, m, levels, points), every)

    heads = b.cast(b.shape(m), INDEX)
    size = b.cast(spatial_shapes, INDEX)
    height, width = (table(b.op("Gather", size, b.ints(axis), axis=1)) for axis in (0, 1))
    start = table(b.op("Mul", b.cast(b.unsqueeze(level_start_index, 1), INDEX), heads))
    start = b.op("Add", start, table(b.reshape(b.cast(b.arange(m), INDEX), m, 1, 1)))
    if n != 1:
        image = b.op("Mul", b.cast(b.arange(n), INDEX), b.cast(b.shape(b.product(s, m)), INDEX))
        start = b.op("Add", start, b.reshape(image, n, 1, 1))  # (N, 1, M*L*P)

    def axis(location: Value, size: Value) -> list[tuple[Value, Value]]:
        size = b.cast(size, precise)
        x = b.op("Sub", b.op("Mul", location, size), b.like(0.5, location))
        return corners(b, x, size)

    locations = b.reshape(b.cast(sampling_locations, precise), n, queries, every, 2)
    x, y = (b.squeeze(part, 3) for part in b.split(locations, 3, [1, 1]))
    weights = b.reshape(b.cast(attention_weights, precise), n, queries, every)
    columns = [(b.op("Mul", index, heads), weight) for index, weight in axis(x, width)]
    row = b.op("Mul", width, heads)
    rows = [(b.op("Add", b.op("Mul", i, row), start), b.op("Mul", weight, weights)) for i, weight in axis(y, height)]

    # (N, Lq, M, 1, L*P) @ (N, Lq, M, L*P, D) for each of the four corners
    value = values(b, value, scale, precise) if int8 else b.cast(value, precise)
    source = b.reshape(value, b.product(n, s, m), d)
    parts = []
    for j, v in rows:
        for i, w in columns:
            index = b.reshape(b.op("Add", j, i), n, queries, m, samples)
            weight = b.reshape(b.op("Mul", v, w), n, queries, m, 1, samples)
            parts.append(b.op("MatMul", weight, b.op("Gather", source, index, axis=0)))
    return b.cast(b.reshape(b.op("Sum", *parts), n, queries, b.product(m, d)), dtype)


Symbolic(OP, body)
