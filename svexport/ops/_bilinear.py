"""Bilinear interpolation along one axis, zero outside; shared by the references of the gathering ops."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["corners"]


def corners(x: Tensor, size: Tensor | int) -> list[tuple[Tensor, Tensor]]:
    """The two pixels around each coordinate: (index, weight) of the lower and of the upper one.

    Both are 0 for a pixel outside ``0 .. size - 1``, and for a NaN coordinate.

    Args:
        x: pixel coordinates along the axis; 0 is the centre of the first pixel.
        size: number of pixels along the axis; a tensor broadcasts against ``x``.
    """
    lower = x.floor()
    fraction = x - lower

    def corner(pixel: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        inside = (pixel >= 0) & (pixel < size)
        return torch.where(inside, pixel, 0).long(), torch.where(inside, weight, 0)

    return [corner(lower, 1 - fraction), corner(lower + 1, fraction)]
