"""Sums and sorting, as the TorchScript exporter writes them: corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ORDER"]

_Value = torch._C.Value
_Own = Callable[..., Any]
_kinds = torch.onnx.JitScalarType


def _cumsum(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """CumSum is not for booleans."""
    if _kinds.from_value(self, _kinds.UNDEFINED) == _kinds.BOOL:
        self = g.op("Cast", self, to_i=_kinds.INT64.onnx_type())
    return own(g, self, *rest)


def _unique_along(g: Any, own: _Own, self: _Value, dim: _Value, sorted: _Value, *rest: _Value) -> Any:
    """Sorted, as torch's always is along a dimension."""
    return own(g, self, dim, g.op("Constant", value_t=torch.tensor(True)), *rest)


def _unique(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Of the whole tensor, the places have its shape, which the exporter's own forgets."""
    values, places, *counts = own(g, self, *rest)
    return (values, g.op("Reshape", places, g.op("Shape", self)), *counts)


ORDER: dict[str, Callable[..., Any]] = {
    "aten::cumsum": _cumsum,
    "aten::_unique2": _unique,
    "aten::unique_dim": _unique_along,
}
