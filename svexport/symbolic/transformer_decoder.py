"""``SvTransformerDecoder``: the body combines MatMuls with the bodies of the ops that the decoder consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from svexport.ops._decoder.config import EPS, weight_names
from svexport.ops.transformer_decoder import OP
from svexport.symbolic import add_bias_residual_layer_norm, camera_sample, scaled_dot_product_attention
from svexport.symbolic._builder import Builder, Dim, Value, static
from svexport.symbolic._symbolic import Symbolic
from svexport.symbolic.layer_norm import normalize

__all__: list[str] = []


class _Layers:
    """Writes the steps of a decoder's layers, with its parameters by name."""

    def __init__(self, b: Builder, parameters: Mapping[str, Value], query: Value, lidar2img: Value, heads: int) -> None:
        self.b, self.parameters, self.heads = b, parameters, heads
        self.batch, self.queries = b.dim(query, 0), b.dim(query, 1)
        self.cams, self.channels = b.dim(lidar2img, 1), b.dim(parameters["cls.0.bias"], 0)
        self.shape = static(self.batch, self.queries, self.channels)

    def linear(self, name: str, x: Value, bias: bool = True) -> Value:
        y = _product(self.b, x, self.parameters[f"{name}.weight"])
        return self.b.op("Add", y, self.parameters[f"{name}.bias"]) if bias else y

    def relu(self, x: Value) -> Value:
        return self.b.op("Relu", x)

    def branch(self, name: str, x: Value) -> Value:
        """Linear, norm and ReLU, twice."""
        for linear, norm in ((0, 1), (3, 4)):
            x = self.linear(f"{name}.{linear}", x)
            affine = self.parameters[f"{name}.{norm}.weight"], self.parameters[f"{name}.{norm}.bias"]
            x = self.relu(normalize(self.b, x, 1, *affine, EPS))
        return x

    def add_norm(self, last: str, norm: str, x: Value, residual: Value, extra: Value | None = None) -> Value:
        affine = self.parameters[f"{norm}.weight"], self.parameters[f"{norm}.bias"]
        product, bias = self.linear(last, x, bias=False), self.parameters[f"{last}.bias"]
        return add_bias_residual_layer_norm.body(self.b, product, bias, residual, *affine, EPS, extra)[0]

    def attended(self, layer: str, query: Value, query_pos: Value, extra: Value | None) -> Value:
        """The queries after self attention."""
        b, channels = self.b, self.channels
        where = b.op("Add", query, query_pos)
        weight = b.reshape(self.parameters[f"{layer}.mha.in_proj_weight"], 3, channels, channels)
        bias = b.reshape(self.parameters[f"{layer}.mha.in_proj_bias"], 3, channels)
        projected = []
        for x, start, end in ((where, 0, 2), (query, 2, 3)):  # q and k, v
            count = end - start
            rows = b.reshape(b.slice(weight, 0, start, end), b.product(count, channels), channels)
            y = b.op("Add", _product(b, x, rows), b.reshape(b.slice(bias, 0, start, end), b.product(count, channels)))
            y = b.reshape(y, self.batch, self.queries, count, self.heads, b.quotient(channels, self.heads))
            y = b.transpose(y, (2, 0, 3, 1, 4))
            projected += [b.squeeze(b.slice(y, 0, j, j + 1), 0) for j in range(count)]  # (B, H, Q, C/H)
        q, k, v = projected
        mixed = scaled_dot_product_attention.body(b, q, k, v, None, False, (), False)
        mixed = b.transpose(replace(mixed, shape=q.shape), (0, 2, 1, 3))
        mixed = b.reshape(mixed, self.batch, self.queries, channels)
        return self.add_norm(f"{layer}.mha.out_proj", f"{layer}.mha_norm", mixed, query, extra)

    def box(self, layer: str, query: Value, precise: int) -> Value:
        box = self.relu(self.linear(f"{layer}.reg.2", self.relu(self.linear(f"{layer}.reg.0", query))))
        return self.b.cast(self.linear(f"{layer}.reg.4", box), precise)


def body(
    b: Builder,
    query: Value,
    query_pos: Value,
    reference_points: Value,
    features: Sequence[Value],
    lidar2img: Value,
    weights: Sequence[Value],
    num_layers: int,
    num_heads: int,
    num_points: int,
    num_groups: int,
    image_size: Sequence[int],
    pc_range: Sequence[float],
    depth_eps: float,
    in_image: int,
    uv_clamp: Sequence[float],
    activation: int,
    learned_offsets: int,
    residual_query_pos: int,
    pool: int,
    scales: Sequence[float],
) -> tuple[Value, Value, Value]:
    dtype = query.dtype
    precise = TensorProto.DOUBLE if TensorProto.DOUBLE in (dtype, reference_points.dtype) else TensorProto.FLOAT
    names = weight_names({"num_layers": num_layers, "learned_offsets": learned_offsets})
    layers = _Layers(b, dict(zip(names, weights, strict=True)), query, lidar2img, num_heads)
    sizes = layers.batch, layers.queries
    levels = _levels(b, features, dtype, (layers.batch, layers.cams, layers.channels), pool, scales)
    points = b.cast(reference_points, precise)
    zero = b.constant(np.zeros((1, 1, 1, 3)), precise)
    view = image_size, pc_range, depth_eps, in_image, uv_clamp, activation, [1.0] * len(levels)
    for i in range(num_layers):
        layer = f"layers.{i}"
        query = layers.attended(layer, query, query_pos, query_pos if residual_query_pos else None)
        svca = f"{layer}.svca"
        where = b.op("Add", query, query_pos)
        scores = layers.linear(f"{svca}.attention_weights", where)
        scores = b.reshape(scores, *sizes, layers.cams, num_points, len(levels), num_groups)
        offsets = zero
        if learned_offsets:
            offsets = b.reshape(layers.linear(f"{svca}.sampling_offsets", where), *sizes, num_points, 3)
        sampled = b.cast(camera_sample.body(b, levels, points, lidar2img, scores, offsets, *view), dtype)
        logits = _inverse_sigmoid(b, points)
        position = layers.branch(f"{svca}.position_encoder", b.cast(logits, dtype))
        query = layers.add_norm(f"{svca}.output_proj", f"{layer}.svca_norm", sampled, query, position)
        hidden = layers.relu(layers.linear(f"{layer}.ffn.0", query))
        query = layers.add_norm(f"{layer}.ffn.2", f"{layer}.ffn_norm", hidden, query)
        box = layers.box(layer, query, precise)
        offset = b.concat([b.slice(box, 2, 0, 2), b.slice(box, 2, 4, 5)], axis=2)
        moved = b.op("Add", offset, logits)
        points = b.op("Sigmoid", moved, shape=points.shape)

    hidden = layers.branch("cls", query)
    boxes = b.cast(_boxes(b, points, box, pc_range, precise), reference_points.dtype)
    return layers.linear("cls.6", hidden), boxes, b.cast(points, reference_points.dtype)


def _boxes(b: Builder, points: Value, box: Value, pc_range: Sequence[float], precise: int) -> Value:
    """The boxes of the last layer, with centres in metres."""
    low, high = np.split(np.array(pc_range), 2)
    centre = b.op("Mul", points, b.constant(high - low, precise))
    centre = b.op("Add", centre, b.constant(low, precise))
    places = ((centre, 0, 2), (box, 2, 4), (centre, 2, 3), (box, 5, np.iinfo(np.int64).max))
    return b.concat([b.slice(t, 2, start, end) for t, start, end in places], axis=2)


def _product(b: Builder, x: Value, weight: Value) -> Value:
    shape = None if x.shape is None or weight.shape is None else (*x.shape[:-1], weight.shape[0])
    return b.op("MatMul", x, b.transpose(weight, (1, 0)), shape=shape)


def _inverse_sigmoid(b: Builder, x: Value) -> Value:
    x = b.clip(x, 0.0, 1.0)
    one = b.op("Sub", b.like(1, x), x)
    ratio = b.op("Div", b.clip(x, EPS, None), b.clip(one, EPS, None))
    return b.op("Log", ratio)


def _levels(
    b: Builder,
    features: Sequence[Value],
    dtype: int | None,
    sizes: tuple[Dim, Dim, Dim],
    pool: int,
    scales: Sequence[float],
) -> list[Value]:
    """The levels as floating point, ``(B, cams, C, H, W)``, and the pooled one."""
    batch, cams, channels = sizes
    images = b.product(batch, cams)
    precise = TensorProto.DOUBLE if dtype == TensorProto.DOUBLE else TensorProto.FLOAT
    levels = []
    for feature, scale in zip(features, scales, strict=True):
        height, width = b.dim(feature, 3), b.dim(feature, 4)
        if feature.dtype == TensorProto.INT8:
            if feature.rank == 6:
                padded = b.product(b.dim(feature, 2), 32)
                feature = b.reshape(b.transpose(feature, (0, 1, 2, 5, 3, 4)), batch, cams, padded, height, width)
                if padded != channels:
                    feature = b.op("Gather", feature, b.arange(channels), axis=2)
            # no DequantizeLinear: ONNX Runtime moves it behind the pooling, with the wrong type of zero point
            step = b.constant(np.float32(scale), precise)
            feature = b.op("Mul", b.cast(feature, precise), step, shape=feature.shape)
        elif feature.dtype != dtype:
            feature = b.cast(feature, TensorProto.DOUBLE if TensorProto.DOUBLE in (dtype, feature.dtype) else precise)
        levels.append(b.reshape(feature, batch, cams, channels, height, width))
    if pool:
        last = levels[-1]
        height, width = (b.quotient(b.dim(last, axis), 2) for axis in (3, 4))
        image = b.reshape(last, images, channels, b.dim(last, 3), b.dim(last, 4))
        pooled = b.op("MaxPool", image, kernel_shape=[2, 2], strides=[2, 2])
        levels.append(b.reshape(pooled, batch, cams, channels, height, width))
    return levels


Symbolic(OP, body)
