"""Merges constant factors and sums after a linear node into its weights: of a layer scale, of queries, of a norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx

from svexport.graph.scope import Scope, is_standard, readers_of, scopes, used_names
from svexport.graph.walk import STANDARD, attributes_of

__all__ = ["merge_weights"]

_MOVES = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"}
"""Ops that a scalar factor can be moved through."""


class _Step(NamedTuple):
    """A node's effect on a tensor: a product with a constant, or a sum with one."""

    tensor: str
    constant: np.ndarray
    is_sum: bool


class _Linear(NamedTuple):
    """A node with constant weights, and the place of its bias: an input of its own, or of the Add behind it."""

    node: onnx.NodeProto
    weight: np.ndarray
    axis: int
    """The channel axis of the result."""
    rank: int
    """The rank of the result."""
    holder: onnx.NodeProto
    place: int
    bias: np.ndarray | None


def merge_weights(model: onnx.ModelProto) -> None:
    """Merges Mul and Div by constants, and Add and Sub of constants if there is no bias yet, into the weights of the
    preceding Conv, ConvTranspose, Gemm or MatMul, in place, in all graphs of a model.

    Constants are computed in float64 and rounded once. Nothing is merged if another node reads the weights or the
    result, or if a number would overflow or leave the range of normal numbers.
    """
    for scope in scopes(model):
        while _merge_some(scope):
            pass


def _merge_some(scope: Scope) -> bool:
    graph, used, readers = scope.graph, used_names(scope.graph), readers_of(scope.graph)
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        step = _step(node, scope)
        maker = None if step is None else makers.get(step.tensor)
        if step is None or maker is None or readers[step.tensor] != 1:
            continue
        linear = _linear_before(step, scope, makers, readers)
        if linear is not None and _merged(step, linear, scope):
            maker.output[list(maker.output).index(step.tensor)] = node.output[0]
            graph.node.remove(node)
            scope.drop_unused(used)
            return True
    return False


def _step(node: onnx.NodeProto, scope: Scope) -> _Step | None:
    if node.domain not in STANDARD or node.op_type not in {"Mul", "Div", "Add", "Sub"}:
        return None
    first, second = node.input
    if first in scope.constants and node.op_type in {"Mul", "Add"}:
        first, second = second, first
    shape, constant = scope.shape(first), scope.array(second)
    if first in scope.constants or shape is None or constant is None or constant.dtype.kind != "f":
        return None
    constant = constant.astype(np.float64)
    if constant.ndim > len(shape) or not np.isfinite(constant).all() or (node.op_type == "Div" and not constant.all()):
        return None
    value = {"Div": np.reciprocal, "Sub": np.negative}.get(node.op_type, np.positive)(constant)
    return _Step(first, value, node.op_type in {"Add", "Sub"})


def _linear_before(
    step: _Step, scope: Scope, makers: Mapping[str, onnx.NodeProto], readers: Counter[str]
) -> _Linear | None:
    """The linear node whose result a step takes, or, of one number for all, takes moved."""
    name = step.tensor
    while step.constant.size == 1 and not step.is_sum and name in makers and readers[name] == 1:
        if makers[name].domain not in STANDARD or makers[name].op_type not in _MOVES:
            break
        name = makers[name].input[0]
    if name not in makers or readers[name] != 1:
        return None
    node = makers[name]
    if is_standard(node, "Add"):
        for place in (1, 0):
            product, bias = makers.get(node.input[1 - place]), scope.array(node.input[place])
            if product is not None and bias is not None and readers[node.input[1 - place]] == 1:
                linear = _linear(product, scope, readers)
                if linear is not None and product.op_type == "MatMul":
                    return linear._replace(holder=node, place=place, bias=bias)
        return None
    return _linear(node, scope, readers)


def _linear(node: onnx.NodeProto, scope: Scope, readers: Counter[str]) -> _Linear | None:
    if node.domain not in STANDARD or node.op_type not in {"Conv", "ConvTranspose", "Gemm", "MatMul"}:
        return None
    weight, shape = scope.array(node.input[1]), scope.shape(node.output[0])
    if weight is None or weight.dtype.kind != "f" or readers[node.input[1]] != 1:
        return None
    has_bias = len(node.input) > 2 and bool(node.input[2])
    bias = scope.array(node.input[2]) if has_bias else None
    if has_bias and bias is None:
        return None
    if node.op_type in {"Conv", "ConvTranspose"}:
        return _Linear(node, weight, 1, weight.ndim, node, 2, bias)
    if weight.ndim != 2 or shape is None or not shape:
        return None
    return _Linear(node, weight, len(shape) - 1, len(shape), node, 2, bias)


def _merged(step: _Step, linear: _Linear, scope: Scope) -> bool:
    """Writes the weights that do what a step does, too; tells whether there are such."""
    node, channels = linear.node, _channels(linear)
    numbers = _by_channel(step.constant, linear, channels)
    if numbers is None:
        return False
    if step.is_sum:
        if linear.bias is not None or node.op_type == "MatMul" or attributes_of(node).get("beta", 1) != 1:
            return False
        weight, bias = None, _rounded(np.broadcast_to(numbers, channels), linear.weight.dtype)
    else:
        weight = _rounded(_scaled(linear, numbers), linear.weight.dtype)
        if weight is None:
            return False
        bias = None if linear.bias is None else _rounded(_as_bias(linear, numbers), linear.bias.dtype)
    if bias is None and (step.is_sum or linear.bias is not None):
        return False
    if weight is not None:
        node.input[1] = scope.constant(weight, node.input[1])
    if bias is not None:
        stem = linear.holder.input[linear.place] if linear.bias is not None else f"{node.output[0]}_bias"
        linear.holder.input.extend([""] * (linear.place + 1 - len(linear.holder.input)))
        linear.holder.input[linear.place] = scope.constant(bias, stem)
    return True


def _channels(linear: _Linear) -> int:
    attributes = attributes_of(linear.node)
    match linear.node.op_type:
        case "Conv":
            return int(linear.weight.shape[0])
        case "ConvTranspose":
            return int(linear.weight.shape[1]) * int(attributes.get("group", 1))
        case "Gemm" if attributes.get("transB"):
            return int(linear.weight.shape[0])
    return int(linear.weight.shape[1])


def _by_channel(constant: np.ndarray, linear: _Linear, channels: int) -> np.ndarray | None:
    """A scalar without axes, or one number per channel; None for a constant with other axes."""
    if constant.size == 1:
        return constant.reshape(())
    behind = linear.rank - 1 - linear.axis
    sizes = [1] * (constant.ndim - 1 - behind) + [channels] + [1] * behind
    return constant.reshape(channels) if list(constant.shape) == sizes else None


def _scaled(linear: _Linear, factor: np.ndarray) -> np.ndarray:
    weight = linear.weight.astype(np.float64)
    attributes = attributes_of(linear.node)
    if not factor.ndim or linear.node.op_type == "MatMul":
        return weight * factor
    if linear.node.op_type == "Gemm":
        return weight * (factor[:, None] if attributes.get("transB") else factor)
    if linear.node.op_type == "Conv":
        return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    group = int(attributes.get("group", 1))
    parts = weight.reshape(group, -1, *weight.shape[1:]) * factor.reshape(group, 1, -1, *[1] * (weight.ndim - 2))
    return parts.reshape(weight.shape)


def _as_bias(linear: _Linear, factor: np.ndarray) -> np.ndarray:
    assert linear.bias is not None
    return linear.bias.astype(np.float64) * factor


def _rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """In that type; None where numbers are too large for it, or too small to be as precise."""
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype)
    kept = np.isfinite(rounded) & ((np.abs(rounded) >= np.finfo(dtype).tiny) | (array == 0))
    return rounded if kept.all() else None
