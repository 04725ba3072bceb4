"""Pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets._float import at_least_float
from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Value

__all__: list[str] = []

moves("MaxPool MaxUnpool")
unchanged("LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool MaxUnpool", 22)
unchanged("AveragePool MaxPool LpPool MaxUnpool", 11)
unchanged("MaxPool", 12)


@dataclass(frozen=True)
class Window:
    """What the attributes of a pool say, one number per spatial axis.

    ``before`` and ``after`` are the padding, "auto_pad" and "ceil_mode" worked in; ``out`` is the size of the result,
    None where it depends on a size that is not static.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]
    out: list[int | None]
    stated: list[tuple[int, int]]
    """The padding before "ceil_mode" adds to it."""
    dropped: bool
    """Whether a last window that "ceil_mode" would add starts in the padding."""

    @property
    def pads(self) -> list[int]:
        return [*self.before, *self.after]

    @property
    def dilated(self) -> bool:
        return any(d != 1 and k != 1 for d, k in zip(self.dilations, self.kernel))


def window_of(node: Node) -> Window:
    """The window of a pool, with "auto_pad" and "ceil_mode" as padding.

    What "ceil_mode" adds is part of no count and no sum. A last window that would start in the padding is dropped.
    """
    kernel = node.attribute("kernel_shape")
    axes = len(kernel)
    strides = node.attribute("strides") or [1] * axes
    dilations = node.attribute("dilations") or [1] * axes
    pads = node.attribute("pads") or [0] * (2 * axes)
    auto, ceil = node.attribute("auto_pad"), node.attribute("ceil_mode", 0) == 1
    shape = node.input().shape
    sizes = (None,) * axes if shape is None else shape[2:]
    before, after, out, stated = [], [], [], []
    dropped = False
    for i, size in enumerate(sizes):
        reach = dilations[i] * (kernel[i] - 1) + 1
        pad = (pads[i], pads[axes + i])
        if auto == "VALID":
            pad = (0, 0)
        elif auto.startswith("SAME"):
            if size is None:
                node.refuse(f"what {auto} pads depends on sizes that are not static")
            total = max((math.ceil(size / strides[i]) - 1) * strides[i] + reach - size, 0)
            small, large = total // 2, total - total // 2
            pad = (small, large) if auto == "SAME_UPPER" else (large, small)
        stated.append(pad)
        count, extra = None, 0
        if size is not None:
            span = size + sum(pad) - reach
            count = (math.ceil(span / strides[i]) if ceil and auto in ("NOTSET", "") else span // strides[i]) + 1
            if ceil and (count - 1) * strides[i] >= size + pad[0]:
                count, dropped = count - 1, True
            extra = max((count - 1) * strides[i] - span, 0)
        elif ceil and strides[i] > 1 and auto in ("NOTSET", ""):
            if pad[1] + strides[i] > reach:
                node.refuse("whether ceil_mode drops the last window depends on a size that is not static")
            extra = strides[i] - 1  # whatever the size, that rounds up
        before.append(pad[0])
        after.append(pad[1] + extra)
        out.append(count)
    return Window(kernel, strides, dilations, before, after, out, stated, dropped)


@down("AveragePool MaxPool", 22)
def last_window(b: Builder, node: Node) -> Value | None:
    """Whether "ceil_mode" drops a last window that starts in the padding was not said: where it does, it is."""
    shape = node.input().shape
    if node.attribute("ceil_mode") != 1 or shape is None or None in shape[2:]:
        return None
    window = window_of(node)
    if not window.dropped:
        return None
    if [*zip(window.before, window.after)] != window.stated:
        if node.proto.op_type == "AveragePool" and node.attribute("count_include_pad"):
            return _average(b, node, window)
        node.set(pads=window.pads, auto_pad=None)
    node.remove("ceil_mode")
    return None


# ------------------------------------------------------------------ averages and norms


@down("AveragePool", 19)
def average_pool(b: Builder, node: Node) -> Value | None:
    """Dilation is new."""
    window = window_of(node) if node.has("dilations") else None
    if window is None or not window.dilated:
        node.remove("dilations")
        return None
    return _average(b, node, window)


@down("AveragePool", 10)
def average_pool_floor(b: Builder, node: Node) -> Value | None:
    """So is rounding up the size of the result."""
    if node.attribute("ceil_mode") != 1:
        node.remove("ceil_mode")
        return None
    window = window_of(node)
    if [*zip(window.before, window.after)] == window.stated:
        node.remove("ceil_mode")
        return None
    return _average(b, node, window)


def _average(b: Builder, node: Node, window: Window) -> Value:
    """The sum over each window, over the number of elements in it."""
    given = node.typed()
    x = at_least_float(b, given)
    total = _sums(b, node, x, window)
    if node.attribute("count_include_pad"):
        pads = [pad[0] for pad in window.stated], [pad[1] for pad in window.stated]
    else:
        pads = [0] * len(window.kernel), [0] * len(window.kernel)
    sizes = [b.dim(node.input(), i) for i in range(2, node.rank())]
    if all(isinstance(size, int) for size in sizes):
        count: np.ndarray = np.ones(())
        for i, size in enumerate(sizes):
            assert isinstance(size, int)
            starts = np.arange(window.out[i] or 0) * window.strides[i] - window.before[i]
            taps = starts[:, None] + np.arange(window.kernel[i]) * window.dilations[i]
            within = (taps >= -pads[0][i]) & (taps < size + pads[1][i])
            count = count[..., None] * within.sum(1)
        number = b.constant(count, x.dtype)
    else:
        ones = b.expand(b.constant(np.ones([1] * x.rank), x.dtype), 1, 1, *sizes)
        if any(pads[0]) or any(pads[1]):
            ones = _padded(b, ones, pads[0], pads[1], 1.0)
        left = replace_pads(window, pads)
        number = _sums(b, node, ones, left)
    return b.cast(b.op("Div", total, number), given.dtype)


def replace_pads(window: Window, pads: tuple[list[int], list[int]]) -> Window:
    """The window over an input that has ``pads`` in it already."""
    return replace(
        window,
        before=[p - q for p, q in zip(window.before, pads[0])],
        after=[p - q for p, q in zip(window.after, pads[1])],
    )


def _padded(b: Builder, x: Value, before: Sequence[int], after: Sequence[int], value: float) -> Value:
    """Constant padding of the spatial axes."""
    pads = [0, 0, *before, 0, 0, *after]
    shape = None
    if x.shape is not None:
        added = [0, 0, *(p + q for p, q in zip(before, after))]
        shape = [None if size is None else size + extra for size, extra in zip(x.shape, added)]
    if b.opset >= 11:
        return b.op("Pad", x, b.ints(*pads), b.like(value, x), shape=shape)
    return b.op("Pad", x, pads=pads, value=value, shape=shape)


def _sums(b: Builder, node: Node, x: Value, window: Window) -> Value:
    """The sum over each window of every channel: a convolution of channels alone with ones."""
    rank = len(window.kernel) + 2
    x = x if x.shape is not None else replace(x, shape=(None,) * rank)
    rows = b.reshape(x, b.product(b.dim(x, 0), b.dim(x, 1)), 1, *(b.dim(x, i) for i in range(2, rank)))
    ones = b.constant(np.ones((1, 1, *window.kernel)), x.dtype)
    dilations = window.dilations if window.dilated else None
    sums = b.op(
        "Conv", rows, ones, kernel_shape=window.kernel, strides=window.strides, pads=window.pads, dilations=dilations
    )
    sums = replace(sums, dtype=x.dtype, shape=(None, 1, *window.out))
    return b.reshape(sums, b.dim(x, 0), b.dim(x, 1), *(b.dim(sums, i) for i in range(2, rank)))


@down("LpPool", 18)
def lp_pool(b: Builder, node: Node) -> Value | None:
    """Dilation and rounding up are new: the root of a sum of powers."""
    window = window_of(node) if node.has("dilations") or node.attribute("ceil_mode") else None
    same = window is not None and [*zip(window.before, window.after)] == window.stated
    if window is None or (same and not window.dilated):
        node.remove("dilations", "ceil_mode")
        return None
    given, p = node.typed(), node.attribute("p")
    x = at_least_float(b, given)
    power = b.op("Abs", x)
    if p != 1:
        power = b.op("Pow", power, b.like(p, x))
    sums = _sums(b, node, power, window)
    root = sums if p == 1 else b.op("Pow", sums, b.like(1 / p, x))
    return b.cast(root, given.dtype)


# ------------------------------------------------------------------ maxima


@down("MaxPool", 10)
def max_pool(b: Builder, node: Node) -> Value | tuple[Value | None, ...] | None:
    """Dilation and rounding up are new: windows are laid out side by side, and padding does the rest."""
    window = window_of(node)
    if not window.dilated:
        if [*zip(window.before, window.after)] != window.stated:
            if any(p >= k for p, k in zip(window.after, window.kernel)):
                node.refuse("ceil_mode adds as much padding as the kernel is long")
            node.set(pads=window.pads, auto_pad=None)
        node.remove("dilations", "ceil_mode")
        return None
    if node.output(1) is not None:
        node.refuse("indices of a dilated MaxPool")
    x = node.input()
    lowest = float(np.finfo(np.float32).min) if node.dtype() != TensorProto.FLOAT16 else -65504.0
    padded = _padded(
        b,
        replace(x, shape=node.input().shape or (None,) * (len(window.kernel) + 2)),
        window.before,
        window.after,
        lowest,
    )
    for i, kernel in enumerate(window.kernel):
        out = window.out[i]
        if out is None:
            node.refuse("its window is dilated, over a size that is not static")
        taps = np.arange(out)[:, None] * window.strides[i] + np.arange(kernel) * window.dilations[i]
        shape = [*(padded.shape or ())]
        shape[2 + i] = out * kernel
        padded = b.op("Gather", padded, b.ints(*taps.ravel()), axis=2 + i, shape=shape)
    return b.op("MaxPool", padded, kernel_shape=window.kernel, strides=window.kernel)
