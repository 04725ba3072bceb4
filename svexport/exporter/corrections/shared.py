"""The conversions of both exporters, for that on TorchScript."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from svexport.exporter.conversions import CONVERSIONS, ELEMENTWISE, TYPES
from svexport.exporter.corrections.writer import read, writer_of
from svexport.symbolic._symbolic import TensorInfo

__all__ = ["SHARED"]

_Value = torch._C.Value

_COMPOSITES: dict[str, Callable[..., Any]] = {
    "aten::argsort": lambda write, x, *dim: CONVERSIONS["aten::sort"](write, x, *dim)[1],
    "aten::argsort.stable": lambda write, x, **given: CONVERSIONS["aten::sort.stable"](write, x, **given)[1],
    "aten::max.other": CONVERSIONS["aten::maximum"],
    "aten::min.other": CONVERSIONS["aten::minimum"],
}
"""Of functions that torch makes of others, but not while TorchScript traces."""

_ALL = CONVERSIONS | _COMPOSITES
_IN_ONE_TYPE = ELEMENTWISE | {"aten::max.other", "aten::min.other"}


def _converted(g: Any, own: Callable[..., Any], *values: _Value) -> Any:
    """By the number of arguments, for the exporter has made tensors of numbers, of which others are overloads. Its own
    is of values of unknown types."""
    node, write = g.original_node, writer_of(g)
    kind = write.dtype(next(node.outputs()))
    known = (s for s in torch._C._jit_get_schemas_for_operator(node.kind()) if len(s.arguments) == len(values))
    named = [(s, ".".join(filter(None, (s.name, s.overload_name)))) for s in known]
    found = [(s, name) for s, name in named if name in _ALL]
    schema, name = next((one for one in found if _takes_lists(one[0], values)), found[0] if found else (None, ""))
    if schema is None or kind is None or write.dtype(values[0]) is None:
        return own(g, *values)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument, value in zip(schema.arguments, values, strict=True):
        given = None if argument.name == "dtype" else read(value, "constant")  # that is of the result
        if isinstance(given, TensorInfo) or (isinstance(given, list) and "List" not in str(argument.type)):
            given = value
        if value is values[0]:  # of which the type is asked
            given = value
        if isinstance(given, _Value) and name in _IN_ONE_TYPE and write.dtype(given) != kind:
            given = write("Cast", given, to=TYPES[kind])
        if argument.kwarg_only:
            kwargs[argument.name] = given
        else:
            args.append(given)
    return _ALL[name](write, *args, **kwargs)


def _takes_lists(schema: Any, values: Sequence[_Value]) -> bool:
    """Whether an overload has lists where numbers are given in lists (``dim=(0, 2)``)."""
    lists = (isinstance(read(value, "constant"), list) for value in values)
    return all("List" in str(argument.type) for argument, given in zip(schema.arguments, lists, strict=True) if given)


SHARED = {name.partition(".")[0]: _converted for name in _ALL}
"""By the function of ATen."""
