"""Stores weights as the int8 numbers that QuantizeLinear makes: a quarter of the file, for runtimes that read them."""

from __future__ import annotations

import numpy as np
import onnx

from svexport.graph.scope import Scope, drop_unused, is_standard, scopes, used_inside

__all__ = ["FIRST_WITH_INT8_WEIGHTS", "store_quantized"]

FIRST_WITH_INT8_WEIGHTS = (10, 0)
"""TensorRT: "weights of Q/DQ models may be specified using a high-precision data type or a low-precision quantized
type". Source: NVIDIA TensorRT developer guide, Explicit Quantization, Quantized Weights."""


def store_quantized(model: onnx.ModelProto) -> int:
    """Computes QuantizeLinear of float32 constants that nothing else reads, in place, before DequantizeLinear.

    The computation is ONNX's: division in float32, rounding half to even, saturation.

    Returns:
        The number of constants that became int8.
    """
    return sum(_store(scope) for scope in scopes(model))


def _store(scope: Scope) -> int:
    takers: dict[str, list[onnx.NodeProto]] = {}
    for node in scope.graph.node:
        for name in (*node.input, *used_inside(node)):
            takers.setdefault(name, []).append(node)
    outputs = {output.name for output in scope.graph.output}
    before = set(scope.constants)
    found = [node for node in scope.graph.node if is_standard(node, "QuantizeLinear") and len(node.input) == 3]
    found = [node for node in found if node.output[0] not in outputs and _only_dequantized(takers, node.output[0])]
    known = {node.output[0] for node in found}
    renamed: dict[str, str] = {}
    for node in found:
        name = node.input[0]
        others = any(one.output[0] not in known for one in takers[name]) or name in outputs
        if not others and (value := _quantized(scope, node)) is not None:
            renamed[node.output[0]] = scope.constant(value, f"{name}_int8")
    if not renamed:
        return 0
    for node in scope.graph.node:
        if is_standard(node, "DequantizeLinear"):
            node.input[0] = renamed.get(node.input[0], node.input[0])
    drop_unused(scope.graph, before=before | renamed.keys())
    return len(renamed)


def _only_dequantized(takers: dict[str, list[onnx.NodeProto]], name: str) -> bool:
    behind = takers.get(name, [])
    return bool(behind) and all(is_standard(one, "DequantizeLinear") and name == one.input[0] for one in behind)


def _quantized(scope: Scope, node: onnx.NodeProto) -> np.ndarray | None:
    """The result of a QuantizeLinear of constants; None for other types, and for nodes with further attributes."""
    x, scale, zero = (scope.array(name) for name in node.input)
    if x is None or scale is None or zero is None or x.dtype != np.float32 or scale.dtype != np.float32:
        return None
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if zero.dtype != np.int8 or zero.any() or attributes.keys() - {"axis"} or scale.ndim > 1 or not x.size:
        return None
    if scale.ndim and (scale.size > 1 or x.ndim > 0):
        axis = attributes.get("axis", 1) % max(x.ndim, 1)
        if scale.size not in (1, x.shape[axis]):
            return None
        scale = scale.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    if not (scale > 0).all() or not np.isfinite(x).all():
        return None  # what becomes of NaN is each runtime's own
    with np.errstate(over="ignore"):  # infinite steps are beyond, too
        return np.clip(np.rint(x / scale), -128, 127).astype(np.int8)
