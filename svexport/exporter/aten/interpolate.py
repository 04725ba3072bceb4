"""``F.interpolate`` where ONNX's Resize gives other sizes or other pixels than torch.

Sizes: torch multiplies by ``scale_factor`` in float64 and truncates, Resize does so in float32: 90 * 0.7 gives 62
pixels in torch and 63 in Resize. Pixels: torch multiplies coordinates by old / new size, ONNX Runtime's Resize divides
them by new / old size. Rounded to float32, these differ for 3 of 100 pairs of sizes, for example 14 and 2: with nearest
pixels, a whole row or column differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.errors import ExportError
from svexport.exporter.aten.pool import is_known, means
from svexport.exporter.constants import leaves_of
from svexport.tracing.swapped import untraced

__all__ = ["interpolate", "is_resized_alike", "nearest_exact"]

_SIZES = np.arange(1, 1 << 15)
"""Values of a dynamic size that are checked."""

_FEW = 128
"""Largest sum of rows and columns for which torch uses another kernel on a CPU."""


class _Axis(NamedTuple):
    """One resized dimension.

    Attributes:
        old, new: sizes before and after; symbols if they are dynamic.
        scale: the factor by which torch places pixels; None if that is the ratio of the sizes.
    """

    old: Any
    new: Any
    scale: float | None

    @property
    def is_static(self) -> bool:
        return isinstance(self.old, int) and isinstance(self.new, int)

    @property
    def is_kept(self) -> bool:
        return is_known(self.old == self.new) and self.scale in (None, 1)


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``F.interpolate``, traced as equivalent functions wherever Resize would differ from torch."""
    if any(isinstance(factor, torch.SymFloat) for factor in leaves_of(scale_factor)):
        raise ExportError(
            "F.interpolate by a factor computed from dynamic sizes is not exported: give size=(height, width)"
        )
    output = F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if antialias or any(not isinstance(size, torch.SymInt) and size == 0 for size in input.shape):
        return output
    old, rank = input.shape[2:], input.dim() - 2
    factors: list[float | None] = [None] * rank
    new: Sequence[Any] = output.shape[2:]
    if scale_factor is not None:
        given = [float(f) for f in (scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor] * rank)]
        # Compute the sizes from the input's: ``output.shape`` would be read from what the file has computed.
        new = [n if isinstance(n, int) else torch.sym_int(o * f) for n, o, f in zip(new, old, given, strict=True)]
        if not recompute_scale_factor and mode != "area" and not align_corners:
            factors = [*given]
    axes = [_Axis(*axis) for axis in zip(old, new, factors, strict=True)]
    if mode in ("nearest", "nearest-exact"):
        return _nearest(input, output, axes, mode)
    if mode == "area":
        return output if all(axis.is_static for axis in axes) else _area(input, axes)
    if factors[0] is not None:
        return _scaled(input, output, axes, mode)
    if scale_factor is not None and not all(axis.is_static for axis in axes):
        return F.interpolate(input, [axis.new for axis in axes], mode=mode, align_corners=align_corners)
    return output


# ------------------------------------------------------------------ between pixels


def _scaled(input: Tensor, output: Tensor, axes: Sequence[_Axis], mode: str) -> Tensor:
    """Resizes by factors. Where Resize would differ, sums gathered pixels, one axis after the other."""
    if all(axis.is_kept or _is_scaled_alike(axis, mode) for axis in axes):
        return output
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    for dim, axis in enumerate(axes, start=2):
        if not axis.is_kept:
            values = _sum_of_pixels(values, dim, axis, mode)
    return values.to(input.dtype)


def _is_scaled_alike(axis: _Axis, mode: str) -> bool:
    """Whether Resize makes as many pixels as torch, at the same coordinates."""
    return is_resized_alike(axis.scale, mode, np.array([axis.old]) if axis.is_static else _SIZES)


def is_resized_alike(scale: Any, mode: str, sizes: npt.NDArray[Any] = _SIZES) -> bool:
    """Whether Resize by a factor makes as many pixels as torch for every size, at the same coordinates.

    Args:
        mode: ONNX's or torch's name; if it is empty, only the numbers of pixels are compared.
    """
    new, larger = np.trunc(sizes * float(scale)), sizes > 1
    if not np.array_equal(_resized(sizes, scale), new):
        return False
    if not mode:
        return True
    copied = new == sizes  # ONNX Runtime copies if all sizes are kept, torch unless bicubic
    if mode != "nearest":
        return not (copied & larger).any()
    pixel = sizes.astype(np.float32)
    places = (np.floor(x) for x in (pixel / np.float32(scale), pixel * np.float32(1 / scale)))
    copied |= (new == 2 * sizes) & (scale != 2)
    return np.array_equal(*places) and not (copied & larger).any()


def _resized(sizes: Any, scale: Any) -> Any:
    """The number of pixels that Resize makes of a dimension."""
    return np.floor(np.asarray(sizes, np.float32) * np.float32(scale))


def _sum_of_pixels(values: Tensor, dim: int, axis: _Axis, mode: str) -> Tensor:
    """Weighted sum of the two or four pixels around a coordinate. Source: ATen's ``area_pixel_compute_source_index``,
    and ``compute_source_index_and_lambda`` and ``get_cubic_upsample_coefficients`` of its CPU kernels."""
    before, after = (torch.full((), n, dtype=torch.float32, device=values.device) for n in (axis.old, axis.new))
    pixel = torch.arange(axis.new, device=values.device).to(torch.float32)
    place = (pixel + 0.5) * float(np.float32(1 / axis.scale)) - 0.5  # type: ignore[operator]
    if mode != "bicubic":
        place = torch.where(after == before, pixel, place.clamp(min=0))  # unchanged sizes are copied
    low = place.floor()
    t = (place - low).to(values.dtype)
    weights: Sequence[tuple[int, Any]] = ((0, 1 - t), (1, t))
    if mode == "bicubic":
        far, near = (lambda x: ((x - 5) * x + 8) * x * -0.75 + 3), (lambda x: (1.25 * x - 2.25) * x * x + 1)
        weights = ((-1, far(t + 1)), (0, near(t)), (1, near(1 - t)), (2, far(2 - t)))
    shape = [-1 if d == dim else 1 for d in range(values.dim())]
    total: Any = 0
    for offset, weight in weights:
        index = torch.minimum((low + offset).clamp(min=0), before - 1).to(torch.int64)
        total = total + values.index_select(dim, index) * weight.reshape(shape)
    return total


# ------------------------------------------------------------------ nearest pixels


def _nearest(input: Tensor, output: Tensor, axes: Sequence[_Axis], mode: str) -> Tensor:
    """Resizes to nearest pixels; gathers them wherever Resize may take others than torch."""
    if mode == "nearest-exact" and all(multiples := [_multiple(axis) for axis in axes]):
        return F.interpolate(input, scale_factor=[float(n) for n in multiples])
    if all(axis.is_kept or _is_resized_alike(axis, axes, input, mode) for axis in axes):
        return output
    for dim, axis in enumerate(axes, start=2):
        if not axis.is_kept:
            input = input.index_select(dim, _places(axis, axes, input, mode))
    return input


def nearest_exact(input: Tensor, output_size: Sequence[int] | None, *scales: Any) -> Tensor:
    """``aten::_upsample_nearest_exact`` for the static sizes of a TorchScript trace."""
    with untraced():
        old = input.shape[2:]
        given = scales[0] if len(scales) == 1 and not isinstance(scales[0], float) else scales
        factors = given or [None] * len(old)
        new = output_size or [int(size * factor) for size, factor in zip(old, factors, strict=True)]
        axes = [_Axis(*axis) for axis in zip(old, map(int, new), factors, strict=True)]
    return _nearest(input, input, axes, "nearest-exact")


def _multiple(axis: _Axis) -> int:
    """The ratio of new to old pixels; 0 if it is not one integer for all sizes."""
    if axis.scale is not None:
        return int(axis.scale) if float(axis.scale).is_integer() else 0
    return axis.new // axis.old if axis.is_static and axis.new % axis.old == 0 else int(axis.is_kept)


def _is_resized_alike(axis: _Axis, axes: Sequence[_Axis], like: Tensor, mode: str) -> bool:
    """Whether Resize takes the same pixels as torch."""
    if mode == "nearest-exact":  # Resize rounds its coordinates
        return False
    if not axis.is_static and axis.scale is None:
        return is_known(axis.new % axis.old == 0)
    if not axis.is_static:
        return is_resized_alike(axis.scale, mode)
    ratio = np.float32(axis.scale or np.float32(axis.new) / np.float32(axis.old))
    divided = np.floor(np.arange(axis.new, dtype=np.float32) / ratio)
    divided = np.minimum(divided, np.float32(axis.old - 1))
    same_size = axis.scale is None or _resized(axis.old, axis.scale) == axis.new
    return bool(same_size) and np.array_equal(_known_places(axis, axes, like, mode), divided)


def _known_places(axis: _Axis, axes: Sequence[_Axis], like: Tensor, mode: str) -> npt.NDArray[np.float32]:
    """:func:`_places` of a static size."""
    pixel = np.arange(axis.new, dtype=np.float32)
    if axis.new in (axis.old, 2 * axis.old) and mode == "nearest" and _is_whole(axes, like) is True:
        return np.floor(pixel * np.float32(axis.old / axis.new))
    ratio = np.float32(axis.old) / np.float32(axis.new) if axis.scale is None else np.float32(1 / axis.scale)
    place = np.floor((pixel if mode == "nearest" else pixel + np.float32(0.5)) * ratio)
    return np.minimum(place, np.float32(axis.old - 1))


def _places(axis: _Axis, axes: Sequence[_Axis], like: Tensor, mode: str) -> Tensor:
    """Indices ``(new,)`` of pixels to gather on an axis. Source: ``nearest_neighbor_compute_source_index`` of ATen."""
    if axis.is_static and isinstance(_is_whole(axes, like), bool):
        return torch.tensor(_known_places(axis, axes, like, mode).astype(np.int64).tolist(), device=like.device)
    before, after = (torch.full((), n, dtype=torch.float32, device=like.device) for n in (axis.old, axis.new))
    pixel = torch.arange(axis.new, device=like.device).to(torch.float32)
    ratio = before / after if axis.scale is None else torch.full_like(before, float(np.float32(1 / axis.scale)))
    places = ((pixel if mode == "nearest" else pixel + 0.5) * ratio).floor()
    if mode == "nearest" and axis.scale is not None and (whole := _is_whole(axes, like)) is not False:
        same = torch.where(after == before, pixel, torch.where(after == 2 * before, (pixel / 2).floor(), places))
        places = same if whole is True else torch.where(whole, same, places)
    return torch.minimum(places, before - 1).to(torch.int64)


def _is_whole(axes: Sequence[_Axis], like: Tensor) -> Any:
    """Whether torch ignores the factor when the size is kept or doubled; a tensor if dynamic sizes decide.
    Source: ``nearest_idx`` and ``_use_vectorized_kernel_cond_2d`` of ATen/native/cpu."""
    if like.device.type != "cpu" or len(axes) == 1:
        return False
    memory_format = torch.channels_last if len(axes) == 2 else torch.channels_last_3d
    if like.shape[1] > 3 and like.is_contiguous(memory_format=memory_format):
        return True
    if len(axes) == 3:
        return False
    total = axes[0].new + axes[1].new
    return total <= _FEW if isinstance(total, int) else torch.full((), total, device=like.device) <= _FEW


# ------------------------------------------------------------------ areas


def _area(input: Tensor, axes: Sequence[_Axis]) -> Tensor:
    """Means of windows of dynamic sizes: one matrix product per axis."""
    for dim, axis in enumerate(axes, start=2):
        if not axis.is_kept:
            input = (input.transpose(dim, -1) @ means(axis.old, axis.new, input)).transpose(dim, -1)
    return input
