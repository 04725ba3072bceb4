"""``SvFold``: the body is a ConvTranspose that puts the element of each channel at its position in the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from svexport.ops.fold import OP
from svexport.symbolic._builder import Builder, Dim, Value, static
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__ = ["fold"]


def fold(
    b: Builder,
    input: Value,
    output_size: Sequence[Dim],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """Adds the nodes of ``F.fold``: columns become an image, and overlaps are summed."""
    *batch, rows, _ = b.dims(input)
    kernel = int(np.prod(kernel_size))
    channels = rows // kernel if isinstance(rows, int) else b.op("Div", rows, b.ints(kernel))
    if 0 in (*batch, channels):
        empty = b.shape(*batch, channels, *output_size)
        return b.op("Expand", b.like(0, input), empty, shape=[*input.shape[:-2], None, None, None])
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel_size)]
    blocks = [_blocks(b, *each) for each in zip(output_size, padding, spans, stride)]
    images = b.reshape(input, b.product(*batch, channels), kernel, *blocks)
    # Pad the far end that the strides do not reach. A dynamic size gets the most it may need, and is cropped below.
    known = [isinstance(size, int) for size in output_size]
    far = [
        size + 2 * p - span - s * (count - 1) if fixed else s - 1
        for fixed, size, p, span, s, count in zip(known, output_size, padding, spans, stride, blocks)
    ]
    pads = [p if fixed else 0 for fixed, p in zip(known, padding)]
    image = b.op(
        "ConvTranspose",
        images,
        b.constant(np.eye(kernel).reshape(kernel, 1, *kernel_size), input.dtype),
        kernel_shape=list(kernel_size),
        dilations=list(dilation),
        pads=pads * 2,
        strides=list(stride),
        output_padding=far,
    )
    for axis, (fixed, size, p) in enumerate(zip(known, output_size, padding), 2):
        if not fixed:
            image = b.op("Gather", image, b.op("Add", b.arange(size), b.ints(p)), axis=axis)
    image = replace(image, shape=static(b.product(*batch, channels), 1, *output_size))
    return b.reshape(image, *batch, channels, *output_size)


def _blocks(b: Builder, size: Dim, padding: int, span: int, stride: int) -> Dim:
    """The number of blocks along an axis."""
    if isinstance(size, int):
        return (size + 2 * padding - span) // stride + 1
    steps = b.op("Div", b.op("Add", size, b.ints(2 * padding - span)), b.ints(stride))
    return b.op("Add", steps, b.ints(1))


def convert(
    input: TensorInfo, output_size: Sequence[int | TensorInfo], *blocks: Sequence[int]
) -> tuple[Any, ...] | None:
    """``aten::col2im``."""
    return None if input.shape is None else (input, output_size, *blocks)


Symbolic(OP, fold, aten={"col2im": convert})
