"""Rewrites a model to compute in float64, so that rounding hides no error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svexport.errors import UnsupportedError
from svexport.graph.scope import constant_value
from svexport.graph.substitute import rewrite
from svexport.graph.walk import attributes_of, graphs
from svexport.symbolic._builder import Builder, Value

__all__ = ["in_float64"]

_FLOAT, _DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

_POINTS = 48
"""Number of points of the quadrature of erf's integral; the error is below 1e-15."""

_MOST_ERF = 6.0
"""From this argument on, erf is 1 in float64."""

_TO_THE_END = 2**62


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model with float64 for float32 in all inputs, outputs and values; constants keep their numbers.

    Ops without a float64 kernel in ONNX Runtime, such as convolutions, are composed of other ops.

    Args:
        model: a model in standard ONNX with its weights, of opset 11 or later.

    Raises:
        UnsupportedError: if the model uses half precision, or a node has no form in float64.
    """
    precise = onnx.ModelProto()
    precise.CopyFrom(model)
    known: dict[str, np.ndarray] = {}
    for graph in graphs(precise.graph):
        _convert(graph, known)

    def write(b: Builder, node: onnx.NodeProto) -> Value | None:
        form = _FORMS.get(node.op_type)
        return form and form(b, node, known)

    rewrite(precise, "in_float64", write)
    return precise


def _convert(graph: onnx.GraphProto, known: dict[str, np.ndarray]) -> None:
    """Converts the types of one graph, in place, and adds its constants to ``known``."""
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.elem_type = _precise(value.type.tensor_type.elem_type)
    for tensor in graph.initializer:
        _convert_tensor(tensor)
        known[tensor.name] = numpy_helper.to_array(tensor)
    for node in graph.node:
        if node.op_type == "Constant" and (value := constant_value(node)) is not None:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(value)
            _convert_tensor(tensor)
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("value", tensor))
            known[node.output[0]] = numpy_helper.to_array(tensor)
            continue
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _convert_tensor(attribute.t)
            elif attribute.name in ("to", "dtype"):
                attribute.i = _precise(attribute.i)


def _precise(kind: int) -> int:
    if kind in _HALVES:
        raise UnsupportedError("half precision has no counterpart in float64")
    return _DOUBLE if kind == _FLOAT else kind


def _convert_tensor(tensor: onnx.TensorProto) -> None:
    if _precise(tensor.data_type) != tensor.data_type:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


# ---------------------------------------------------------------- ops without a kernel of float64

_Form = Callable[[Builder, onnx.NodeProto, Mapping[str, np.ndarray]], Value]


def _input(node: onnx.NodeProto, place: int = 0) -> Value:
    return Value(node.input[place], _DOUBLE)


def _convolution(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    """A convolution as a MatMul: concatenates, channels last, what each tap of the kernel reads, times the weights."""
    weight, given = known.get(node.input[1]), attributes_of(node)
    if weight is None or given.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise UnsupportedError("a convolution by weights that are computed, or padded by name, has no form in float64")
    kernel, groups = weight.shape[2:], given.get("group", 1)
    rank = len(kernel)
    pads, strides, dilations = _window(given, rank)
    if tuple(given.get("kernel_shape", kernel)) != kernel or min(pads) < 0:
        raise UnsupportedError("a convolution whose attributes do not fit its weights has no form in float64")
    x = b.op("Transpose", _padded(b, _input(node), pads), perm=[0, *range(2, rank + 2), 1])
    read = _taps(b, x, range(1, rank + 1), kernel, strides, dilations)
    y = b.op("MatMul", b.concat(read, -1), b.constant(_as_matrix(weight, groups)))
    if len(node.input) > 2 and node.input[2]:
        y = b.op("Add", y, _input(node, 2))
    return b.op("Transpose", y, perm=[0, rank + 1, *range(1, rank + 1)])


def _window(given: Mapping[str, Any], rank: int) -> tuple[list[int], list[int], list[int]]:
    """Pads, strides and dilations of a node with a window."""
    return given.get("pads", [0] * 2 * rank), given.get("strides", [1] * rank), given.get("dilations", [1] * rank)


def _padded(b: Builder, x: Value, pads: Sequence[int]) -> Value:
    half = len(pads) // 2
    return b.op("Pad", x, b.ints(0, 0, *pads[:half], 0, 0, *pads[half:])) if any(pads) else x


def _taps(
    b: Builder, x: Value, axes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[Value]:
    """What each tap of a window reads along these axes, the last tap fastest."""
    read = []
    for place in itertools.product(*map(range, kernel)):
        starts = [p * d for p, d in zip(place, dilations, strict=True)]
        left = [(k - 1 - p) * d for k, p, d in zip(kernel, place, dilations, strict=True)]
        ends = [-n if n else _TO_THE_END for n in left]
        read.append(b.op("Slice", x, b.ints(*starts), b.ints(*ends), b.ints(*axes), b.ints(*strides)))
    return read


def _average_pool(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    """Sums along one axis after the other, over the number of pixels."""
    given = attributes_of(node)
    if given.get("auto_pad", b"NOTSET") != b"NOTSET" or given.get("ceil_mode"):
        raise UnsupportedError("an average pool padded by name, or with ceil_mode, has no form in float64")
    kernel = given["kernel_shape"]
    pads, strides, dilations = _window(given, len(kernel))

    def total(x: Value) -> Value:
        x = _padded(b, x, pads)
        for axis, (size, *rest) in enumerate(zip(kernel, strides, dilations, strict=True), start=2):
            x = b.op("Sum", *_taps(b, x, [axis], [size], *([n] for n in rest)))
        return x

    x = _input(node)
    if given.get("count_include_pad") or not any(pads):
        return b.op("Div", total(x), b.like(math.prod(kernel), x))
    ones = b.op("Expand", b.like(1.0, x), b.op("Shape", x, dtype=TensorProto.INT64))
    return b.op("Div", total(x), total(ones))


def _as_matrix(weight: np.ndarray, groups: int) -> np.ndarray:
    """Weights (filters, channels of a group, *kernel) as a matrix (taps of the kernel * channels, filters)."""
    filters, channels = weight.shape[:2]
    places = weight.reshape(groups, filters // groups, channels, -1).transpose(
        0, 3, 2, 1
    )  # group, place, channel, filter
    matrix = np.zeros((places.shape[1], groups, channels, groups, filters // groups))
    for group in range(groups):
        matrix[:, group, :, group] = places[group]
    return matrix.reshape(-1, filters)


def _erf(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    """erf by Gauss-Legendre quadrature: 2/sqrt(pi) times the integral of exp(-t**2) from 0 to x."""
    points, weights = np.polynomial.legendre.leggauss(_POINTS)
    x = b.clip(_input(node), -_MOST_ERF, _MOST_ERF)
    at = b.op("Mul", b.unsqueeze(x, -1), b.constant((points + 1) / 2))
    values = b.op("Exp", b.op("Neg", b.op("Mul", at, at)))
    total = b.op("MatMul", values, b.constant(weights / math.sqrt(math.pi)))
    return b.op("Mul", total, x)


def _where_negative(b: Builder, x: Value, other: Value) -> Value:
    return b.op("Where", b.op("Less", x, b.like(0.0, x)), other, x)


def _leaky_relu(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    x = _input(node)
    return _where_negative(b, x, b.op("Mul", x, b.like(attributes_of(node).get("alpha", 0.01), x)))


def _prelu(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    x = _input(node)
    return _where_negative(b, x, b.op("Mul", x, _input(node, 1)))


def _elu(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    x = _input(node)
    less = b.op("Sub", b.op("Exp", b.op("Min", x, b.like(0.0, x))), b.like(1.0, x))
    return _where_negative(b, x, b.op("Mul", less, b.like(attributes_of(node).get("alpha", 1.0), x)))


def _hard_sigmoid(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    x, given = _input(node), attributes_of(node)
    y = b.op("Mul", x, b.like(given.get("alpha", 0.2), x))
    return b.clip(b.op("Add", y, b.like(given.get("beta", 0.5), x)), 0.0, 1.0)


def _softplus(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    x = _input(node)
    small = b.op("Log", b.op("Add", b.op("Exp", b.op("Neg", b.op("Abs", x))), b.like(1.0, x)))
    return b.op("Add", small, b.op("Max", x, b.like(0.0, x)))


def _resize(b: Builder, node: onnx.NodeProto, known: Mapping[str, np.ndarray]) -> Value:
    """A nearest Resize only moves pixels: it moves two float32 halves of each number, which have 48 bits together."""
    if attributes_of(node).get("mode", b"nearest") != b"nearest":
        raise UnsupportedError("Resize that interpolates has no form in float64")
    x = _input(node)
    high = b.cast(x, _FLOAT)
    low = b.cast(b.op("Sub", x, b.cast(high, _DOUBLE)), _FLOAT)
    given = attributes_of(node)
    scales = node.input[2] if len(node.input) > 2 else ""
    if scales in known:
        factors: Value | None = b.constant(known[scales].astype(np.float32)) if known[scales].size else None
    elif scales:
        factors = b.cast(Value(scales, _DOUBLE), _FLOAT)
    else:
        factors = None
    nothing = b.constant(np.zeros(0, np.float32)) if b.opset < 13 else None  # where no input may be left out
    rest = [nothing, nothing if factors is None else factors, *(Value(name) for name in node.input[3:])]
    moved = [b.cast(b.op("Resize", half, *rest, **given), _DOUBLE) for half in (high, low)]
    return b.op("Add", *moved)


_FORMS: dict[str, _Form] = {
    "AveragePool": _average_pool,
    "Conv": _convolution,
    "Elu": _elu,
    "Erf": _erf,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": _leaky_relu,
    "PRelu": _prelu,
    "Resize": _resize,
    "Softplus": _softplus,
}
