"""Quantization: by per-tensor ops, or by arithmetic in float32, in which 16-bit integers are exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Value, dtype_name

__all__ = ["RANGES", "dequantized", "quantized"]

unchanged("QuantizeLinear DequantizeLinear", 24)

RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535),
}
"""The integers that float32 and all older opsets hold."""

_FLOAT = TensorProto.FLOAT
_FLOAT8 = {TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ}
_INT4 = {TensorProto.INT4, TensorProto.UINT4}


# ------------------------------------------------------------------ to integers


@down("QuantizeLinear", 23)
def quantize_23(b: Builder, node: Node) -> Value | None:
    """The scale had the type of the input, and the division its precision."""
    dtype = _quantized_dtype(node)
    if dtype not in RANGES and dtype not in _FLOAT8 | _INT4:
        node.refuse(f"there are no tensors of {dtype_name(dtype)} there")
    x, scale, zero = node.input(0), node.input(1), node.given(2)
    precision = node.attribute("precision")
    node.remove("precision")
    if node.dtype(0) == node.dtype(1) and precision in (0, node.dtype(0)):
        return None
    wide = TensorProto.FLOAT if precision == 0 else precision
    node.give(b.cast(x, wide), b.cast(scale, wide), zero)
    return None


@down("QuantizeLinear", 21)
def quantize_21(b: Builder, node: Node) -> Value | None:
    """Blocks and integers of other widths are new."""
    dtype = _quantized_dtype(node)
    if dtype in _INT4:
        node.refuse(f"there are no tensors of {dtype_name(dtype)} there")
    if node.attribute("block_size") or dtype not in {TensorProto.INT8, TensorProto.UINT8} | _FLOAT8:
        return _by_arithmetic(b, node, dtype)
    x, scale, zero = node.input(0), node.input(1), node.given(2)
    node.remove("block_size", "output_dtype")
    if zero is None and dtype != TensorProto.UINT8:
        if scale.shape is None or None in scale.shape:
            node.refuse("its scale has no static size, which a zero point of that type must have")
        node.give(x, scale, b.constant(np.zeros(scale.shape), dtype))
    return None


@down("QuantizeLinear", 19)
def quantize_19(b: Builder, node: Node) -> Value | None:
    """Only float32 was quantized, and only to integers."""
    dtype = _quantized_dtype(node)
    if dtype in _FLOAT8:
        node.refuse(f"there are no tensors of {dtype_name(dtype)} there")
    x, scale, zero = node.typed(), node.typed(1), node.given(2)
    node.remove("saturate")
    x_float = x if x.dtype == TensorProto.INT32 else b.cast(x, _FLOAT)
    node.give(x_float, b.cast(scale, _FLOAT), zero)
    return None


@down("QuantizeLinear", 13)
def quantize_13(b: Builder, node: Node) -> Value | None:
    """There was one scale for all."""
    if _whole(node):
        node.remove("axis")
        return None
    return _by_arithmetic(b, node, _quantized_dtype(node))


@down("QuantizeLinear", 10)
def quantize_10(b: Builder, node: Node) -> Value:
    return _by_arithmetic(b, node, _quantized_dtype(node))


def _quantized_dtype(node: Node) -> int:
    """The type of what QuantizeLinear makes."""
    if node.given(2) is not None:
        return node.dtype(2)
    return node.attribute("output_dtype", 0) or TensorProto.UINT8


def _by_arithmetic(b: Builder, node: Node, dtype: int) -> Value:
    if dtype not in RANGES:
        node.refuse(f"no older op computes with {dtype_name(dtype)}")
    x = node.typed()
    scale, zero = (None if v is None else _spread(b, node, v, i) for i, v in ((1, node.input(1)), (2, node.given(2))))
    assert scale is not None
    y = b.op("Div", b.cast(x, _FLOAT), b.cast(scale, _FLOAT), shape=x.shape)
    return quantized(b, y, None if zero is None else b.cast(zero, _FLOAT), dtype)


def quantized(b: Builder, y: Value, zero: Value | None, dtype: int) -> Value:
    """Rounds float32 numbers, halves to even, adds the zero point and saturates."""
    low, high = RANGES[dtype]
    if b.opset >= 11:
        y = b.op("Round", y)
    else:  # so large a number leaves no bits for a fraction
        large = b.like(1.5 * 2.0**23, y)
        y = b.clip(y, -(2.0**18), 2.0**18)
        y = b.op("Sub", b.op("Add", y, large), large)
    if zero is not None:
        y = b.op("Add", y, zero, shape=y.shape)
    return b.cast(replace(b.clip(y, float(low), float(high)), dtype=_FLOAT, shape=y.shape), dtype)


# ------------------------------------------------------------------ and back


@down("DequantizeLinear", 23)
def dequantize_23(b: Builder, node: Node) -> Value | None:
    """The result had the type of the scale, and there was no float4."""
    dtype = node.attribute("output_dtype") or node.dtype(1)
    if (constant := _constant_floats(b, node)) is not None:
        return _scaled(b, node, constant, dtype)
    node.remove("output_dtype")
    if dtype == node.dtype(1):
        return None
    scale = b.cast(node.input(1), _FLOAT)
    stated = {name: node.attribute(name) for name in ("axis", "block_size") if node.has(name)}
    y = b.op("DequantizeLinear", node.input(0), scale, node.given(2), dtype=_FLOAT, **stated)
    return b.cast(y, dtype)


@down("DequantizeLinear", 21)
def dequantize_21(b: Builder, node: Node) -> Value | None:
    """Blocks and integers of other widths are new. Constants of four bits are constants of eight."""
    dtype, block = node.dtype(), node.attribute("block_size")
    x, scale, zero = node.input(0), node.input(1), node.given(2)
    if dtype in _INT4:
        numbers, zeros = node.constant(0), node.constant(2)
        if numbers is None or (zero is not None and zeros is None):
            node.refuse(f"there are no tensors of {dtype_name(dtype)} there, except constants")
        wide = TensorProto.INT8 if dtype == TensorProto.INT4 else TensorProto.UINT8
        x = b.constant(numbers.astype(np.int8), wide)
        zero = None if zeros is None else b.constant(zeros.astype(np.int8), wide)
    if block or dtype in (TensorProto.INT16, TensorProto.UINT16):
        if (constant := _constant_floats(b, node)) is not None:
            return _scaled(b, node, constant, node.dtype(1))
        return dequantized(b, node, x, zero)
    node.give(x, scale, zero)
    node.remove("block_size")
    return None


@down("DequantizeLinear", 19)
def dequantize_19(b: Builder, node: Node) -> Value | None:
    """Only float32 was made. The product of short numbers is rounded once."""
    if (constant := _constant_floats(b, node)) is not None:
        return _scaled(b, node, constant, node.dtype(1))
    if node.dtype() in _FLOAT8:
        node.refuse(f"there are no tensors of {dtype_name(node.dtype())} there, except constants")
    dtype = node.dtype(1)
    if dtype == _FLOAT:
        return None
    stated = {name: node.attribute(name) for name in ("axis",) if node.has(name)}
    scale = b.cast(node.input(1), _FLOAT)
    return b.cast(b.op("DequantizeLinear", node.input(0), scale, node.given(2), dtype=_FLOAT, **stated), dtype)


@down("DequantizeLinear", 13)
def dequantize_13(b: Builder, node: Node) -> Value | None:
    """There was one scale for all."""
    if _whole(node):
        node.remove("axis")
        return None
    return dequantized(b, node, node.input(0), node.given(2))


@down("DequantizeLinear", 10)
def dequantize_10(b: Builder, node: Node) -> Value:
    return dequantized(b, node, node.input(0), node.given(2))


def dequantized(b: Builder, node: Node, x: Value, zero: Value | None) -> Value:
    """``(x - zero) * scale``."""
    dtype = x.dtype if x.dtype is not None else node.dtype()
    if zero is not None:
        precise = TensorProto.INT32 if dtype == TensorProto.INT32 else _FLOAT
        spread = _spread(b, node, replace(zero, dtype=zero.dtype or node.dtype(2)), 2)
        x = b.op("Sub", b.cast(x, precise), b.cast(spread, precise), shape=x.shape)
    return _scaled(b, node, b.cast(x, _FLOAT), node.dtype(1))


def _scaled(b: Builder, node: Node, x: Value, dtype: int) -> Value:
    scale = b.cast(_spread(b, node, node.typed(1), 1), _FLOAT)
    return b.cast(b.op("Mul", x, scale, shape=x.shape), dtype)


def _constant_floats(b: Builder, node: Node) -> Value | None:
    """A constant of float8 or float4 as float32, which holds them all; its zero point is zero."""
    if node.dtype() not in {*_FLOAT8, TensorProto.FLOAT4E2M1}:
        return None
    numbers = node.constant(0)
    return None if numbers is None else b.constant(numbers.astype(np.float32))


# ------------------------------------------------------------------ scales


def _whole(node: Node) -> bool:
    """Whether one scale is for all."""
    shape = node.input(1).shape
    return shape is not None and len(shape) == 0


def _spread(b: Builder, node: Node, value: Value, index: int) -> Value:
    """A scale or zero point, to broadcast with the input: for all, for each along an axis, or for a block."""
    shape = value.shape if value.shape is not None else node.input(index).shape
    if shape == ():
        return value
    axis, block = node.attribute("axis", 1), node.attribute("block_size", 0)
    rank = node.rank()
    axis %= max(rank, 1)
    if block:
        value = replace(value, shape=shape or (None,) * rank)
        blocks = [b.dim(value, i) for i in range(rank)]
        each = b.expand(b.unsqueeze(value, axis + 1), *blocks[: axis + 1], block, *blocks[axis + 1 :])
        each = b.reshape(each, *blocks[:axis], b.product(blocks[axis], block), *blocks[axis + 1 :])
        size, made = b.dim(node.input(), axis), blocks[axis]
        if isinstance(size, int):
            return each if isinstance(made, int) and made * block == size else b.slice(each, axis, 0, size)
        return b.op("Slice", each, b.ints(0), size, b.ints(axis), shape=(None,) * rank)
    if rank <= 1:
        return value
    return b.op("Reshape", value, b.ints(*(-1 if i == axis else 1 for i in range(rank))))


# ------------------------------------------------------------------ at run time


@down("DynamicQuantizeLinear", 11)
def dynamic_quantize(b: Builder, node: Node) -> tuple[Value | None, ...]:
    """Scale and zero point from the extremes of the input, which zero is one of at least."""
    x = replace(node.input(), dtype=_FLOAT)
    zero, one = b.like(0, x), b.like(1, x)
    low = b.op("Min", b.op("ReduceMin", x, keepdims=0, shape=()), zero, shape=())
    high = b.op("Max", b.op("ReduceMax", x, keepdims=0, shape=()), zero, shape=())
    scale = b.op("Div", b.op("Sub", high, low), b.like(255, x))
    empty = b.op("Not", b.op("Greater", scale, zero))
    scale = b.op("Where", empty, one, scale)
    start = b.op("Div", b.op("Sub", zero, low), scale)
    point = quantized(b, start, None, TensorProto.UINT8)
    return b.op("QuantizeLinear", x, scale, point, dtype=TensorProto.UINT8, shape=x.shape), scale, point
