"""Reductions, sorting and what is made of masks, as the TorchScript exporter writes them: corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from svexport.exporter.conversions import (
    extreme,
    extreme_along,
    larger,
    mean_of_some,
    place_of_extreme,
    sorted_along,
)
from svexport.exporter.corrections.elementwise import arithmetic
from svexport.exporter.corrections.writer import TorchScriptWriter, is_floating

__all__ = ["ORDER"]

_Value = torch._C.Value
_Own = Callable[..., Any]
_kinds = torch.onnx.JitScalarType


def _cumsum(g: Any, own: _Own, self: _Value, dim: _Value, dtype: _Value) -> Any:
    """CumSum is not for booleans."""
    if _kinds.from_value(self, _kinds.UNDEFINED) == _kinds.BOOL:
        self = g.op("Cast", self, to_i=_kinds.INT64.onnx_type())
    return own(g, self, dim, dtype)


def _of_masks(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Of booleans, the largest and where it is: ONNX has neither for them before opset 20, and TensorRT at none."""
    if _kinds.from_value(self, _kinds.UNDEFINED) != _kinds.BOOL:
        return own(g, self, *rest)
    numbers = [
        g.op("Cast", v, to_i=_kinds.FLOAT.onnx_type()) if _kinds.from_value(v, _kinds.UNDEFINED) == _kinds.BOOL else v
        for v in (self, *rest[:1])  # of max, another tensor, or the dimension
    ]
    results = own(g, *numbers, *rest[1:])
    values, *places = [results] if isinstance(results, _Value) else results
    values = g.op("Cast", values, to_i=_kinds.BOOL.onnx_type())
    return (values, *places) if places else values


def _extreme_of(name: str) -> Callable[..., Any]:
    """``max`` or ``min``, of one tensor, along a dimension, or of two: NaN is what comes out of NaN."""

    def convert(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
        kind, write = _kinds.from_value(self, _kinds.UNDEFINED), TorchScriptWriter(g)
        if kind in (_kinds.BOOL, _kinds.UNDEFINED):
            return _of_masks(g, own, self, *rest)
        if not rest:
            return extreme(write, f"Reduce{name}", self, None, False)
        if len(rest) == 1:
            return _larger(name)(g, own, self, *rest)
        axis, keep = (int(symbolic_helper._get_const(v, "i", "dim")) for v in rest)
        return extreme_along(write, f"Reduce{name}", self, axis, bool(keep))

    return convert


def _extremes_of(name: str) -> Callable[..., Any]:
    """``amax`` or ``amin``: as of ``max``."""

    def convert(g: Any, own: _Own, self: _Value, dim: _Value, keepdim: _Value) -> Any:
        if _kinds.from_value(self, _kinds.UNDEFINED) in (_kinds.BOOL, _kinds.UNDEFINED):
            return _of_masks(g, own, self, dim, keepdim)
        axes, keep = symbolic_helper._parse_arg(dim, "is"), symbolic_helper._parse_arg(keepdim, "i")
        return extreme(TorchScriptWriter(g), f"Reduce{name}", self, axes or None, bool(keep))

    return convert


def _place_of(name: str) -> Callable[..., Any]:
    """``argmax`` or ``argmin``: as of ``max``."""

    def convert(g: Any, own: _Own, self: _Value, dim: _Value, keepdim: _Value) -> Any:
        kind = _kinds.from_value(self, _kinds.UNDEFINED)
        if not is_floating(kind) or symbolic_helper._is_none(dim):
            return _of_masks(g, own, self, dim, keepdim)
        axis, keep = (symbolic_helper._parse_arg(v, "i") for v in (dim, keepdim))
        return place_of_extreme(TorchScriptWriter(g), f"Arg{name}", self, axis, bool(keep))

    return convert


def _larger(name: str) -> Callable[..., Any]:
    """``maximum`` or ``minimum``."""

    def convert(g: Any, own: _Own, self: _Value, other: _Value) -> Any:
        kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
        if kind == _kinds.BOOL:
            return _of_masks(g, own, self, other)
        if kind == _kinds.UNDEFINED or is_floating(kind):
            return arithmetic(g, own, self, other)
        values = (
            v if _kinds.from_value(v, _kinds.UNDEFINED) == kind else g.op("Cast", v, to_i=kind.onnx_type())
            for v in (self, other)
        )
        return larger(TorchScriptWriter(g), name, *values)

    return convert


def _sort(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """With ``stable`` before dim and descending, which the exporter's own takes for them: TopK is stable anyway."""
    return _sorted(g, own, self, *rest[-2:]) or own(g, self, *rest[-2:])


def _argsort(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """As of ``sort``."""
    result = _sorted(g, own, self, *rest[-2:])
    return result[1] if result else own(g, self, *rest[-2:])


def _sorted(g: Any, own: _Own, self: _Value, dim: _Value, descending: _Value) -> Any:
    rank = symbolic_helper._get_tensor_rank(self)
    axis, largest = (symbolic_helper._maybe_get_const(v, "i") for v in (dim, descending))
    if rank is None or isinstance(axis, _Value) or isinstance(largest, _Value):
        return None
    place = g.op("Constant", value_t=torch.tensor([axis % max(rank, 1)]))
    size = g.op("Gather", g.op("Shape", self), place) if rank else None
    return sorted_along(TorchScriptWriter(g), self, size, axis, bool(largest))


def _topk(g: Any, own: _Own, self: _Value, k: _Value, dim: _Value, largest: _Value, sorted: _Value) -> Any:
    """As of ``max``."""
    number = symbolic_helper._maybe_get_const(k, "i")
    if isinstance(number, _Value):
        count = symbolic_helper._reshape_helper(g, number, g.op("Constant", value_t=torch.tensor([1])))
        if _kinds.from_value(count, _kinds.UNDEFINED) != _kinds.INT64:
            count = g.op("Cast", count, to_i=_kinds.INT64.onnx_type())
    else:
        count = g.op("Constant", value_t=torch.tensor([number]))
    axis, most = (symbolic_helper._parse_arg(v, "i") for v in (dim, largest))
    return sorted_along(TorchScriptWriter(g), self, count, axis, bool(most))


def _any(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """The exporter's own asks whether the sum is positive; ``all`` is made of it."""
    if _kinds.from_value(self, _kinds.UNDEFINED) != _kinds.BOOL:
        self = g.op("Cast", self, to_i=_kinds.BOOL.onnx_type())
    return own(g, self, *rest)


def _unique_along(g: Any, own: _Own, self: _Value, dim: _Value, sorted: _Value, *rest: _Value) -> Any:
    """Sorted, as torch's always is along a dimension."""
    return own(g, self, dim, g.op("Constant", value_t=torch.tensor(True)), *rest)


def _unique(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Of the whole tensor, the places have its shape, which the exporter's own forgets."""
    values, places, *counts = own(g, self, *rest)
    return (values, g.op("Reshape", places, g.op("Shape", self)), *counts)


def _mean(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """NaN of what a mask has chosen where that is nothing."""
    result = own(g, self, *rest)
    sizes = symbolic_helper._get_tensor_sizes(self)
    masks = any(node.kind() == "onnx::NonZero" for node in g.block.nodes())
    kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
    if not is_floating(kind) or not (sizes is None or 0 in sizes or (None in sizes and masks)):
        return result
    axes = (
        symbolic_helper._parse_arg(rest[0], "is") if len(rest) > 1 and not symbolic_helper._is_none(rest[0]) else None
    )
    return mean_of_some(TorchScriptWriter(g), result, self, axes)


ORDER: dict[str, Callable[..., Any]] = {
    **{
        f"aten::{form.format(name.lower())}": convert(name)
        for name in ("Max", "Min")
        for form, convert in (("{}", _extreme_of), ("a{}", _extremes_of), ("arg{}", _place_of), ("{}imum", _larger))
    },
    "aten::all": _any,
    "aten::any": _any,
    "aten::argsort": _argsort,
    "aten::cumsum": _cumsum,
    "aten::mean": _mean,
    "aten::sort": _sort,
    "aten::topk": _topk,
    "aten::_unique2": _unique,
    "aten::unique_dim": _unique_along,
}
