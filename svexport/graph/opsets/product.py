"""Products of matrices, convolutions, Einsum and Det."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets._float import at_least_float
from svexport.graph.opsets.quantize import quantized
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.ops._einsum.labels import parse
from svexport.symbolic import einsum
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic.inverse import LARGEST

__all__: list[str] = []

unchanged("Conv ConvTranspose", 22, 11)
unchanged("Det", 22)
unchanged("Gemm MatMul", 13)

_FLOAT, _INT32 = TensorProto.FLOAT, TensorProto.INT32


@down("Gemm", 11)
def gemm(b: Builder, node: Node) -> None:
    """C was a required input."""
    if node.given(2) is None:
        node.give(node.input(0), node.input(1), b.constant(np.zeros(1), node.dtype()))


@down("Einsum", 12)
def einsum_12(b: Builder, node: Node) -> Value:
    """Einsum as matrix products."""
    operands = [node.typed(i) for i in range(len(node.proto.input))]
    ranks = tuple(node.rank(i) for i in range(len(operands)))
    try:
        labels, all_ranks = parse(node.attribute("equation"), ranks)
    except RuntimeError as error:
        node.refuse(str(error))
    return einsum.body(b, operands, labels, all_ranks)


@down("Det", 11)
def det(b: Builder, node: Node) -> Value:
    """Elimination with the largest pivot of each column, row by row, for matrices of a small static size."""
    rank = node.rank()
    given = node.typed()
    n = next((size for size in (given.shape or ())[-2:] if size is not None), None)
    if n is None or not 0 < n <= LARGEST:
        found = "a size that is not static" if n is None else f"{n} rows"
        node.refuse(f"its matrices have {found}; it is written for 1 to {LARGEST}")
    x = at_least_float(b, replace(given, shape=(*(given.shape or ())[:-2], n, n)))
    rows, columns = rank - 2, rank - 1
    numbers = b.constant(np.arange(n).reshape(n, 1))
    zero, one = b.like(0, x), b.like(1, x)
    remaining = b.constant(np.ones((n, 1)), x.dtype)  # 1 for rows that no pivot is taken from yet
    product: Value | None = None
    for k in range(n):
        column = b.slice(x, columns, k, k + 1)  # (*, n, 1)
        free = b.op("Greater", remaining, zero)
        size = b.op("Where", free, b.op("Abs", column), b.like(-1, x))
        largest = b.op("ArgMax", size, axis=rows, keepdims=1)
        chosen = b.op("Equal", numbers, largest, shape=column.shape)
        row = b.reduce_sum(b.op("Where", chosen, x, zero), [rows], keepdims=True)
        pivot = b.slice(row, columns, k, k + 1)  # (*, 1, 1)
        before = b.op("Less", numbers, largest)
        passed = b.reduce_sum(b.op("Where", before, remaining, zero, shape=column.shape), [rows], keepdims=True)
        factor = b.op("Mul", pivot, _sign(b, passed))
        product = factor if product is None else b.op("Mul", product, factor)
        if k + 1 < n:
            remaining = b.op("Where", chosen, zero, remaining)
            nothing = b.op("Equal", b.cast(b.op("Sign", pivot), _INT32), b.constant(0, _INT32))
            share = b.op("Div", column, b.op("Where", nothing, one, pivot))
            x = b.op("Sub", x, b.op("Mul", share, row))
    assert product is not None
    return b.cast(b.squeeze(replace(product, shape=(*(given.shape or ())[:-2], 1, 1)), rows, columns), given.dtype)


def _sign(b: Builder, count: Value) -> Value:
    """1 for an even number, -1 for an odd one."""
    half = b.op("Mul", count, b.like(0.5, count))
    odd = b.op("Sub", half, b.op("Floor", half))  # 0 or 1/2
    return b.op("Sub", b.like(1, count), b.op("Mul", odd, b.like(4, count)))


# ------------------------------------------------------------------ integers


@down("MatMulInteger", 10)
def matmul_integer(b: Builder, node: Node) -> Value:
    return b.op("MatMul", _centred(b, node, 0, 2, -2), _centred(b, node, 1, 3, -1))


def _centred(b: Builder, node: Node, index: int, zero_index: int, axis: int) -> Value:
    """An operand less its zero point: one for all, or one for each along an axis."""
    x = node.typed(index)
    zero = node.given(zero_index)
    x = b.cast(x, _INT32)
    if zero is None:
        return x
    if zero.shape is None:
        node.refuse(f"the rank of its zero point {zero.name!r} is not known")
    zero = b.cast(replace(zero, dtype=node.dtype(zero_index)), _INT32)
    if zero.rank == 1 and axis == -2 and zero.shape != (1,):
        zero = b.unsqueeze(zero, 1)
    return b.op("Sub", x, zero)


@down("QLinearMatMul", 21)
def qlinear_matmul_21(b: Builder, node: Node) -> None:
    """Scales were float32."""
    inputs = node.inputs
    for i in (1, 4, 6):
        inputs[i] = b.cast(node.typed(i), _FLOAT)
    node.give(*inputs)


@down("QLinearMatMul", 10)
def qlinear_matmul_10(b: Builder, node: Node) -> Value:
    total = b.op("MatMul", _centred(b, node, 0, 2, -2), _centred(b, node, 3, 5, -1))
    left, right, scale = node.input(1), node.input(4), node.input(6)
    if left.shape is None:
        node.refuse(f"the rank of its scale {left.name!r} is not known")
    if len(left.shape) == 1 and left.shape != (1,):
        left = b.unsqueeze(left, 1)
    factor = b.op("Div", b.op("Mul", left, right), scale)
    return _requantized(b, node, total, factor, 7)


def _requantized(b: Builder, node: Node, total: Value, factor: Value, zero_index: int) -> Value:
    y = b.op("Mul", b.cast(total, _FLOAT), factor)
    dtype = node.dtype(zero_index)
    zero = b.cast(replace(node.input(zero_index), dtype=dtype), _FLOAT)
    return quantized(b, y, zero, dtype)


@down("ConvInteger", 10)
def conv_integer(b: Builder, node: Node) -> Value:
    return _conv(b, node, 0, 1, 2, 3)


@down("QLinearConv", 10)
def qlinear_conv(b: Builder, node: Node) -> Value:
    total = _conv(b, node, 0, 3, 2, 5)
    ones = [1] * (node.rank() - 2)
    if (bias := node.given(8)) is not None:
        total = b.op("Add", total, b.reshape(replace(bias, dtype=_INT32), 1, b.dim(node.input(3), 0), *ones))
    scale = node.input(4)
    if scale.shape is None:
        node.refuse(f"the rank of its scale {scale.name!r} is not known")
    if scale.shape not in ((), (1,)):
        scale = b.reshape(replace(scale, dtype=_FLOAT), 1, b.dim(node.input(3), 0), *ones)
    factor = b.op("Div", b.op("Mul", node.input(1), scale), node.input(6))
    return _requantized(b, node, total, factor, 7)


_EXACT = 2**24 // 255**2
"""So many products of differences of eight bits add up to an integer that float32 holds."""


def _conv(b: Builder, node: Node, x_index: int, w_index: int, x_zero: int, w_zero: int) -> Value:
    """A convolution of integers: in float32, of so few channels at a time that it is exact, added as integers."""
    rank = node.rank()
    outputs, inputs, *kernel = node.sizes(w_index)
    group, taps = node.attribute("group"), math.prod(kernel)
    channels = max(_EXACT // max(taps, 1), 0)
    if channels == 0 or (group != 1 and channels < inputs):
        node.refuse("its sums of products are larger than float32 holds exactly")
    x = b.cast(_centred(b, node, x_index, x_zero, 0), _FLOAT)
    weight = node.typed(w_index)
    zero = node.given(w_zero)
    if zero is not None and zero.shape is not None and len(zero.shape) == 1:
        zero = b.reshape(replace(zero, dtype=node.dtype(w_zero)), -1, *[1] * (rank - 1))
    w = b.cast(weight, _FLOAT)
    if zero is not None:
        w = b.op("Sub", w, b.cast(replace(zero, dtype=node.dtype(w_zero)), _FLOAT), shape=weight.shape)
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    stated = {name: node.attribute(name) for name in names if node.has(name)}
    total: Value | None = None
    for start in range(0, inputs, channels):
        end = min(start + channels, inputs)
        part = (x, w) if end - start == inputs else (b.slice(x, 1, start, end), b.slice(w, 1, start, end))
        y = b.cast(
            replace(b.op("Conv", *part, **stated), dtype=_FLOAT, shape=(None, outputs, *[None] * len(kernel))), _INT32
        )
        total = y if total is None else b.op("Add", total, y)
    if total is None:
        node.refuse("its weight has no channels")
    return total
