"""``F.interpolate`` to the nearest pixel, where Resize may take the one beside it.

torch multiplies places by the ratio of old to new size, ONNX Runtime's Resize divides them by that of new to old.
Rounded to float32, these differ for 3 of 100 pairs of sizes, 14 and 2 for one: a whole row or column is another one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["interpolate"]


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``F.interpolate``, traced by pixels that are gathered where Resize to ``size`` may take others."""
    output = F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if mode != "nearest" or size is None or 0 in input.shape:
        return output
    old = input.shape[2:]
    axes = list(zip(old, size if isinstance(size, (tuple, list)) else [size] * len(old), strict=True))
    if all(_is_resized_alike(*axis) for axis in axes):
        return output
    for axis, (before, after) in enumerate(axes, start=2):
        if not statically_known_true(before == after):
            input = input.index_select(axis, _places(before, after, input))
    return input


def _is_resized_alike(old: Any, new: Any) -> bool:
    if not (isinstance(old, int) and isinstance(new, int)):
        return statically_known_true(new % old == 0)
    divided = np.floor(np.arange(new, dtype=np.float32) / (np.float32(new) / np.float32(old)))
    return np.array_equal(_static_places(old, new), np.minimum(divided, np.float32(old - 1)))


def _static_places(old: int, new: int) -> npt.NDArray[np.float32]:
    ratio = np.float32(old) / np.float32(new)
    places: npt.NDArray[np.float32] = np.floor(np.arange(new, dtype=np.float32) * ratio)
    return np.minimum(places, np.float32(old - 1))


def _places(old: Any, new: Any, like: Tensor) -> Tensor:
    """Of the pixels to gather along an axis, ``(new,)``. Source: ``nearest_neighbor_compute_source_index`` of ATen."""
    if isinstance(old, int) and isinstance(new, int):
        return torch.tensor(_static_places(old, new).astype(np.int64).tolist(), device=like.device)
    before, after = (torch.full((), n, dtype=torch.float32, device=like.device) for n in (old, new))
    places = torch.arange(new, device=like.device).to(torch.float32) * (before / after)
    return torch.minimum(places.floor(), before - 1).to(torch.int64)
