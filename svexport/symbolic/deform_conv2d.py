"""``SvDeformConv2d``: the body gathers rows, each the channels of a pixel, and multiplies them with the kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.ops.deform_conv2d import OP
from svexport.symbolic._bilinear import INDEX, corners
from svexport.symbolic._builder import Builder, Dim, Value
from svexport.symbolic._sampling import values
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__: list[str] = []


def body(
    b: Builder,
    input: Value,
    offset: Value,
    weight: Value,
    bias: Value | None,
    mask: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    offset_groups: int,
    scale: float,
) -> Value:
    if input.dtype == TensorProto.INT8:
        precise = TensorProto.DOUBLE if weight.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
        input, result = values(b, input, scale, precise), weight.dtype
    else:
        result = input.dtype
    precise = TensorProto.DOUBLE if TensorProto.DOUBLE in (input.dtype, offset.dtype) else TensorProto.FLOAT
    n, channels, height, width = (b.dim(input, axis) for axis in range(4))
    outputs, inputs, *kernel = (b.dim(weight, axis) for axis in range(4))
    out = [b.dim(offset, axis) for axis in (2, 3)]
    taps, places = b.product(*kernel), b.product(*out)

    # A block is the channels that share a group and an offset group. With one offset group all blocks read alike.
    blocks = math.lcm(groups, offset_groups)
    split = (1, 1) if offset_groups == 1 else (groups, blocks // groups)

    def by_place(x: Value) -> Value:  # (N, offset_groups, taps.., oH, oW) -> (N, *split, oH*oW, taps)
        if offset_groups not in (1, blocks):
            x = b.op("Gather", x, b.ints(*np.arange(blocks) * offset_groups // blocks), axis=1)
        return b.transpose(b.reshape(x, n, *split, taps, places), (0, 1, 4, 3, 2))

    # Where the taps read, in pixels; rows (N, G, oH*oW, taps, blocks/G) of `source`, each the channels of a block
    moves = b.reshape(b.cast(offset, precise), n, offset_groups, *kernel, 2, *out)
    positions = []
    for axis, move in enumerate(b.split(moves, 4, [1, 1])):
        tap = _steps(b, kernel[axis], dilation[axis], -padding[axis], precise)
        place = _steps(b, out[axis], stride[axis], 0, precise)
        tap = b.reshape(tap, kernel[axis], *[1] * (4 - axis))
        position = b.op("Add", move, b.op("Add", tap, b.reshape(place, out[axis], *[1] * (1 - axis))))
        positions.append(by_place(position))
    y, x = (
        corners(b, position, b.cast(b.shape(size), precise))
        for position, size in zip(positions, (height, width), strict=True)
    )
    start = b.constant(np.arange(blocks).reshape(groups, 1, 1, -1), INDEX)
    if n != 1:
        image = b.op("Mul", b.arange(n), b.shape(b.product(height, width, blocks)))
        start = b.op("Add", start, b.reshape(b.cast(image, INDEX), n, 1, 1, 1, 1))
    row, column = (b.cast(b.shape(step), INDEX) for step in (b.product(width, blocks), blocks))
    rows = [(b.op("Add", b.op("Mul", index, row), start), weight) for index, weight in y]
    columns = [(b.op("Mul", index, column), weight) for index, weight in x]
    if mask is not None:
        mask = by_place(b.reshape(b.cast(mask, precise), n, offset_groups, taps, *out))
        rows = [(index, b.op("Mul", weight, mask)) for index, weight in rows]

    source = b.transpose(b.cast(input, precise), (0, 2, 3, 1))
    source = b.reshape(source, b.product(n, height, width, blocks), b.quotient(channels, blocks))
    parts = []
    for j, v in rows:
        for i, w in columns:
            pixel = b.op("Gather", source, b.op("Add", j, i), axis=0)
            parts.append(b.op("Mul", pixel, b.unsqueeze(b.op("Mul", v, w), 5)))
    read = b.op("Sum", *parts)

    # (N, G, oH*oW, taps*C/G) @ (G, taps*C/G, O/G)
    terms, per_group = b.product(taps, inputs), b.quotient(outputs, groups)
    matrix = b.reshape(b.cast(weight, precise), groups, per_group, inputs, taps)
    matrix = b.reshape(b.transpose(matrix, (0, 3, 2, 1)), groups, terms, per_group)
    output = b.op("MatMul", b.reshape(read, n, groups, places, terms), matrix)
    output = b.reshape(b.transpose(output, (0, 1, 3, 2)), n, outputs, *out)
    if bias is not None:
        output = b.op("Add", output, b.reshape(b.cast(bias, precise), outputs, 1, 1))
    return b.cast(output, result)


def _steps(b: Builder, size: Dim, step: int, start: int, dtype: int) -> Value:
    """``start, start + step, ...``: ``size`` numbers."""
    if isinstance(size, int):
        return b.constant(start + step * np.arange(size), dtype)
    steps = b.op("Mul", b.cast(b.arange(size), dtype), b.constant(step, dtype))
    return b.op("Add", steps, b.constant(start, dtype), shape=(None,))


def convert(
    input: TensorInfo,
    weight: TensorInfo,
    offset: TensorInfo,
    mask: TensorInfo,
    bias: TensorInfo,
    stride_h: int,
    stride_w: int,
    padding_h: int,
    padding_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> tuple[Any, ...]:
    """``torchvision::deform_conv2d``; its mask argument is a dummy if no mask is used."""
    stride, padding, dilation = (stride_h, stride_w), (padding_h, padding_w), (dilation_h, dilation_w)
    numbers = stride, padding, dilation, groups, offset_groups, 1.0
    return input, offset, weight, bias, mask if use_mask else None, *numbers


Symbolic(OP, body, aten={"torchvision::deform_conv2d": convert})
