"""Shapes, concatenation and indices, as the TorchScript exporter writes them: corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from svexport.errors import ExportError
from svexport.exporter.corrections.writer import integers_of

__all__ = ["SHAPES"]

_Value = torch._C.Value
_Own = Callable[..., Any]
_kinds = torch.onnx.JitScalarType


def _repeat_interleave(g: Any, own: _Own, self: _Value, repeats: _Value, dim: _Value, output_size: _Value) -> Any:
    """The exporter's own counts a negative dimension from the front in place, in a constant that other nodes share."""
    if not symbolic_helper._is_none(dim):
        dim = _dims_from_the_front(g, dim, symbolic_helper._get_tensor_rank(self))
    return own(g, self, repeats, dim, output_size)


def _dims_from_the_front(g: Any, dims: _Value, rank: int | None) -> _Value:
    if not rank:
        return dims
    numbers = [d % rank for d in integers_of(dims)]
    scalar = symbolic_helper._get_tensor_rank(dims) in (None, 0)
    return g.op("Constant", value_t=torch.tensor(numbers[0] if scalar else numbers))


def _permute(g: Any, own: _Own, self: _Value, dims: _Value) -> Any:
    """The exporter's own writes negative dimensions, which ONNX does not have."""
    axes = symbolic_helper._parse_arg(dims, "is")
    order = [axis % len(axes) for axis in axes]
    return self if order == sorted(order) else g.op("Transpose", self, perm_i=order)


def _index(g: Any, own: _Own, self: _Value, indices: _Value) -> Any:
    """The exporter's own makes one index of several, and a wrong one where any of them is negative."""
    values = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    if sum(not symbolic_helper._is_none(value) for value in values) > 1:
        counted = [_from_the_front(g, self, axis, value) for axis, value in enumerate(values)]
        indices = g.op("prim::ListConstruct", *counted)
    return own(g, self, indices)


def _index_put(g: Any, own: _Own, self: _Value, indices: _Value, values: _Value, accumulate: _Value) -> Any:
    """The exporter keeps a dimension of size 1 for each that a number takes away (``x[i, 0] = y``), and reshapes."""
    given = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    if not given:  # what ``x.copy_(values)`` becomes
        return _copy(g, own, self, values, accumulate)
    if len(given) > 1:
        given = [_places(g, value) for value in given]
        indices = g.op("prim::ListConstruct", *given)
    ranks = [r for r in map(symbolic_helper._get_tensor_rank, (self, values, *given)) if r is not None]
    if len(ranks) == len(given) + 2:
        whole, count, *each = ranks
        rank = max(each)
        single = [rank - r for r, value in zip(each, given, strict=True) if r and _numbers_of(value) == 1]
        if single and count == rank + whole - len(given) - len(single):
            inner = _unexpanded(values)
            if inner is not values and symbolic_helper._get_tensor_rank(inner) == count:
                values = inner
            values = symbolic_helper._unsqueeze_helper(g, values, sorted(single))
        elif not single:
            values = _unexpanded(values)
    return own(g, self, indices, values, accumulate)


def _unexpanded(values: _Value) -> _Value:
    """Without the Expands to the size of a slice: they have the numbers of the trace, and are done where needed."""
    while values.node().kind() == "onnx::Expand":
        values = next(values.node().inputs())
    return values


def _places(g: Any, index: _Value) -> _Value:
    """The places of a mask, which the exporter has given dimensions of size 1 as if it were indices."""
    node = index.node()
    if _kinds.from_value(index, _kinds.UNDEFINED) != _kinds.BOOL or node.kind() != "onnx::Reshape":
        return index
    mask, shape = node.inputs()
    if symbolic_helper._get_tensor_rank(mask) != 1:
        return index
    places = g.op("Reshape", g.op("NonZero", mask), shape)
    sizes = [None] + [1] * ((symbolic_helper._get_tensor_rank(index) or 1) - 1)
    places.setType(torch._C.TensorType.create_from_tensor(torch.empty(0, dtype=torch.int64)).with_sizes(sizes))
    return places


def _numbers_of(value: _Value) -> int | None:
    constant = value.node().kind() == "onnx::Constant"
    return torch.as_tensor(symbolic_helper._node_get(value.node(), "value")).numel() if constant else None


def _repeat(g: Any, own: _Own, self: _Value, repeats: _Value) -> Any:
    """The exporter's own forgets the sizes that stay as they are beside one that is repeated dynamically often."""
    result = own(g, self, repeats)
    rank = symbolic_helper._get_tensor_rank(self)
    if rank is None or not symbolic_helper._is_packed_list(repeats):
        return result
    times = [symbolic_helper._maybe_get_const(one, "i") for one in symbolic_helper._unpack_list(repeats)]
    sizes = [1] * (len(times) - rank) + [symbolic_helper._get_tensor_dim_size(self, axis) for axis in range(rank)]
    known = [n * s if isinstance(n, int) and s is not None else None for n, s in zip(times, sizes, strict=True)]
    result.setType(self.type().with_sizes(known))
    return result


def _from_the_front(g: Any, self: _Value, axis: int, index: _Value) -> _Value:
    masks = (_kinds.BOOL, _kinds.UINT8)
    if symbolic_helper._is_none(index) or _kinds.from_value(index) in masks:
        return index
    size = symbolic_helper._get_tensor_dim_size(self, axis)
    place = g.op("Constant", value_t=torch.tensor(axis if size is None else size))
    length = place if size is not None else g.op("Gather", g.op("Shape", self), place)
    if _kinds.from_value(index) != _kinds.INT64:
        index = g.op("Cast", index, to_i=_kinds.INT64.onnx_type())
    negative = g.op("Less", index, g.op("Constant", value_t=torch.tensor(0)))
    return g.op("Where", negative, g.op("Add", index, length), index)


def _expand(g: Any, own: _Own, self: _Value, size: _Value, implicit: _Value) -> Any:
    """The exporter's own finds out in the file which sizes are -1, six nodes long, and no shape is known after them."""
    known = symbolic_helper._maybe_get_const(size, "is")
    if not symbolic_helper._is_value(known):
        return g.op("Expand", self, g.op("Constant", value_t=torch.tensor(known, dtype=torch.int64).abs()))
    if not symbolic_helper._is_packed_list(size):
        return own(g, self, size, implicit)
    parts: list[_Value] = []
    for one in symbolic_helper._unpack_list(size):
        number = symbolic_helper._maybe_get_const(one, "t")
        if isinstance(number, torch.Tensor):
            parts.append(g.op("Constant", value_t=number.reshape(1).abs()))  # 1 leaves a size as it is, too
        else:
            rank = symbolic_helper._get_tensor_rank(one)
            parts.append(one if rank == 1 else symbolic_helper._unsqueeze_helper(g, one, [0]))
    return g.op("Expand", self, g.op("Concat", *parts, axis_i=0)) if parts else g.op("Identity", self)


def _copy(g: Any, own: _Own, self: _Value, values: _Value, non_blocking: _Value) -> Any:
    """What ``x.copy_(values)`` becomes, which the exporter lacks."""
    kind = _kinds.from_value(self, _kinds.UNDEFINED)
    if kind not in (_kinds.UNDEFINED, _kinds.from_value(values, _kinds.UNDEFINED)):
        values = g.op("Cast", values, to_i=kind.onnx_type())
    sizes = [symbolic_helper._get_tensor_sizes(v) for v in (self, values)]
    if sizes[0] is not None and None not in sizes[0] and sizes[0] == sizes[1]:
        return g.op("Identity", values)
    expanded = g.op("Expand", values, g.op("Shape", self))
    expanded.setType(self.type())
    return expanded


def _one_hot(g: Any, own: _Own, self: _Value, num_classes: _Value) -> Any:
    """The exporter's own writes a depth of -1 where the classes are counted in the values."""
    if symbolic_helper._maybe_get_const(num_classes, "i") == -1:
        raise ExportError(
            "torch.nn.functional.one_hot without num_classes counts the classes in its input, so that the size of its "
            "output is that of the given values; write one_hot(x, num_classes=...)"
        )
    return own(g, self, num_classes)


SHAPES: dict[str, Callable[..., Any]] = {
    "aten::copy": _copy,
    "aten::expand": _expand,
    "aten::index": _index,
    "aten::index_put": _index_put,
    "aten::one_hot": _one_hot,
    "aten::permute": _permute,
    "aten::repeat": _repeat,
    "aten::repeat_interleave": _repeat_interleave,
}
