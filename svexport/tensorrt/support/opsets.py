"""Finds features of a newer opset in a node that an older opset lacks, from ONNX's schemas."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs

__all__ = ["newer_than"]

_OTHERWISE = {"GroupNormalization": 21}
"""Ops whose meaning changes at an opset, with the same inputs and attributes."""
_RENAMED = {("GridSample", "mode")}
"""Attributes whose default was renamed but means the same."""


@cache
def _schema(name: str, opset: int) -> defs.OpSchema | None:
    try:
        return defs.get_schema(name, max_inclusive_version=opset, domain="")
    except defs.SchemaError:
        return None


def newer_than(node: onnx.NodeProto, opset: int, known: int) -> str:
    """The feature of a node at ``opset`` that the earlier opset ``known`` lacks; empty if it means the same in both.

    A parser that knows opsets up to ``known`` reads the node as one of that opset. Types are not compared, because each
    TensorRT version has its own list of types. Ops that ``known`` does not have at all are not checked either.
    """
    new, old = _schema(node.op_type, opset), _schema(node.op_type, known)
    if new is None or old is None or new.since_version == old.since_version:
        return ""
    if known < _OTHERWISE.get(node.op_type, 0) <= opset:
        return f"{node.op_type} of opset {new.since_version}"
    if old.max_input < len(node.input) <= new.max_input:
        return f"{new.inputs[old.max_input].name} as an input"
    if old.max_output < len(node.output) <= new.max_output:
        return f"the output {new.outputs[old.max_output].name}"
    given = {
        a.name for a in node.attribute if a.name not in new.attributes or a != new.attributes[a.name].default_value
    }
    if unknown := sorted(given - set(old.attributes)):
        return f"the attribute {unknown[0]}"
    for name, attribute in new.attributes.items():
        if name in given or name not in old.attributes or (node.op_type, name) in _RENAMED:
            continue  # the default of a new attribute is the old behaviour
        before = old.attributes[name].default_value
        if attribute.default_value != before:
            return f"another default of {name}"
    return ""
