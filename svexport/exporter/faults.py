"""Single faults of a graph: what an exporter or a converter may get wrong about one node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from svexport.graph.walk import attributes_of, graphs_of

__all__ = ["Fault", "faults_of"]

_TURNED = {
    "And": ("Or",),
    "Equal": ("GreaterOrEqual", "LessOrEqual"),
    "Greater": ("GreaterOrEqual", "Less"),
    "GreaterOrEqual": ("Greater", "LessOrEqual"),
    "Less": ("LessOrEqual", "Greater"),
    "LessOrEqual": ("Less", "GreaterOrEqual"),
    "Or": ("And", "Xor"),
    "Xor": ("Or",),
}
_MIXED_UP = {
    "Add": ("Sub",),
    "ArgMax": ("ArgMin",),
    "ArgMin": ("ArgMax",),
    "AveragePool": ("MaxPool",),
    "Ceil": ("Floor",),
    "Floor": ("Ceil", "Round"),
    "GlobalAveragePool": ("GlobalMaxPool",),
    "GlobalMaxPool": ("GlobalAveragePool",),
    "Max": ("Min",),
    "Min": ("Max",),
    "Relu": ("LeakyRelu", "Elu"),
    "ReduceMax": ("ReduceMin", "ReduceMean"),
    "ReduceMean": ("ReduceSum", "ReduceMax"),
    "ReduceMin": ("ReduceMax",),
    "ReduceSum": ("ReduceMean",),
    "Round": ("Floor",),
    "Sigmoid": ("HardSigmoid",),
    "Softmax": ("LogSoftmax",),
    "Sub": ("Add",),
    "Tanh": ("Erf",),
}
"""For each op, the ops that it may be confused with."""

_COMMUTES = {"Add", "And", "Equal", "Max", "Mean", "Min", "Mul", "Or", "Sum", "Xor"}
_STRINGS: dict[str, tuple[str, ...]] = {
    "approximate": ("none", "tanh"),
    "auto_pad": ("SAME_UPPER", "SAME_LOWER"),
    "coordinate_transformation_mode": ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"),
    "direction": ("forward", "reverse", "LEFT", "RIGHT"),
    "mode": ("constant", "edge", "reflect", "nearest", "linear", "cubic", "bilinear", "bicubic", "DCR", "CRD"),
    "nearest_mode": ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"),
    "padding_mode": ("zeros", "border", "reflection"),
    "reduction": ("none", "add", "mul", "max", "min"),
}
_AT_MOST = 3
"""Most other values that are tried for one attribute."""

_SWITCHES = {"align_corners", "ceil_mode", "count_include_pad", "exclusive", "fmod", "largest", "reverse"}
_SWITCHES |= {"select_last_index", "transA", "transB", "upper"}
_DROPPED = "dropped"


@dataclass(frozen=True)
class Fault:
    """One node changed so that it computes something else.

    Attributes:
        kind: what is wrong: ``"dropped"``, ``"axis=2"``, ``"inputs swapped"``.
        node: the changed node; None if its output becomes its first input, or is transposed.
        constants: the constant inputs that change, by name.
        transposed: the two axes of the output that are swapped.
    """

    kind: str
    node: onnx.NodeProto | None = None
    constants: Mapping[str, np.ndarray] | None = None
    transposed: tuple[int, int] | None = None


def faults_of(
    node: onnx.NodeProto, constants: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]
) -> Iterator[Fault]:
    """Faults of a node with one output; ``constants`` and recorded ``values`` are by name."""
    output = values[node.output[0]]
    first = _value(node, 0, constants, values)
    if first is not None and first.dtype == output.dtype and first.shape == output.shape:
        yield Fault(_DROPPED)
    for a in range(output.ndim - 1):
        if output.shape[a] == output.shape[a + 1] > 1:
            yield Fault(f"axes {a} and {a + 1} of the result transposed", transposed=(a, a + 1))
            break
    if any(True for _ in graphs_of(node)):
        return
    for op in _TURNED.get(node.op_type, ()):
        yield Fault(f"{op} instead", _another(node, op))
    for op in _MIXED_UP.get(node.op_type, ()):
        if "axes" not in attributes_of(node) or op.startswith("Reduce"):
            yield Fault(f"{op} instead", _another(node, op))
    yield from _swapped(node, constants, values)
    yield from _attributes(node, max(output.ndim, first.ndim if first is not None else 0))
    yield from _constants(node, constants)


def _value(node: onnx.NodeProto, place: int, *known: Mapping[str, np.ndarray]) -> np.ndarray | None:
    name = node.input[place] if len(node.input) > place else ""
    return next((values[name] for values in known if name in values), None)


def _another(node: onnx.NodeProto, op: str, **attributes: Any) -> onnx.NodeProto:
    """A copy of the node with another op, or with other attributes."""
    other = onnx.NodeProto()
    other.CopyFrom(node)
    other.op_type = op
    if op != node.op_type and op in ("LeakyRelu", "Elu", "HardSigmoid"):
        del other.attribute[:]
    for name, value in attributes.items():
        for attribute in [a for a in other.attribute if a.name == name]:
            other.attribute.remove(attribute)
        other.attribute.append(helper.make_attribute(name, value))
    return other


def _swapped(node: onnx.NodeProto, *known: Mapping[str, np.ndarray]) -> Iterator[Fault]:
    if node.op_type in _COMMUTES or len(node.input) < 2:
        return
    for a in range(min(len(node.input) - 1, 3)):
        one, other = _value(node, a, *known), _value(node, a + 1, *known)
        if one is None or other is None or one.dtype != other.dtype or one.ndim != other.ndim:
            continue
        if {*node.input[a : a + 2]} <= known[0].keys() and np.array_equal(one, other):
            continue
        changed = _another(node, node.op_type)
        changed.input[a], changed.input[a + 1] = node.input[a + 1], node.input[a]
        yield Fault(f"inputs {a} and {a + 1} swapped", changed)


def _attributes(node: onnx.NodeProto, rank: int) -> Iterator[Fault]:
    given = attributes_of(node)
    single = [size == 1 for size in given.get("kernel_shape", ())]  # a tap is at one place, however far others were
    for name, value in given.items():
        others: list[Any] = []
        if name == "momentum" and not given.get("training_mode"):
            continue  # of training alone
        if name in ("axis", "batch_dims") and isinstance(value, int):
            others = [(value + 1) % max(rank, 1), (value - 1) % max(rank, 1)]
        elif name == "axes" and isinstance(value, (list, tuple)):
            others = [[(axis + 1) % max(rank, 1) for axis in value]]
        elif name in _SWITCHES:
            others = [1 - value]
        elif name in ("pads", "strides", "dilations", "kernel_shape", "perm", "output_padding"):
            others = [list(reversed(value)), [*value[1:], value[0]], *_shifted(name, list(value))]
        elif isinstance(value, float):
            others = [value * 1.1 if value else 0.1, value * 100]
        elif isinstance(value, bytes) and name in _STRINGS:
            others = [text for text in _STRINGS[name] if text != value.decode()]
        if name == "dilations" and single:
            others = [[v if one else o for v, o, one in zip(value, other, single, strict=True)] for other in others]
        found = [other for other in others if other != value and not (isinstance(other, list) and other == list(value))]
        for other in found[:_AT_MOST] if name != "mode" else found:
            yield Fault(f"{name}={other}", _another(node, node.op_type, **{name: other}))
    if node.op_type in ("Conv", "MaxPool", "AveragePool") and "pads" not in given and "auto_pad" not in given:
        kernel = given.get("kernel_shape", [1, 1])
        yield Fault("padded", _another(node, node.op_type, pads=[1] * len(kernel) + [0] * len(kernel)))


def _shifted(name: str, value: list[int]) -> Iterator[list[int]]:
    """``pads`` with all padding moved to the beginning; strides or dilations changed by one."""
    half = len(value) // 2
    if name == "pads" and any(value):
        begins, ends = value[:half], value[half:]
        yield [b + e for b, e in zip(begins, ends, strict=True)] + [0] * half
    elif name in ("strides", "dilations"):
        yield [max(v - 1, 1) if v > 1 else 2 for v in value]


def _constants(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> Iterator[Fault]:
    for place, name in enumerate(node.input):
        value = constants.get(name)
        if value is None or not value.size or place == 0 == len(node.input) - 1:
            continue
        if value.dtype == bool:
            yield Fault(f"constant {place} negated", node, {name: ~value})
        elif value.dtype.kind == "f":
            yield Fault(f"constant {place} a tenth larger", node, {name: (value * 1.1 + 1e-3).astype(value.dtype)})
            finite = np.where(np.isfinite(value), np.abs(value), 0)
            one = value.copy()
            most = np.unravel_index(int(finite.argmax()), value.shape)
            one[most] = value[most] * 0.5 + 0.1
            yield Fault(f"an element of constant {place}", node, {name: one})
            if value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1:
                yield Fault(f"constant {place} transposed", node, {name: np.ascontiguousarray(value.swapaxes(-1, -2))})
        elif value.dtype.kind in "iu":
            for by in (1, -1):
                one = value.copy()
                one.reshape(-1)[0] += by
                yield Fault(f"constant {place} {by:+}", node, {name: one})
