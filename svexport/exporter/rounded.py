"""Refuses TorchScript files that compute numbers from dynamic sizes in float32, where Python and torch use float64.

int(90 * 0.7) is 62 in float64 and 63 in float32. torch.export keeps such numbers exact
(:mod:`svexport.exporter.numbers`, :mod:`svexport.exporter.aten.interpolate`); TorchScript has lost the double.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from svexport.errors import ExportError
from svexport.exporter.aten.interpolate import is_resized_alike
from svexport.graph.scope import Scope, is_standard, scopes
from svexport.graph.walk import attributes_of

__all__ = ["nearest_unlike", "refuse_rounded"]

_THROUGH = {"Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"}
_FLOATS = {"Add", "Div", "Mul", "Pow", "Sqrt", "Sub"}
_ROUNDED = {"Cast", "Ceil", "Floor", "Round"}
_INTEGERS = {TensorProto.INT32, TensorProto.INT64}
MOST_PIXELS = 4097
"""Sizes are checked up to this many pixels for whether the nearest pixels are torch's."""

_BITS = 256
"""A factor that is a multiple of 1/256 is exact in float32 for sizes below 65,536."""


def refuse_rounded(model: onnx.ModelProto) -> None:
    """Raises ExportError if some possible size would be rounded to another number than torch's."""
    for scope in scopes(model):
        made = {name: node for node in scope.graph.node for name in node.output}
        for node in scope.graph.node:
            found = _scale(scope, node) or _nearest(scope, made, node) or _rounding(scope, made, node)
            if found:
                where = f" (node {node.name})" if node.name else ""
                raise ExportError(
                    f"{found} of a dynamic size{where}: for some sizes the file makes another number of pixels than "
                    "torch, or other pixels. TorchScript traces the model, because torch.export does not take it, and "
                    "computes this in float32\n"
                    "  give sizes as numbers or by // (size=...), or make the size static"
                )


def _scale(scope: Scope, node: NodeProto) -> str:
    """Describes a Resize by factors, if the factor of a dynamic size gives another result in float32; else empty."""
    if not (is_standard(node, "Resize") or is_standard(node, "Upsample")):
        return ""
    inputs = [name for name in node.input[1:] if name]
    arrays = [scope.array(name) for name in inputs]
    scales = next((a for a in arrays if a is not None and a.dtype == np.float32 and a.size), None)
    if scales is None:
        return ""
    shape = scope.shape(node.input[0]) or [None] * scales.size
    attributes = attributes_of(node)
    mode = attributes.get("mode", b"nearest").decode()
    if attributes.get("coordinate_transformation_mode", b"").decode() == "align_corners":
        mode = ""  # coordinates depend on the sizes alone
    for size, scale in zip(shape, scales.tolist(), strict=True):
        meant = Fraction(scale).limit_denominator(1000)
        close = abs(float(meant) - scale) < 1e-6 * scale
        if not isinstance(size, int) and scale != 1 and not is_resized_alike(float(meant) if close else scale, mode):
            return f"F.interpolate by a factor of {float(meant) if close else scale:.6g}"
    return ""


def _nearest(scope: Scope, made: dict[str, NodeProto], node: NodeProto) -> str:
    """Describes a nearest Resize to a size, if it takes other pixels than torch for some dynamic size; else empty."""
    if not is_standard(node, "Resize") or len(node.input) < 4:
        return ""
    attributes = attributes_of(node)
    kind = attributes.get("mode", b"nearest"), attributes.get("coordinate_transformation_mode")
    old = scope.shape(node.input[0])
    if kind != (b"nearest", b"asymmetric") or old is None:
        return ""
    counts: list[int] = []  # trailing constant sizes
    concat = made.get(node.input[3])
    for part in reversed(concat.input if concat is not None and concat.op_type == "Concat" else node.input[3:]):
        array = scope.array(part)
        if array is None:
            break
        counts = [*array.tolist(), *counts]
    for size, count in zip(reversed(old), reversed(counts), strict=False):
        if not isinstance(size, int) and any(nearest_unlike(n, count) for n in range(1, MOST_PIXELS)):
            return f"F.interpolate to the nearest {count} pixels"
    return ""


def nearest_unlike(old: int, new: int) -> bool:
    """Whether Resize between two sizes may take other nearest pixels: it divides coordinates, and torch multiplies."""
    if old < 1 or new < 1 or new % old == 0:
        return False
    place = np.arange(new, dtype=np.float32)
    multiplied = np.floor(place * np.float32(np.float32(old) / np.float32(new)))
    return bool((multiplied != np.floor(place / np.float32(new / old))).any())


def _rounding(scope: Scope, made: dict[str, NodeProto], node: NodeProto) -> str:
    """Describes a rounded number, if it is computed from sizes in float32 and may be inexact; else empty."""
    if node.op_type not in _ROUNDED or node.domain:
        return ""
    if node.op_type == "Cast" and attributes_of(node)["to"] not in _INTEGERS:
        return ""
    steps = _steps(made, node.input[0], 8)
    return f"{steps[0].op_type} in float32, rounded," if steps and not _is_exact(scope, steps) else ""


def _steps(made: dict[str, NodeProto], name: str, depth: int) -> list[NodeProto] | None:
    """The float32 arithmetic from sizes to a number, last node first; None if it does not start from sizes."""
    node = made.get(name)
    if node is None or node.domain or depth == 0:
        return None
    if node.op_type == "Cast":
        if attributes_of(node)["to"] != TensorProto.FLOAT:
            return None
        return [] if _is_size(made, node.input[0], depth) else _steps(made, node.input[0], depth - 1)
    if node.op_type not in _THROUGH | _FLOATS | {"Ceil", "Floor"}:
        return None
    inputs = node.input[:1] if node.op_type in _THROUGH - {"Concat"} else node.input
    below = [steps for name in inputs if (steps := _steps(made, name, depth - 1)) is not None]
    if not below:
        return None
    return [*([node] if node.op_type in _FLOATS else []), *(step for steps in below for step in steps)]


def _is_size(made: dict[str, NodeProto], name: str, depth: int) -> bool:
    """Whether an integer is computed from sizes."""
    node = made.get(name)
    if node is None or node.domain or depth == 0:
        return False
    if node.op_type in ("Shape", "Size"):
        return True
    if node.op_type == "Cast" and attributes_of(node)["to"] not in _INTEGERS:
        return False
    known = _THROUGH | {"Add", "Cast", "Div", "Max", "Min", "Mod", "Mul", "Sub"}
    return node.op_type in known and any(_is_size(made, name, depth - 1) for name in node.input)


def _is_exact(scope: Scope, steps: list[NodeProto]) -> bool:
    """Whether steps are exact: one division by an integer, which rounds like the exact quotient, or short factors."""
    if len(steps) == 1 and steps[0].op_type == "Div":
        divisor = scope.array(steps[0].input[1])
        return divisor is not None and bool((divisor == np.floor(divisor)).all())
    for step in steps:
        numbers = [v for name in step.input if (v := scope.array(name)) is not None]
        short = all(bool((n * _BITS == np.floor(n * _BITS)).all()) for n in numbers)
        if step.op_type not in ("Add", "Mul", "Sub") or not numbers or not short:
            return False
    return True
