"""Corrections of the TorchScript exporter's conversions that differ from torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from svexport.errors import ExportError
from svexport.exporter.conversions import CONVERSIONS, ELEMENTWISE, WHOLE
from svexport.exporter.jit_graph import GraphWriter, constant_of, read
from svexport.symbolic._symbolic import TensorInfo
from svexport.tracing.quantizers import full_range

__all__ = ["CORRECTIONS"]

_Value = torch._C.Value
_Own = Callable[..., Any]

# ------------------------------------------------------------------ the conversions of both exporters

_COMPOSITES: dict[str, Callable[..., Any]] = {
    "aten::argsort": lambda write, x, *dim: CONVERSIONS["aten::sort"](write, x, *dim)[1],
    "aten::argsort.stable": lambda write, x, **given: CONVERSIONS["aten::sort.stable"](write, x, **given)[1],
    "aten::max.other": CONVERSIONS["aten::maximum"],
    "aten::min.other": CONVERSIONS["aten::minimum"],
}
"""Conversions of functions that torch.export decomposes into others of ``CONVERSIONS``, and TorchScript does not."""

_ALL = CONVERSIONS | _COMPOSITES
_IN_ONE_TYPE = ELEMENTWISE | {"aten::max.other", "aten::min.other"}


def _converted(g: Any, own: _Own, *values: _Value) -> Any:
    """Picks the conversion by the number of arguments: the exporter has turned numbers into tensors, so types do not
    tell overloads apart. Values of unknown dtype go to the exporter's own conversion."""
    node, write = g.original_node, GraphWriter(g)
    kind = write.dtype(next(node.outputs()))
    known = (s for s in torch._C._jit_get_schemas_for_operator(node.kind()) if len(s.arguments) == len(values))
    named = ((s, ".".join(filter(None, (s.name, s.overload_name)))) for s in known)
    schema, name = next((one for one in named if one[1] in _ALL), (None, ""))
    if schema is None or kind is None or write.dtype(values[0]) is None:
        return own(g, *values)
    args: dict[str, Any] = {}
    kwargs: dict[str, Any] = {}
    for argument, value in zip(schema.arguments, values, strict=True):
        given = None if argument.name == "dtype" else read(value, "constant")  # dtype is the result's
        is_list = isinstance(given, list) and "Tensor" in str(argument.type)
        if isinstance(given, TensorInfo) or is_list or value is values[0]:  # its dtype is needed
            given = value
        if isinstance(given, _Value) and name in _IN_ONE_TYPE:
            given = write.typed(given, kind)
        (kwargs if argument.kwarg_only else args)[argument.name] = given
    return _ALL[name](write, *args.values(), **kwargs)


# ------------------------------------------------------------------ arithmetic


def _promoted(g: Any, own: _Own, *values: _Value) -> Any:
    """Casts integers and booleans to the result's floating-point dtype. The exporter's own leaves them, or computes in
    float64 with them and numbers (``arange(4) + 0.5``), and with what follows."""
    write = GraphWriter(g)
    kind = write.dtype(g.original_node.output())
    if kind is not None and kind.is_floating_point:
        values = (*(write.typed(v, kind if write.dtype(v) in WHOLE else None) for v in values[:2]), *values[2:])
    return own(g, *values)


def _unary(op_type: str) -> Callable[..., Any]:
    """A function that ONNX has and the exporter lacks."""
    return lambda g, own, self: _promoted(g, lambda g, self: g.op(op_type, self), self)


def _softplus(g: Any, own: _Own, self: _Value, beta: _Value, threshold: _Value) -> Any:
    """``softplus`` with its threshold, which the exporter's own ignores."""
    write = GraphWriter(g)
    kind, result = write.dtype(self), own(g, self, beta, threshold)
    if constant_of(threshold) >= 12 or kind is None:  # from there both give the same number
        return result
    factor, limit = (write.constant(torch.tensor(constant_of(v), dtype=kind)) for v in (beta, threshold))
    return write("Where", write("Greater", write("Mul", self, factor), limit), self, result)


def _rounded(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """Rounding leaves integers as they are."""
    kind = GraphWriter(g).dtype(self)
    return own(g, self, *rest) if kind is None or kind.is_floating_point else g.op("Identity", self)


def _cumsum(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """``cumsum``. ONNX's CumSum takes no booleans."""
    write = GraphWriter(g)
    return own(g, write.typed(self, torch.int64 if write.dtype(self) == torch.bool else None), *rest)


# ------------------------------------------------------------------ layers and sets


def _of_batches(rank: int) -> Callable[..., Any]:
    """Also takes one image without a batch, (C, H, W), whose axes the exporter's own misreads."""

    def convert(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
        if _rank(self) != rank - 1:
            return own(g, self, *rest)
        results = own(g, symbolic_helper._unsqueeze_helper(g, self, [0]), *rest)
        if isinstance(results, _Value):
            return symbolic_helper._squeeze_helper(g, results, [0])
        return tuple(symbolic_helper._squeeze_helper(g, result, [0]) for result in results)

    return convert


def _fake_quantize(g: Any, own: _Own, self: _Value, scale: _Value, zero_point: _Value, *rest: _Value) -> Any:
    """Fake quantization to any range. The exporter's own needs a full range, or adds a Clip that TensorRT lacks."""
    *axis, low, high = map(constant_of, rest)
    full = full_range(low, high)
    if full is None or full == (low, high):
        return own(g, self, scale, zero_point, *rest)
    write = GraphWriter(g)
    step, zero = (write.typed(value, torch.float32) for value in (scale, zero_point))
    if axis:
        shape = write.constant(torch.tensor([-1 if dim == axis[0] else 1 for dim in range(_rank(self) or 1)]))
        step, zero = (write("Reshape", value, shape) for value in (step, zero))
    for bound, beyond, limit in zip((low, high), ("Max", "Min"), full, strict=True):
        if bound != limit:
            steps = write("Sub", write.constant(torch.tensor(float(bound))), zero)
            self = write(beyond, self, write("Mul", steps, step))
    return own(g, self, scale, zero_point, *rest[:-2], *(write.constant(torch.tensor(limit)) for limit in full))


def _unique_along(g: Any, own: _Own, self: _Value, dim: _Value, sorted: _Value, *rest: _Value) -> Any:
    """``unique`` along a dimension, always sorted, as torch's is."""
    return own(g, self, dim, g.op("Constant", value_t=torch.tensor(True)), *rest)


def _unique(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
    """``unique`` of the whole tensor. The exporter's own returns the inverse indices flat; torch's have its shape."""
    values, places, *counts = own(g, self, *rest)
    return (values, g.op("Reshape", places, g.op("Shape", self)), *counts)


def _one_hot(g: Any, own: _Own, self: _Value, num_classes: _Value) -> Any:
    """``one_hot``. The exporter's own writes a depth of -1 if the number of classes depends on values."""
    if constant_of(num_classes) == -1:
        raise ExportError(
            "torch.nn.functional.one_hot without num_classes counts the classes in its input, so the size of its "
            "output depends on values; write one_hot(x, num_classes=...)"
        )
    return own(g, self, num_classes)


# ------------------------------------------------------------------ shapes and indices

_rank = symbolic_helper._get_tensor_rank


def _listed(values: _Value) -> list[_Value]:
    return symbolic_helper._unpack_list(values) if symbolic_helper._is_packed_list(values) else [values]


def _repeat_interleave(g: Any, own: _Own, self: _Value, repeats: _Value, dim: _Value, output_size: _Value) -> Any:
    """Replaces a negative dimension: the exporter's own would change it in a constant that other nodes share."""
    if not symbolic_helper._is_none(dim) and (rank := _rank(self)):
        dim = g.op("Constant", value_t=torch.tensor(constant_of(dim) % rank))
    return own(g, self, repeats, dim, output_size)


def _permute(g: Any, own: _Own, self: _Value, dims: _Value) -> Any:
    """``permute`` with dimensions counted from the front: the exporter's own writes negative ones, invalid in ONNX."""
    axes = constant_of(dims)
    order = [axis % len(axes) for axis in axes]
    return self if order == sorted(order) else g.op("Transpose", self, perm_i=order)


def _index(g: Any, own: _Own, self: _Value, indices: _Value) -> Any:
    """Counts several indices from the front: the exporter's own joins them, wrongly if any is negative."""
    values = _listed(indices)
    if sum(not symbolic_helper._is_none(value) for value in values) > 1:
        counted = [_from_the_front(g, self, axis, value) for axis, value in enumerate(values)]
        indices = g.op("prim::ListConstruct", *counted)
    return own(g, self, indices)


def _from_the_front(g: Any, self: _Value, axis: int, index: _Value) -> _Value:
    write = GraphWriter(g)
    if symbolic_helper._is_none(index) or write.dtype(index) in (torch.bool, torch.uint8):
        return index
    length = write("Gather", write("Shape", self), write.constant(torch.tensor(axis)))
    index = write.typed(index, torch.int64)
    negative = write("Less", index, write.constant(torch.tensor(0)))
    return write("Where", negative, write("Add", index, length), index)


def _index_put(g: Any, own: _Own, self: _Value, indices: _Value, values: _Value, accumulate: _Value) -> Any:
    """``index_put``. The exporter keeps an axis of size 1 for each that an integer removes (``x[i, 0].fill_(y)``)."""
    given = _listed(indices)
    if not given:  # traced from ``x.copy_(values)``
        return _copy(g, own, self, values, accumulate)
    ranks = [r for r in map(_rank, (self, values, *given)) if r is not None]
    if len(ranks) == len(given) + 2:
        whole, count, *each = ranks
        rank = max(each)
        single = [rank - r for r, value in zip(each, given, strict=True) if r and _is_one_number(value)]
        if single and count == rank + whole - len(given) - len(single):
            inner = _unexpanded(values)
            values = inner if _rank(inner) == count else values
            values = symbolic_helper._unsqueeze_helper(g, values, sorted(single))
        elif not single:
            values = _unexpanded(values)
    return own(g, self, indices, values, accumulate)


def _unexpanded(values: _Value) -> _Value:
    """Strips Expands to the size of a slice: they hold the trace's numbers, and are added again where needed."""
    while values.node().kind() == "onnx::Expand":
        values = next(values.node().inputs())
    return values


def _is_one_number(value: _Value) -> bool:
    return (number := constant_of(value)) is not None and torch.as_tensor(number).numel() == 1


def _repeat(g: Any, own: _Own, self: _Value, repeats: _Value) -> Any:
    """``repeat``. The exporter's own loses static sizes if another axis has a dynamic number of repeats."""
    result, rank = own(g, self, repeats), _rank(self)
    if rank is None or not symbolic_helper._is_packed_list(repeats):
        return result
    times = list(map(constant_of, _listed(repeats)))
    sizes = [1] * (len(times) - rank) + [symbolic_helper._get_tensor_dim_size(self, axis) for axis in range(rank)]
    known = [n * s if isinstance(n, int) and s is not None else None for n, s in zip(times, sizes, strict=True)]
    result.setType(self.type().with_sizes(known))
    return result


def _expand(g: Any, own: _Own, self: _Value, size: _Value, implicit: _Value) -> Any:
    """``expand``. The exporter's own finds sizes of -1 with six nodes in the file, after which no shape is known."""
    if (known := constant_of(size)) is not None:
        return g.op("Expand", self, g.op("Constant", value_t=torch.tensor(known, dtype=torch.int64).abs()))
    if not symbolic_helper._is_packed_list(size):
        return own(g, self, size, implicit)
    parts: list[_Value] = []
    for one in _listed(size):
        number = constant_of(one)
        if number is not None:
            parts.append(g.op("Constant", value_t=torch.tensor(number).reshape(1).abs()))  # 1 also keeps the size
        else:
            parts.append(one if _rank(one) == 1 else symbolic_helper._unsqueeze_helper(g, one, [0]))
    return g.op("Expand", self, g.op("Concat", *parts, axis_i=0))


def _copy(g: Any, own: _Own, self: _Value, values: _Value, non_blocking: _Value) -> Any:
    """``x.copy_(values)``, which the exporter lacks."""
    write = GraphWriter(g)
    values = write.typed(values, write.dtype(self))
    sizes = [symbolic_helper._get_tensor_sizes(v) for v in (self, values)]
    if sizes[0] is not None and None not in sizes[0] and sizes[0] == sizes[1]:
        return g.op("Identity", values)
    expanded = g.op("Expand", values, g.op("Shape", self))
    expanded.setType(self.type())
    return expanded


_OF_FLOATS = (
    *("acos", "add", "asin", "atan", "cos", "erf", "exp", "fmod", "log", "log2", "mul", "outer", "reciprocal"),
    *("rsqrt", "rsub", "sigmoid", "sin", "sqrt", "sub", "tan", "tanh"),
)
_POOLS = ("adaptive_avg_pool{}d", "adaptive_max_pool{}d", "avg_pool{}d", "max_pool{}d_with_indices")

CORRECTIONS: dict[str, Callable[..., Any]] = {
    **{name.partition(".")[0]: _converted for name in _ALL},
    **{f"aten::{name}": _promoted for name in _OF_FLOATS},
    **{f"aten::{name}": _rounded for name in ("ceil", "floor", "round")},
    **{f"aten::{name}": _unary(name.capitalize()) for name in ("acosh", "asinh", "atanh", "cosh", "sinh")},
    **{f"aten::{pool.format(axes)}": _of_batches(axes + 2) for axes in (1, 2, 3) for pool in _POOLS},
    **{f"aten::max_pool{axes}d": _of_batches(axes + 2) for axes in (1, 3)},  # max_pool2d is one of our ops
    "aten::_unique2": _unique,
    "aten::copy": _copy,
    "aten::cumsum": _cumsum,
    "aten::expand": _expand,
    **{f"aten::fake_quantize_per_{part}_affine": _fake_quantize for part in ("channel", "tensor")},
    "aten::index": _index,
    "aten::index_put": _index_put,
    "aten::one_hot": _one_hot,
    "aten::permute": _permute,
    **{f"aten::pixel_{name}": _of_batches(4) for name in ("shuffle", "unshuffle")},
    "aten::repeat": _repeat,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::softplus": _softplus,
    "aten::unique_dim": _unique_along,
}
"""By aten function, its conversion, which gets the exporter's own as an argument."""
