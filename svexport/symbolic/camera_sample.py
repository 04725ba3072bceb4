"""``SvCameraSample``: the body projects by products and sums, samples level by level, and weights the samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from svexport.ops.camera_sample import ACTIVATIONS, OP, OUTSIDE
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._sampling import LINEAR, Sampler, values
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(
    b: Builder,
    features: Sequence[Value],
    reference_points: Value,
    lidar2img: Value,
    weights: Value,
    offsets: Value,
    image_size: Sequence[int],
    pc_range: Sequence[float],
    depth_eps: float,
    in_image: int,
    uv_clamp: Sequence[float],
    activation: int,
    scales: Sequence[float],
) -> Value:
    dtype = weights.dtype if features[0].dtype == TensorProto.INT8 else features[0].dtype
    dtypes = (dtype, reference_points.dtype, lidar2img.dtype, offsets.dtype)
    precise = TensorProto.DOUBLE if TensorProto.DOUBLE in dtypes else TensorProto.FLOAT
    batch, queries, cams, points, levels, groups = (b.dim(weights, axis) for axis in range(6))
    images, channels = b.product(batch, cams), b.dim(features[0], 2)

    # (B, Q, points, 3), metres
    low, high = np.split(np.array(pc_range), 2)
    place = b.op("Mul", b.cast(reference_points, precise), b.constant(high - low, precise))
    place = b.unsqueeze(b.op("Add", place, b.constant(low, precise)), 2)
    place = b.op("Add", place, b.cast(offsets, precise))
    place = b.expand(place, batch, queries, points, 3)
    place = b.unsqueeze(b.transpose(place, (0, 3, 1, 2)), 1, 2)  # (B, 1, 1, 3, Q, points)

    # No MatMul: TensorRT may run it in TF32, which would be off by pixels.
    matrix = b.unsqueeze(b.slice(b.cast(lidar2img, precise), 2, 0, 3), 4, 5)  # (B, cams, 3, 4, 1, 1)
    image = b.reduce_sum(b.op("Mul", b.slice(matrix, 3, 0, 3), place), [3])
    image = b.op("Add", image, b.squeeze(b.slice(matrix, 3, 3, 4), 3))
    xy, depth = b.split(image, 2, [2, 1])  # (B, cams, 2 and 1, Q, points)
    seen = b.op("Greater", depth, b.like(depth_eps, depth))
    uv = b.op("Div", xy, b.clip(depth, depth_eps, None))
    uv = b.op("Div", uv, b.constant(np.reshape(image_size[::-1], (2, 1, 1)), precise))
    if in_image:
        centred = b.op("Sub", b.op("Mul", uv, b.like(2, uv)), b.like(1, uv))
        for comparison, bound in (("Greater", -1), ("Less", 1)):  # false for NaN
            seen = b.op("And", seen, b.op(comparison, centred, b.like(bound, uv)))
    else:
        seen = b.op("And", seen, b.op("Not", b.op("IsNaN", uv)))
        uv = b.clip(uv, *uv_clamp)
    uv = b.op("Where", seen, uv, b.like(OUTSIDE, uv))
    uv = b.reshape(uv, images, 2, 1, queries, points)

    weights = b.cast(weights, precise)
    if ACTIVATIONS[activation] == "sigmoid":
        weights = b.transpose(b.op("Sigmoid", weights), (4, 0, 2, 5, 1, 3))
    else:
        weights = b.transpose(weights, (0, 1, 5, 2, 3, 4))
        weights = b.op("Softmax", b.reshape(weights, batch, queries, groups, b.product(cams, points, levels)), axis=3)
        weights = b.reshape(weights, batch, queries, groups, cams, points, levels)
        weights = b.transpose(weights, (5, 0, 3, 2, 1, 4))
    weights = b.unsqueeze(weights, 4)  # (L, B, cams, G, 1, Q, points)

    parts = []
    for level, (feature, scale) in enumerate(zip(features, scales, strict=True)):
        if feature.dtype == TensorProto.INT8:
            feature = values(b, feature, scale, precise)
        feature = b.reshape(feature, images, channels, b.dim(feature, 3), b.dim(feature, 4))
        sampler = Sampler(b, feature, [queries, points], LINEAR)
        x = b.op("Sub", b.op("Mul", b.cast(uv, sampler.dtype), sampler.size()), sampler.number(0.5))
        sampled = b.cast(sampler.zeros(x), precise)  # (B*cams, C, Q, points)
        sampled = b.op("Where", b.op("IsNaN", sampled), b.like(0, sampled), sampled)
        sampled = b.reshape(sampled, batch, cams, groups, b.quotient(channels, groups), queries, points)
        part = b.op("Mul", sampled, b.squeeze(b.slice(weights, 0, level, level + 1), 0))
        parts.append(b.reduce_sum(part, [1, 5]))  # (B, G, C/G, Q)
    output = b.transpose(b.op("Sum", *parts), (0, 3, 1, 2))
    return b.cast(b.reshape(output, batch, queries, channels), dtype)


Symbolic(OP, body)
