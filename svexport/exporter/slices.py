"""Assignments to slices (``x[..., 0] = y``), put together of parts: the TorchScript exporter makes scatters of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.onnx import symbolic_helper

__all__ = ["assigned", "unexpanded"]

_Value = torch._C.Value
_END = 2**63 - 1

_Span = tuple[int, int]
"""Start and end of a part of a dimension, as Slice has them."""


def assigned(g: Any, self: _Value, indices: _Value, values: _Value) -> _Value | None:
    """``self`` with values in a part of it that is a slice in every dimension; None where it is not seen to be one.

    The exporter has made an index of each slice, that of all places for a whole dimension, which ScatterND would take:
    some twenty nodes, and an index for each element.
    """
    rank, kind = symbolic_helper._get_tensor_rank(self), torch.onnx.JitScalarType.from_value(self)
    given = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    if rank is None or len(given) > rank:
        return None
    spans: dict[int, _Span] = {}
    single = []
    for axis, index in enumerate(given):
        span = _span(self, axis, index, behind=len(given) - 1 - axis)
        if span is None:
            return None
        size = symbolic_helper._get_tensor_dim_size(self, axis)
        if span not in ((0, _END), (0, size)):
            spans[axis] = span
        if span[1] == span[0] + 1 or span == (-1, _END):
            single.append(axis)
    unknown = torch.onnx.JitScalarType.UNDEFINED
    sizes = symbolic_helper._get_tensor_sizes(values)
    if sizes is None or unknown in (kind, torch.onnx.JitScalarType.from_value(values, unknown)):
        return None
    part = [_length(self, axis, spans.get(axis, (0, _END))) for axis in range(rank)]
    kept = _kept(part, single, sizes)
    if kept is None:
        return None
    values = unexpanded(values)
    count = symbolic_helper._get_tensor_rank(values)
    if count is None:
        return None
    if torch.onnx.JitScalarType.from_value(values) != kind:
        values = g.op("Cast", values, to_i=kind.onnx_type())
    if missing := [axis for axis in range(rank) if axis not in kept[len(kept) - count :]]:
        values = symbolic_helper._unsqueeze_helper(g, values, missing)
    result = _put_together(g, self, spans, values)
    result.setType(self.type())
    return result


def _length(self: _Value, axis: int, span: _Span) -> int | None:
    size = symbolic_helper._get_tensor_dim_size(self, axis)
    if size is not None:
        return len(range(size)[span[0] : span[1]])
    return span[1] - span[0] if 0 <= span[0] < span[1] < _END else -span[0] if span[0] < 0 and span[1] == _END else None


def _kept(part: Sequence[int | None], single: Sequence[int], sizes: Sequence[int | None]) -> list[int] | None:
    """The dimensions of a slice that values of these sizes have: an index takes a dimension away, of those of size 1.

    Which of several it was makes no difference where what is left has the same sizes. None where it has not, or where
    nothing fits.
    """
    if not sizes:
        return []
    fitting: dict[tuple[int | None, ...], list[int]] = {}
    for gone in itertools.combinations(single, max(len(part) - len(sizes), 0)):
        kept = [axis for axis in range(len(part)) if axis not in gone]
        lengths = tuple(part[axis] for axis in kept)
        if len(kept) == len(sizes) and all(map(_fits, lengths, sizes)):
            fitting[lengths] = kept
    return next(iter(fitting.values())) if len(fitting) == 1 else None


def _fits(length: int | None, size: int | None) -> bool:
    """A dynamic size is none of 1; for it may stand one of the trace."""
    return size != 1 if length is None else size in (None, length)


def unexpanded(values: _Value) -> _Value:
    """Without the Expands to the size of a slice: they have the numbers of the trace, and are done where needed."""
    while _is_expanded(values):
        values = next(values.node().inputs())
    return values


def _is_expanded(values: _Value) -> bool:
    return values.node().kind() == "onnx::Expand"


def _put_together(g: Any, x: _Value, spans: Mapping[int, _Span], values: _Value) -> _Value:
    if not spans:
        sizes = [symbolic_helper._get_tensor_dim_size(v, a) for v in (x, values) for a in range(_rank(x))]
        same = None not in sizes and sizes[: _rank(x)] == sizes[_rank(x) :]
        return values if same else g.op("Expand", values, g.op("Shape", x))
    axis, (start, end) = next(iter(spans.items()))
    size = symbolic_helper._get_tensor_dim_size(x, axis)
    inner = _put_together(g, _part(g, x, axis, start, end), {a: s for a, s in spans.items() if a != axis}, values)
    parts = [inner]
    if start:
        parts.insert(0, _part(g, x, axis, 0, start))
    if end not in (size, _END):
        parts.append(_part(g, x, axis, end, _END))
    return g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else inner


def _rank(x: _Value) -> int:
    return symbolic_helper._get_tensor_rank(x) or 0


def _part(g: Any, x: _Value, axis: int, start: int, end: int) -> _Value:
    part = symbolic_helper._slice_helper(g, x, axes=[axis], starts=[start], ends=[end])
    sizes = [symbolic_helper._get_tensor_dim_size(x, a) for a in range(_rank(x))]
    size = sizes[axis]
    sizes[axis] = len(range(size)[start:end]) if size is not None else None
    part.setType(x.type().with_sizes(sizes))
    return part


def _span(self: _Value, axis: int, index: _Value, behind: int) -> _Span | None:
    """The slice that an index stands for; ``behind`` indices follow it, each with a dimension of its own."""
    size = symbolic_helper._get_tensor_dim_size(self, axis)
    numbers = _constant(index)
    if numbers is not None:
        count = numbers.numel()
        if numbers.dtype not in (torch.int64, torch.int32) or not count:
            return None
        if numbers.dim() != behind + 1 or numbers.shape[0] != count:
            return None
        numbers = numbers.flatten().long()
        first = int(numbers[0]) if size is None else int(numbers[0]) % size
        consecutive = (numbers == torch.arange(count) + numbers[0]).all()
        beyond = first < 0 < first + count or (size is not None and first + count > size)
        return (first, first + count or _END) if consecutive and not beyond else None
    node = index.node()
    if node.kind() == "onnx::Reshape":
        shape = _constant(list(node.inputs())[1])
        if shape is None or shape.tolist() != [-1] + [1] * behind:
            return None
        node = next(node.inputs()).node()
    elif behind:
        return None
    start, end = 0, _END
    if node.kind() == "onnx::Slice":
        data, *rest = node.inputs()
        given = [_constant(value) for value in rest]
        if len(given) != 4 or any(number is None or number.numel() != 1 for number in given):
            return None
        start, end, _, step = (int(number) for number in given if number is not None)
        if step != 1:
            return None
        node = data.node()
    if not _whole(self, axis, node):
        return None
    if size is not None:
        places = range(size)[start:end]
        return (places.start, places.stop) if places else None
    whole = (start, end) == (0, _END)
    certain = 0 <= start < end or (start < 0 and start < (0 if end == _END else end) <= 0)
    return (start, end) if whole or certain else None


def _whole(self: _Value, axis: int, node: torch._C.Node) -> bool:
    """Whether it counts the places of a dimension of ``self``."""
    if node.kind() != "onnx::Range":
        return False
    start, limit, step = node.inputs()
    if [_number(start), _number(step)] != [0, 1]:
        return False
    number, size = _number(limit), symbolic_helper._get_tensor_dim_size(self, axis)
    if number is not None:
        return number == size
    node = limit.node()
    while node.kind() in ("onnx::Cast", "onnx::Squeeze"):
        node = next(node.inputs()).node()
    if node.kind() != "onnx::Gather":
        return False
    shape, place = node.inputs()
    of = shape.node()
    return of.kind() == "onnx::Shape" and _number(place) == axis and next(of.inputs()).unique() == self.unique()


def _number(value: _Value) -> int | None:
    constant = _constant(value)
    return None if constant is None or constant.numel() != 1 else int(constant)


def _constant(value: _Value) -> Tensor | None:
    """The value of a constant, or of one number that is made of constants and static sizes."""
    node = value.node()
    if node.kind() == "onnx::Constant":
        return torch.as_tensor(symbolic_helper._node_get(node, "value"))
    if node.kind() == "onnx::Gather":
        shape, place = node.inputs()
        axis = _number(place) if shape.node().kind() == "onnx::Shape" else None
        size = None if axis is None else symbolic_helper._get_tensor_dim_size(next(shape.node().inputs()), axis)
        return None if size is None else torch.tensor(size)
    if node.kind() in ("onnx::Unsqueeze", "onnx::Squeeze", "onnx::Cast"):
        inner = _constant(next(node.inputs()))
        return None if inner is None or inner.numel() != 1 else inner.reshape(1)
    if node.kind() in _ARITHMETIC:
        parts = [_number(part) for part in node.inputs()]
        return None if None in parts else torch.tensor(_ARITHMETIC[node.kind()](*parts))
    return None


_ARITHMETIC = {"onnx::Add": operator.add, "onnx::Mul": operator.mul, "onnx::Sub": operator.sub}
