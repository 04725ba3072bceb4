"""Resize, down to Upsample: newer attributes become sizes and scales; modes without an equivalent gather pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets._numbers import Number
from svexport.graph.opsets.resample import Axis, Kernel, places, resample
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Dim, Value

__all__: list[str] = []

unchanged("Upsample", 10)

_ROI, _SCALES, _SIZES = 1, 2, 3


@down("Resize", 19)
def half_pixel_symmetric(b: Builder, node: Node) -> Value | None:
    """The mode differs from half_pixel where a scale makes no whole number of pixels."""
    if node.attribute("coordinate_transformation_mode") != "half_pixel_symmetric":
        return None
    scales, sizes = _factors(node), node.input().shape
    whole = _given(node, _SCALES) is None
    if scales is not None:
        known = [None] * node.rank() if sizes is None else sizes
        each = [(float(scale), known[dim]) for dim, scale in zip(_dims(node), scales.tolist(), strict=True)]
        whole = all(scale.is_integer() or (size and (scale * size).is_integer()) for scale, size in each)
    if not whole:
        return _apart(b, node)
    node.set(coordinate_transformation_mode="half_pixel")
    return None


@down("Resize", 18)
def axes_and_policies(b: Builder, node: Node) -> Value | None:
    """A choice of axes, aspect ratios and antialiasing are new."""
    policy, x = node.attribute("keep_aspect_ratio_policy"), node.input()
    reduced = node.attribute("antialias") and node.attribute("mode") != "nearest"
    if reduced:
        scales = _scales(b, node)
        reduced = any(isinstance(scale, Value) or scale < 1 for scale in scales)
    if reduced:
        return _apart(b, node)
    if policy != "stretch" and node.given(_SIZES) is not None:
        axes = _axes(b, node)
        exact = all(_by_sizes(axis) for axis in axes)
        if not exact and not all(_by_scale(axis) for axis in axes):
            return _apart(b, node)
        factors: dict[int, Number] = dict.fromkeys(range(node.rank()), np.ones(1, np.float32))
        factors |= {axis.dim: axis.scale for axis in axes}
        news: dict[int, Dim] = {axis.dim: axis.new for axis in axes}
        if exact:
            sizes = b.shape(*(news.get(i, b.dim(x, i)) for i in range(node.rank())))
            node.give(x, _full_roi(b, node), None, sizes)
        else:
            every = [factor for factor in factors.values() if isinstance(factor, np.ndarray)]
            node.give(x, _full_roi(b, node), b.constant(np.concatenate(every)))
    elif node.has("axes"):
        dims = _dims(node)
        if node.given(_SIZES) is not None:
            new = dict(zip(dims, _entries(b, node, _SIZES, len(dims)), strict=True))
            sizes = b.shape(*(new.get(i, b.dim(x, i)) for i in range(node.rank())))
            node.give(x, _full_roi(b, node), None, sizes)
        else:
            known = _factors(node)
            scales_given = replace(node.input(_SCALES), dtype=TensorProto.FLOAT) if known is None else known
            node.give(x, _full_roi(b, node), _spread(b, node, scales_given, 1.0))
    node.remove("axes", "antialias", "keep_aspect_ratio_policy")
    return None


@down("Resize", 13)
def inputs_for_absent(b: Builder, node: Node) -> None:
    """Absent inputs were empty ones."""
    x, roi, scales, sizes = (node.given(i) for i in range(4))
    empty = b.constant(np.zeros(0, np.float32))
    node.give(x, roi or empty, scales or empty, sizes)


@down("Resize", 11)
def scales_only(b: Builder, node: Node) -> Value | None:
    """There were scales alone, and pixels counted from their corner."""
    scales = _as_scales(b, node)
    if scales is None:
        return _apart(b, node)
    return b.op("Resize", node.input(), scales, mode=node.attribute("mode"))


@down("Resize", 10)
def upsample(b: Builder, node: Node) -> Value | None:
    """Upsample, which enlarges only."""
    scales = node.constant(1)
    if scales is not None and (scales >= 1).all():
        return b.op("Upsample", node.input(0), node.input(1), mode=node.attribute("mode"))
    if scales is None:
        node.refuse("Upsample only enlarges, and the scales are not constant")
    return _apart(b, node)


# ------------------------------------------------------------------ what a node says

_COORDINATES = {
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
    *("tf_half_pixel_for_nn", "tf_crop_and_resize"),
}


def _kernel(node: Node) -> Kernel:
    if node.version < 11:
        return Kernel(mode=node.attribute("mode"), coordinates="asymmetric", nearest="simple")
    coordinates = node.attribute("coordinate_transformation_mode")
    if coordinates not in _COORDINATES:
        node.refuse(f"its coordinate_transformation_mode {coordinates!r} is not one of ONNX")
    return Kernel(
        node.attribute("mode"),
        coordinates,
        node.attribute("nearest_mode"),
        node.attribute("cubic_coeff_a"),
        bool(node.attribute("exclude_outside")),
        bool(node.attribute("antialias", 0)),
        node.attribute("extrapolation_value"),
    )


def _dims(node: Node) -> list[int]:
    """The axes that scales and sizes are of."""
    axes = node.attribute("axes") if node.version >= 18 else None
    return list(range(node.rank())) if axes is None else [axis % node.rank() for axis in axes]


def _factors(node: Node) -> np.ndarray | None:
    """The scales, where they are given and constant."""
    scales = node.constant(1 if node.version < 11 else _SCALES)
    return None if scales is None or scales.size == 0 else scales.astype(np.float32)


def _given(node: Node, index: int) -> Value | None:
    """An input that may be left out, or be empty."""
    value = node.given(index)
    return None if value is None or value.shape == (0,) else value


def _entries(b: Builder, node: Node, index: int, count: int) -> list[Dim]:
    """Sizes that an input lists, one by one."""
    if (ints := node.ints(index)) is not None:
        return list(ints)
    value = b.cast(replace(node.input(index), dtype=TensorProto.INT64, shape=(count,)), TensorProto.INT64)
    return list(b.split(value, 0, [1] * count)) if count > 1 else [value]


def _scales(b: Builder, node: Node) -> list[Number]:
    """The factor of every axis of :func:`_dims`, ``(1,)`` each: float32, as ONNX Runtime has it."""
    return [axis.scale for axis in _axes(b, node, every=True)]


def _axes(b: Builder, node: Node, every: bool = False) -> list[Axis]:
    """The axes that are resized, or ``every`` one of :func:`_dims`."""
    x, dims, kernel = node.input(), _dims(node), _kernel(node)
    old = [b.dim(x, dim) for dim in dims]
    new: list[Dim]
    scales: list[Number]
    index = 1 if node.version < 11 else _SCALES
    if (given := _given(node, index)) is not None:
        if (factors := _factors(node)) is not None:
            scales = list(factors.reshape(-1, 1))
        else:
            given = replace(given, dtype=TensorProto.FLOAT, shape=(len(dims),))
            scales = list(b.split(given, 0, [1] * len(dims))) if len(dims) > 1 else [given]
        if kernel.coordinates == "tf_crop_and_resize":
            node.refuse("runtimes differ on whether its region counts in the size of the result")
        new = [_scaled(b, size, scale) for size, scale in zip(old, scales)]
    else:
        new = _entries(b, node, _SIZES, len(dims))
        scales = [_ratio(b, n, o) for n, o in zip(new, old)]
        policy = node.attribute("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            scales, new = _kept(b, old, scales, policy == "not_larger")
    rois = _regions(b, node, len(dims)) if kernel.coordinates == "tf_crop_and_resize" else [None] * len(dims)
    axes = [Axis(*each) for each in zip(dims, old, new, scales, rois)]
    return axes if every else [axis for axis in axes if not _idle(axis, kernel)]


def _idle(axis: Axis, kernel: Kernel) -> bool:
    """Whether an axis stays as it is."""
    if kernel.coordinates == "tf_crop_and_resize":
        start, end = axis.roi or (0.0, 1.0)
        if isinstance(start, Value) or isinstance(end, Value) or start != 0 or end != 1:
            return False
    if kernel.coordinates == "tf_half_pixel_for_nn":
        return False
    if isinstance(axis.scale, Value) or axis.scale != 1:
        return False
    return isinstance(axis.new, Value) or axis.new == axis.old


def _scaled(b: Builder, size: Dim, scale: Number) -> Dim:
    if isinstance(size, int) and not isinstance(scale, Value):
        return int(np.floor(np.float32(size) * scale.item()))
    if not isinstance(scale, Value) and scale == 1:
        return size
    product = b.op("Mul", b.cast(b.shape(size), TensorProto.FLOAT), scale)
    return b.cast(b.op("Floor", product), TensorProto.INT64)


def _ratio(b: Builder, new: Dim, old: Dim) -> Number:
    if isinstance(new, int) and isinstance(old, int):
        return np.array([new], np.float32) / np.array([max(old, 1)], np.float32)
    if isinstance(new, Value) and isinstance(old, Value) and new.name == old.name:
        return np.ones(1, np.float32)
    new, old = (b.cast(b.shape(d), TensorProto.FLOAT) for d in (new, old))
    return b.op("Div", new, old)


def _kept(b: Builder, old: Sequence[Dim], scales: Sequence[Number], smaller: bool) -> tuple[list[Number], list[Dim]]:
    """One scale for all axes, and the resulting sizes, with halves rounded up."""
    if not any(isinstance(scale, Value) for scale in scales) and all(isinstance(size, int) for size in old):
        known = (min if smaller else max)(scale.item() for scale in scales)  # type: ignore[union-attr]
        sizes = [math.floor(np.float32(known) * np.float32(size) + np.float32(0.5)) for size in old]  # type: ignore[arg-type]
        return [np.array([known], np.float32) for _ in old], list(sizes)
    scale = b.op("Min" if smaller else "Max", *scales)
    new: list[Dim] = []
    for size in old:
        product = b.op("Mul", b.cast(b.shape(size), TensorProto.FLOAT), scale)
        rounded = b.op("Floor", b.op("Add", product, b.like(0.5, product)))
        new.append(b.cast(rounded, TensorProto.INT64))
    return [scale for _ in old], new


def _regions(b: Builder, node: Node, count: int) -> list[tuple[Number, Number]]:
    """Start and end along every axis."""
    if (roi := node.constant(_ROI)) is not None:
        numbers = roi.astype(np.float32).reshape(2, count, 1)
        return list(zip(numbers[0], numbers[1]))
    value = b.cast(replace(node.typed(_ROI), shape=(2 * count,)), TensorProto.FLOAT)
    parts = b.split(value, 0, [1] * (2 * count))
    return list(zip(parts[:count], parts[count:]))


# ------------------------------------------------------------------ forms of older versions


def _apart(b: Builder, node: Node) -> Value:
    node.dtype()
    node.rank()
    return resample(b, node.input(), _axes(b, node), _kernel(node))


def _by_sizes(axis: Axis) -> bool:
    """Whether the sizes alone tell the scale of an axis."""
    if isinstance(axis.scale, Value) or not isinstance(axis.old, int) or not isinstance(axis.new, int):
        return False
    return bool(np.float32(axis.new) / np.float32(axis.old) == axis.scale)


def _by_scale(axis: Axis) -> bool:
    """Whether the scale alone tells the size of an axis."""
    if isinstance(axis.scale, Value) or not isinstance(axis.old, int) or not isinstance(axis.new, int):
        return False
    products = float(axis.old) * float(axis.scale.item()), np.float32(axis.old) * np.float32(axis.scale.item())
    return all(math.floor(product) == axis.new for product in products)  # in double and in single precision


def _full_roi(b: Builder, node: Node) -> Value | None:
    """The region over all axes."""
    roi = _given(node, _ROI)
    if node.attribute("coordinate_transformation_mode") != "tf_crop_and_resize":
        return None
    if roi is None:  # all of it
        return b.constant(np.repeat(np.array([0, 1], np.float32), node.rank()))
    if not node.has("axes"):
        return roi
    count = len(_dims(node))
    known = node.constant(_ROI)
    halves: Sequence[Number] = [] if known is None else [known[:count], known[count:]]
    if known is None:
        halves = b.split(replace(node.typed(_ROI), shape=(2 * count,)), 0, [count, count])
    return b.concat([_spread(b, node, half, other) for half, other in zip(halves, (0.0, 1.0), strict=True)], 0)


def _spread(b: Builder, node: Node, values: Number, other: float) -> Value:
    """Numbers of the chosen axes as numbers of all, ``other`` for the rest."""
    dims, rank = _dims(node), node.rank()
    order = [dims.index(i) if i in dims else len(dims) for i in range(rank)]
    if isinstance(values, np.ndarray):
        return b.constant(np.append(values, values.dtype.type(other))[order])
    padded = b.op("Concat", values, b.constant([other], values.dtype), axis=0, shape=(len(dims) + 1,))
    return b.op("Gather", padded, b.ints(*order), axis=0, shape=(rank,))


def _as_scales(b: Builder, node: Node) -> Value | None:
    """The scales of a Resize-10 that computes the same; None where there are none."""
    kernel, x = _kernel(node), node.input()
    if kernel.mode == "cubic" or kernel.coordinates in ("tf_crop_and_resize", "tf_half_pixel_for_nn"):
        return None
    axes = _axes(b, node, every=True)
    if any(isinstance(axis.scale, Value) or axis.scale < 1 for axis in axes):
        return None
    old = Kernel(kernel.mode, "asymmetric", "simple")
    for axis in axes:
        if _idle(axis, kernel):
            continue
        if not isinstance(axis.old, int) or not isinstance(axis.new, int):
            factor = axis.scale.item()  # type: ignore[union-attr]
            whole = factor == int(factor) and kernel.mode == "nearest"
            plain = kernel.coordinates == "asymmetric" and (kernel.mode == "linear" or kernel.nearest == "floor")
            halves = kernel.coordinates in ("half_pixel", "half_pixel_symmetric") and kernel.nearest.startswith("round")
            if not (plain or (whole and halves)):
                return None
        elif not _by_scale(axis):
            return None
        elif kernel.mode == "linear":
            if kernel.coordinates != "asymmetric":
                return None
        elif not np.array_equal(np.asarray(places(b, axis, kernel)), np.asarray(places(b, axis, old))):
            return None
    moved = [axis for axis in axes if not _idle(axis, kernel)]
    if kernel.mode == "linear" and (x.rank not in (2, 4) or any(axis.dim < x.rank - 2 for axis in moved)):
        return None
    return b.constant(np.concatenate([axis.scale for axis in axes]).astype(np.float32))
