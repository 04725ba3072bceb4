"""Integer sums, products, remainders and extremes that ONNX Runtime gets wrong, rewritten with ops that are exact.

ONNX Runtime computes the first three in double, which holds integers up to 2**53. Beyond that it rounds, and saturates
at the ends of int64 where torch wraps modulo 2**64. For extremes it compares only 32 of 64 bits. Nodes whose values
certainly stay below, such as sums of masks and products of sizes, are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svexport.errors import ExportError
from svexport.graph.scope import byte_size, constants_in, drop_unused, is_standard, used_names
from svexport.graph.substitute import rewrite
from svexport.graph.walk import attributes_of, graphs
from svexport.symbolic._builder import Builder, Value

__all__ = ["PLACES", "Known", "constants_of", "write_exactly"]

_INT32, _INT64 = TensorProto.INT32, TensorProto.INT64
_EXACT = 2**53
_MOST = 2**31 - 1
"""Upper bound on a size, and on the number of elements along dynamic axes."""
_LARGEST: dict[int, int] = {
    TensorProto.BOOL: 1,
    TensorProto.INT8: 2**7,
    TensorProto.UINT8: 2**8,
    TensorProto.INT16: 2**15,
    TensorProto.UINT16: 2**16,
    _INT32: 2**31 - 1,
    TensorProto.UINT32: 2**32,
}
"""Largest absolute value of each integer type; that of the lowest int32 is one more."""
_OF_THE_FIRST = {
    *("Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice", "Squeeze", "Tile"),
    *("Abs", "Cast", "Neg", "ReduceMax", "ReduceMin", "Split", "Transpose", "Unsqueeze"),
}
PLACES = {"ArgMax", "ArgMin", "NonZero", "Shape", "Size"}
"""Ops whose results are sizes or indices, whatever their inputs are."""


def write_exactly(model: onnx.ModelProto, infer: Callable[[], Mapping[str, Value]]) -> None:
    """Replaces integer nodes that ONNX Runtime would round, or has no kernel for, by others, in place.

    Args:
        model: a model with unique names of values.
        infer: infers the types of its values; called only if there are such nodes.

    Raises:
        ExportError: if a node has no exact form at the model's opset.
    """
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    if not any(is_standard(node, node.op_type) and node.op_type in _FORMS for node in nodes):
        return
    types = infer()
    found = Known(types, {name: node for node in nodes for name in node.output}, constants_of(model))

    def write(b: Builder, node: onnx.NodeProto) -> Value | None:
        form = _FORMS.get(node.op_type)
        x = types.get(node.input[0]) if form else None
        if form is None or x is None or x.dtype not in (_INT32, _INT64) or x.shape is None:
            return None
        return form(b, node, found)

    before = [(graph, used_names(graph)) for graph in graphs(model.graph)]
    rewrite(model, "exactly", write)
    for graph, used in reversed(before):
        drop_unused(graph, used)


def constants_of(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """The constants of all graphs by name: initializers that no input overrides, and ``Constant`` nodes."""
    overridable = {value.name for value in model.graph.input}
    found: dict[str, TensorProto] = {}
    for graph in graphs(model.graph):
        found |= {name: tensor for name, tensor in constants_in(graph).items() if name not in overridable}
    return found


@dataclass(frozen=True)
class Known:
    """What is known of the values of a model: types, the nodes that make them, and constants."""

    types: Mapping[str, Value]
    made_by: Mapping[str, onnx.NodeProto]
    constants: Mapping[str, TensorProto]
    _largest: dict[str, float] = field(default_factory=dict)

    def value(self, name: str) -> Value:
        """The type of a value, as far as it is known."""
        return self.types.get(name, Value(name))

    def array(self, name: str) -> np.ndarray | None:
        """The value of a constant that is not large; None for anything else."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL or byte_size(tensor) > 2**16:
            return None
        return numpy_helper.to_array(tensor)

    def largest(self, name: str, steps: int = 50) -> float:
        """An upper bound on the absolute values of a tensor, found by looking at most ``steps`` nodes back."""
        if name not in self._largest:
            dtype, node = self.value(name).dtype, self.made_by.get(name)
            most = math.inf if dtype is None else _LARGEST.get(dtype, math.inf)
            array = self.array(name)
            if array is not None:
                most = float(np.abs(array.astype(np.float64)).max(initial=0))
            elif node is not None and steps:
                most = min(most, self._largest_made(node, steps - 1))
            self._largest[name] = most
        return self._largest[name]

    def _largest_made(self, node: onnx.NodeProto, steps: int) -> float:
        kind, given = node.op_type, [name for name in node.input if name]
        if kind in PLACES:
            return _MOST
        if kind in _OF_THE_FIRST:
            return self.largest(given[0], steps)
        if kind in ("Concat", "Where", "OneHot"):
            values = {"Concat": given, "Where": given[1:], "OneHot": given[2:]}[kind]
            return max(self.largest(value, steps) for value in values)
        if kind in ("Mul", "Add", "Sub"):
            bounds = [self.largest(value, steps) for value in given]
            return math.prod(bounds) if kind == "Mul" else sum(bounds)
        if kind == "Min":
            below = -min(self.lowest(value, steps) for value in given)
            return max(below, min(self.largest(value, steps) for value in given))
        return math.inf

    def lowest(self, name: str, steps: int = 50) -> float:
        """A lower bound on the numbers of a tensor, none of which is NaN then; minus infinity if none is known."""
        if (array := self.array(name)) is not None:
            return float(np.nan_to_num(array.astype(np.float64), nan=-math.inf).min(initial=0))
        node = self.made_by.get(name)
        if node is None or not steps:
            return -math.inf
        kind, given = node.op_type, [value for value in node.input if value]
        if kind in PLACES:
            return 0
        if kind == "Cast" and self.largest(given[0], steps) > _LARGEST.get(self.value(name).dtype or 0, math.inf):
            return -math.inf
        if kind in _OF_THE_FIRST - {"Abs", "Neg"}:
            return self.lowest(given[0], steps - 1)
        if kind == "Where":
            asked, (x, other) = self.made_by.get(given[0]), given[1:]
            if asked is not None and asked.op_type == "Greater" and asked.input[0] == x:  # x > y ? x : other
                x = asked.input[1]
            return min(self.lowest(x, steps - 1), self.lowest(other, steps - 1))
        if kind in ("Concat", "Min"):
            return min(self.lowest(value, steps - 1) for value in given)
        return -math.inf

    def is_of_sizes(self, name: str) -> bool:
        """Whether a tensor holds sizes of one tensor, so that their product is a number of elements."""
        node = self.made_by.get(name)
        while node is not None and node.op_type in ("Gather", "Slice", "Identity", "Cast"):
            node = self.made_by.get(node.input[0])
        return node is not None and node.op_type == "Shape"

    def axes(self, node: onnx.NodeProto) -> tuple[list[int], bool] | None:
        """The axes that a node reduces, from the front, and whether it keeps them as 1; None if they are unknown."""
        attributes, shape = attributes_of(node), self.value(node.input[0]).shape or ()
        axes = attributes.get("axes")
        if len(node.input) > 1 and node.input[1]:
            given = self.array(node.input[1])
            if given is None:
                return None
            axes = given.ravel().tolist()
        if not axes:
            axes = [] if attributes.get("noop_with_empty_axes", 0) else range(len(shape))
        return [int(axis) % len(shape) for axis in axes], bool(attributes.get("keepdims", 1))


def _count(shape: Sequence[int | None], axes: Sequence[int]) -> int:
    """An upper bound on the number of elements that a reduction combines into one."""
    sizes = [shape[axis] for axis in axes]
    return _MOST if None in sizes else math.prod(sizes)  # type: ignore[arg-type]


def _sum(b: Builder, node: onnx.NodeProto, known: Known) -> Value | None:
    """The sum over digits of a few bits each, whose sums are exact in double."""
    x, reduced = known.value(node.input[0]), known.axes(node)
    if reduced is None or not reduced[0]:
        return None
    axes, keepdims = reduced
    count = _count(x.shape or (), axes)
    if known.largest(node.input[0]) * count <= (_MOST if x.dtype == _INT32 else _EXACT):
        return None
    if x.dtype == _INT32 and count <= 2**21:
        return b.cast(b.reduce_sum(b.cast(x, _INT64), axes, keepdims), _INT32)
    bits = 53 - (count - 1).bit_length()
    rest, base, places = b.cast(x, _INT64), 2**bits, -(-63 // bits)
    total: Value | None = None
    for place in range(places):
        digit = rest
        if place < places - 1:
            quotient = b.op("Div", rest, b.like(base, rest))
            digit = b.op("Sub", rest, b.op("Mul", quotient, b.like(base, rest)))
            rest = quotient
        term = b.reduce_sum(digit, axes, keepdims)
        term = b.op("Mul", term, b.like(base**place, rest)) if place else term
        total = term if total is None else b.op("Add", total, term)
    assert total is not None
    return b.cast(total, x.dtype)


def _product(b: Builder, node: onnx.NodeProto, known: Known) -> Value | None:
    x, reduced = known.value(node.input[0]), known.axes(node)
    if reduced is None or not reduced[0] or known.is_of_sizes(node.input[0]):
        return None
    axes, keepdims = reduced
    largest, count = known.largest(node.input[0]), _count(x.shape or (), axes)
    if largest <= 1 or count * math.log2(largest) < (31 if x.dtype == _INT32 else 53):
        return None
    for axis in axes:
        x = _product_along(b, x, axis)
    return x if keepdims else b.squeeze(x, *axes)


def _with(shape: Sequence[int | None], axis: int, size: int) -> tuple[int | None, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _product_along(b: Builder, x: Value, axis: int) -> Value:
    """The product along one axis: multiplies halves repeatedly; a dynamic axis element by element in a Scan."""
    assert x.shape is not None
    size = x.shape[axis]
    if not size:
        return _scanned_product(b, x, axis)
    while size > 1:
        half = size // 2
        first, second = b.slice(x, axis, 0, half), b.slice(x, axis, half, 2 * half)
        parts = [b.op("Mul", first, second)]
        parts += [b.slice(x, axis, 2 * half, size)] * (size % 2)
        size -= half
        x = b.op("Concat", *parts, axis=axis, shape=_with(x.shape, axis, size)) if len(parts) > 1 else parts[0]
    return x


def _scanned_product(b: Builder, x: Value, axis: int) -> Value:
    """The product along a dynamic axis by a Scan; it begins with a one, because ONNX Runtime cannot scan 0 elements."""
    assert x.dtype is not None
    assert x.shape is not None
    zeros = b.reduce_sum(b.op("Sub", x, x), [axis], keepdims=True)
    ones = b.op("Add", zeros, b.like(1, x))
    factors = b.op("Concat", ones, x, axis=axis)
    shape = [size for i, size in enumerate(x.shape) if i != axis]
    so_far, factor, product = (
        helper.make_tensor_value_info(f"{b.prefix}{stem}", x.dtype, shape) for stem in ("so_far", "factor", "product")
    )
    mul = helper.make_node("Mul", [so_far.name, factor.name], [product.name])
    body = helper.make_graph([mul], "product", [so_far, factor], [product])
    start = b.squeeze(ones, axis)
    result = b.op("Scan", start, factors, body=body, num_scan_inputs=1, scan_input_axes=[axis], shape=shape)
    return b.unsqueeze(result, axis)


def _extreme(b: Builder, node: onnx.NodeProto, known: Known) -> Value | None:
    """The extreme through its index: ArgMax and ArgMin compare all bits."""
    x, reduced = known.value(node.input[0]), known.axes(node)
    if reduced is None or not reduced[0] or x.dtype != _INT64 or known.largest(node.input[0]) <= _MOST:
        return None
    if b.opset < 11:
        raise ExportError(f"ONNX Runtime has no exact {node.op_type} of int64 below opset 11; export with opset=11")
    axes, keepdims = reduced
    for axis in axes:
        place = b.op(f"Arg{node.op_type[-3:]}", x, axis=axis, keepdims=1)
        x = b.op("GatherElements", x, place, axis=axis, shape=_with(x.shape or (), axis, 1))
    return x if keepdims else b.squeeze(x, *axes)


def _remainder(b: Builder, node: onnx.NodeProto, known: Known) -> Value | None:
    """``x - x / y * y``: division rounds towards zero, so the remainder has the sign of ``x``, as that of ``fmod``."""
    x, y = map(known.value, node.input)
    if x.dtype != _INT64 or not attributes_of(node).get("fmod", 0):
        return None
    return b.op("Sub", x, b.op("Mul", b.op("Div", x, y), y))


def _affine(b: Builder, node: onnx.NodeProto, known: Known) -> Value | None:
    """A Gemm of integers, for which ONNX Runtime has no kernel, as MatMul, Mul and Add."""
    attributes = attributes_of(node)
    factors = [attributes.get(name, 1.0) for name in ("alpha", "beta")]
    if not all(float(factor).is_integer() for factor in factors):
        raise ExportError(f"a product of matrices of integers times {factors} has no exact form in ONNX")
    x, y, *added = (known.value(name) for name in node.input if name)
    x, y = (b.transpose(v, [1, 0]) if attributes.get(t, 0) else v for v, t in ((x, "transA"), (y, "transB")))
    result, *added = (
        value if factor == 1 else b.op("Mul", value, b.like(int(factor), x))
        for value, factor in zip((b.op("MatMul", x, y), *added), factors, strict=False)
    )
    return b.op("Add", result, *added) if added else result


_FORMS: dict[str, Callable[[Builder, onnx.NodeProto, Known], Value | None]] = {
    "Gemm": _affine,
    "Mod": _remainder,
    "ReduceMax": _extreme,
    "ReduceMin": _extreme,
    "ReduceProd": _product,
    "ReduceSum": _sum,
}
