"""Resizing with antialiasing; ONNX has it from opset 18 only, and TensorRT not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["interpolate"]


def reference(input: Tensor, size: Sequence[int], bicubic: bool, align_corners: bool, scales: Sequence[int]) -> Tensor:
    # Scales are pairs of numerator and denominator, because a float attribute cannot hold a double.
    factors = [numerator / denominator for numerator, denominator in zip(scales[::2], scales[1::2])]
    function = torch.ops.aten._upsample_bicubic2d_aa if bicubic else torch.ops.aten._upsample_bilinear2d_aa
    size = size or [int(s * f) for s, f in zip(input.shape[2:], factors)]
    precise = input.to(torch.promote_types(input.dtype, torch.float32))  # the CPU has no half kernel
    return function(precise, size, align_corners, *(factors or (None, None))).to(input.dtype).contiguous()


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for bicubic in (False, True):
        yield make(2, 3, 7, 11), (3, 4), bicubic, False, ()
        yield make(1, 2, 5, 4), (), bicubic, False, (1, 2, 13, 10)
        yield make(1, 1, 6, 3), (4, 2), bicubic, True, ()  # not (4, 1): torch repeats the first row then
        yield make(1, 2, 1, 5), (3, 5), bicubic, False, (29, 10, 1, 1)


OP = Op(
    name="interpolate",
    schema="(Tensor input, SymInt[] size, bool bicubic, bool align_corners, int[] scales) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``F.interpolate``. With ``antialias``, a file at any opset holds two products with constant matrices.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.interpolate.html

    Shape:
        - input: ``(N, C, H, W)`` with ``antialias`` (bilinear and bicubic only)
        - output: ``(N, C, *size)``; either may be dynamic
    """
    return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
