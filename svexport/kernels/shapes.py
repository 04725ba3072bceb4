"""Converts the shape and type of contiguous tensors, as users give them, to the planners' problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from svexport.errors import UnsupportedError

__all__ = ["ITEM_SIZES", "SHAPES", "problem"]

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def problem(op: str, shape: Sequence[int], dtype: str, *, backward: bool = False) -> dict[str, int]:
    """The planner's problem of an op for a shape; :data:`SHAPES` says which tensor has this shape.

    Raises:
        UnsupportedError: if the op has no planner, or the shape does not fit that tensor.
    """
    if op not in SHAPES:
        raise UnsupportedError(f"{op} has no planner; those that have one: {', '.join(sorted(SHAPES))}")
    if dtype not in ITEM_SIZES:
        raise UnsupportedError(f"the kernels compute in {', '.join(ITEM_SIZES)}; not in {dtype}")
    meaning, function = SHAPES[op]
    found = function(shape, ITEM_SIZES[dtype], backward) if shape and min(shape) > 0 else None
    if found is None:
        raise UnsupportedError(f"{op}: a shape is that of {meaning}; got {'x'.join(map(str, shape)) or 'none'}")
    return found


def _norm(shape: Sequence[int], item_size: int, backward: bool) -> dict[str, int]:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    strides = math.gcd(16, columns * item_size) if rows > 1 else 16
    return {
        "backward": int(backward), "rows": rows, "columns": columns, "item_size": item_size, "strides": strides,
    }  # fmt: skip


def _ms_deform(shape: Sequence[int], item_size: int, backward: bool) -> dict[str, int] | None:
    if len(shape) != 5:
        return None
    images, queries, heads, samples, channels = shape
    return {
        "backward": int(backward), "images": images, "rows": queries * heads, "samples": samples, "channels": channels,
        "item_size": item_size,
    }  # fmt: skip


def _camera(shape: Sequence[int], item_size: int, backward: bool) -> dict[str, int] | None:
    if len(shape) != 5 or backward:
        return None
    images, queries, points, levels, channels = shape
    return {
        "images": images, "queries": queries, "points": points, "levels": levels, "channels": channels,
        "item_size": item_size, "planes": int(levels <= 4),
    }  # fmt: skip


def _deform_conv2d(shape: Sequence[int], item_size: int, backward: bool) -> dict[str, int] | None:
    if len(shape) != 5 or backward:
        return None
    images, channels, height, width, taps = shape
    return {
        "images": images, "channels": channels, "pixels": height * width, "taps": taps,
        "input_bytes": images * channels * height * width * item_size, "runs": int(channels * item_size >= 16),
    }  # fmt: skip


def _einsum(shape: Sequence[int], item_size: int, backward: bool) -> dict[str, int] | None:
    if len(shape) != 7 or backward:
        return None
    shared, outer, x_count, rows, x_width, z_count, z_width = shape
    whole = all(rows * width * item_size % 16 == 0 for width in (x_width, z_width))
    pairs = all(width * item_size % 4 == 0 for width in (x_width, z_width))
    return {
        "shared": shared, "outer": outer, "x_count": x_count, "rows": rows, "x_width": x_width, "z_count": z_count,
        "z_width": z_width, "item_size": item_size, "whole": int(whole), "pairs": int(pairs),
        "aligned": math.gcd(4, rows),
    }  # fmt: skip


def _grid_sample(shape: Sequence[int], item_size: int, backward: bool) -> dict[str, int] | None:
    if len(shape) != 5 or backward:
        return None
    images, channels, height, width, points = shape
    row = next(unit for unit in (8, 4, 2) if width * item_size % unit == 0)
    return {
        "images": images, "channels": channels, "height": height, "width": width, "points": points, "across": points,
        "item_size": item_size, "row_alignment": row, "planes": 1, "dense": 1, "pairs": int(points % 2 == 0),
        "workspace": 1,
    }  # fmt: skip


def _grid_sample_backward(shape: Sequence[int], item_size: int, backward: bool) -> dict[str, int] | None:
    if len(shape) != 5 or not backward:
        return None
    images, channels, height, width, points = shape
    return {
        "images": images, "channels": channels, "height": height, "width": width, "points": points, "across": points,
        "item_size": item_size, "dense": 1,
    }  # fmt: skip


_Function = Callable[[Sequence[int], int, bool], "dict[str, int] | None"]

SHAPES: dict[str, tuple[str, _Function]] = {
    "add_bias_residual_layer_norm": ("x, (*, columns)", _norm),
    "camera_sample": ("all it reads of maps in NCHW, (images, queries, points, levels, channels); forward", _camera),
    "deform_conv2d": (
        "the input in NCHW, and the taps, (N, C, H, W, taps); forward",
        _deform_conv2d,
    ),
    "einsum": ("x (S, O, K, T, V), times M and W of z (S, O, M, T, W), the sum over K and V; forward", _einsum),
    "grid_sample": ("the image in NCHW, and its points, (N, C, H, W, points); bilinear, forward", _grid_sample),
    "grid_sample_backward": ("the same, both gradients; give backward", _grid_sample_backward),
    "ms_deform_attn": ("all it does, (images, queries, heads, levels * points, channels of a head)", _ms_deform),
}
"""By op, the tensor or sizes that a shape describes, and its problem; None for another number of dimensions."""
