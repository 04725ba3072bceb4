"""Converts between a node's attributes and the plugin fields that TensorRT passes to a plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from svexport.errors import BackendNotAvailableError
from svexport.ops._op import Op
from svexport.tensorrt.bindings import load_tensorrt_for_plugins

__all__ = ["attributes_of", "fields_of"]


def attributes_of(op: Op, fields: Sequence[Any]) -> dict[str, Any]:
    """Reads the attributes from a collection of plugin fields, in the form that the op takes.

    Raises:
        ValueError: if one is missing, duplicate, unknown, or has a wrong type or length.
        BackendNotAvailableError: if one is a list, and the bindings do not pass lists.
    """
    known = {a.name: a for a in op.attributes}
    if any(a.kind in ("ints", "floats") for a in op.attributes) and not _reads_lists():
        raise BackendNotAvailableError(
            f"{op.node_type} has lists as attributes; the Python bindings of TensorRT "
            f"{load_tensorrt_for_plugins().__version__} show a plugin only their first elements; use the C++ library "
            "(svexport plugins build), or bindings of another version: 10.16 and 11.4 show them all, 10.1, 10.14 and "
            "10.15 do not"
        )
    found: dict[str, Any] = {}
    for field in fields:
        argument = known.get(field.name)
        if argument is None or field.name in found:
            raise ValueError(
                f"{op.node_type} expects each of {', '.join(known)} once, "
                f"got {'a second ' if argument else ''}{field.name}"
            )
        values = np.ravel(field.data)
        whole = argument.kind in ("int", "ints")
        if values.dtype.kind != ("i" if whole else "f") or (argument.kind in ("int", "float") and values.size != 1):
            raise ValueError(
                f"{op.node_type} expects {field.name} of {argument.kind}, got {values.size} of {values.dtype}"
            )
        items = [int(v) if whole else float(v) for v in values]
        found[field.name] = items[0] if argument.kind in ("int", "float") else items
    if missing := [name for name in known if name not in found]:
        raise ValueError(f"{op.node_type} expects each of {', '.join(known)} once, {', '.join(missing)} is missing")
    return found


@cache
def _reads_lists() -> bool:
    """Whether a field's data hold all of its elements, as in most versions of the bindings."""
    trt, given = load_tensorrt_for_plugins(), _lasting(np.array([1, 2], np.int32))
    return list(np.ravel(trt.PluginField("", given, trt.PluginFieldType.INT32).data)) == [1, 2]


def fields_of(trt: ModuleType, op: Op, attributes: Mapping[str, Any] | None = None) -> Any:
    """The attributes as plugin fields, in schema order; without values, the fields that a creator announces."""
    fields = []
    for argument in op.attributes:
        whole = argument.kind in ("int", "ints")
        value = np.array([] if attributes is None else attributes[argument.name], np.int32 if whole else np.float32)
        kind = trt.PluginFieldType.INT32 if whole else trt.PluginFieldType.FLOAT32
        fields.append(trt.PluginField(argument.name, _lasting(value.reshape(-1)), kind))
    return trt.PluginFieldCollection(fields)


_arrays: dict[bytes, np.ndarray] = {}


def _lasting(array: np.ndarray) -> np.ndarray:
    """An equal array that is never freed, because a field does not own the memory that it points to."""
    return _arrays.setdefault(array.dtype.char.encode() + array.tobytes(), array)
