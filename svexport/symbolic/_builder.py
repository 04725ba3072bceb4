"""A small graph builder: bodies are written once against it and are valid at every opset from 9 to 23."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["FLOAT_TYPES", "Builder", "Dim", "Value", "dtype_name", "static"]

FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Value:
    """A tensor of the graph under construction.

    Attributes:
        name: unique in its graph; ``""`` stands for an absent optional input.
        dtype: a ``TensorProto`` data type, or None where it is not known.
        shape: sizes, with None for a dynamic dimension; None instead of a tuple if even the rank is unknown.
    """

    name: str
    dtype: int | None = None
    shape: tuple[int | None, ...] | None = None

    @property
    def rank(self) -> int:
        if self.shape is None:
            raise ValueError(f"the rank of {self.name!r} is not known")
        return len(self.shape)


Dim: TypeAlias = "int | Value"
"""A size: a Python int where it is static, otherwise an int64 tensor of shape (1,) computed by the graph."""


_TRUTHS = {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}
"""Ops whose results are booleans, whatever they are given."""
_COUNTS = {"ArgMax", "ArgMin", "NonZero", "SequenceLength", "Shape", "Size"}
"""Ops whose results are int64, likewise."""
_ALIKE = {"Add", "Concat", "Div", "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Sub", "Sum", "Where"}
"""Ops whose operands, without the condition of a Where, have one data type, which is that of the result."""
_OF_EACH = {"Abs", "Cast", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "Identity", "Log", "Neg"}
_OF_EACH |= {"Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Sqrt", "Tanh"}
_OF_EACH |= _TRUTHS | _ALIKE - {"Concat", "MatMul"}
"""Ops whose results have the shape of their inputs, broadcast."""
_MOST_NUMBERS = 2**20
"""Maximum size of a constant that lists positions; the graph computes longer lists at run time."""


class Builder:
    """Collects the nodes of a body.

    ``op`` adds any standard node. The other methods exist where opsets differ or where a static result can be folded.
    Constants are collected separately (``constants``): a lowered model gets initializers, a function gets ``Constant``
    nodes.

    Args:
        opset: version of the default domain; the body is valid in a model of exactly that opset.
        prefix: prepended to every name, for bodies that are inlined into a larger graph.
    """

    def __init__(self, opset: int, prefix: str = "") -> None:
        self.opset = opset
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self._constant_names: dict[tuple[Any, ...], Value] = {}
        self._dims: dict[tuple[str, int], Value] = {}
        self._counts: dict[str, int] = {}

    # ------------------------------------------------------------------ nodes

    def _name(self, stem: str) -> str:
        count = self._counts[stem] = self._counts.get(stem, -1) + 1
        return f"{self.prefix}{stem}_{count}"

    def ops(
        self, op_type: str, *inputs: Value | np.ndarray | None, outputs: int, **attributes: Any
    ) -> tuple[Value, ...]:
        """Adds a node with several outputs. Arrays become constants; None is an absent input."""
        names = ["" if x is None else self.value(x).name for x in inputs]
        while names and not names[-1]:
            names.pop()
        name = self._name(op_type)
        results = [name if outputs == 1 else f"{name}_{i}" for i in range(outputs)]
        attributes = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op_type, names, results, name=name, **attributes))
        return tuple(Value(result) for result in results)

    def op(
        self,
        op_type: str,
        *inputs: Value | np.ndarray | None,
        dtype: int | None = None,
        shape: Sequence[int | None] | None = None,
        **attributes: Any,
    ) -> Value:
        """Adds a node with one output of a dtype and a shape: as given, or as they follow from the inputs."""
        given = [None if x is None else self.value(x) for x in inputs]
        (result,) = self.ops(op_type, *given, outputs=1, **attributes)
        if dtype is None:
            dtype = _dtype(op_type, given, attributes)
        if shape is None and op_type in _OF_EACH:
            shape = _broadcast([x.shape for x in given if x is not None])
        return replace(result, dtype=dtype, shape=None if shape is None else tuple(shape))

    def value(self, x: Value | np.ndarray) -> Value:
        return x if isinstance(x, Value) else self.constant(x)

    def constant(self, array: Any, dtype: int | None = None) -> Value:
        """A constant tensor; equal ones are shared. It is converted to ``dtype`` (a ``TensorProto`` type), if given."""
        array = np.asarray(array)
        if dtype is not None:
            array = array.astype(helper.tensor_dtype_to_np_dtype(dtype))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constant_names:
            name = self._name("const")
            self.constants[name] = numpy_helper.from_array(array, name)
            self._constant_names[key] = Value(name, self.constants[name].data_type, array.shape)
        return self._constant_names[key]

    def like(self, number: float, x: Value) -> Value:
        """A scalar constant of the dtype of ``x``."""
        if x.dtype is None:
            raise ValueError(f"the dtype of {x.name!r} is not known")
        return self.constant(number, x.dtype)

    def ints(self, *values: int) -> Value:
        """A 1-D int64 constant."""
        return self.constant(np.array(values, np.int64))

    # ------------------------------------------------------------------ sizes

    def dim(self, x: Value, axis: int) -> Dim:
        """The size of a dimension: an int if it is static, otherwise read at run time (once per value and axis)."""
        if axis < 0:
            axis += x.rank
        if x.shape is not None and (size := x.shape[axis]) is not None:
            return size
        key = (x.name, axis)
        if key not in self._dims:
            if (x.name, -1) not in self._dims:
                self._dims[x.name, -1] = self.op("Shape", x, dtype=TensorProto.INT64)
            self._dims[key] = self.op("Gather", self._dims[x.name, -1], self.ints(axis), axis=0, shape=(1,))
        return self._dims[key]

    def dims(self, x: Value) -> list[Dim]:
        """The sizes of all dimensions."""
        return [self.dim(x, axis) for axis in range(x.rank)]

    def product(self, *dims: Dim) -> Dim:
        """The product of sizes; static factors are folded."""
        static = math.prod(d for d in dims if isinstance(d, int))
        result: Value | None = None
        for d in dims:
            if isinstance(d, Value):
                result = d if result is None else self.op("Mul", result, d, shape=(1,))
        if result is None or static == 1:
            return static if result is None else result
        return self.op("Mul", result, self.ints(static), shape=(1,))

    def quotient(self, size: Dim, divisor: Dim) -> Dim:
        """``size // divisor``."""
        if isinstance(size, int) and isinstance(divisor, int):
            return size // divisor
        return self.op("Div", self.shape(size), self.shape(divisor), shape=(1,))

    def shape(self, *dims: Dim) -> Value:
        """A 1-D int64 tensor of the given sizes; a constant if all are static."""
        if all(isinstance(d, int) for d in dims):
            return self.ints(*dims)  # type: ignore[arg-type]
        parts = [self.ints(d) if isinstance(d, int) else d for d in dims]
        if len(parts) == 1:
            return parts[0]
        return self.op("Concat", *parts, axis=0, dtype=TensorProto.INT64, shape=(len(parts),))

    # ------------------------------------------------------------------ layout

    def reshape(self, x: Value, *dims: Dim) -> Value:
        """Reshape; any number of sizes may be dynamic. A size of zero means zero, never "copy"."""
        shape = static(*dims)
        if x.shape == shape and None not in shape:
            return x
        dynamic = [i for i, d in enumerate(dims) if isinstance(d, Value)]
        zero = 0 in dims
        if len(dynamic) == 1 and not zero:
            target = self.ints(*(-1 if isinstance(d, Value) else d for d in dims))
        else:
            target = self.shape(*dims)
        if not dynamic and not zero:
            return self.op("Reshape", x, target, shape=shape)
        if self.opset >= 14 and (zero or len(dynamic) > 1):
            return self.op("Reshape", x, target, allowzero=1, shape=shape)
        if zero:  # before opset 14 a zero means "copy"; make a new empty tensor instead
            if x.dtype is None:
                raise ValueError(f"the dtype of {x.name!r} is not known")
            fill = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(x.dtype)))
            return self.op("ConstantOfShape", target, value=fill, dtype=x.dtype, shape=shape)
        return self.op("Reshape", x, target, shape=shape)

    def expand(self, x: Value, *dims: Dim) -> Value:
        """Expand, to sizes that ``x`` broadcasts to."""
        return self.op("Expand", x, self.shape(*dims), shape=static(*dims))

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Transpose; the identity adds no node."""
        perm = list(perm)
        if perm == list(range(len(perm))):
            return x
        shape = None if x.shape is None else [x.shape[i] for i in perm]
        return self.op("Transpose", x, perm=perm, shape=shape)

    def unsqueeze(self, x: Value, *axes: int) -> Value:
        """Unsqueeze at the given axes of the result."""
        shape = None
        if x.shape is not None:
            rank = len(x.shape) + len(axes)
            axes = tuple(sorted(a % rank for a in axes))
            sizes = iter(x.shape)
            shape = tuple(1 if i in axes else next(sizes) for i in range(rank))
        if self.opset >= 13:
            return self.op("Unsqueeze", x, self.ints(*axes), shape=shape)
        return self.op("Unsqueeze", x, axes=list(axes), shape=shape)

    def squeeze(self, x: Value, *axes: int) -> Value:
        """Squeeze at the given axes; negative axes need opset 11 or a known rank."""
        shape = None
        if x.shape is not None:
            axes = tuple(a % x.rank for a in axes)
            shape = tuple(s for i, s in enumerate(x.shape) if i not in axes)
        if self.opset >= 13:
            return self.op("Squeeze", x, self.ints(*axes), shape=shape)
        return self.op("Squeeze", x, axes=list(axes), shape=shape)

    def slice(self, x: Value, axis: int, start: int, end: int, step: int = 1) -> Value:
        """Slices one axis of ``x`` from ``start`` to ``end`` (clamped as in Python)."""
        shape = None
        if x.shape is not None:
            axis %= x.rank
            sizes = list(x.shape)
            size = sizes[axis]
            sizes[axis] = None if size is None else len(range(size)[start:end:step])
            shape = tuple(sizes)
        if self.opset >= 10:
            steps = () if step == 1 else (self.ints(step),)
            return self.op("Slice", x, self.ints(start), self.ints(end), self.ints(axis), *steps, shape=shape)
        if step != 1:
            raise ValueError("Slice has no steps before opset 10")
        return self.op("Slice", x, axes=[axis], starts=[start], ends=[end], shape=shape)

    def split(self, x: Value, axis: int, sizes: Sequence[int]) -> tuple[Value, ...]:
        """Split into parts of the given sizes."""
        if self.opset >= 13:
            parts = self.ops("Split", x, self.ints(*sizes), outputs=len(sizes), axis=axis)
        else:
            parts = self.ops("Split", x, outputs=len(sizes), axis=axis, split=list(sizes))
        if x.shape is None:
            return tuple(replace(p, dtype=x.dtype) for p in parts)
        axis %= x.rank
        return tuple(
            replace(p, dtype=x.dtype, shape=(*x.shape[:axis], size, *x.shape[axis + 1 :]))
            for p, size in zip(parts, sizes, strict=True)
        )

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        return values[0] if len(values) == 1 else self.op("Concat", *values, axis=axis)

    # ------------------------------------------------------------------ arithmetic

    def cast(self, x: Value, dtype: int | None) -> Value:
        """Cast. It adds no node if ``x`` already has the dtype, or is a constant."""
        if x.dtype == dtype:
            return x
        if dtype is None:
            raise ValueError(f"the dtype to cast {x.name!r} to is not known")
        if x.name in self.constants:
            return self.constant(numpy_helper.to_array(self.constants[x.name]), dtype)
        return self.op("Cast", x, to=dtype, dtype=dtype, shape=x.shape)

    def reduce(self, op_type: str, x: Value, axes: Sequence[int], keepdims: bool = False) -> Value:
        """ReduceSum, ReduceMax, ...: the axes became an input at opset 13 (ReduceSum) or 18 (the others)."""
        shape = None
        if x.shape is not None:
            axes = [a % x.rank for a in axes]
            shape = tuple(1 if i in axes else s for i, s in enumerate(x.shape) if keepdims or i not in axes)
        if not axes:
            return x
        if self.opset >= (13 if op_type == "ReduceSum" else 18):
            return self.op(op_type, x, self.ints(*axes), keepdims=int(keepdims), shape=shape)
        return self.op(op_type, x, axes=list(axes), keepdims=int(keepdims), shape=shape)

    def reduce_sum(self, x: Value, axes: Sequence[int], keepdims: bool = False) -> Value:
        return self.reduce("ReduceSum", x, axes, keepdims)

    def clip(self, x: Value, low: float | Value | None, high: float | Value | None) -> Value:
        """Clamp between scalars. The result for NaN depends on the runtime: mask NaN before indexing."""
        if self.opset >= 12 or (self.opset == 11 and x.dtype in (TensorProto.FLOAT, TensorProto.FLOAT16)):
            bounds = [b if b is None or isinstance(b, Value) else self.like(b, x) for b in (low, high)]
            return self.op("Clip", x, *bounds, shape=x.shape)
        if x.dtype == TensorProto.FLOAT and not isinstance(low, Value) and not isinstance(high, Value):
            return self.op("Clip", x, min=low, max=high, shape=x.shape)
        for op_type, bound in (("Max", low), ("Min", high)):
            if bound is not None:
                x = self.op(op_type, x, bound if isinstance(bound, Value) else self.like(bound, x), shape=x.shape)
        return x

    def arange(self, size: Dim) -> Value:
        """``0, 1, ..., size - 1`` as int64, also at opset 9 (Range exists from 11 on)."""
        if isinstance(size, int):
            if size <= _MOST_NUMBERS:
                return self.constant(np.arange(size, dtype=np.int64))
            size = self.ints(size)
        if self.opset >= 11:
            zero, one = (self.constant(np.array(i, np.int64)) for i in (0, 1))
            return self.op("Range", zero, self.squeeze(size, 0), one, dtype=TensorProto.INT64, shape=(None,))
        one = numpy_helper.from_array(np.ones(1, np.int64))
        ones = self.op("ConstantOfShape", size, value=one, dtype=TensorProto.INT64)
        positions = self.op("NonZero", ones, dtype=TensorProto.INT64, shape=(1, None))
        return self.squeeze(positions, 0)


def _dtype(op_type: str, inputs: Sequence[Value | None], attributes: Mapping[str, Any]) -> int | None:
    """The data type of what an op makes; None if it is not known."""
    if op_type in _TRUTHS:
        return TensorProto.BOOL
    if op_type in _COUNTS:
        return TensorProto.INT64
    if op_type == "Cast":
        return attributes["to"]  # type: ignore[no-any-return]
    operands = inputs[op_type == "Where" :] if op_type in _ALIKE else inputs[:1]
    return next((x.dtype for x in operands if x is not None and x.dtype is not None), None)


def _broadcast(shapes: Sequence[tuple[int | None, ...] | None]) -> tuple[int | None, ...] | None:
    """The shape of operands that are broadcast; None if a rank is not known."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    axes = zip_longest(*(shape[::-1] for shape in known), fillvalue=1)
    sizes = [next((n for n in of_each if n not in (1, None)), None if None in of_each else 1) for of_each in axes]
    return tuple(sizes[::-1])


def static(*dims: Dim) -> tuple[int | None, ...]:
    """The shape that sizes make, as far as it is known before run time."""
    return tuple(d if isinstance(d, int) else None for d in dims)


def dtype_name(dtype: int | None) -> str:
    """torch's name of a ``TensorProto`` data type, as used in messages: ``float32`` for FLOAT."""
    name = "unknown" if dtype is None else TensorProto.DataType.Name(dtype).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)
