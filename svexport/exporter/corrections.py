"""Conversions of the TorchScript exporter that say something else than torch, and ours in their place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.onnx import symbolic_helper

from svexport.exporter.conversions import (
    bounded,
    extreme,
    extreme_along,
    integer_power,
    larger,
    mean_of_some,
    place_of_extreme,
    sorted_along,
)
from svexport.exporter.slices import assigned, unexpanded
from svexport.tracing.quantizers import full_range

__all__ = ["CORRECTIONS"]

_Value = torch._C.Value
_Own = Callable[..., Any]
_kinds = torch.onnx.JitScalarType


def _floor_divide(g: Any, own: _Own, self: _Value, other: _Value) -> Any:
    """The exporter's own rounds towards zero."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.INT64)
    floating = kind.dtype().is_floating_point
    exact = kind if floating else _kinds.INT64
    x, y = (v if _kinds.from_value(v) == exact else g.op("Cast", v, to_i=exact.onnx_type()) for v in (self, other))
    result = g.op("Div", x, y)
    if floating:
        return g.op("Floor", result)
    if not (_not_negative(self) and _not_negative(other)):  # one less where the rest and the divisor differ in sign
        rest = g.op("Sub", x, g.op("Mul", result, y))
        less = g.op("Less", g.op("Mul", rest, y), g.op("Constant", value_t=torch.tensor(0)))
        result = g.op("Sub", result, g.op("Cast", less, to_i=exact.onnx_type()))
    return result if kind == exact else g.op("Cast", result, to_i=kind.onnx_type())


def _clamp(g: Any, own: _Own, self: _Value, low: _Value, high: _Value) -> Any:
    return _bounded(g, self, low, high) or own(g, self, low, high)


def _clamp_min(g: Any, own: _Own, self: _Value, low: _Value) -> Any:
    return _bounded(g, self, low, None) or own(g, self, low)


def _clamp_max(g: Any, own: _Own, self: _Value, high: _Value) -> Any:
    return _bounded(g, self, None, high) or own(g, self, high)


def _bounded(g: Any, self: _Value, low: _Value | None, high: _Value | None) -> Any:
    """Before opset 12 Clip is for floating-point numbers, which the exporter sees to for static shapes alone, and after
    it wrong of large integers; with one bound it makes infinities finite.

    Never does it make floating-point numbers of integers, as such bounds do. None where its own is right.
    """
    mine, kind = (_kinds.from_value(v, _kinds.UNDEFINED) for v in (self, g.original_node.output()))
    if _kinds.UNDEFINED in (mine, kind):
        return None
    bounds = [None if b is None or symbolic_helper._is_none(b) else b for b in (low, high)]
    numbers = all(b is not None and b.node().kind() == "onnx::Constant" for b in bounds)
    if numbers and mine == kind and mine.dtype().is_floating_point:
        return None
    x, low, high = (
        v if v is None or (v is self and mine == kind) else g.op("Cast", v, to_i=kind.onnx_type())
        for v in (self, *bounds)
    )
    return bounded(TorchScriptWriter(g), x, low, high)


def _repeat_interleave(g: Any, own: _Own, self: _Value, repeats: _Value, dim: _Value, output_size: _Value) -> Any:
    """The exporter's own counts a negative dimension from the front in place, in a constant that other nodes share."""
    if not symbolic_helper._is_none(dim):
        dim = _dims_from_the_front(g, dim, symbolic_helper._get_tensor_rank(self))
    return own(g, self, repeats, dim, output_size)


def _cat(g: Any, own: _Own, tensors: _Value, dim: _Value) -> Any:
    """The exporter's own, and those below, write Concat with a negative axis, which it has from opset 11 on."""
    return own(g, tensors, _concat_axis(g, dim, tensors))


def _stack(g: Any, own: _Own, tensors: _Value, dim: _Value) -> Any:
    """As of ``cat``."""
    return own(g, tensors, _concat_axis(g, dim, tensors, more=1))


def _roll(g: Any, own: _Own, self: _Value, shifts: _Value, dims: _Value) -> Any:
    """As of ``cat``."""
    return own(g, self, shifts, _concat_axis(g, dims, self))


def _cross(g: Any, own: _Own, self: _Value, other: _Value, dim: _Value) -> Any:
    """As of ``cat``: made of rolled factors."""
    return own(g, self, other, dim if symbolic_helper._is_none(dim) else _concat_axis(g, dim, self))


def _concat_axis(g: Any, dims: _Value, tensors: _Value, more: int = 0) -> _Value:
    """Dimensions of a tensor or of those in a list, or of one with ``more`` of them, as Concat takes them."""
    packed = symbolic_helper._is_packed_list(tensors)
    values = symbolic_helper._unpack_list(tensors) if packed else [tensors]
    ranks = [rank for rank in map(symbolic_helper._get_tensor_rank, values) if rank is not None]
    return _dims_from_the_front(g, dims, max(ranks) + more) if ranks and g.opset < 11 else dims


def _dims_from_the_front(g: Any, dims: _Value, rank: int | None) -> _Value:
    if not rank:
        return dims
    numbers = [d % rank for d in _numbers(dims)]
    scalar = symbolic_helper._get_tensor_rank(dims) in (None, 0)
    return g.op("Constant", value_t=torch.tensor(numbers[0] if scalar else numbers))


def _permute(g: Any, own: _Own, self: _Value, dims: _Value) -> Any:
    """The exporter's own writes negative dimensions, which ONNX does not have."""
    return _transpose(g, self, symbolic_helper._parse_arg(dims, "is"))


def _movedim(g: Any, own: _Own, self: _Value, source: _Value, destination: _Value) -> Any:
    """As of ``permute``."""
    rank = symbolic_helper._get_tensor_rank(self)
    if rank is None:
        return symbolic_helper._unimplemented("aten::movedim", "dimensions of a tensor of unknown rank", self)
    sources, places = ([d % rank for d in _numbers(value)] for value in (source, destination))
    order = [axis for axis in range(rank) if axis not in sources]
    for place, axis in sorted(zip(places, sources, strict=True)):
        order.insert(place, axis)
    return _transpose(g, self, order)


def _transpose(g: Any, self: _Value, dims: Sequence[int]) -> Any:
    order = [d % len(dims) for d in dims]
    return self if order == sorted(order) else g.op("Transpose", self, perm_i=order)


def _index(g: Any, own: _Own, self: _Value, indices: _Value) -> Any:
    """The exporter's own makes one index of several, and a wrong one where any of them is negative."""
    values = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    if sum(not symbolic_helper._is_none(value) for value in values) > 1:
        counted = [_from_the_front(g, self, axis, value) for axis, value in enumerate(values)]
        indices = g.op("prim::ListConstruct", *counted)
    return own(g, self, indices)


def _index_put(g: Any, own: _Own, self: _Value, indices: _Value, values: _Value, accumulate: _Value) -> Any:
    """What is assigned to a slice is put together of parts; the rest is scattered.

    The exporter keeps a dimension of size 1 for each that a number has taken away (``x[i, 0] = y``), and reshapes.
    """
    put = None if symbolic_helper._parse_arg(accumulate, "b") else assigned(g, self, indices, values)
    if put is not None:
        return put
    given = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    if len(given) > 1:
        given = [_places(g, value) for value in given]
        indices = g.op("prim::ListConstruct", *given)
    ranks = [r for r in map(symbolic_helper._get_tensor_rank, (self, values, *given)) if r is not None]
    if len(ranks) == len(given) + 2:
        whole, count, *each = ranks
        rank = max(each)
        single = [rank - r for r, value in zip(each, given, strict=True) if r and _numbers_of(value) == 1]
        if single and count == rank + whole - len(given) - len(single):
            inner = unexpanded(values)
            if inner is not values and symbolic_helper._get_tensor_rank(inner) == count:
                values = inner
            values = symbolic_helper._unsqueeze_helper(g, values, sorted(single))
        elif not single:
            values = unexpanded(values)
    return own(g, self, indices, values, accumulate)


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


def _cumsum(g: Any, own: _Own, self: _Value, dim: _Value, dtype: _Value) -> Any:
    """CumSum is for half precision from opset 14 on, and never for booleans."""
    kind = _kinds.from_value(self, _kinds.UNDEFINED)
    if kind == _kinds.BOOL:
        self = g.op("Cast", self, to_i=_kinds.INT64.onnx_type())
    if g.opset >= 14 or kind not in (_kinds.HALF, _kinds.BFLOAT16) or not symbolic_helper._is_none(dtype):
        return own(g, self, dim, dtype)
    result = own(g, g.op("Cast", self, to_i=_kinds.FLOAT.onnx_type()), dim, dtype)
    return g.op("Cast", result, to_i=kind.onnx_type())


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
        if kind in (_kinds.BOOL, _kinds.UNDEFINED) or g.opset < 11:
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
        if _kinds.from_value(self, _kinds.UNDEFINED) in (_kinds.BOOL, _kinds.UNDEFINED) or g.opset < 11:
            return _of_masks(g, own, self, dim, keepdim)
        axes, keep = symbolic_helper._parse_arg(dim, "is"), symbolic_helper._parse_arg(keepdim, "i")
        return extreme(TorchScriptWriter(g), f"Reduce{name}", self, axes or None, bool(keep))

    return convert


def _place_of(name: str) -> Callable[..., Any]:
    """``argmax`` or ``argmin``: as of ``max``."""

    def convert(g: Any, own: _Own, self: _Value, dim: _Value, keepdim: _Value) -> Any:
        kind = _kinds.from_value(self, _kinds.UNDEFINED)
        if not _is_floating(kind) or symbolic_helper._is_none(dim):
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
        if kind == _kinds.UNDEFINED or _is_floating(kind):
            return _arithmetic(g, own, self, other)
        values = (
            v if _kinds.from_value(v, _kinds.UNDEFINED) == kind else g.op("Cast", v, to_i=kind.onnx_type())
            for v in (self, other)
        )
        return larger(TorchScriptWriter(g), name, *values)

    return convert


def _of_batches(rank: int) -> Callable[..., Any]:
    """For one image without a batch (C, H, W) as well, which the exporter's own takes for channels of something."""

    def convert(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
        if symbolic_helper._get_tensor_rank(self) != rank - 1:
            return own(g, self, *rest)
        results = own(g, symbolic_helper._unsqueeze_helper(g, self, [0]), *rest)
        if isinstance(results, _Value):
            return symbolic_helper._squeeze_helper(g, results, [0])
        return tuple(symbolic_helper._squeeze_helper(g, result, [0]) for result in results)

    return convert


def _average(axes: int) -> Callable[..., Any]:
    """The exporter's own forgets the divisor."""
    batches = _of_batches(axes + 2)

    def convert(g: Any, own: _Own, self: _Value, size: _Value, *rest: _Value) -> Any:
        *others, ceil, _, divisor = rest
        if symbolic_helper._is_none(divisor):
            return batches(g, own, self, size, *rest)
        if symbolic_helper._parse_arg(ceil, "i"):
            return symbolic_helper._unimplemented(f"avg_pool{axes}d", "ceil_mode with divisor_override", self)
        sizes = symbolic_helper._parse_arg(size, "is")
        count = math.prod(sizes * (axes if len(sizes) == 1 else 1))
        padded, none = g.op("Constant", value_t=torch.tensor(1)), g.op("prim::Constant")
        none.setType(torch._C.NoneType.get())
        result = batches(g, own, self, size, *others, ceil, padded, none)
        factor = count / symbolic_helper._parse_arg(divisor, "i")
        return g.op("Mul", result, _scalar(g, factor, _kinds.from_value(self, _kinds.FLOAT)))

    return convert


def _from_the_front(g: Any, self: _Value, axis: int, index: _Value) -> _Value:
    masks = (_kinds.BOOL, _kinds.UINT8)
    if symbolic_helper._is_none(index) or _kinds.from_value(index) in masks or _not_negative(index):
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
    sizes: list[int | None] = []
    for one in symbolic_helper._unpack_list(size):
        number = symbolic_helper._maybe_get_const(one, "t")
        if isinstance(number, torch.Tensor):
            parts.append(g.op("Constant", value_t=number.reshape(1).abs()))  # 1 leaves a size as it is, too
            sizes.append(int(number))
        else:
            rank = symbolic_helper._get_tensor_rank(one)
            parts.append(one if rank == 1 else symbolic_helper._unsqueeze_helper(g, one, [0]))
            sizes.append(None)
    if not parts:
        return g.op("Identity", self)
    expanded = g.op("Expand", self, g.op("Concat", *parts, axis_i=0))
    own_sizes = symbolic_helper._get_tensor_sizes(self)
    if own_sizes is not None:  # inference finds out from opset 13 on only
        kept = [None] * (len(sizes) - len(own_sizes)) + list(own_sizes)
        expanded.setType(self.type().with_sizes([k if n == -1 else n for n, k in zip(sizes, kept, strict=True)]))
    return expanded


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
    if g.opset < 11 or rank is None or isinstance(axis, _Value) or isinstance(largest, _Value):
        return None
    place = g.op("Constant", value_t=torch.tensor([axis % max(rank, 1)]))
    size = g.op("Gather", g.op("Shape", self), place) if rank else None
    return sorted_along(TorchScriptWriter(g), self, size, axis, bool(largest))


def _topk(g: Any, own: _Own, self: _Value, k: _Value, dim: _Value, largest: _Value, sorted: _Value) -> Any:
    """As of ``max``."""
    if g.opset < 11:
        return own(g, self, k, dim, largest, sorted)
    number = symbolic_helper._maybe_get_const(k, "i")
    if isinstance(number, _Value):
        count = symbolic_helper._reshape_helper(g, number, g.op("Constant", value_t=torch.tensor([1])))
        if _kinds.from_value(count, _kinds.UNDEFINED) != _kinds.INT64:
            count = g.op("Cast", count, to_i=_kinds.INT64.onnx_type())
    else:
        count = g.op("Constant", value_t=torch.tensor([number]))
    axis, most = (symbolic_helper._parse_arg(v, "i") for v in (dim, largest))
    return sorted_along(TorchScriptWriter(g), self, count, axis, bool(most))


def _arithmetic(g: Any, own: _Own, self: _Value, other: _Value, *rest: _Value) -> Any:
    """The exporter's own makes doubles of constant integers and numbers (``arange(4) + 0.5``), and of the rest."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
    if _is_floating(kind):
        self, other = (_floating(g, value, kind) for value in (self, other))
    return own(g, self, other, *rest)


def _floating(g: Any, value: _Value, kind: Any) -> Any:
    """What is of integers or booleans, as ``kind``."""
    mine = _kinds.from_value(value, _kinds.UNDEFINED)
    if mine == _kinds.UNDEFINED or _is_floating(mine) or mine.dtype().is_complex:
        return value
    return g.op("Cast", value, to_i=kind.onnx_type())


def _linspace(g: Any, own: _Own, start: _Value, end: _Value, steps: _Value, *rest: _Value) -> Any:
    """The exporter's own computes with doubles, and one step of a dynamic number of them is NaN."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.FLOAT)
    numbers = [symbolic_helper._maybe_get_const(value, "f") for value in (start, end, steps)]
    if not any(isinstance(number, _Value) for number in numbers):
        ends = numbers[0], numbers[1], int(numbers[2])
        return g.op("Constant", value_t=torch.linspace(*ends, dtype=kind.dtype()))
    first, last, count = (
        g.op("Cast", value, to_i=type_.onnx_type())
        for value, type_ in ((start, kind), (end, kind), (steps, _kinds.INT64))
    )
    one = g.op("Constant", value_t=torch.tensor(1))
    single = g.op("Cast", g.op("Equal", count, one), to_i=_kinds.INT64.onnx_type())
    gaps = g.op("Cast", g.op("Add", g.op("Sub", count, one), single), to_i=kind.onnx_type())
    places = g.op("Cast", symbolic_helper._arange_helper(g, count, None), to_i=kind.onnx_type())
    return g.op("Add", first, g.op("Mul", places, g.op("Div", g.op("Sub", last, first), gaps)))


def _convolution(g: Any, own: _Own, self: _Value, weight: _Value, bias: _Value, *rest: _Value) -> Any:
    """The exporter's own writes the kernel's size, which a kernel of a dynamic one has in itself."""
    sizes = symbolic_helper._get_tensor_sizes(weight)
    if sizes is not None and None not in sizes[2:]:
        return own(g, self, weight, bias, *rest)
    stride, padding, dilation, transposed, output_padding, groups = (_numbers(value) for value in rest[:6])
    inputs = [self, weight] if symbolic_helper._is_none(bias) else [self, weight, bias]
    numbers = {"strides_i": stride, "pads_i": padding * 2, "dilations_i": dilation, "group_i": groups[0]}
    if any(output_padding):
        numbers["output_padding_i"] = output_padding
    result = g.op("ConvTranspose" if transposed[0] else "Conv", *inputs, **numbers)
    if rank := symbolic_helper._get_tensor_rank(self):
        result.setType(self.type().with_sizes([None] * rank))
    return result


def _fake_quantize(g: Any, own: _Own, self: _Value, scale: _Value, zero_point: _Value, *rest: _Value) -> Any:
    """The exporter's own knows no other ranges than those of types, or adds a Clip of uint8, which TensorRT lacks; and
    before opset 13 no scale that is a parameter."""
    *axis, low, high = (int(symbolic_helper._maybe_get_const(value, "i")) for value in rest)
    full = full_range(low, high)
    if full is None or g.opset < (13 if axis else 10):
        return own(g, self, scale, zero_point, *rest)
    scale = g.op("Cast", scale, to_i=_kinds.FLOAT.onnx_type())
    if full != (low, high):
        limits = scale, g.op("Cast", zero_point, to_i=_kinds.FLOAT.onnx_type())
        if axis:
            shape = [1] * (symbolic_helper._get_tensor_rank(self) or 1)
            shape[axis[0]] = -1
            limits = tuple(g.op("Reshape", v, g.op("Constant", value_t=torch.tensor(shape))) for v in limits)
        for bound, beyond, limit in zip((low, high), ("Max", "Min"), full, strict=True):
            if bound != limit:
                steps = g.op("Sub", g.op("Constant", value_t=torch.tensor(float(bound))), limits[1])
                self = g.op(beyond, self, g.op("Mul", steps, limits[0]))
    kind = _kinds.INT8 if full[0] else _kinds.UINT8
    given = scale, g.op("Cast", zero_point, to_i=kind.onnx_type())
    along = {"axis_i": axis[0]} if axis else {}
    return g.op("DequantizeLinear", g.op("QuantizeLinear", self, *given, **along), *given, **along)


def _any(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """The exporter's own asks whether the sum is positive; ``all`` is made of it."""
    if _kinds.from_value(self, _kinds.UNDEFINED) != _kinds.BOOL:
        self = g.op("Cast", self, to_i=_kinds.BOOL.onnx_type())
    return own(g, self, *rest)


def _copy(g: Any, own: _Own, self: _Value, values: _Value, non_blocking: _Value) -> Any:
    """What ``x.copy_(values)`` becomes, which the exporter lacks."""
    kind = _kinds.from_value(self, _kinds.UNDEFINED)
    if kind not in (_kinds.UNDEFINED, _kinds.from_value(values, _kinds.UNDEFINED)):
        values = g.op("Cast", values, to_i=kind.onnx_type())
    sizes = [symbolic_helper._get_tensor_sizes(v) for v in (self, values)]
    if sizes[0] is not None and None not in sizes[0] and sizes[0] == sizes[1]:
        return g.op("Identity", values)
    return g.op("Expand", values, g.op("Shape", self))


def _power(g: Any, own: _Own, self: _Value, exponent: _Value) -> Any:
    """Of integers by products."""
    kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
    if kind == _kinds.UNDEFINED or _is_floating(kind) or kind.dtype().is_complex:
        return own(g, self, exponent)
    base, times = map(_number, (self, exponent))
    if isinstance(base, int) and isinstance(times, int):
        base = self
    return integer_power(TorchScriptWriter(g), base, times, kind.dtype())


def _number(value: _Value) -> Any:
    """A constant of one integer as such."""
    constant = symbolic_helper._maybe_get_const(value, "t")
    single = isinstance(constant, torch.Tensor) and not constant.dim() and not constant.dtype.is_floating_point
    return int(constant) if single and int(constant) >= 0 else value


def _unique_along(g: Any, own: _Own, self: _Value, dim: _Value, sorted: _Value, *rest: _Value) -> Any:
    """Sorted, as torch's always is along a dimension."""
    return own(g, self, dim, g.op("Constant", value_t=torch.tensor(True)), *rest)


def _unique(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Of the whole tensor, the places have its shape, which the exporter's own forgets."""
    values, places, *counts = own(g, self, *rest)
    return (values, g.op("Reshape", places, g.op("Shape", self)), *counts)


def _softplus(g: Any, own: _Own, self: _Value, beta: _Value, threshold: _Value) -> Any:
    """The exporter's own forgets the threshold."""
    result = own(g, self, beta, threshold)
    factor, limit = (symbolic_helper._maybe_get_const(v, "f") for v in (beta, threshold))
    kind = _kinds.from_value(self, _kinds.UNDEFINED)
    if limit >= 12 or not _is_floating(kind):  # from there on both are the same number
        return result
    scaled = g.op("Mul", self, _scalar(g, factor, kind))
    return g.op("Where", g.op("Greater", scaled, _scalar(g, limit, kind)), self, result)


def _promoted(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Of integers and booleans as floating-point numbers, which the exporter's own leaves as they are."""
    return own(g, _floating(g, self, _kinds.from_value(g.original_node.output(), _kinds.FLOAT)), *rest)


def _rounded(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Integers are round."""
    kind = _kinds.from_value(self, _kinds.FLOAT)
    return own(g, self, *rest) if _is_floating(kind) else g.op("Identity", self)


def _unary(op_type: str) -> Callable[..., Any]:
    """A function that ONNX has, and the exporter lacks."""

    def convert(g: Any, own: _Own, self: _Value) -> Any:
        kind = _kinds.from_value(g.original_node.output(), _kinds.FLOAT)
        return g.op(op_type, _floating(g, self, kind))

    return convert


def _compared(op_type: str) -> Callable[..., Any]:
    """``ge`` or ``le``: before opset 12 the exporter's own is that it is not the opposite, which is so of NaN."""

    def convert(g: Any, own: _Own, self: _Value, other: _Value) -> Any:
        alike = _alike(g, self, other) if g.opset < 12 else None
        return own(g, self, other) if alike is None else g.op("Or", g.op(op_type, *alike), _equal(g, *alike))

    return convert


def _equality(differs: bool) -> Callable[..., Any]:
    """``eq`` or ``ne``: before opset 11 there is no Equal of floating-point numbers."""

    def convert(g: Any, own: _Own, self: _Value, other: _Value) -> Any:
        alike = _alike(g, self, other) if g.opset < 11 else None
        if alike is None:
            return own(g, self, other)
        return g.op("Not", _equal(g, *alike)) if differs else _equal(g, *alike)

    return convert


def _alike(g: Any, self: _Value, other: _Value) -> list[_Value] | None:
    """Two floating-point tensors of one type; None where they are no such tensors, or of two such types."""
    kinds = {_kinds.from_value(v, _kinds.UNDEFINED) for v in (self, other)}
    floating = [kind for kind in kinds if _is_floating(kind)]
    return [_floating(g, value, floating[0]) for value in (self, other)] if len(floating) == 1 else None


def _equal(g: Any, self: _Value, other: _Value) -> _Value:
    if g.opset >= 11:
        return g.op("Equal", self, other)
    # Of NaN neither is true.
    differs = g.op("Or", g.op("Less", self, other), g.op("Greater", self, other))
    return g.op("Not", g.op("Or", differs, g.op("Or", g.op("IsNaN", self), g.op("IsNaN", other))))


def _mean(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """NaN of what a mask has chosen where that is nothing."""
    result = own(g, self, *rest)
    sizes = symbolic_helper._get_tensor_sizes(self)
    masks = any(node.kind() == "onnx::NonZero" for node in g.block.nodes())
    kind = _kinds.from_value(g.original_node.output(), _kinds.UNDEFINED)
    if not _is_floating(kind) or not (sizes is None or 0 in sizes or (None in sizes and masks)):
        return result
    axes = (
        symbolic_helper._parse_arg(rest[0], "is") if len(rest) > 1 and not symbolic_helper._is_none(rest[0]) else None
    )
    return mean_of_some(TorchScriptWriter(g), result, self, axes)


def _integers_within(*numbers: float | None) -> Callable[..., Any]:
    """Of integers by comparisons, as of ``clamp``, between these numbers or those that are given."""

    def convert(g: Any, own: _Own, self: _Value, *given: _Value) -> Any:
        kind = _kinds.from_value(self, _kinds.UNDEFINED)
        if kind == _kinds.UNDEFINED or _is_floating(kind):
            return own(g, self, *given)
        bounds = numbers or [symbolic_helper._parse_arg(value, "f") for value in given]
        low, high = (None if n is None else _scalar(g, n, kind) for n in bounds)
        return bounded(TorchScriptWriter(g), self, low, high)

    return convert


class TorchScriptWriter:
    """Writes nodes of a graph that the TorchScript exporter makes: :class:`svexport.exporter.conversions.Writer`."""

    def __init__(self, g: Any) -> None:
        self._g = g
        self.opset: int = g.opset

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        typed = {f"{name}_{'f' if isinstance(value, float) else 'i'}": value for name, value in attributes.items()}
        return self._g.op(op_type, *inputs, outputs=outputs, **typed)

    def constant(self, tensor: torch.Tensor) -> Any:
        return self._g.op("Constant", value_t=tensor)

    def dtype(self, value: Any) -> torch.dtype | None:
        kind = _kinds.from_value(value, _kinds.UNDEFINED)
        return None if kind == _kinds.UNDEFINED else kind.dtype()

    def rank(self, value: Any) -> int | None:
        return symbolic_helper._get_tensor_rank(value)

    def reduced(self, op_type: str, x: Any, axes: Sequence[int] | None, keepdims: bool) -> Any:
        if op_type == "ReduceSum" and axes is not None:
            return symbolic_helper._reducesum_helper(self._g, x, axes_i=list(axes), keepdims_i=int(keepdims))
        given = {} if axes is None else {"axes_i": list(axes)}
        return self._g.op(op_type, x, keepdims_i=int(keepdims), **given)

    def squeezed(self, x: Any, axis: int) -> Any:
        return symbolic_helper._squeeze_helper(self._g, x, [axis])

    def unsqueezed(self, x: Any) -> Any:
        rank = self.rank(x)
        return symbolic_helper._unsqueeze_helper(self._g, x, [-1 if rank is None else rank])


def _is_floating(kind: Any) -> bool:
    return kind != _kinds.UNDEFINED and kind.dtype().is_floating_point


def _scalar(g: Any, number: float, kind: Any) -> _Value:
    return g.op("Constant", value_t=torch.tensor(number, dtype=kind.dtype()))


def _numbers(value: _Value) -> list[int]:
    return symbolic_helper._parse_arg(value, "t").reshape(-1).tolist()


def _not_negative(value: _Value) -> bool:
    """Whether a number is surely not negative: a size, a place, a constant, or made of those by what keeps them so."""
    node = value.node()
    if node.kind() == "onnx::Constant":
        return bool((torch.as_tensor(symbolic_helper._node_get(node, "value")) >= 0).all())
    if node.kind() in _NOT_NEGATIVE or (node.kind() == "onnx::TopK" and value.offset() == 1):
        return True
    if node.kind() in _OF_THE_FIRST:
        return _not_negative(next(node.inputs()))
    return node.kind() in _OF_ALL and all(map(_not_negative, node.inputs()))


_NOT_NEGATIVE = {"onnx::ArgMax", "onnx::ArgMin", "onnx::NonZero", "onnx::Shape"}
_OF_THE_FIRST = {
    *("onnx::Cast", "onnx::Expand", "onnx::Flatten", "onnx::Gather", "onnx::Identity", "onnx::Reshape", "onnx::Slice"),
    *("onnx::Squeeze", "onnx::Tile", "onnx::Transpose", "onnx::Unsqueeze"),
}
_OF_ALL = {"onnx::Add", "onnx::Concat", "onnx::Div", "onnx::Mul", "onnx::Range"}

_POOLS = ("adaptive_avg_pool{}d", "adaptive_max_pool{}d", "avg_pool{}d", "max_pool{}d_with_indices")

# Of an aten function: its conversion, which is given the exporter's own.
CORRECTIONS: dict[str, Callable[..., Any]] = {
    **{f"aten::{pool.format(axes)}": _of_batches(axes + 2) for axes in (1, 2, 3) for pool in _POOLS},
    **{f"aten::avg_pool{axes}d": _average(axes) for axes in (2, 3)},
    # But aten::max_pool2d, which is an op of ours.
    **{f"aten::max_pool{axes}d": _of_batches(axes + 2) for axes in (1, 3)},
    "aten::pixel_shuffle": _of_batches(4),
    "aten::pixel_unshuffle": _of_batches(4),
    **{f"aten::{name}": _arithmetic for name in ("add", "fmod", "mul", "outer", "remainder", "rsub", "sub")},
    **{
        f"aten::{form.format(name.lower())}": convert(name)
        for name in ("Max", "Min")
        for form, convert in (("{}", _extreme_of), ("a{}", _extremes_of), ("arg{}", _place_of), ("{}imum", _larger))
    },
    **{
        f"aten::{name}": _promoted
        for name in (
            "acos",
            "asin",
            "atan",
            "cos",
            "erf",
            "exp",
            "log",
            "reciprocal",
            "rsqrt",
            "sigmoid",
            "sin",
            "sqrt",
        )
    },
    **{f"aten::{name}": _promoted for name in ("log1p", "log2", "tan", "tanh")},
    **{f"aten::{name}": _rounded for name in ("ceil", "floor", "round")},
    **{f"aten::{name}": _unary(name.capitalize()) for name in ("acosh", "asinh", "atanh", "cosh", "sinh")},
    "aten::_convolution": _convolution,
    "aten::all": _any,
    "aten::any": _any,
    "aten::argsort": _argsort,
    "aten::cat": _cat,
    "aten::clamp": _clamp,
    "aten::clamp_max": _clamp_max,
    "aten::clamp_min": _clamp_min,
    "aten::copy": _copy,
    "aten::cross": _cross,
    "aten::cumsum": _cumsum,
    "aten::expand": _expand,
    "aten::fake_quantize_per_channel_affine": _fake_quantize,
    "aten::fake_quantize_per_tensor_affine": _fake_quantize,
    "aten::floor_divide": _floor_divide,
    "aten::eq": _equality(differs=False),
    "aten::ge": _compared("Greater"),
    "aten::hardtanh": _integers_within(),
    "aten::index": _index,
    "aten::index_put": _index_put,
    "aten::le": _compared("Less"),
    "aten::ne": _equality(differs=True),
    "aten::linalg_cross": _cross,
    "aten::linspace": _linspace,
    "aten::mean": _mean,
    "aten::movedim": _movedim,
    "aten::permute": _permute,
    "aten::pow": _power,
    "aten::relu": _integers_within(0, None),
    "aten::relu6": _integers_within(0, 6),
    "aten::repeat": _repeat,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::roll": _roll,
    "aten::softplus": _softplus,
    "aten::sort": _sort,
    "aten::stack": _stack,
    "aten::topk": _topk,
    "aten::_unique2": _unique,
    "aten::unique_dim": _unique_along,
}
