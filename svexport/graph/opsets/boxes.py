"""Regions of interest, and non-maximum suppression."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import TensorProto, helper

from svexport.graph.opsets._float import at_least_float
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Dim, Value

__all__: list[str] = []

unchanged("MaxRoiPool RoiAlign", 22)
unchanged("NonMaxSuppression", 11)

_BOOL, _INT64, _FLOAT = TensorProto.BOOL, TensorProto.INT64, TensorProto.FLOAT


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
    given, rois, batch = node.typed(), node.typed(1), node.input(2)
    x = at_least_float(b, given)
    rois = b.cast(replace(rois, shape=rois.shape or (None, 4)), x.dtype)
    n, c, h, w = (b.dim(x, i) for i in range(4))
    r = b.dim(rois, 0)
    corners = b.op("Mul", rois, b.like(node.attribute("spatial_scale"), x))
    if half_pixel:
        corners = b.op("Sub", corners, b.like(0.5, x))
    x1, y1, x2, y2 = b.split(corners, 1, [1, 1, 1, 1])  # (R, 1)

    def along(start: Value, end: Value, bins: int, size: Dim) -> list[tuple[Value, Value]]:
        """(index, weight) of both pixels of every sample, ``(R, bins * ratio)``; weights 0 outside."""
        extent = b.op("Sub", end, start)
        if not half_pixel:
            extent = b.op("Max", extent, b.like(1, x))
        points = (np.arange(bins)[:, None] + (np.arange(ratio) + 0.5) / ratio).reshape(1, -1) / bins
        at = b.op("Add", start, b.op("Mul", extent, b.constant(points, x.dtype)))
        total = b.cast(b.shape(size), x.dtype)
        out = b.op("Or", b.op("Less", at, b.like(-1, x)), b.op("Greater", at, total))
        last = b.op("Sub", total, b.like(1, x))
        at = b.op("Max", b.op("Min", at, last), b.like(0, x))
        low = b.op("Floor", at)
        high = b.op("Min", b.op("Add", low, b.like(1, x)), last)
        part = b.op("Sub", at, low)
        zero = b.like(0, x)
        pairs = (low, b.op("Sub", b.like(1, x), part)), (high, part)
        return [(b.cast(place, TensorProto.INT64), b.op("Where", out, zero, weight)) for place, weight in pairs]

    rows = along(y1, y2, height, h)
    columns = along(x1, x2, width, w)
    pixels = b.reshape(b.transpose(x, (0, 2, 3, 1)), b.product(n, h, w), c)
    first = b.op("Mul", b.cast(batch, TensorProto.INT64), b.shape(b.product(h, w)))
    first = b.unsqueeze(first, 1, 2)  # (R, 1, 1)
    parts = []
    for j, v in rows:
        row = b.op("Add", b.op("Mul", b.unsqueeze(j, 2), b.shape(w)), first)
        for i, u in columns:
            index = b.op("Add", row, b.unsqueeze(i, 1))  # (R, oh * ratio, ow * ratio)
            weight = b.op("Mul", b.unsqueeze(v, 2), b.unsqueeze(u, 1))
            read = b.op("Gather", pixels, index, axis=0)
            parts.append(b.op("Mul", read, b.unsqueeze(weight, 3)))
    largest = node.attribute("mode") == "max"
    samples = b.op("Max" if largest else "Sum", *parts, shape=(None,) * 4)
    bins = b.reshape(samples, r, height, ratio, width, ratio, c)
    pooled = b.reduce("ReduceMax" if largest else "ReduceMean", bins, [2, 4])
    return b.cast(b.transpose(replace(pooled, shape=(None, height, width, None)), (0, 3, 1, 2)), given.dtype)


# ------------------------------------------------------------------ suppression


@down("NonMaxSuppression", 10)
def non_max_suppression(b: Builder, node: Node) -> Value:
    """A loop that takes the best box that is left of each class and drops what overlaps it."""
    node.rank(0)
    node.rank(1)
    boxes, scores = replace(node.input(0), dtype=_FLOAT), replace(node.input(1), dtype=_FLOAT)
    count = b.dim(scores, 2)
    sides = _sides(b, boxes, bool(node.attribute("center_point_box")))
    area = b.op("Mul", *(b.op("Sub", high, low) for low, high in sides))
    remaining = b.op("Not", b.op("Less", scores, scores))
    if (least := node.given(4)) is not None:
        above = b.op("Greater", scores, replace(least, shape=None))
        remaining = b.op("And", remaining, above, shape=scores.shape)
    limit = b.ints(0) if node.given(2) is None else _one(b, replace(node.input(2), dtype=_INT64))
    wanted = b.op("Greater", limit, b.ints(0))
    trips = b.op("Where", b.op("Less", limit, b.shape(count)), limit, b.shape(count))
    trips = b.op("Where", wanted, trips, b.ints(0))
    threshold = b.constant(np.zeros(1, np.float32)) if node.given(3) is None else _one(b, node.input(3))
    body = _step(b, scores, sides, area, threshold, b.arange(count))
    _, chosen, valid = b.ops("Loop", b.squeeze(trips, 0), b.constant(np.array(True)), remaining, outputs=3, body=body)
    known = (None, *(scores.shape or ())[:2], 1)
    chosen, valid = (
        b.squeeze(b.transpose(Value(x.name, _INT64, known), (3, 1, 2, 0)), 0) for x in (chosen, valid)
    )  # (B, C, trips)
    places = b.op("NonZero", valid, shape=(3, None))
    batch_class = b.slice(places, 0, 0, 2)
    flat = b.op("NonZero", b.reshape(valid, -1))
    box = b.op("Gather", b.reshape(chosen, -1), flat, axis=0, shape=(1, None))
    return b.transpose(replace(b.concat([batch_class, box], 0), dtype=_INT64, shape=(3, None)), (1, 0))


def _one(b: Builder, x: Value) -> Value:
    """A scalar, which may come as one of a vector, as ``(1,)``."""
    return b.op("Reshape", x, b.ints(1), shape=(1,))


def _sides(b: Builder, boxes: Value, centred: bool) -> list[tuple[Value, Value]]:
    """Begin and end of boxes ``(B, N, 4)`` along both axes, ``(B, 1, N)`` each."""
    shape = (boxes.shape or ())[0], 1, (boxes.shape or ())[1]
    columns = [replace(x, shape=shape) for x in b.split(b.transpose(boxes, (2, 0, 1)), 0, [1, 1, 1, 1])]
    parts = [b.transpose(replace(x, shape=(1, *shape[::2])), (1, 0, 2)) for x in columns]
    if not centred:
        return [
            (b.op("Min", low, high), b.op("Max", low, high)) for low, high in zip(parts[:2], parts[2:], strict=True)
        ]
    halves = [b.op("Div", size, b.like(2, size)) for size in parts[2:]]
    return [
        (b.op("Sub", middle, half), b.op("Add", middle, half)) for middle, half in zip(parts[:2], halves, strict=True)
    ]


def _step(
    outer: Builder, scores: Value, sides: list[tuple[Value, Value]], area: Value, threshold: Value, numbers: Value
) -> object:
    """The body of the loop: of ``remaining`` boxes ``(B, C, N)`` the best, whether there is one, and who remains."""
    b = Builder(outer.opset, f"{outer.prefix}step/")
    remaining = Value(f"{b.prefix}remaining", _BOOL, scores.shape)
    zero = b.like(0, scores)
    left = b.op("Where", remaining, scores, b.like(-np.inf, scores))
    best = b.op("ArgMax", left, axis=2, keepdims=1)  # (B, C, 1)
    found = b.reduce("ReduceMax", b.cast(remaining, _FLOAT), [2], keepdims=True)
    taken = b.op("Equal", numbers, best, shape=scores.shape)

    def of_taken(values: Value) -> Value:
        return b.reduce_sum(b.op("Where", taken, values, zero), [2], keepdims=True)

    overlap: Value | None = None
    for low, high in sides:
        start, end = b.op("Max", low, of_taken(low)), b.op("Min", high, of_taken(high))
        length = b.op("Max", b.op("Sub", end, start), zero)
        overlap = length if overlap is None else b.op("Mul", overlap, length)
    assert overlap is not None
    union = b.op("Sub", b.op("Add", area, of_taken(area)), overlap)
    ratio = b.op("Div", overlap, union)
    close = b.op("And", b.op("Greater", overlap, zero), b.op("Greater", ratio, threshold))
    dropped = b.op("Or", taken, close)
    rest = b.op("And", remaining, b.op("Not", dropped))
    more = b.op("Identity", Value(f"{b.prefix}go_on", _BOOL))
    outer.constants.update(b.constants)
    info = helper.make_tensor_value_info
    flags = b.cast(replace(found, dtype=_FLOAT), _INT64)
    return helper.make_graph(
        b.nodes,
        "step",
        [
            info(f"{b.prefix}number", _INT64, []),
            info(f"{b.prefix}go_on", _BOOL, []),
            info(remaining.name, _BOOL, [None] * 3),
        ],
        [
            info(more.name, _BOOL, []),
            info(rest.name, _BOOL, [None] * 3),
            info(best.name, _INT64, [None] * 3),
            info(flags.name, _INT64, [None] * 3),
        ],
    )
