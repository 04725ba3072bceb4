"""Sampling grids of affine maps; the TorchScript exporter has them from opset 20 only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["affine_grid"]


def reference(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    precise = torch.promote_types(theta.dtype, torch.float32)  # half cannot tell more than 2048 columns apart
    return F.affine_grid(theta.to(precise), list(size), align_corners).to(theta.dtype).contiguous()


def fake(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    return theta.new_empty((size[0], *size[2:], len(size) - 2))


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for align_corners in (False, True):
        yield make(2, 2, 3), (2, 3, 5, 7), align_corners
        yield make(2, 3, 4), (2, 1, 3, 5, 2), align_corners
        yield make(1, 2, 3), (1, 1, 1, 4), align_corners


OP = Op(
    name="affine_grid",
    schema="(Tensor theta, SymInt[] size, bool align_corners) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
    plugin=False,
    inline=True,
)


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """``F.affine_grid``, computed in float32 at least.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.affine_grid.html

    Shape:
        - theta: ``(N, 2, 3)`` or ``(N, 3, 4)``, floating point
        - size: shape of the output image, ``(N, C, H, W)`` or ``(N, C, D, H, W)``; any size may be dynamic
        - output: ``(N, H, W, 2)`` or ``(N, D, H, W, 3)``, the dtype of theta

    Raises:
        ValueError: if theta is not floating point.
        NotImplementedError, RuntimeError: if theta and size do not fit.
    """
    return F.affine_grid(theta, list(size), align_corners)
