"""Pools, and what chooses boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets._float import at_least_float
from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.rules import Node, down, refused, unchanged
from svexport.symbolic._builder import Builder, Dim, Value

__all__: list[str] = []

moves("MaxPool MaxUnpool")
unchanged("LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool MaxUnpool MaxRoiPool RoiAlign", 22)
unchanged("AveragePool MaxPool LpPool MaxUnpool NonMaxSuppression", 11)
unchanged("MaxPool", 12)
refused(
    "NonMaxSuppression",
    10,
    "which boxes remain is decided one after the other, which no op does",
)


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
    auto, ceil = node.attribute("auto_pad"), bool(node.attribute("ceil_mode", 0))
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


def _spatial(node: Node, b: Builder) -> list[Dim]:
    return [b.dim(node.input(), i) for i in range(2, node.rank())]


@down("AveragePool MaxPool", 22)
def last_window(b: Builder, node: Node) -> Value | None:
    """Whether "ceil_mode" drops a last window that starts in the padding was not said: where it does, it is."""
    shape = node.input().shape
    if not node.attribute("ceil_mode") or shape is None or None in shape[2:]:
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
    if not node.attribute("ceil_mode"):
        node.remove("ceil_mode")
        return None
    window = window_of(node)
    if [*zip(window.before, window.after)] == window.stated:
        node.remove("ceil_mode")
        return None
    return _average(b, node, window)


def _average(b: Builder, node: Node, window: Window) -> Value:
    """The sum over each window, over the number of elements in it."""
    given = node.input()
    x = at_least_float(b, replace(given, dtype=node.dtype()))
    total = _sums(b, node, x, window)
    if node.attribute("count_include_pad"):
        pads = [pad[0] for pad in window.stated], [pad[1] for pad in window.stated]
    else:
        pads = [0] * len(window.kernel), [0] * len(window.kernel)
    sizes = _spatial(node, b)
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
        ones = b.op("Expand", b.constant(np.ones([1] * x.rank), x.dtype), b.shape(1, 1, *sizes))
        ones = replace(ones, shape=(1, 1, *(s if isinstance(s, int) else None for s in sizes)))
        if any(pads[0]) or any(pads[1]):
            ones = _padded(b, ones, pads[0], pads[1], 1.0)
        left = replace_pads(window, pads)
        number = _sums(b, node, ones, left)
    return b.cast(b.op("Div", total, number, shape=total.shape), given.dtype)


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
    given, p = node.input(), node.attribute("p")
    x = at_least_float(b, replace(given, dtype=node.dtype()))
    power = b.op("Abs", x, shape=x.shape)
    if p != 1:
        power = b.op("Pow", power, b.like(p, x), shape=x.shape)
    sums = _sums(b, node, power, window)
    root = sums if p == 1 else b.op("Pow", sums, b.like(1 / p, x), shape=sums.shape)
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
            node.refuse("a dilated window over a size that is not static")
        taps = np.arange(out)[:, None] * window.strides[i] + np.arange(kernel) * window.dilations[i]
        shape = [*(padded.shape or ())]
        shape[2 + i] = out * kernel
        padded = b.op("Gather", padded, b.ints(*taps.ravel()), axis=2 + i, shape=shape)
    return b.op("MaxPool", padded, kernel_shape=window.kernel, strides=window.kernel)


# ------------------------------------------------------------------ regions


@down("RoiAlign", 16)
def roi_align(b: Builder, node: Node) -> Value | None:
    """Regions shifted by half a pixel are new: samples at places that are computed."""
    if node.attribute("coordinate_transformation_mode") == "output_half_pixel":
        node.remove("coordinate_transformation_mode")
        return None
    return _align(b, node, half_pixel=True)


@down("RoiAlign", 10)
def roi_align_10(b: Builder, node: Node) -> Value:
    return _align(b, node, half_pixel=False)


def _align(b: Builder, node: Node, half_pixel: bool) -> Value:
    """Bilinear samples at every point of every bin, read from the image as rows of channels.

    A point more than a pixel outside of the image counts as zero; one that is closer is moved to its edge.
    """
    ratio, height, width = (node.attribute(name) for name in ("sampling_ratio", "output_height", "output_width"))
    if ratio <= 0:
        node.refuse("with sampling_ratio 0 the number of samples depends on the size of each region")
    node.rank()
    given, rois, batch = node.input(0), node.input(1), node.input(2)
    x = at_least_float(b, replace(given, dtype=node.dtype()))
    rois = b.cast(replace(rois, dtype=node.dtype(1), shape=rois.shape or (None, 4)), x.dtype)
    n, c, h, w = (b.dim(x, i) for i in range(4))
    r = b.dim(rois, 0)
    corners = b.op("Mul", rois, b.like(node.attribute("spatial_scale"), x), shape=rois.shape)
    if half_pixel:
        corners = b.op("Sub", corners, b.like(0.5, x), shape=rois.shape)
    x1, y1, x2, y2 = b.split(corners, 1, [1, 1, 1, 1])  # (R, 1)

    def along(start: Value, end: Value, bins: int, size: Dim) -> list[tuple[Value, Value]]:
        """(index, weight) of both pixels of every sample, ``(R, bins * ratio)``; weights 0 outside."""
        extent = b.op("Sub", end, start, shape=(None, 1))
        if not half_pixel:
            extent = b.op("Max", extent, b.like(1, x), shape=(None, 1))
        points = (np.arange(bins)[:, None] + (np.arange(ratio) + 0.5) / ratio).reshape(1, -1) / bins
        at = b.op("Add", start, b.op("Mul", extent, b.constant(points, x.dtype)), shape=(None, bins * ratio))
        total = b.cast(b.shape(size), x.dtype)
        out = b.op(
            "Or",
            b.op("Less", at, b.like(-1, x), dtype=TensorProto.BOOL),
            b.op("Greater", at, total, dtype=TensorProto.BOOL),
            dtype=TensorProto.BOOL,
        )
        last = b.op("Sub", total, b.like(1, x))
        at = b.op("Max", b.op("Min", at, last), b.like(0, x), shape=at.shape)
        low = b.op("Floor", at, shape=at.shape)
        high = b.op("Min", b.op("Add", low, b.like(1, x)), last, shape=at.shape)
        part = b.op("Sub", at, low, shape=at.shape)
        zero = b.like(0, x)
        pairs = (low, b.op("Sub", b.like(1, x), part)), (high, part)
        return [
            (b.cast(place, TensorProto.INT64), b.op("Where", out, zero, weight, dtype=x.dtype, shape=at.shape))
            for place, weight in pairs
        ]

    rows = along(y1, y2, height, h)
    columns = along(x1, x2, width, w)
    pixels = b.reshape(b.transpose(x, (0, 2, 3, 1)), b.product(n, h, w), c)
    first = b.op("Mul", b.cast(batch, TensorProto.INT64), b.shape(b.product(h, w)), shape=(None,))
    first = b.unsqueeze(first, 1, 2)  # (R, 1, 1)
    parts = []
    for j, v in rows:
        row = b.op("Add", b.op("Mul", b.unsqueeze(j, 2), b.shape(w)), first)
        for i, u in columns:
            index = b.op("Add", row, b.unsqueeze(i, 1))  # (R, oh * ratio, ow * ratio)
            weight = b.op("Mul", b.unsqueeze(v, 2), b.unsqueeze(u, 1), shape=(None,) * 3)
            read = b.op("Gather", pixels, index, axis=0, dtype=x.dtype)
            parts.append(b.op("Mul", read, b.unsqueeze(weight, 3)))
    largest = node.attribute("mode") == "max"
    samples = b.op("Max" if largest else "Sum", *parts, dtype=x.dtype, shape=(None,) * 4)
    bins = b.reshape(samples, r, height, ratio, width, ratio, c)
    pooled = b.reduce("ReduceMax" if largest else "ReduceMean", bins, [2, 4])
    return b.cast(b.transpose(replace(pooled, shape=(None, height, width, None)), (0, 3, 1, 2)), given.dtype)
