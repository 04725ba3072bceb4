"""Normalizations: over a batch, groups of channels, or the last axes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets._float import at_least_float
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Value

__all__: list[str] = []

unchanged("InstanceNormalization LpNormalization", 22)
unchanged("MeanVarianceNormalization LRN", 13)


@down("BatchNormalization", 15)
def batch_normalization(b: Builder, node: Node) -> Value | tuple[Value | None, ...] | None:
    """Scale and bias had the type of the input."""
    return _one_type(b, node, [1, 2], [3, 4])


@down("BatchNormalization", 14)
def batch_normalization_training(b: Builder, node: Node) -> Value | tuple[Value | None, ...] | None:
    """Mean and variance had the type of the input, and statistics of the batch were another op's."""
    if node.attribute("training_mode") == 1:
        return _training(b, node)
    node.remove("training_mode")
    return _one_type(b, node, [1, 2, 3, 4], [])


def _one_type(b: Builder, node: Node, same: list[int], other: list[int]) -> Value | tuple[Value | None, ...] | None:
    """Casts inputs of different types, where an older version has one: exactly, to the widest."""
    dtypes = {i: node.dtype(i) for i in range(5)}
    if all(dtypes[i] == dtypes[0] for i in same):
        return None
    if node.attribute("training_mode") == 1:
        return _training(b, node)
    wide = TensorProto.DOUBLE if TensorProto.DOUBLE in dtypes.values() else TensorProto.FLOAT
    inputs = [b.cast(node.input(i), wide) for i in range(5)]
    attributes = {name: value for name, value in node.attributes().items() if name in ("epsilon", "momentum")}
    return b.cast(b.op("BatchNormalization", *inputs, **attributes, shape=inputs[0].shape), dtypes[0])


def _training(b: Builder, node: Node) -> tuple[Value | None, ...]:
    """Training mode: uses the statistics of the batch, and blends them into the running ones."""
    x, scale, bias, mean, variance = (node.input(i) for i in range(5))
    rank = node.rank()
    for i in range(5):
        node.dtype(i)
    y = at_least_float(b, x)
    axes = [i for i in range(rank) if i != 1]
    channels = [1, b.dim(x, 1), *[1] * (rank - 2)]

    def over_channels(value: Value) -> Value:
        return b.reshape(b.cast(value, y.dtype), *channels)

    batch_mean = b.reduce("ReduceMean", y, axes, keepdims=True)
    centred = b.op("Sub", y, batch_mean)
    batch_variance = b.reduce("ReduceMean", b.op("Mul", centred, centred), axes, keepdims=True)
    deviation = b.op("Sqrt", b.op("Add", batch_variance, b.like(node.attribute("epsilon"), y)))
    result = b.op("Mul", b.op("Div", centred, deviation), over_channels(scale))
    outputs: list[Value | None] = [b.cast(b.op("Add", result, over_channels(bias)), x.dtype)]
    momentum = node.attribute("momentum")
    for index, running, batch in ((1, mean, batch_mean), (2, variance, batch_variance)):
        if node.output(index) is None:
            outputs.append(None)
            continue
        kept = b.op("Mul", b.cast(running, y.dtype), b.like(momentum, y))
        added = b.op("Mul", b.reshape(batch, channels[1]), b.like(1 - momentum, y))
        outputs.append(b.cast(b.op("Add", kept, added), running.dtype))
    return tuple(outputs)


@down("LayerNormalization", 17)
def layer_normalization(b: Builder, node: Node) -> tuple[Value | None, ...]:
    """The definition: mean and variance in the type that ``stash_type`` names, at least float32."""
    x, scale, bias = node.typed(), node.typed(1), node.given(2)
    axes, stash = _last_axes(node), node.attribute("stash_type")
    y = b.cast(x, stash)
    mean = b.reduce("ReduceMean", y, axes, keepdims=True)
    centred = b.op("Sub", y, mean)
    power = b.op("Pow", centred, b.like(2, y))  # with Pow, runtimes make one kernel of all this
    variance = b.reduce("ReduceMean", power, axes, keepdims=True)
    deviation = b.op("Sqrt", b.op("Add", variance, b.like(node.attribute("epsilon"), y)))
    result = b.op("Div", centred, deviation)
    result = b.op("Mul", result, b.cast(scale, stash))
    if bias is not None:
        result = b.op("Add", result, b.cast(node.typed(2), stash))
    outputs: list[Value | None] = [b.cast(result, x.dtype)]
    outputs.append(None if node.output(1) is None else mean)
    outputs.append(None if node.output(2) is None else b.op("Reciprocal", deviation))
    return tuple(outputs)


@down("RMSNormalization", 23)
def rms_normalization(b: Builder, node: Node) -> Value:
    x, scale = node.typed(), node.typed(1)
    axes, stash = _last_axes(node), node.attribute("stash_type")
    y = b.cast(x, stash)
    square = b.reduce("ReduceMean", b.op("Mul", y, y), axes, keepdims=True)
    root = b.op("Sqrt", b.op("Add", square, b.like(node.attribute("epsilon"), y)))
    result = b.op("Div", y, root)
    result = b.op("Mul", result, b.cast(scale, stash))
    return b.cast(result, scale.dtype)


def _last_axes(node: Node) -> list[int]:
    """The axes from ``axis`` on: counted from the back where the rank is not known."""
    axis, x = node.attribute("axis"), node.input()
    if axis < 0 and x.shape is None:
        return list(range(axis, 0))
    rank = node.rank()
    return list(range(axis % rank, rank))


@down("GroupNormalization", 21)
def group_normalization(b: Builder, node: Node) -> Value:
    """Scale and bias of every channel, after groups that are normalized alone."""
    x, scale, bias = node.typed(), node.typed(1), node.typed(2)
    groups = node.attribute("num_groups")
    stash = node.attribute("stash_type")
    precise = b.cast(x, stash) if stash else x
    ones, zeros = (b.constant(np.full(groups, number), precise.dtype) for number in (1, 0))
    y = _by_groups(b, node, precise, ones, zeros)
    channels = [b.dim(x, 1), *[1] * (node.rank() - 2)]
    scale, bias = (b.reshape(b.cast(v, y.dtype), *channels) for v in (scale, bias))
    y = b.op("Add", b.op("Mul", y, scale), bias)
    return b.cast(y, x.dtype)


@down("GroupNormalization", 18)
def group_normalization_18(b: Builder, node: Node) -> Value:
    """Scale and bias of every group."""
    x = node.typed()
    precise = at_least_float(b, x)
    scale, bias = (b.cast(node.typed(i), precise.dtype) for i in (1, 2))
    return b.cast(_by_groups(b, node, precise, scale, bias), x.dtype)


def _by_groups(b: Builder, node: Node, x: Value, scale: Value, bias: Value) -> Value:
    """InstanceNormalization with groups of channels for channels."""
    groups = node.attribute("num_groups")
    node.rank()
    dims = b.dims(x)
    rows = b.reshape(x, dims[0], groups, b.quotient(b.product(*dims[1:]), groups))
    if x.dtype == TensorProto.DOUBLE:  # of which ONNX Runtime has no InstanceNormalization
        scale, bias = (b.unsqueeze(replace(v, shape=(groups,)), 1) for v in (scale, bias))
        centred = b.op("Sub", rows, b.reduce("ReduceMean", rows, [2], keepdims=True))
        square = b.op("Mul", centred, centred)
        variance = b.op("Add", b.reduce("ReduceMean", square, [2], keepdims=True), b.like(node.attribute("epsilon"), x))
        y = b.op("Div", centred, b.op("Sqrt", variance))
        y = b.op("Add", b.op("Mul", y, scale), bias)
    else:
        y = b.op("InstanceNormalization", rows, scale, bias, epsilon=node.attribute("epsilon"), shape=rows.shape)
    return b.reshape(y, *dims)
